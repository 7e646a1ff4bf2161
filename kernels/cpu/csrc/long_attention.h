// Attention of few tokens over many keys: threads share a token's scores, weights and sums.
//
// Every number is computed as in attend_item(), from the same numbers in the same order, so the bits are the same.
#pragma once

#include "item_attention.h"

namespace {

constexpr int SLICE = 4 * WIDTH;  // elements of a head summed by one thread

template <typename T, typename K>
struct LongAttention {
    const Step* step;
    Rules rules;
    const Item* items;
    const T* query;
    int64_t query_stride;
    const K* pool;
    T* output;

    int group() const { return step->num_heads / step->num_kv_heads; }
    int slices() const { return (step->head_dim + SLICE - 1) / SLICE; }
    int position(const Item& item) const { return step->seq_lens[item.sequence] - 1; }
    int first_tile(const Item& item) const {
        return rules.window ? larger(0, position(item) - rules.window + 1) / TILE : 0;
    }
    int end_tile(const Item& item) const { return position(item) / TILE + 1; }
    Range seen(const Item& item, int tile) const {
        const int of_token = position(item), first_key = tile * TILE;
        return {rules.window ? larger(0, of_token - rules.window + 1 - first_key) : 0, smaller(TILE, of_token + 1 - first_key)};
    }
    // Per row: scores (later weights) in tiles, then one factor per tile, then the total.
    float* scores_of_row(int64_t item, int head) const {
        return step->scores + (item * step->num_heads + head) * step->scores_stride;
    }
    float* factors_of_row(float* scores, const Item& item) const { return scores + (int64_t)end_tile(item) * TILE; }
    const K* keys_of(int kv_head) const { return pool + (int64_t)kv_head * step->block_size * step->head_dim; }
    const int32_t* table_of(const Item& item) const { return step->block_tables + item.sequence * step->table_stride; }

    // Score the rows of a KV head for one of `ranges` parts of the tiles.
    void score(int64_t index, int kv_head, int range, int ranges) const {
        const Item& item = items[index];
        const int D = step->head_dim, first = first_tile(item), count = end_tile(item) - first;
        static thread_local Scratch scratch;
        float* queries = scratch.floats((size_t)group() * D);
        for (int row = 0; row < group(); row++) {
            const T* from = query + item.first_token * query_stride + (int64_t)(kv_head * group() + row) * D;
            for (int d = 0; d < D; d += WIDTH) store(queries + row * D + d, times(load(from + d), splat(rules.scale)));
        }
        for (int tile = first + count * range / ranges; tile < first + count * (range + 1) / ranges; tile++) {
            const K* keys[TILE];
            const Range of_tile = seen(item, tile);
            addresses(*step, keys_of(kv_head), table_of(item), tile * TILE, of_tile.end, keys);
            for (int row = 0; row < group(); row += MAX_ROWS)
                score_rows(queries + row * D, smaller(MAX_ROWS, group() - row), keys, of_tile,
                           scores_of_row(index, kv_head * group() + row) + tile * TILE);
        }
    }

    void score_rows(float* queries, int count, const K* const* keys, Range range, float* to) const {
        alignas(64) float scores[MAX_ROWS][TILE] = {};
        Row rows[MAX_ROWS];
        for (int row = 0; row < count; row++) rows[row].query = queries + row * step->head_dim;
        if (count == 3) scores_of<3>(rows, keys, range, step->head_dim, scores);
        if (count == 2) scores_of<2>(rows, keys, range, step->head_dim, scores);
        if (count == 1) scores_of<1>(rows, keys, range, step->head_dim, scores);
        for (int row = 0; row < count; row++) memcpy(to + row * step->scores_stride, scores[row], sizeof scores[row]);
    }

    void weigh_row(int64_t index, int head) const {
        const Item& item = items[index];
        float *scores = scores_of_row(index, head), *factors = factors_of_row(scores, item);
        Row row = {nullptr, nullptr, rules.sinks ? rules.sinks[head] : -INFINITY, rules.sinks ? 1.0f : 0.0f};
        for (int tile = first_tile(item); tile < end_tile(item); tile++)
            factors[tile] = weigh(row, scores + tile * TILE, seen(item, tile), rules.softcap);
        factors[end_tile(item)] = row.total;
    }

