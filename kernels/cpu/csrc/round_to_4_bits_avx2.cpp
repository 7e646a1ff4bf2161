// Rounds a weight to INT4_MINIMUM (linear_weight.h) with a small squared error, as kernels/w4a16/rounding.py does.
#include <math.h>

#include "operation.h"
#include "processor.h"
#include "simd.h"

namespace {

constexpr int GROUP = 32, VECTORS = GROUP / WIDTH, LARGEST = 15;
// Steps over the group's range that are tried: fewer than 15 reach beyond it, more clip its ends. None is half of an
// integer: numbers that were rounded to 5 bits before would be ties. The best fit is then refined.
constexpr int TRIES = 15, REFINEMENTS = 2;
constexpr float FIRST_STEPS = 13.1f, MORE_STEPS = 0.25f;

struct Numbers {
    Vec of[VECTORS];
};

// A group as scale * integer + minimum; both are exact in float16.
struct Fit {
    float scale, minimum;
};

float in_half(float x) { return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// The nearest integers 0 to 15 of (x - lowest) * factor; NaN stays NaN.
Numbers integers(const Numbers& x, float lowest, float factor) {
    const Vec whole = splat(1.5f * (1 << 23));  // a float32 of this size has no fraction
    Numbers found;
    for (int i = 0; i < VECTORS; i++) {
        const Vec exact = times(x.of[i] - splat(lowest), splat(factor));
        found.of[i] = maximum(splat(0.0f), minimum(splat(LARGEST), exact)) + whole - whole;
    }
    return found;
}

Numbers integers(const Numbers& x, const Fit& fit) {
    return integers(x, fit.minimum, fit.scale == 0.0f ? 0.0f : 1.0f / fit.scale);
}

float squared_error(const Numbers& x, const Fit& fit) {
    const Numbers quants = integers(x, fit);
    Vec squares = splat(0.0f);
    for (int i = 0; i < VECTORS; i++) {
        const Vec error = fma(quants.of[i], splat(fit.scale), splat(fit.minimum)) - x.of[i];
        squares = fma(error, error, squares);
    }
    return sum(squares);
}

// The fit of least squares for given integers.
Fit least_squares(const Numbers& x, const Numbers& quants) {
    Vec x_sum = splat(0.0f), quant_sum = x_sum, squares = x_sum, products = x_sum;
    for (int i = 0; i < VECTORS; i++) {
        x_sum = x_sum + x.of[i];
        quant_sum = quant_sum + quants.of[i];
        squares = fma(quants.of[i], quants.of[i], squares);
        products = fma(quants.of[i], x.of[i], products);
    }
    enum { X, QUANTS, SQUARES, PRODUCTS };
    float of[4];
    _mm_storeu_ps(of, sums(x_sum, quant_sum, squares, products));
    const float scale = (GROUP * of[PRODUCTS] - of[X] * of[QUANTS]) / (GROUP * of[SQUARES] - of[QUANTS] * of[QUANTS]);
    return {in_half(scale), in_half((of[X] - scale * of[QUANTS]) / GROUP)};
}

Fit best_fit(const Numbers& x) {
    Vec low = x.of[0], high = x.of[0];
    for (int i = 1; i < VECTORS; i++) low = minimum(low, x.of[i]), high = maximum(high, x.of[i]);
    const float lowest = -largest(splat(0.0f) - low), range = largest(high) - lowest;
    Fit best = {in_half(range / LARGEST), in_half(lowest)};
    float least = squared_error(x, best);
    const auto improve = [&](const Numbers& quants) {
        const Fit fit = least_squares(x, quants);
        const float error = squared_error(x, fit);
        if (error < least) best = fit, least = error;  // not if any number is NaN
    };
    for (int i = 0; i < TRIES; i++) improve(integers(x, lowest, (FIRST_STEPS + i * MORE_STEPS) / range));
    for (int i = 0; i < REFINEMENTS; i++) improve(integers(x, best));
    return least < INFINITY ? best : Fit{NAN, NAN};
}

Numbers group_at(const float* from, int64_t count) {
    float padded[GROUP] = {};
    memcpy(padded, from, (count < GROUP ? count : GROUP) * sizeof *from);
    Numbers x;
    for (int i = 0; i < VECTORS; i++) x.of[i] = load(padded + i * WIDTH);
    return x;
}

void write_group(const Numbers& x, const Fit& fit, uint8_t* quants, uint16_t* scale, uint16_t* minimum) {
    float whole[GROUP];
    const Numbers found = integers(x, fit);
    for (int i = 0; i < VECTORS; i++) store(whole + i * WIDTH, found.of[i]);
    for (int i = 0; i < GROUP / 2; i++) quants[i] = (uint8_t)whole[i] | (uint8_t)whole[i + GROUP / 2] << 4;
    *scale = _cvtss_sh(fit.scale, 0);
    *minimum = _cvtss_sh(fit.minimum, 0);
}

}  // namespace

// weight [rows, columns] -> quants [rows, groups, 16], scales and minima [rows, groups], float16. A missing input of the
// last group is 0. A group that no float16 scale and minimum fit, or with NaN or infinity, has NaN as both.
PAGESTREAM_EXPORT void pagestream_round_to_4_bits(const float* weight, int64_t rows, int64_t columns, uint8_t* quants,
                                                  uint16_t* scales, uint16_t* minima, int num_threads) {
    const int64_t groups = (columns + GROUP - 1) / GROUP;
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        for (int64_t group = 0; group < groups; group++) {
            const Numbers x = group_at(weight + row * columns + group * GROUP, columns - group * GROUP);
            const int64_t at = row * groups + group;
            write_group(x, best_fit(x), quants + at * (GROUP / 2), scales + at, minima + at);
        }
    });
}
