// AVX-512 and VNNI in terms of AVX2, by SIMDe, and what its Debian version lacks: linear_avx512.cpp on any test machine.
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
