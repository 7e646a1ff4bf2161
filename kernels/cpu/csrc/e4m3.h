// 8-bit keys and values: e4m3 of the OCP specification, with maximum 448 and no infinity. Reads are exact; stores round
// to
// nearest even and clamp to +-448. NaN stays NaN.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

struct E4m3 {
    uint8_t bits;
};

constexpr float E4M3_MAX = 448.0f, MIN_NORMAL = 0.015625f;  // smaller numbers are 2^-9 apart

// Read as float16, the exponent has 5 bits and the number is 2^-8 of its value. All bits set is NaN.
constexpr float OF_HALF = 256.0f;

#if defined(__AVX512F__)
inline Vec load(const E4m3* at) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
    const __m256i max_value = _mm256_set1_epi16(0x7f), magnitude = _mm256_and_si256(words, max_value);
    const __m256i is_nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(magnitude, max_value), 1);
    const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(words, 7), 15);
    const __m256i found = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), is_nan);
    return times(_mm512_cvtph_ps(found), splat(OF_HALF));
}
#else
inline Vec load(const E4m3* at) {
    const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)at));
    const __m128i max_value = _mm_set1_epi16(0x7f), magnitude = _mm_and_si128(words, max_value);
    const __m128i is_nan = _mm_srli_epi16(_mm_cmpeq_epi16(magnitude, max_value), 1);
    const __m128i sign = _mm_slli_epi16(_mm_srli_epi16(words, 7), 15);
    const __m128i found = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7)), is_nan);
    return times(_mm256_cvtph_ps(found), splat(OF_HALF));
}
#endif

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline void narrow(E4m3* at, float x) {
    const float magnitude = fabsf(x), bounded = magnitude > E4M3_MAX ? E4M3_MAX : magnitude;
    const uint32_t bits = bits_of(bounded), normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    // The last bit of 2^14 is 2^-9.
    const uint32_t least = bits_of(bounded + 16384.0f) - bits_of(16384.0f);
    const uint32_t rounded = x != x ? 0x7f : bounded < MIN_NORMAL ? least : normal;
    at->bits = (uint8_t)(bits_of(x) >> 24 & 0x80) | (uint8_t)rounded;
}

inline void store(E4m3* at, Vec x) {
    alignas(64) float values[WIDTH];
    store(values, x);
    for (int i = 0; i < WIDTH; i++) narrow(at + i, values[i]);
}

}  // namespace
