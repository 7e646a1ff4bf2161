// Attention of many rows over a tile, as in prompts. The keys are transposed so that a vector holds one element of
// WIDTH
// keys and a score needs no horizontal sum. Transposing a tile pays off from eight rows on.
//
// Every number is computed as in attend_rows() and in the same order: a score is WIDTH chains of products, one per
// vector
// lane, added as sums() adds lanes. A row therefore has the same bits in both.
#pragma once

#include "attention.h"

// Not inlined: four of these in one function spill each other's registers, 1.8 times as slow with GCC 12.
#define NOINLINE __attribute__((noinline)) static

namespace {

constexpr int BLOCK_ROWS = 32;                        // rows per pass over the keys, and then the values, of a tile
constexpr int SCORED_ROWS = 4, KEY_VECS = 2;          // computed together: 8 chains cover the latency of an addition
constexpr int VALUE_VECS = WIDTH == 16 ? 4 : 2;       // for 4 rows: sums that fit 32 or 16 registers
constexpr int SCORED_KEYS = KEY_VECS * WIDTH;

// Transpose elements d..d+7 of eight keys into eight rows of `to`, one key per column.
inline void transpose_square(const float* const* keys, int d, float* to) {
    __m256 joined[8], pairs[8];
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const __m128 low = _mm_loadu_ps(keys[i] + d + 4 * half), high = _mm_loadu_ps(keys[i + 4] + d + 4 * half);
            joined[i + 4 * half] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
        }
    for (int half = 0; half < 8; half += 4)
        for (int i = 0; i < 2; i++) {
            pairs[half + i] = _mm256_unpacklo_ps(joined[half + 2 * i], joined[half + 2 * i + 1]);
            pairs[half + i + 2] = _mm256_unpackhi_ps(joined[half + 2 * i], joined[half + 2 * i + 1]);
        }
    for (int half = 0; half < 8; half += 4)
        for (int i = 0; i < 4; i += 2) {
            const __m256 a = pairs[half + i], b = pairs[half + i + 1];
            _mm256_storeu_ps(to + (half + i) * TILE, _mm256_shuffle_ps(a, b, 0x44));
            _mm256_storeu_ps(to + (half + i + 1) * TILE, _mm256_shuffle_ps(a, b, 0xee));
        }
}

// `count` keys -> [head_dim, TILE]; the last key may repeat.
inline void transpose(const float* const* keys, int count, int head_dim, float* to) {
    for (int key = 0; key < count; key += PADDED)
        for (int d = 0; d < head_dim; d += 8) transpose_square(keys + key, d, to + d * TILE + key);
}

// Scores of some rows and SCORED_KEYS keys.
template <int ROWS>
struct Scores {
    Vec of[ROWS][KEY_VECS];

    Scores operator+(const Scores& other) const {
        Scores found;
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < KEY_VECS; i++) found.of[row][i] = of[row][i] + other.of[row][i];
        return found;
    }
};

// The chain of one lane: elements lane, lane + WIDTH and so on.
template <int ROWS>
inline Scores<ROWS> chain(const Row* rows, const float* transposed, int lane, int head_dim) {
    Scores<ROWS> sum;
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < KEY_VECS; i++) sum.of[row][i] = splat(0.0f);
    for (int d = lane; d < head_dim; d += WIDTH) {
        Vec keys[KEY_VECS];
        for (int i = 0; i < KEY_VECS; i++) keys[i] = load(transposed + d * TILE + i * WIDTH);
        for (int row = 0; row < ROWS; row++) {
            const Vec query = splat(rows[row].query[d]);
            for (int i = 0; i < KEY_VECS; i++) sum.of[row][i] = fma(query, keys[i], sum.of[row][i]);
        }
    }
    return sum;
}

// What sums() makes of the lanes from `lane` on, of 8; a wider vector is halved first.
template <int ROWS, int LANES>
inline Scores<ROWS> sum_of_lanes(const Row* rows, const float* transposed, int lane, int head_dim) {
    if constexpr (LANES > 1)
        return sum_of_lanes<ROWS, LANES / 2>(rows, transposed, lane, head_dim) +
               sum_of_lanes<ROWS, LANES / 2>(rows, transposed, lane + LANES / 2, head_dim);
    else if constexpr (WIDTH == 16)
        return chain<ROWS>(rows, transposed, lane, head_dim) + chain<ROWS>(rows, transposed, lane + 8, head_dim);
    else
        return chain<ROWS>(rows, transposed, lane, head_dim);
}

template <int ROWS>
NOINLINE void transposed_scores(const Row* rows, const float* transposed, Range seen, int head_dim, float (*scores)[TILE]) {
    for (int key = seen.first / SCORED_KEYS * SCORED_KEYS; key < seen.end; key += SCORED_KEYS) {
        const Scores<ROWS> found = sum_of_lanes<ROWS, 8>(rows, transposed + key, 0, head_dim);
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < KEY_VECS; i++) store(scores[row] + key + i * WIDTH, found.of[row][i]);
    }
}

