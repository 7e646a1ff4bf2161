// Quantize a group of four rows to 16-bit words with AVX-512. The numbers equal those of quantize_group().
//
// A 128-bit lane holds two words of each of the four rows, so maxima, divisions and sums take one instruction for all
// rows,
// and a quarter of a tile's line is written at once.
#pragma once

#include "linear.h"

namespace {

constexpr int FOUR = 4;
constexpr int GROUPS_AHEAD = 3;  // prefetched per row

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const uint16_t* from) {  // bfloat16 is the upper half of a float32
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

// Transpose the 128-bit lanes of four vectors: vector i gets the i-th 32 bits of all four.
inline void transpose_lanes(__m512i (&of)[FOUR]) {
    const __m512i low[] = {_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpacklo_epi32(of[2], of[3])};
    const __m512i high[] = {_mm512_unpackhi_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[2], of[3])};
    of[0] = _mm512_unpacklo_epi64(low[0], low[1]);
    of[1] = _mm512_unpackhi_epi64(low[0], low[1]);
    of[2] = _mm512_unpacklo_epi64(high[0], high[1]);
    of[3] = _mm512_unpackhi_epi64(high[0], high[1]);
}

inline __m128i max_of_lanes(__m512i of) {
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(of), _mm512_extracti64x4_epi64(of, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

inline __m128i sum_of_lanes(__m512i of) {
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(of), _mm512_extracti64x4_epi64(of, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Each row's largest magnitude: floats compare like their bits, NaN last.
inline __m128i max_bits_of(const __m512 (&values)[FOUR][2]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i maxima[FOUR];
    for (int row = 0; row < FOUR; row++)
        maxima[row] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(values[row][0]), magnitude),
                                     _mm512_and_si512(_mm512_castps_si512(values[row][1]), magnitude));
    transpose_lanes(maxima);
    return max_of_lanes(_mm512_max_epi32(_mm512_max_epi32(maxima[0], maxima[1]), _mm512_max_epi32(maxima[2], maxima[3])));
}

// `rows` point to GROUP numbers each; quants [GROUP / 2 pairs][stride] get the words of four rows per line.
template <class Element>
inline void quantize_four(const Element* const (&rows)[FOUR], int32_t* quants, int stride,
                          float* scales, float* scaled_sums) {
    __m512 values[FOUR][2];
    for (int row = 0; row < FOUR; row++)
        for (int half = 0; half < 2; half++) values[row][half] = load16(rows[row] + half * 16);
    for (int row = 0; row < FOUR; row++)  // hardware prefetchers do not follow rows read side by side
        for (int half = 0; half < 2; half++)
            _mm_prefetch((const char*)(rows[row] + GROUPS_AHEAD * GROUP + half * 16), _MM_HINT_T0);
    const __m128i max_bits = max_bits_of(values);
    const __m128 max_value = _mm_castsi128_ps(max_bits), limit = _mm_set1_ps(MAX_QUANT);
    const __m128i is_finite = _mm_cmpgt_epi32(_mm_set1_epi32(0x7f800000), max_bits);
    const __m128 is_zero = _mm_cmplt_ps(max_value, _mm_set1_ps(1e-30f));
    alignas(16) float factors[FOUR];  // also 0 for non-finite rows, whose words are zeroed below
    _mm_store_ps(factors, _mm_and_ps(_mm_castsi128_ps(is_finite), _mm_andnot_ps(is_zero, _mm_div_ps(limit, max_value))));
    const __m128 scale = _mm_blendv_ps(_mm_set1_ps(__builtin_nanf("")), _mm_andnot_ps(is_zero, _mm_div_ps(max_value, limit)),
                                       _mm_castsi128_ps(is_finite));
    // Packing works per lane: lane i has quads i and 4 + i, each four in the order first, third, second, fourth.
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i words[FOUR];
    for (int row = 0; row < FOUR; row++) {
        const __m512 factor = _mm512_set1_ps(factors[row]);
        words[row] = _mm512_shuffle_epi8(_mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(values[row][0], factor)),
                                                            _mm512_cvtps_epi32(_mm512_mul_ps(values[row][1], factor))),
                                         order);
    }
    transpose_lanes(words);
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < FOUR; i++) {
        words[i] = _mm512_and_si512(words[i], _mm512_broadcast_i32x4(is_finite));
        sums = _mm512_dpwssd_epi32(sums, words[i], _mm512_set1_epi16(1));
        int32_t* to = quants + (i / 2 * QUADS + i % 2) * stride;
        _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(words[i]));
        _mm_storeu_si128((__m128i*)(to + 2 * stride), _mm512_extracti32x4_epi32(words[i], 1));
        _mm_storeu_si128((__m128i*)(to + 4 * stride), _mm512_extracti32x4_epi32(words[i], 2));
        _mm_storeu_si128((__m128i*)(to + 6 * stride), _mm512_extracti32x4_epi32(words[i], 3));
    }
    _mm_storeu_ps(scales, scale);
    _mm_storeu_ps(scaled_sums, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum_of_lanes(sums))));
}

}  // namespace
