// A packed weight, as kernels/cpu/linear.py makes it and every kernel reads it.
//
// Blocks of 16 outputs, with groups of 32 inputs:
//     8 bits   [8 quads of inputs][16 outputs][4 inputs] int8
//     4 bits   [4][16][4] uint8, the low nibble is quad j, the high nibble quad j + 4
//     scales, minima   [16] float16
#pragma once

#include <stdint.h>

enum Format { INT8 = 0, INT4_ZERO_8 = 1, INT4_MINIMUM = 2 };  // 4 bits: scale * (quant - 8), scale * quant + minimum
enum Gate { NO_GATE = 0, SILU = 1, GELU_TANH = 2 };            // activation(gate) * up, for a weight with both
enum Type { FLOAT32 = 0, BFLOAT16 = 1 };                      // of inputs and outputs

struct LinearWeight {
    const uint8_t* quants;
    const uint16_t* scales;
    const uint16_t* minima;  // only for INT4_MINIMUM
    const float* bias;       // or null
    int64_t outputs;         // rows of the weight; gated: rows of gate and up, whose blocks alternate
    int64_t inputs;
    int32_t format;
    int32_t gate;
};
