// Paged attention over the block table, for tokens that decode and for parts of prompts alike.
//
// The sums of a row (a token's query head) are in an order that its own position gives: keys in tiles of TILE from
// position 0, the online softmax tile by tile. Rows that see the same keys of a tile are computed together, which
// shares what is read and changes no sum. So a row has the same bits alone, among others, in any chunk of a prompt.
#pragma once

#include <cmath>
#include <cstdlib>

#include "e4m3.h"
#include "operation.h"

// What all layers of a step share. The fields are kernels/cpu/step.py's.
struct Step {
    const int32_t* block_tables;     // [S, table_stride]
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;         // [S]
    const int64_t* positions;        // [T]
    const int64_t* slots;            // [T]
    float* scores;         // [T, Hq, scores_stride], of sequences whose tokens threads share; or null
    int64_t scores_stride;
    int64_t table_stride;
    int64_t block_stride;  // elements from a block's keys to the next one's
    int64_t value_offset;  // elements from a block's keys to its values
    int64_t num_tokens;
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t num_threads;
    int32_t shares_tokens;  // every sequence has one token, and there are few: threads may share one
};

// Tokens of one sequence whose attention one thread computes for one KV head.
struct Item {
    int32_t sequence, first_token, end_token, first_output;
};

struct Rules {
    float scale;
    float softcap;         // 0: none
    int32_t window;        // a token sees that many keys, itself among them; 0: all
    const float* sinks;    // [Hq]: a score that takes part in the softmax and has no value; or null
    float value_scale;     // of values in e4m3, else 1; that of keys is in `scale`
};

namespace {

constexpr int TILE = 64;       // keys
constexpr int MOST_ROWS = 3;   // computed together: 3 rows x 4 keys are the sums that 16 registers hold
constexpr int KEYS = 4;        // whose scores are computed together

template <typename T>
inline T smaller(T a, T b) { return a < b ? a : b; }
template <typename T>
inline T larger(T a, T b) { return a < b ? b : a; }

class Scratch {
  public:
    ~Scratch() { free(memory_); }
    float* floats(size_t count) {
        if (count > count_) {
            free(memory_);
            memory_ = (float*)aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
            count_ = memory_ ? count : 0;
        }
        return memory_;
    }

