// Vectors of float32 as wide as the instruction set of the including source, and bf16 conversion.
//
// Everything is in an anonymous namespace: otherwise the linker could keep one copy of a function for several
// instruction
// sets and run AVX-512 on a processor without it.
#pragma once

// GCC 12 warns about undefined vectors in its own header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct Bf16 {
    uint16_t bits;
};

#if defined(__AVX512F__)
using Vec = __m512;
using Int = __m512i;
constexpr int WIDTH = 16;
inline Vec load(const float* at) { return _mm512_loadu_ps(at); }
inline Vec load(const Bf16* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
inline void store(float* at, Vec x) { _mm512_storeu_ps(at, x); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec two_to_the_last_bits(Vec of) {  // -126..127, taken as an 8-bit number
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(of), 23), _mm512_set1_epi32(127 << 23)));
}
// x where `a` >= `b` or either is NaN, else 0.
inline Vec unless_less(Vec x, Vec a, Vec b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}
inline void store(Bf16* at, Vec x) {
    const Int bits = _mm512_castps_si512(x);
    const Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    Int rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline __m256 halved(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
inline __m256 halved_maximum(Vec x) {
    return _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
#else
using Vec = __m256;
using Int = __m256i;
constexpr int WIDTH = 8;
inline Vec load(const float* at) { return _mm256_loadu_ps(at); }
inline Vec load(const Bf16* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
inline void store(float* at, Vec x) { _mm256_storeu_ps(at, x); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec two_to_the_last_bits(Vec of) {  // -126..127, taken as an 8-bit number
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(of), 23), _mm256_set1_epi32(127 << 23)));
}
inline Vec unless_less(Vec x, Vec a, Vec b) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x); }
inline void store(Bf16* at, Vec x) {
    const Int bits = _mm256_castps_si256(x);
    const Int odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    Int rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const Int no_number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), no_number);
    rounded = _mm256_srli_epi32(rounded, 16);
    rounded = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128((__m128i*)at, _mm256_castsi256_si128(rounded));
}
inline __m256 halved(Vec x) { return x; }
inline __m256 halved_maximum(Vec x) { return x; }
#endif

inline float widened(float x) { return x; }
inline float widened(Bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void narrow(float* at, float x) { *at = x; }
inline void narrow(Bf16* at, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    at->bits = (x != x) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec times(Vec a, Vec b) { return a * b; }

// The sums of four vectors' elements, all in the same order of additions.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(halved(a), halved(b)), _mm256_hadd_ps(halved(c), halved(d)));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}
inline float sum(Vec x) { return _mm_cvtss_f32(sums(x, x, x, x)); }
inline float largest(Vec x) {
    const __m256 half = halved_maximum(x);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// The largest elements of four vectors.
inline __m128 largests(Vec a, Vec b, Vec c, Vec d) {
    const __m256 first = halved_maximum(a), second = halved_maximum(b), third = halved_maximum(c), last = halved_maximum(d);
    const __m256 ab = _mm256_max_ps(_mm256_unpacklo_ps(first, second), _mm256_unpackhi_ps(first, second));
    const __m256 cd = _mm256_max_ps(_mm256_unpacklo_ps(third, last), _mm256_unpackhi_ps(third, last));
    const __m256 all = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// e^x for x in -87..88 or NaN. Relative error 2^-22 (polynomial of Cephes' expf, Moshier 1989).
inline Vec exponential_within(Vec x) {
    // Added to such a number, a float32 has no fraction: the sum rounds to nearest even, and its last bits are n.
    const Vec whole = splat(1.5f * (1 << 23)), shifted = times(x, splat(1.44269504088896341f)) + whole;
    const Vec n = shifted - whole;
    Vec rest = fma(n, splat(-0.693359375f), x);
    rest = fma(n, splat(2.12194440e-4f), rest);
    Vec y = splat(1.9875691500e-4f);
    y = fma(y, rest, splat(1.3981999507e-3f));
    y = fma(y, rest, splat(8.3334519073e-3f));
    y = fma(y, rest, splat(4.1665795894e-2f));
    y = fma(y, rest, splat(1.6666665459e-1f));
    y = fma(y, rest, splat(5.0000001201e-1f));
    y = fma(y, times(rest, rest), rest) + splat(1.0f);
    return times(y, two_to_the_last_bits(shifted));
}

// e^x, clamped to x = 88; 0 below -87.
inline Vec exponential(Vec x) {
    const Vec lowest = splat(-87.0f);
    return unless_less(exponential_within(maximum(lowest, minimum(splat(88.0f), x))), x, lowest);  // keeps NaN
}
// e^x for x <= 0.
inline Vec exponential_of_negative(Vec x) {
    const Vec lowest = splat(-87.0f);
    return unless_less(exponential_within(maximum(lowest, x)), x, lowest);
}
inline float exponential(float x) {
    float value[WIDTH];
    store(value, exponential(splat(x)));
    return value[0];
}

}  // namespace
