// A packed weight, as kernels/cpu/linear.py makes it and every kernel reads it.
//
// Blocks of 16 outputs, with groups of 32 inputs:
//     8 bits   [8 quads of inputs][16 outputs][4 inputs] int8
//     4 bits   [4][16][4] uint8, the low nibble is quad j, the high nibble quad j + 4
//     scales, minima   [16] float16; scales of E2M1: [16] uint8, the exponent of a power of two plus 127 (e8m0)
#pragma once

#include <stdint.h>

// 4 bits: scale * (quant - 8), scale * quant + minimum, scale * the number of E2M1_NUMBERS with this index
enum Format { INT8 = 0, INT4_ZERO_8 = 1, INT4_MINIMUM = 2, E2M1 = 3 };
// For a weight with both: activation(gate) * up, or with limits, gate * sigmoid(alpha * gate) * (up + up_offset) with gate
// at most `limit` and up within it.
enum Gate { NO_GATE = 0, SILU = 1, GELU_TANH = 2, LIMITED_SILU = 3 };
enum Type { FLOAT32 = 0, BFLOAT16 = 1 };                      // of inputs and outputs

// Twice the values of the 4-bit numbers with a sign, two bits of exponent and one of fraction; half of a scale belongs to
// them. Half of 2^-126 and of 2^-127 is taken as 0.
#define E2M1_NUMBERS 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

struct LinearWeight {
    const uint8_t* quants;
    const void* scales;
    const uint16_t* minima;  // only for INT4_MINIMUM
    const float* bias;       // or null
    int64_t outputs;         // rows of the weight; gated: rows of gate and up, whose blocks alternate
    int64_t inputs;
    int32_t format;
    int32_t gate;
    float alpha, limit, up_offset;  // of LIMITED_SILU
};
