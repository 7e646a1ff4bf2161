// Linear layers with float32 or bfloat16 weights and float32 inputs, summed in float32.
//
// An output is one chain of fused multiply-adds over its inputs in order, starting from its bias. The number of rows
// computed together and the number of threads change no sum.
#pragma once

#include "attention.h"

namespace {

constexpr int PANEL = 2 * WIDTH;         // outputs whose weights are interleaved per input
constexpr int DENSE_ROWS = 6;            // rows of inputs; 12 of 16 registers hold their sums
constexpr int64_t ROWS_IN_CACHE = 192;   // rows of inputs that every panel reads again

// weight [outputs, inputs] -> [panels, inputs, PANEL], padded with zeros.
template <typename From, typename W>
void pack_dense(const void* weight, int64_t outputs, int64_t inputs, void* packed, int num_threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int column = 0; column < PANEL; column++) {
            const int64_t output = panel * PANEL + column;
            W* to = (W*)packed + panel * inputs * PANEL + column;
            for (int64_t k = 0; k < inputs; k++)
                narrow(to + k * PANEL, output < outputs ? widened(((const From*)weight)[output * inputs + k]) : 0.0f);
        }
}

template <int ROWS, typename W, typename T>
inline void multiply_panel(
    const float* x, const W* panel, const float* bias, int64_t inputs, int64_t outputs, int columns, T* output) {
    alignas(64) float first[PANEL] = {};
    for (int column = 0; bias && column < columns; column++) first[column] = bias[column];
    Vec sums_of[ROWS][2];
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < 2; part++) sums_of[row][part] = load(first + part * WIDTH);
    for (int64_t k = 0; k < inputs; k++) {
        const Vec weights[2] = {load(panel + k * PANEL), load(panel + k * PANEL + WIDTH)};
        for (int row = 0; row < ROWS; row++) {
            const Vec input = splat(x[row * inputs + k]);
            for (int part = 0; part < 2; part++) sums_of[row][part] = fma(input, weights[part], sums_of[row][part]);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        T* to = output + row * outputs;
        if (columns == PANEL) {
            for (int part = 0; part < 2; part++) store(to + part * WIDTH, sums_of[row][part]);
        } else {
            for (int part = 0; part < 2; part++) store(first + part * WIDTH, sums_of[row][part]);
            for (int column = 0; column < columns; column++) narrow(to + column, first[column]);
        }
    }
}

template <typename W, typename T>
inline void multiply_rows(
    const float* x, int64_t rows, const W* panel, const float* bias, int64_t inputs, int64_t outputs, int columns,
    T* output) {
    while (rows > 0) {
        const int64_t count = smaller<int64_t>(rows, DENSE_ROWS);
        if (count == 6) multiply_panel<6>(x, panel, bias, inputs, outputs, columns, output);
        if (count == 5) multiply_panel<5>(x, panel, bias, inputs, outputs, columns, output);
        if (count == 4) multiply_panel<4>(x, panel, bias, inputs, outputs, columns, output);
        if (count == 3) multiply_panel<3>(x, panel, bias, inputs, outputs, columns, output);
        if (count == 2) multiply_panel<2>(x, panel, bias, inputs, outputs, columns, output);
        if (count == 1) multiply_panel<1>(x, panel, bias, inputs, outputs, columns, output);
        rows -= count, x += count * inputs, output += count * outputs;
    }
}

// x [rows, inputs] -> output [rows, outputs]; `bias` [outputs] or null.
template <typename W, typename T>
void multiply_dense(
    const float* x, int64_t rows, const void* packed, const float* bias, int64_t outputs, int64_t inputs,
    void* output, int num_threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, blocks = (rows + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE;
    const int64_t chunk = larger<int64_t>(1, panels / (num_threads * 8));
    perform_parts(blocks * panels, chunk, num_threads, [=](int64_t part, uint8_t*) {
        const int64_t panel = part % panels, first_row = part / panels * ROWS_IN_CACHE, first = panel * PANEL;
        multiply_rows(
            x + first_row * inputs, smaller(ROWS_IN_CACHE, rows - first_row), (const W*)packed + first * inputs,
            bias ? bias + first : nullptr, inputs, outputs, (int)smaller<int64_t>(PANEL, outputs - first),
            (T*)output + first_row * outputs + first);
    });
}

}  // namespace
