// Activations of gated products, the same bits in every file that includes this.
#pragma once

#include <immintrin.h>

#include "linear_weight.h"

namespace {

// e^x within 2 units of the last place; the same bits in every file, which libm does not promise.
inline __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));  // NaN stays: it is second
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 sum = _mm256_set1_ps(1.9875691500e-4f);  // Cephes' expf
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(1.3981999507e-3f));
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(8.3334519073e-3f));
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(4.1665795894e-2f));
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(1.6666665459e-1f));
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(5.0000001201e-1f));
    sum = _mm256_add_ps(_mm256_fmadd_ps(sum, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(sum, _mm256_castsi256_ps(power));
}

// x / (1 + e^-z), where z is x (SiLU) or 2 sqrt(2 / pi) (x + 0.044715 x^3) (GELU by tanh).
inline __m256 activated(__m256 x, int gate) {
    __m256 z = x;
    if (gate == GELU_TANH) {
        const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
        z = _mm256_mul_ps(_mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), x), _mm256_set1_ps(1.5957691f));
    }
    const __m256 minus_z = _mm256_xor_ps(z, _mm256_set1_ps(-0.0f));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(minus_z)));
}

}  // namespace
