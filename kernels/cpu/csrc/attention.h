// Paged attention over the block table, for decoding tokens and parts of prompts.
//
// The order of a row's sums (a row is a token's query head) depends only on its position: keys in tiles of TILE from
// position 0, online softmax tile by tile. Rows that see the same keys of a tile are computed together, which shares
// reads and changes no sum. A row therefore has the same bits in any batch and in any chunk of a prompt.
#pragma once

#include <cmath>
#include <cstdlib>

#include "e4m3.h"
#include "operation.h"

// Shared by all layers of a step. The fields mirror kernels/cpu/step.py.
struct Step {
    const int32_t* block_tables;     // [S, table_stride]
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;         // [S]
    const int64_t* positions;        // [T]
    const int64_t* slots;            // [T]
    float* scores;         // [T, Hq, scores_stride], for sequences whose token is shared by threads; or null
    int64_t scores_stride;
    int64_t table_stride;
    int64_t block_stride;  // elements from a block's keys to those of the next block
    int64_t value_offset;  // elements from a block's keys to its values
    int64_t num_tokens;
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t num_threads;
    int32_t shares_tokens;  // every sequence has one token and there are few, so threads may share one
};

// Tokens of one sequence whose attention one thread computes for one KV head.
struct Item {
    int32_t sequence, first_token, end_token, first_output;
};

struct Rules {
    float scale;
    float softcap;         // 0: none
    int32_t window;        // number of visible keys, including the token's own; 0: all
    const float* sinks;    // [Hq]: a score that enters the softmax without a value; or null
    float value_scale;     // for e4m3 values, else 1; the key scale is part of `scale`
};

namespace {

constexpr int TILE = 64;       // keys
constexpr int MAX_ROWS = 3;   // computed together: 16 registers hold the sums of 3 rows x 4 keys
constexpr int KEYS = 4;        // scored together
constexpr int PADDED = 8;      // key addresses per tile are rounded up to this; many_rows.h transposes as many

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
    float* sum;    // [D], weighted sum of the values
    float maximum, total;
};

inline Vec weighted(Vec sum, float total, const Rules& rules) {
    return times(sum / splat(total), splat(rules.value_scale));
}

// Keys of one tile visible to a row.
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
            Vec query[ROWS];  // with 4 key vectors and 1 query vector instead, a sum would have no register
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

// Apply the softcap and hide the keys that a row does not see.
inline void finish_scores(float* scores, Range seen, float softcap) {
    for (int key = seen.first / WIDTH * WIDTH; softcap > 0.0f && key < seen.end; key += WIDTH) {
        // cap * tanh(score / cap)
        const Vec twice = exponential(times(load(scores + key), splat(2.0f / softcap)));
        store(scores + key, times(splat(softcap), splat(1.0f) - splat(2.0f) / (twice + splat(1.0f))));
    }
    for (int key = 0; key < seen.first; key++) scores[key] = -INFINITY;
    for (int key = seen.end; key < TILE; key++) scores[key] = -INFINITY;
}

inline Vec max_of(const float* scores) {
    Vec max_value = splat(-INFINITY);
    for (int key = 0; key < TILE; key += WIDTH) max_value = maximum(max_value, load(scores + key));
    return max_value;
}

// Turn scores into weights relative to the largest score; return their total per lane.
inline Vec weights_of(float* scores, float largest_score) {
    Vec total = splat(0.0f);
    for (int key = 0; key < TILE; key += WIDTH) {
        const Vec weight = exponential_of_negative(load(scores + key) - splat(largest_score));
        store(scores + key, weight);
        total = total + weight;
    }
    return total;
}

// Turn scores into weights; return the factor for everything summed before.
inline float weigh(Row& row, float* scores, Range seen, float softcap) {
    finish_scores(scores, seen, softcap);
    const float now = larger(row.maximum, largest(max_of(scores)));
    const float total = sum(weights_of(scores, now));
    const float factor = exponential(row.maximum - now);
    row.total = row.total * factor + total;
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
        for (end = first + 1; end < num_rows && end < first + MAX_ROWS && seen[end] == seen[first];) end++;
        const Range range = seen[first];
        if (range.first >= range.end) continue;
        if (end - first == 3) attend_rows<3>(rows + first, keys, values, range, head_dim, softcap);
        if (end - first == 2) attend_rows<2>(rows + first, keys, values, range, head_dim, softcap);
        if (end - first == 1) attend_rows<1>(rows + first, keys, values, range, head_dim, softcap);
    }
}

// The addresses of a tile's keys or values. After `end` the last one repeats; it is read but not used.
template <typename K>
inline void addresses(const Step& step, const K* head, const int32_t* table, int first_key, int end, const K** found) {
    for (int key = 0; key < end; key++) {
        const int position = first_key + key, block = table[position / step.block_size];
        found[key] = head + block * step.block_stride + (int64_t)(position % step.block_size) * step.head_dim;
    }
    for (int key = end; key % PADDED; key++) found[key] = found[end - 1];
}

}  // namespace
