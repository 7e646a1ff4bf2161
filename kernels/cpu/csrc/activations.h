// Gate activations. They produce the same bits in every translation unit.
#pragma once

#include "linear_weight.h"
#include "simd.h"

namespace {

// x / (1 + e^-z), where z is x (SiLU) or 2 sqrt(2 / pi) (x + 0.044715 x^3) (GELU by tanh).
inline Vec activated(Vec x, int gate) {
    Vec z = x;
    if (gate == GELU_TANH) {
        const Vec cube = times(times(x, x), x);
        z = times(fma(cube, splat(0.044715f), x), splat(1.5957691f));
    }
    const Vec bounded = minimum(splat(88.0f), maximum(splat(-87.0f), times(z, splat(-1.0f))));  // keeps NaN
    return x / (splat(1.0f) + exponential_within(bounded));
}

}  // namespace