  private:
    float* memory_ = nullptr;
    size_t count_ = 0;
};

// One query head of one token.
struct Row {
    float* query;  // [D], scaled
    float* sum;    // [D], of the values by weight
    float maximum, total;
};

inline Vec weighted(Vec sum, float total, const Rules& rules) {
    return times(sum / splat(total), splat(rules.value_scale));
}

// Keys of one tile that a row sees.
struct Range {
    int first, end;
    bool operator==(const Range& other) const { return first == other.first && end == other.end; }
};

template <int ROWS, typename K>
inline void scores_of(Row* rows, const K* const* keys, Range seen, int head_dim, float (*scores)[TILE]) {
    for (int key = seen.first / KEYS * KEYS; key < seen.end; key += KEYS) {
        Vec sums_of[ROWS][KEYS];
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < KEYS; i++) sums_of[row][i] = splat(0.0f);
        for (int d = 0; d < head_dim; d += WIDTH) {
            Vec query[ROWS];  // these and one vector of keys: with four of keys and one of a query a sum has no register
            for (int row = 0; row < ROWS; row++) query[row] = load(rows[row].query + d);
            for (int i = 0; i < KEYS; i++) {
                const Vec loaded = load(keys[key + i] + d);
                for (int row = 0; row < ROWS; row++) sums_of[row][i] = fma(query[row], loaded, sums_of[row][i]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            _mm_storeu_ps(scores[row] + key, sums(sums_of[row][0], sums_of[row][1], sums_of[row][2], sums_of[row][3]));
    }
}

// Scores into weights, and by how much what was summed before is to be scaled.
inline float weigh(Row& row, float* scores, Range seen, float softcap) {
    for (int key = seen.first / WIDTH * WIDTH; softcap > 0.0f && key < seen.end; key += WIDTH) {
        // cap * tanh(score / cap)
        const Vec twice = exponential(times(load(scores + key), splat(2.0f / softcap)));
        store(scores + key, times(splat(softcap), splat(1.0f) - splat(2.0f) / (twice + splat(1.0f))));
    }
    for (int key = 0; key < seen.first; key++) scores[key] = -INFINITY;
    for (int key = seen.end; key < TILE; key++) scores[key] = -INFINITY;
    Vec most = splat(-INFINITY);
    for (int key = 0; key < TILE; key += WIDTH) most = maximum(most, load(scores + key));
    const float now = larger(row.maximum, largest(most));
    Vec total = splat(0.0f);
    for (int key = 0; key < TILE; key += WIDTH) {
        const Vec weight = exponential(load(scores + key) - splat(now));
        store(scores + key, weight);
        total = total + weight;
    }
    const float factor = exponential(row.maximum - now);
    row.total = row.total * factor + sum(total);
    row.maximum = now;
    return factor;
}

template <int ROWS, int VECS, typename K>
inline void add_values_at(
    Row* rows, const K* const* values, Range seen, int d, float (*weights)[TILE], const float* factors) {
    Vec sums_of[ROWS][VECS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECS; i++) sums_of[row][i] = times(load(rows[row].sum + d + i * WIDTH), splat(factors[row]));
    for (int key = seen.first; key < seen.end; key++) {
        Vec weight[ROWS];
        for (int row = 0; row < ROWS; row++) weight[row] = splat(weights[row][key]);
        for (int i = 0; i < VECS; i++) {
            const Vec loaded = load(values[key] + d + i * WIDTH);
            for (int row = 0; row < ROWS; row++) sums_of[row][i] = fma(weight[row], loaded, sums_of[row][i]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECS; i++) store(rows[row].sum + d + i * WIDTH, sums_of[row][i]);
}

template <int ROWS, typename K>
inline void attend_rows(
    Row* rows, const K* const* keys, const K* const* values, Range seen, int head_dim, float softcap) {
    alignas(64) float scores[ROWS][TILE];
    float factors[ROWS];
    scores_of<ROWS>(rows, keys, seen, head_dim, scores);
    for (int row = 0; row < ROWS; row++) factors[row] = weigh(rows[row], scores[row], seen, softcap);
    int d = 0;
    for (; d + 4 * WIDTH <= head_dim; d += 4 * WIDTH) add_values_at<ROWS, 4>(rows, values, seen, d, scores, factors);
    for (; d < head_dim; d += WIDTH) add_values_at<ROWS, 1>(rows, values, seen, d, scores, factors);
}

template <typename K>
inline void attend_tile(
    Row* rows, const Range* seen, int num_rows, const K* const* keys, const K* const* values, int head_dim,
    float softcap) {
    for (int first = 0, end; first < num_rows; first = end) {
        for (end = first + 1; end < num_rows && end < first + MOST_ROWS && seen[end] == seen[first];) end++;
        const Range range = seen[first];
        if (range.first >= range.end) continue;
        if (end - first == 3) attend_rows<3>(rows + first, keys, values, range, head_dim, softcap);
        if (end - first == 2) attend_rows<2>(rows + first, keys, values, range, head_dim, softcap);
        if (end - first == 1) attend_rows<1>(rows + first, keys, values, range, head_dim, softcap);
    }
}

// The addresses of a tile's keys, or of its values; behind `end` those of its last one, which is read and not used.
template <typename K>
inline void addresses(const Step& step, const K* head, const int32_t* table, int first_key, int end, const K** found) {
    for (int key = 0; key < end; key++) {
        const int position = first_key + key, block = table[position / step.block_size];
        found[key] = head + block * step.block_stride + (int64_t)(position % step.block_size) * step.head_dim;
    }
    for (int key = end; key % KEYS; key++) found[key] = found[end - 1];
}

// Of a tile that many rows read: widened once.
template <typename K>
inline void widen(const K* const* from, int count, int head_dim, float* to, const float** found) {
    for (int key = 0; key < count; key++) {
        for (int d = 0; d < head_dim; d += WIDTH) store(to + key * head_dim + d, load(from[key] + d));
        found[key] = to + key * head_dim;
    }
}

template <typename T, typename K>
void attend_item(
    const Step& step, const Rules& rules, Item item, int kv_head, const T* query, int64_t query_stride, const K* pool,
    T* output) {
    static thread_local Scratch scratch;
    const int D = step.head_dim, group = step.num_heads / step.num_kv_heads;
    const int num_tokens = item.end_token - item.first_token, num_rows = num_tokens * group;
    const int num_new = step.query_start_loc[item.sequence + 1] - step.query_start_loc[item.sequence];
    const int first_position = step.seq_lens[item.sequence] - num_new + item.first_token -
                               step.query_start_loc[item.sequence];
    // A row's query and sum, then the row itself and its range, then a widened tile of keys and of values.
    const size_t rows_at = (size_t)2 * num_rows * D, ranges_at = rows_at + num_rows * sizeof(Row) / sizeof(float);
    const size_t tiles_at = (ranges_at + num_rows * sizeof(Range) / sizeof(float) + 15) / 16 * 16;
    float* memory = scratch.floats(tiles_at + (size_t)2 * TILE * D);
    Row* rows = (Row*)(memory + rows_at);
    Range* seen = (Range*)(memory + ranges_at);
    for (int index = 0; index < num_rows; index++) {
        const int token = index / group, head = kv_head * group + index % group;
        Row& row = rows[index];
        row.query = memory + (size_t)2 * index * D;
        row.sum = row.query + D;
        row.maximum = rules.sinks ? rules.sinks[head] : -INFINITY;
        row.total = rules.sinks ? 1.0f : 0.0f;
        const T* from = query + (item.first_token + token) * query_stride + (int64_t)head * D;
        for (int d = 0; d < D; d += WIDTH) {
            store(row.query + d, times(load(from + d), splat(rules.scale)));
            store(row.sum + d, splat(0.0f));
        }
    }
    const K* head = pool + (int64_t)kv_head * step.block_size * D;
    const int32_t* table = step.block_tables + item.sequence * step.table_stride;
    const int last_position = first_position + num_tokens - 1;
    const int begin = rules.window ? larger(0, first_position - rules.window + 1) / TILE * TILE : 0;
    const bool is_widened = sizeof(K) != sizeof(float) && num_rows > 2 * MOST_ROWS;
    for (int first_key = begin; first_key <= last_position; first_key += TILE) {
        const int count = smaller(TILE, last_position + 1 - first_key);
        for (int index = 0; index < num_rows; index++) {
            const int position = first_position + index / group;
            seen[index].first = rules.window ? larger(0, position - rules.window + 1 - first_key) : 0;
            seen[index].end = smaller(TILE, position + 1 - first_key);
        }
        const K *keys[TILE], *values[TILE];
        addresses(step, head, table, first_key, count, keys);
        addresses(step, head + step.value_offset, table, first_key, count, values);
        if (is_widened) {
            const float *wide_keys[TILE], *wide_values[TILE];
            const int padded = (count + KEYS - 1) / KEYS * KEYS;
            widen(keys, padded, D, memory + tiles_at, wide_keys);
            widen(values, count, D, memory + tiles_at + TILE * D, wide_values);
            attend_tile(rows, seen, num_rows, wide_keys, wide_values, D, rules.softcap);
        } else {
            attend_tile(rows, seen, num_rows, keys, values, D, rules.softcap);
        }
    }
    for (int index = 0; index < num_rows; index++) {
        const Row& row = rows[index];
        const int64_t place = (int64_t)(item.first_output + index / group) * step.num_heads + kv_head * group + index % group;
        for (int d = 0; d < D; d += WIDTH) store(output + place * D + d, weighted(load(row.sum + d), row.total, rules));
    }
}

}  // namespace
