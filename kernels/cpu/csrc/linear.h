// Linear layers with 8-bit and 4-bit weights, for any instruction set with the operations of `Set` (see linear_avx2.cpp
// and
// linear_avx512.cpp).
//
// Weights and input rows have one scale per group of 32 inputs. A group's sum is an integer sum, so it is exact in any
// order: at most 32 * 128 * 32,512, and for 8 bits the same again for the zero point, within int32. Groups are added in
// float32 in the order of the inputs, one fused multiply-add each. An output therefore depends only on its row and its
// weights, not on other rows, threads or the instruction set.
//
//     output = sum over groups of  (sum of quants of weight and row) * (scale of weight * scale of row)
//                                + minimum of weight * (scale of row * sum of the row's quants)
//
// Everything is internal to each including file, because code for one instruction set must not be linked into another.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "activations.h"
#include "linear_weight.h"
#include "operation.h"
#include "processor.h"

namespace {

constexpr int GROUP = 32, OUTPUTS = 16, QUADS = GROUP / 4, LINE = OUTPUTS * 4;  // line: 4 inputs of 16 outputs
// Input rows have 16 bits: 8 bits are a third of a percent off, which often changes the most likely token. A 16-bit row
// is
// two products of 8 bits, because dpbusd has no wider operand that keeps weights as bytes, unless the instruction set
// widens its weights (has_whole_rows).
constexpr int BASE = 255;
constexpr float MAX_QUANT = 127 * BASE + 127;
constexpr int MAX_ROWS = 8;      // multiplied at once
constexpr int ROWS_PER_PASS = 128;  // their quants stay in the L2 cache while all weights are read
constexpr int MIN_SHARED_ROWS = 4;    // fewer rows are quantized by one thread, because sharing them takes longer

struct Rows {  // quantized
    int8_t* quants;      // [rows][groups][2][GROUP]: a quant is BASE * first byte + second byte; or 16-bit numbers,
                         // of each four in the order first, third, second, fourth
    float* scales;       // [rows][groups]
    int32_t* sums;       // sums of a group's quants
    float* scaled_sums;  // scales * sums
    int64_t groups;
};

inline __m256 load8(const float* from, int64_t count) {
    if (count >= 8) return _mm256_loadu_ps(from);
    float padded[8] = {};
    memcpy(padded, from, count * sizeof(float));
    return _mm256_loadu_ps(padded);
}

inline __m256 load8(const uint16_t* from, int64_t count) {  // bfloat16 is the upper half of a float32
    uint16_t padded[8] = {};
    if (count < 8) from = (const uint16_t*)memcpy(padded, from, count * sizeof(uint16_t));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16));
}