    // Sum one slice of the rows of a KV head.
    void sum(int64_t index, int kv_head, int slice) const {
        for (int row = 0; row < group(); row += MAX_ROWS) {
            const int count = smaller(MAX_ROWS, group() - row), head = kv_head * group() + row;
            if (count == 3) sum_rows<3>(index, kv_head, head, slice * SLICE);
            if (count == 2) sum_rows<2>(index, kv_head, head, slice * SLICE);
            if (count == 1) sum_rows<1>(index, kv_head, head, slice * SLICE);
        }
    }

    template <int ROWS>
    void sum_rows(int64_t index, int kv_head, int head, int from) const {
        const Item& item = items[index];
        const int D = step->head_dim, end = smaller(D, from + SLICE);
        alignas(64) float sums[ROWS][SLICE] = {}, weights[ROWS][TILE];
        Row rows[ROWS];
        for (int row = 0; row < ROWS; row++) rows[row].sum = sums[row];
        for (int tile = first_tile(item); tile < end_tile(item); tile++) {
            const K* values[TILE];
            float factors[ROWS];
            const Range range = seen(item, tile);
            addresses(*step, keys_of(kv_head) + step->value_offset + from, table_of(item), tile * TILE, range.end, values);
            for (int row = 0; row < ROWS; row++) {
                float* scores = scores_of_row(index, head + row);
                factors[row] = factors_of_row(scores, item)[tile];
                memcpy(weights[row], scores + tile * TILE, sizeof weights[row]);
            }
            if (end - from == SLICE)
                add_values_at<ROWS, 4>(rows, values, range, 0, weights, factors);
            else
                for (int d = 0; d < end - from; d += WIDTH)
                    add_values_at<ROWS, 1>(rows, values, range, d, weights, factors);
        }
        for (int row = 0; row < ROWS; row++) {
            const float total = factors_of_row(scores_of_row(index, head + row), item)[end_tile(item)];
            T* to = output + ((int64_t)item.first_output * step->num_heads + head + row) * D + from;
            for (int d = 0; d < end - from; d += WIDTH) store(to + d, weighted(load(sums[row] + d), total, rules));
        }
    }
};

// Items with one token each. Without memory for scores (short sequences), each KV head is one part.
template <typename T, typename K>
void attend_few(const LongAttention<T, K>& attention, int64_t num_items) {
    const int kv_heads = attention.step->num_kv_heads, heads = attention.step->num_heads, slices = attention.slices();
    const int num_threads = attention.step->num_threads, ranges = 2 * num_threads;
    auto score = [=](int64_t part, uint8_t*) {
        if (!attention.step->scores) return;
        attention.score(part / ranges / kv_heads, (int)(part / ranges % kv_heads), (int)(part % ranges), ranges);
    };
    auto weigh = [=](int64_t part, uint8_t*) {
        if (attention.step->scores) attention.weigh_row(part / heads, (int)(part % heads));
    };
    auto sum = [=](int64_t part, uint8_t*) {
        const int64_t index = part / slices / kv_heads;
        const int kv_head = (int)(part / slices % kv_heads), slice = (int)(part % slices);
        if (attention.step->scores)
            attention.sum(index, kv_head, slice);
        else if (slice == 0)
            attend_item<T, K>(*attention.step, attention.rules, attention.items[index], kv_head, attention.query,
                              attention.query_stride, attention.pool, attention.output);
    };
    const Operation operations[3] = {
        operation(num_items * kv_heads * ranges, 1, score),
        operation(num_items * heads, 1, weigh),
        operation(num_items * kv_heads * slices, 1, sum),
    };
    perform(operations, 3, num_threads);
}

template <typename T, typename K>
void attend(
    const Step& of_step, const Rules& rules, const Item* items, int64_t num_items, const void* query,
    int64_t query_stride, const void* pool, void* output) {
    const Step* step = &of_step;
    const int64_t count = num_items * step->num_kv_heads;
    const LongAttention<T, K> attention = {
        step, rules, items, (const T*)query, query_stride, (const K*)pool, (T*)output};
    if (step->shares_tokens && num_items == step->num_tokens) return attend_few(attention, num_items);
    perform_parts(count, 1, step->num_threads, [=](int64_t part, uint8_t*) {
        attend_item<T, K>(
            *step, rules, items[part / step->num_kv_heads], (int)(part % step->num_kv_heads), attention.query,
            query_stride, attention.pool, attention.output);
    });
}

}  // namespace
