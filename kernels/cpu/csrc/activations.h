// Gate activations. They produce the same bits in every translation unit.
#pragma once

#include "linear_weight.h"
#include "simd.h"

namespace {

// x / (1 + e^-z).
inline Vec by_sigmoid(Vec x, Vec z) {
    const Vec bounded = minimum(splat(88.0f), maximum(splat(-87.0f), times(z, splat(-1.0f))));  // keeps NaN
    return x / (splat(1.0f) + exponential_within(bounded));
}

// x / (1 + e^-z), where z is x (SiLU) or 2 sqrt(2 / pi) (x + 0.044715 x^3) (GELU by tanh).
inline Vec activated(Vec x, int gate) {
    if (gate != GELU_TANH) return by_sigmoid(x, x);
    const Vec cube = times(times(x, x), x);
    return by_sigmoid(x, times(fma(cube, splat(0.044715f), x), splat(1.5957691f)));
}

inline Vec gated(Vec gate, Vec up, const LinearWeight& weight) {
    if (weight.gate != LIMITED_SILU) return times(activated(gate, weight.gate), up);
    const Vec x = minimum(splat(weight.limit), gate);  // keeps NaN
    const Vec bounded = minimum(splat(weight.limit), maximum(splat(-weight.limit), up));
    return times(by_sigmoid(x, times(splat(weight.alpha), x)), bounded + splat(weight.up_offset));
}

}  // namespace