inline int32_t largest(__m256i of) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline int32_t total(__m256i of) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline __m256i bytes_of(const __m256i (&integers)[4]) {
    const __m256i low = _mm256_packs_epi32(integers[0], integers[1]), high = _mm256_packs_epi32(integers[2], integers[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work on each half of a register
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

inline void store_whole(const __m256i (&integers)[4], int8_t* quants) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int half = 0; half < 2; half++) {
        const __m256i packed = _mm256_packs_epi32(integers[2 * half], integers[2 * half + 1]);  // works on each half
        const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
        _mm256_storeu_si256((__m256i*)(quants + half * GROUP), _mm256_shuffle_epi8(words, order));
    }
}

// Quantize a group to -MAX_QUANT..MAX_QUANT, stored as two bytes in -127..127 or as one 16-bit number, and its scale.
// A group with NaN or infinity gets the scale NaN, so only its own row's outputs are NaN. A group too small for a scale
// becomes zeros.
template <class Element>
void quantize_group(const Element* from, int64_t count, bool is_whole, int8_t* quants, float* scale, int32_t* sum) {
    __m256 values[4];
    __m256i bits = _mm256_setzero_si256();  // largest magnitude: floats compare like their bits, NaN last
    for (int part = 0; part < 4; part++) {
        const int64_t left = count - 8 * part;
        values[part] = left > 0 ? load8(from + 8 * part, left) : _mm256_setzero_ps();
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(values[part]), _mm256_set1_epi32(0x7fffffff));
        bits = _mm256_max_epi32(bits, magnitude);
    }
    const int32_t max_bits = largest(bits);
    float max_value;
    memcpy(&max_value, &max_bits, sizeof max_value);
    const bool is_finite = max_bits < 0x7f800000, is_zero = max_value < 1e-30f;
    const float factor = is_finite && !is_zero ? MAX_QUANT / max_value : 0.0f;
    *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : max_value / MAX_QUANT;
    __m256i integers[4], sums = _mm256_setzero_si256();
    for (int part = 0; part < 4; part++) {
        integers[part] = is_finite ? _mm256_cvtps_epi32(_mm256_mul_ps(values[part], _mm256_set1_ps(factor)))
                                   : _mm256_setzero_si256();
        sums = _mm256_add_epi32(sums, integers[part]);
    }
    *sum = total(sums);
    if (is_whole) return store_whole(integers, quants);
    __m256i upper[4], lower[4];
    for (int part = 0; part < 4; part++) {
        // BASE is odd, so no quotient lies halfway between integers, and a rounded 1 / BASE is exact enough.
        const __m256 quotient = _mm256_mul_ps(_mm256_cvtepi32_ps(integers[part]), _mm256_set1_ps(1.0f / BASE));
        upper[part] = _mm256_cvtps_epi32(quotient);
        lower[part] = _mm256_sub_epi32(integers[part], _mm256_mullo_epi32(upper[part], _mm256_set1_epi32(BASE)));
    }
    _mm256_storeu_si256((__m256i*)quants, bytes_of(upper));
    _mm256_storeu_si256((__m256i*)(quants + GROUP), bytes_of(lower));
}

template <class Element>
void quantize_row(const Element* from, int64_t inputs, bool is_whole, const Rows& rows, int64_t row) {
    for (int64_t group = 0; group < rows.groups; group++) {
        const int64_t at = row * rows.groups + group;
        quantize_group(from + group * GROUP, inputs - group * GROUP, is_whole, rows.quants + at * 2 * GROUP,
                       rows.scales + at, rows.sums + at);
        rows.scaled_sums[at] = rows.scales[at] * (float)rows.sums[at];
    }
}

