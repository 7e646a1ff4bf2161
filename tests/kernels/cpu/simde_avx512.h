// AVX-512 and VNNI in terms of AVX2, by SIMDe, and what its Debian version lacks: csrc/*_avx512.cpp on any test machine.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

static inline simde__m512 emulated_cvtph_ps(__m256i halves) {
    simde__m512_private made;
    made.m256[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    made.m256[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    return simde__m512_from_private(made);
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(halves) emulated_cvtph_ps(halves)

static inline simde__m512 emulated_cvtepi32_ps(simde__m512i integers) {
    const simde__m512i_private from = simde__m512i_to_private(integers);
    simde__m512_private made;
    for (int half = 0; half < 2; half++) made.m256[half] = _mm256_cvtepi32_ps(from.m256i[half]);
    return simde__m512_from_private(made);
}
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(integers) emulated_cvtepi32_ps(integers)

static inline simde__m512i emulated_cvtepu16_epi32(__m256i shorts) {
    simde__m512i_private made;
    made.m256i[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(shorts));
    made.m256i[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(shorts, 1));
    return simde__m512i_from_private(made);
}
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) emulated_cvtepu16_epi32(x)

static inline simde__m512i emulated_cvtps_epi32(simde__m512 x) {
    const simde__m512_private from = simde__m512_to_private(x);
    simde__m512i_private made;
    for (int half = 0; half < 2; half++) made.m256i[half] = _mm256_cvtps_epi32(from.m256[half]);
    return simde__m512i_from_private(made);
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) emulated_cvtps_epi32(x)

static inline __m256i emulated_cvtepi32_epi16(simde__m512i x) {
    const simde__m512i_private from = simde__m512i_to_private(x);
    simde__m256i_private made;
    for (int i = 0; i < 16; i++) made.i16[i] = (int16_t)from.i32[i];
    return simde__m256i_from_private(made);
}
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) emulated_cvtepi32_epi16(x)

static inline __m256 emulated_extractf32x8_ps(simde__m512 x, int i) {
    return simde__m512_to_private(x).m256[i];
}
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, i) emulated_extractf32x8_ps(x, i)

#define __AVX512F__ 1  // from here on, behind the compiler's own headers: sources choose by it
