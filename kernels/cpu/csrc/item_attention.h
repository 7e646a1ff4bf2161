// Attention of an item: its rows over the key tiles that they see, in order.
#pragma once

#include "many_rows.h"

namespace {

constexpr int MIN_TRANSPOSED_ROWS = 8;  // from this many rows on, a tile of keys is transposed

// The rows of an item for one KV head, with their scratch memory.
template <typename T, typename K>
class ItemRows {
  public:
    ItemRows(const Step& step, const Rules& rules, Item item, int kv_head)
        : step_(step), rules_(rules), item_(item), kv_head_(kv_head), group_(step.num_heads / step.num_kv_heads),
          count_((item.end_token - item.first_token) * group_) {
        const int32_t* starts = step.query_start_loc + item.sequence;
        first_position_ = step.seq_lens[item.sequence] - (starts[1] - starts[0]) + item.first_token - starts[0];
        // Layout: query and sum of each row, the rows, their ranges, then tiles of keys and values.
        const size_t rows_at = (size_t)2 * count_ * step.head_dim;
        const size_t ranges_at = rows_at + count_ * sizeof(Row) / sizeof(float);
        const size_t tiles_at = (ranges_at + count_ * sizeof(Range) / sizeof(float) + 15) / 16 * 16;
        static thread_local Scratch scratch;
        memory_ = scratch.floats(tiles_at + (size_t)2 * TILE * step.head_dim);
        rows_ = (Row*)(memory_ + rows_at);
        seen_ = (Range*)(memory_ + ranges_at);
        wide_ = memory_ + tiles_at;
        transposed_ = wide_ + TILE * step.head_dim;
    }

    void begin(const T* query, int64_t query_stride) {
        for (int index = 0; index < count_; index++) {
            const int D = step_.head_dim, token = item_.first_token + index / group_;
            const int head = kv_head_ * group_ + index % group_;
            Row& row = rows_[index];
            row.query = memory_ + (size_t)2 * index * D;
            row.sum = row.query + D;
            row.maximum = rules_.sinks ? rules_.sinks[head] : -INFINITY;
            row.total = rules_.sinks ? 1.0f : 0.0f;
            const T* from = query + token * query_stride + (int64_t)head * D;
            for (int d = 0; d < D; d += WIDTH) {
                store(row.query + d, times(load(from + d), splat(rules_.scale)));
                store(row.sum + d, splat(0.0f));
            }
        }
    }

    void attend(const K* pool) {
        const K* head = pool + (int64_t)kv_head_ * step_.block_size * step_.head_dim;
        const int32_t* table = step_.block_tables + item_.sequence * step_.table_stride;
        const int end = first_position_ + (count_ - 1) / group_ + 1;
        const int begin = rules_.window ? larger(0, first_position_ - rules_.window + 1) / TILE * TILE : 0;
        for (int first_key = begin; first_key < end; first_key += TILE) {
            const int keys_of_tile = smaller(TILE, end - first_key);
            const K *keys[TILE], *values[TILE];
            addresses(step_, head, table, first_key, keys_of_tile, keys);
            for (int key = 0; key < keys_of_tile; key++) values[key] = keys[key] + step_.value_offset;
            find_seen(first_key);
            if (count_ >= MIN_TRANSPOSED_ROWS)
                attend_many(keys, values, keys_of_tile);
            else
                attend_tile(rows_, seen_, count_, keys, values, step_.head_dim, rules_.softcap);
        }
    }

    void finish(T* output) const {
        const int D = step_.head_dim;
        for (int index = 0; index < count_; index++) {
            const Row& row = rows_[index];
            const int64_t token = item_.first_output + index / group_;
            T* to = output + (token * step_.num_heads + kv_head_ * group_ + index % group_) * D;
            for (int d = 0; d < D; d += WIDTH) store(to + d, weighted(load(row.sum + d), row.total, rules_));
        }
    }

  private:
    void find_seen(int first_key) {
        int position = first_position_;
        for (int index = 0; index < count_; index += group_, position++) {
            const Range of_token = {rules_.window ? larger(0, position - rules_.window + 1 - first_key) : 0,
                                    smaller(TILE, position + 1 - first_key)};
            for (int row = index; row < index + group_; row++) seen_[row] = of_token;
        }
    }

    void attend_many(const K* const* keys, const K* const* values, int keys_of_tile) {
        const int D = step_.head_dim;
        const float *wide_keys[TILE], *wide_values[TILE];
        widen(keys, (keys_of_tile + PADDED - 1) / PADDED * PADDED, D, wide_, wide_keys);
        transpose(wide_keys, keys_of_tile, D, transposed_);
        widen(values, keys_of_tile, D, wide_, wide_values);  // overwrites the keys, which are already transposed
        attend_transposed(rows_, seen_, count_, transposed_, wide_values, D, rules_.softcap);
    }

    const Step& step_;
    const Rules& rules_;
    const Item item_;
    const int kv_head_, group_, count_;
    int first_position_;  // position of the item's first token
    float *memory_, *wide_, *transposed_;
    Row* rows_;
    Range* seen_;
};

template <typename T, typename K>
void attend_item(
    const Step& step, const Rules& rules, Item item, int kv_head, const T* query, int64_t query_stride, const K* pool,
    T* output) {
    ItemRows<T, K> rows(step, rules, item, kv_head);
    rows.begin(query, query_stride);
    rows.attend(pool);
    rows.finish(output);
}

}  // namespace
