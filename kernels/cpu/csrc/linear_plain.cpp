// linear.h as plain loops for every processor. The fast kernels are compared with it bit for bit when the library is
// loaded
// and in tests. It shares no code with them, so an error in one is not in the other.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "linear_weight.h"
#include "processor.h"

namespace {

float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)fraction, -24);
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float element(const void* x, int64_t at, int type) {
    if (type == FLOAT32) return ((const float*)x)[at];
    const uint32_t bits = (uint32_t)((const uint16_t*)x)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int weight_quant(const LinearWeight& weight, int64_t block, int64_t group, int64_t groups, int lane, int input) {
    const int quad = input / 4, within = lane * 4 + input % 4;
    const int64_t of_block = block * groups + group;
    if (weight.format == INT8) return (int8_t)weight.quants[of_block * 512 + quad * 64 + within];
    const int both = weight.quants[of_block * 256 + quad % 4 * 64 + within], quant = quad < 4 ? both & 15 : both >> 4;
    const int numbers[16] = {E2M1_NUMBERS};
    return weight.format == E2M1 ? numbers[quant] : quant - (weight.format == INT4_ZERO_8 ? 8 : 0);
}

struct Row {
    std::vector<int> quants, sums;
    std::vector<float> scales;
};

Row quantized(const LinearWeight& weight, const void* x, int64_t at, int type, int64_t groups) {
    Row row{std::vector<int>(groups * 32), std::vector<int>(groups), std::vector<float>(groups)};
    for (int64_t group = 0; group < groups; group++) {
        const int64_t count = weight.inputs - group * 32 < 32 ? weight.inputs - group * 32 : 32;
        float max_value = 0.0f;
        bool is_finite = true;
        for (int64_t i = 0; i < count; i++) {
            const float value = element(x, at + group * 32 + i, type);
            is_finite = is_finite && isfinite(value);
            max_value = fmaxf(max_value, fabsf(value));
        }
        const bool is_zero = max_value < 1e-30f;
        row.scales[group] = !is_finite ? NAN : is_zero ? 0.0f : max_value / 32512.0f;
        const float factor = is_finite && !is_zero ? 32512.0f / max_value : 0.0f;
        for (int64_t i = 0; i < count && is_finite; i++) {
            row.quants[group * 32 + i] = (int)nearbyintf(element(x, at + group * 32 + i, type) * factor);
            row.sums[group] += row.quants[group * 32 + i];
        }
    }
    return row;
}

float scale_of(const LinearWeight& weight, int64_t at) {
    if (weight.format != E2M1) return half_to_float(((const uint16_t*)weight.scales)[at]);
    const int exponent = ((const uint8_t*)weight.scales)[at];
    return exponent > 1 ? ldexpf(1.0f, exponent - 128) : 0.0f;
}

float product(const LinearWeight& weight, int64_t block, int lane, const Row& row, int64_t groups) {
    float sum = 0.0f;
    for (int64_t group = 0; group < groups; group++) {
        int exact = 0;
        for (int i = 0; i < 32; i++)
            exact += weight_quant(weight, block, group, groups, lane, i) * row.quants[group * 32 + i];
        const int64_t at = (block * groups + group) * 16 + lane;
        sum = fmaf((float)exact, scale_of(weight, at) * row.scales[group], sum);
        if (weight.format == INT4_MINIMUM)
            sum = fmaf(half_to_float(weight.minima[at]), row.scales[group] * (float)row.sums[group], sum);
    }
    return sum;
}

float exponential(float x) {
    x = fminf(fmaxf(x, -87.0f), 88.0f);
    const float n = nearbyintf(x * 1.44269504f);
    const float r = fmaf(n, 2.12194440e-4f, fmaf(-n, 0.693359375f, x));
    float sum = 1.9875691500e-4f;
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = fmaf(sum, r, factor);
    return ldexpf(fmaf(sum, r * r, r) + 1.0f, (int)n);
}

float gated(float x, float up, const LinearWeight& weight) {
    if (isnan(x) || isnan(up)) return NAN;
    float z = x;
    if (weight.gate == GELU_TANH) z = fmaf(x * x * x, 0.044715f, x) * 1.5957691f;
    if (weight.gate == LIMITED_SILU) {
        x = fminf(x, weight.limit);
        z = weight.alpha * x;
        up = fminf(fmaxf(up, -weight.limit), weight.limit) + weight.up_offset;
    }
    return x / (1.0f + exponential(-z)) * up;
}

void store(float value, void* out, int64_t at, int type) {
    if (type == FLOAT32) {
        ((float*)out)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t*)out)[at] = isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

PAGESTREAM_EXPORT int pagestream_linear_plain(const LinearWeight* weight, const void* x, int64_t x_stride, int x_type,
                                              int64_t num_rows, void* out, int64_t out_stride, int out_type, int) {
    const int64_t groups = (weight->inputs + 31) / 32, width = weight->gate ? weight->outputs / 2 : weight->outputs;
    for (int64_t row = 0; row < num_rows; row++) {
        const Row of_row = quantized(*weight, x, row * x_stride, x_type, groups);
        for (int64_t output = 0; output < width; output++) {
            const int64_t block = output / 16;
            const int lane = output % 16;
            float value = product(*weight, weight->gate ? 2 * block : block, lane, of_row, groups);
            if (weight->bias) value += weight->bias[output];
            if (weight->gate) {
                float up = product(*weight, 2 * block + 1, lane, of_row, groups);
                if (weight->bias) up += weight->bias[width + output];
                value = gated(value, up, *weight);
            }
            store(value, out, row * out_stride + output, out_type);
        }
    }
    return 0;
}