// weigh() for up to BLOCK_ROWS rows, phase by phase, because a single row waits for each of its numbers. Horizontal
// sums
// cover four rows at once, factors a vector of rows.
NOINLINE void weigh_rows(
    Row* rows, const Range* seen, int count, float (*scores)[TILE], float softcap, float* factors) {
    Vec lanes[BLOCK_ROWS];  // largest scores, then totals, per lane
    alignas(64) float found[BLOCK_ROWS];
    for (int row = 0; row < count; row++) {
        if (!(seen[row] == Range{0, TILE} && softcap == 0.0f)) finish_scores(scores[row], seen[row], softcap);
        lanes[row] = max_of(scores[row]);
    }
    for (int row = count; row % 4; row++) lanes[row] = lanes[count - 1];
    for (int row = 0; row < count; row += 4)
        _mm_store_ps(found + row, largests(lanes[row], lanes[row + 1], lanes[row + 2], lanes[row + 3]));
    for (int row = 0; row < count; row++) {
        const float before = rows[row].maximum, now = larger(before, found[row]);
        factors[row] = before - now;
        rows[row].maximum = now;
    }
    for (int row = 0; row < count; row += WIDTH) store(factors + row, exponential_of_negative(load(factors + row)));
    for (int row = 0; row < count; row++) lanes[row] = weights_of(scores[row], rows[row].maximum);
    for (int row = 0; row < count; row += 4)
        _mm_store_ps(found + row, sums(lanes[row], lanes[row + 1], lanes[row + 2], lanes[row + 3]));
    for (int row = 0; row < count; row++) rows[row].total = rows[row].total * factors[row] + found[row];
}

// Add the values for ROWS rows that see the same keys.
template <int ROWS, typename K>
NOINLINE void add_values(
    Row* rows, const K* const* values, Range seen, int head_dim, float (*weights)[TILE], const float* factors) {
    constexpr int STEP = VALUE_VECS * WIDTH;
    int d = 0;
    for (; d + STEP <= head_dim; d += STEP) add_values_at<ROWS, VALUE_VECS>(rows, values, seen, d, weights, factors);
    for (; d < head_dim; d += WIDTH) add_values_at<ROWS, 1>(rows, values, seen, d, weights, factors);
}

// Up to BLOCK_ROWS rows, each of which sees at least one key.
inline void attend_block(
    Row* rows, const Range* seen, int num_rows, const float* transposed, const float* const* values, int head_dim,
    float softcap) {
    alignas(64) float scores[BLOCK_ROWS][TILE];
    alignas(64) float factors[BLOCK_ROWS] = {};
    for (int row = 0, count; row < num_rows; row += count) {
        count = smaller(SCORED_ROWS, num_rows - row);
        const Range all = {seen[row].first, seen[row + count - 1].end};  // later tokens see later keys
        if (count == 4) transposed_scores<4>(rows + row, transposed, all, head_dim, scores + row);
        if (count == 3) transposed_scores<3>(rows + row, transposed, all, head_dim, scores + row);
        if (count == 2) transposed_scores<2>(rows + row, transposed, all, head_dim, scores + row);
        if (count == 1) transposed_scores<1>(rows + row, transposed, all, head_dim, scores + row);
    }
    weigh_rows(rows, seen, num_rows, scores, softcap, factors);
    for (int row = 0, count; row < num_rows; row += count) {
        for (count = 1; count < SCORED_ROWS && row + count < num_rows && seen[row + count] == seen[row];) count++;
        if (count == 4) add_values<4>(rows + row, values, seen[row], head_dim, scores + row, factors + row);
        if (count == 3) add_values<3>(rows + row, values, seen[row], head_dim, scores + row, factors + row);
        if (count == 2) add_values<2>(rows + row, values, seen[row], head_dim, scores + row, factors + row);
        if (count == 1) add_values<1>(rows + row, values, seen[row], head_dim, scores + row, factors + row);
    }
}

// Rows in token order: those without a visible key are the first, or with a window the last.
inline void attend_transposed(
    Row* rows, const Range* seen, int num_rows, const float* transposed, const float* const* values, int head_dim,
    float softcap) {
    int row = 0, end = num_rows;
    while (row < end && seen[row].first >= seen[row].end) row++;
    while (row < end && seen[end - 1].first >= seen[end - 1].end) end--;
    for (; row < end; row += BLOCK_ROWS)
        attend_block(rows + row, seen + row, smaller(BLOCK_ROWS, end - row), transposed, values, head_dim, softcap);
}

// Return a float32 tile in place, or widened into `to`.
inline void widen(const float* const* from, int count, int, float*, const float** found) {
    memcpy(found, from, count * sizeof *found);
}
template <typename K>
inline void widen(const K* const* from, int count, int head_dim, float* to, const float** found) {
    for (int key = 0; key < count; key++) {
        for (int d = 0; d < head_dim; d += WIDTH) store(to + key * head_dim + d, load(from[key] + d));
        found[key] = to + key * head_dim;
    }
}

}  // namespace