inline __m128i bfloat16_of(__m256 values) {  // round to nearest even
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i upper = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    upper = _mm256_blendv_epi8(upper, _mm256_set1_epi32(0x7fc0), is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

inline void store(const float* sums, int64_t count, void* to, int type) {  // up to OUTPUTS
    if (type == FLOAT32) {
        // Reads match the width of the gate's writes: a wider read would wait for the cache.
        for (int part = 0; count == OUTPUTS && part < OUTPUTS; part += WIDTH)
            store((float*)to + part, load(sums + part));
        if (count < OUTPUTS) memcpy(to, sums, count * sizeof(float));
        return;
    }
    uint16_t rounded[OUTPUTS];
    for (int part = 0; part < OUTPUTS; part += 8)
        _mm_storeu_si128((__m128i*)(rounded + part), bfloat16_of(_mm256_loadu_ps(sums + part)));
    memcpy(to, rounded, count * sizeof(uint16_t));
}

// The scales of outputs from index `at` on, for the numbers that dot() adds.
template <class Set, int FORMAT>
inline typename Set::Floats scales_at(const void* scales, int64_t at) {
    return FORMAT == E2M1 ? Set::halved_powers((const uint8_t*)scales + at) : Set::load((const uint16_t*)scales + at);
}

// The sums of `count` rows from `row` on for one block of 16 outputs, in sums[count][16].
template <class Set, int FORMAT, int ROWS>
void multiply_tile(const LinearWeight& weight, int64_t block, const Rows& rows, int64_t row, float* sums) {
    constexpr int PARTS = Set::parts(ROWS);  // parts of a block computed at once
    constexpr int64_t BYTES = FORMAT == INT8 ? QUADS * LINE : QUADS * LINE / 2;
    for (int first = 0; first < OUTPUTS / Set::LANES; first += PARTS) {
        typename Set::Floats sum[ROWS][PARTS];
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < PARTS; part++) sum[r][part] = Set::zero();
        for (int64_t group = 0; group < rows.groups; group++) {
            const int64_t of_block = block * rows.groups + group;
            const uint8_t* quants = weight.quants + of_block * BYTES + first * Set::LANES * 4;
            typename Set::Integers exact[ROWS][PARTS];
            Set::template dot<FORMAT, ROWS, PARTS>(quants, rows.quants + (row * rows.groups + group) * 2 * GROUP,
                                                   rows.groups * 2 * GROUP, exact);
            for (int part = 0; part < PARTS; part++) {
                const int64_t lane = of_block * OUTPUTS + (first + part) * Set::LANES;
                const typename Set::Floats scale = scales_at<Set, FORMAT>(weight.scales, lane);
                for (int r = 0; r < ROWS; r++) {
                    const int64_t at = (row + r) * rows.groups + group;
                    const typename Set::Floats factor = Set::multiply(scale, Set::all(rows.scales[at]));
                    const typename Set::Floats exact_float = Set::template without_zero<FORMAT>(exact[r][part], rows.sums[at]);
                    sum[r][part] = Set::multiply_add(exact_float, factor, sum[r][part]);
                    if (FORMAT == INT4_MINIMUM)
                        sum[r][part] = Set::multiply_add(Set::load(weight.minima + lane), Set::all(rows.scaled_sums[at]),
                                                         sum[r][part]);
                }
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < PARTS; part++)
                Set::save(sums + r * OUTPUTS + (first + part) * Set::LANES, sum[r][part]);
    }
}

template <class Set, int FORMAT>
int multiply_rows(const LinearWeight& weight, int64_t block, const Rows& rows, int64_t row, int64_t left, float* sums) {
    if (Set::MAX_ROWS >= 8 && left >= 8) return multiply_tile<Set, FORMAT, 8>(weight, block, rows, row, sums), 8;
    if (Set::MAX_ROWS >= 4 && left >= 4) return multiply_tile<Set, FORMAT, 4>(weight, block, rows, row, sums), 4;
    if (left >= 2) return multiply_tile<Set, FORMAT, 2>(weight, block, rows, row, sums), 2;
    return multiply_tile<Set, FORMAT, 1>(weight, block, rows, row, sums), 1;
}

template <class Set>
int multiply(const LinearWeight& weight, int64_t block, const Rows& rows, int64_t row, int64_t left, float* sums) {
    switch (weight.format) {
        case INT8: return multiply_rows<Set, INT8>(weight, block, rows, row, left, sums);
        case INT4_ZERO_8: return multiply_rows<Set, INT4_ZERO_8>(weight, block, rows, row, left, sums);
        case E2M1: return multiply_rows<Set, E2M1>(weight, block, rows, row, left, sums);
        default: return multiply_rows<Set, INT4_MINIMUM>(weight, block, rows, row, left, sums);
    }
}

void add_bias(float* sums, int rows, const float* bias, int64_t count) {
    for (int r = 0; r < rows; r++)
        for (int64_t lane = 0; lane < count; lane++) sums[r * OUTPUTS + lane] += bias[lane];
}

// Outputs of one block, or of a pair of blocks of a gated weight, for rows `row` to `end`.
template <class Set>
void compute_block(const LinearWeight& weight, int64_t block, const Rows& rows, int64_t row, int64_t end, uint8_t* out,
                   int64_t out_stride, int out_type) {
    const int64_t width = weight.gate ? weight.outputs / 2 : weight.outputs, at = block * OUTPUTS;
    const int64_t count = width - at < OUTPUTS ? width - at : OUTPUTS, size = out_type == FLOAT32 ? 4 : 2;
    float sums[MAX_ROWS * OUTPUTS], up[MAX_ROWS * OUTPUTS];
    for (int done; row < end; row += done) {
        done = multiply<Set>(weight, weight.gate ? 2 * block : block, rows, row, end - row, sums);
        if (weight.bias) add_bias(sums, done, weight.bias + at, count);
        if (weight.gate) {
            multiply<Set>(weight, 2 * block + 1, rows, row, end - row, up);
            if (weight.bias) add_bias(up, done, weight.bias + width + at, count);
            for (int i = 0; i < done * OUTPUTS; i += WIDTH)
                store(sums + i, gated(load(sums + i), load(up + i), weight));
        }
        for (int r = 0; r < done; r++) store(sums + r * OUTPUTS, count, out + ((row + r) * out_stride + at) * size, out_type);
    }
}

Rows rows_in(uint8_t* memory, int64_t num_rows, int64_t groups) {
    const int64_t all_groups = num_rows * groups;
    float* scales = (float*)(memory + all_groups * 2 * GROUP);
    return {(int8_t*)memory, scales, (int32_t*)(scales + all_groups), scales + 2 * all_groups, groups};
}

// x [rows, inputs] -> out [rows, outputs]; strides are in elements per row. Returns 0, or 1 if out of memory.
template <class Set>
int linear(const LinearWeight& of_weight, const void* x, int64_t x_stride, int x_type, int64_t num_rows, void* out,
           int64_t out_stride, int out_type, int num_threads) {
    if (num_rows == 0) return 0;
    const LinearWeight weight = of_weight;
    const int64_t groups = (weight.inputs + GROUP - 1) / GROUP, inputs = weight.inputs;
    const int64_t width = weight.gate ? weight.outputs / 2 : weight.outputs;
    const int64_t blocks = (width + OUTPUTS - 1) / OUTPUTS, passes = (num_rows + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
    const bool is_whole = Set::has_whole_rows(weight.format);
    auto quantize = [=](int64_t row, uint8_t* shared) {
        const Rows rows = rows_in(shared, num_rows, groups);
        if (x_type == FLOAT32)
            quantize_row((const float*)x + row * x_stride, inputs, is_whole, rows, row);
        else
            quantize_row((const uint16_t*)x + row * x_stride, inputs, is_whole, rows, row);
    };
    auto multiply_block = [=](int64_t part, uint8_t* shared) {
        const int64_t row = part / blocks * ROWS_PER_PASS, left = num_rows - row;
        compute_block<Set>(weight, part % blocks, rows_in(shared, num_rows, groups), row,
                           row + (left < ROWS_PER_PASS ? left : ROWS_PER_PASS), (uint8_t*)out, out_stride, out_type);
    };
    const Operation operations[2] = {
        operation(num_rows, num_rows < MIN_SHARED_ROWS ? num_rows : num_rows / (4 * num_threads), quantize),
        // Blocks go to the next free thread: on a busy machine one thread may get half of a core.
        operation(passes * blocks, blocks / (num_threads * 8), multiply_block, num_rows * groups * (2 * GROUP + 12)),
    };
    return perform(operations, 2, num_threads) ? 0 : 1;
}

}  // namespace

#define PAGESTREAM_LINEAR(NAME, SET)                                                                                  \
    PAGESTREAM_EXPORT int NAME(const LinearWeight* weight, const void* x, int64_t x_stride, int x_type,               \
                               int64_t num_rows, void* out, int64_t out_stride, int out_type, int num_threads) {      \
        return linear<SET>(*weight, x, x_stride, x_type, num_rows, out, out_stride, out_type, num_threads);           \
    }
