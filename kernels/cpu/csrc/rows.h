// Norms, rotary embedding with the KV store, and the MLP gate: row by row, in an order that depends only on its length.
#pragma once

#include "long_attention.h"

namespace {

constexpr int64_t MIN_ELEMENTS_PER_THREAD = 1 << 14;  // elements per thread; with fewer, a thread costs more than it saves

inline int threads_for(int64_t elements, int num_threads) {
    return (int)larger<int64_t>(1, smaller<int64_t>(num_threads, elements / MIN_ELEMENTS_PER_THREAD));
}

template <typename T>
inline float sum_of_squares(const T* x, int64_t size) {
    Vec sums_of[2] = {splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH)
        for (int part = 0; part < 2; part++) {
            const Vec value = load(x + i + part * WIDTH);
            sums_of[part] = fma(value, value, sums_of[part]);
        }
    float total = sum(sums_of[0] + sums_of[1]);
    for (; i < size; i++) total += widened(x[i]) * widened(x[i]);
    return total;
}

// x / sqrt(sum(x^2) + eps) * weight. The size is folded into `weight` (its root) and `eps`.
template <typename T>
inline void norm_row(const T* x, const float* weight, float eps, int64_t size, T* normed) {
    const float factor = 1.0f / sqrtf(sum_of_squares(x, size) + eps);
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) store(normed + i, times(times(load(x + i), splat(factor)), load(weight + i)));
    for (; i < size; i++) narrow(normed + i, widened(x[i]) * factor * weight[i]);
}

// Replaces `x` by x + residual.
template <typename T>
inline void add_norm_row(T* x, const T* residual, const float* weight, float eps, int64_t size, T* normed) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) store(x + i, load(x + i) + load(residual + i));
    for (; i < size; i++) narrow(x + i, widened(x[i]) + widened(residual[i]));
    norm_row(x, weight, eps, size, normed);
}

template <typename T>
void add_rms_norm(
    void* x, const void* residual, const float* weight, float eps, int64_t rows, int64_t size, void* normed,
    int num_threads) {
    num_threads = threads_for(rows * size, num_threads);
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        add_norm_row((T*)x + row * size, (const T*)residual + row * size, weight, eps, size, (T*)normed + row * size);
    });
}

// `parts` rows of `size` elements are contiguous in each of `tokens` rows of `stride` elements.
template <typename T>
void rms_norm(
    const void* x, const float* weight, float eps, int64_t tokens, int64_t stride, int64_t parts, int64_t size,
    void* normed, int64_t normed_stride, int num_threads) {
    num_threads = threads_for(tokens * parts * size, num_threads);
    perform_parts(tokens, tokens / (4 * num_threads), num_threads, [=](int64_t token, uint8_t*) {
        for (int64_t part = 0; part < parts; part++)
            norm_row(
                (const T*)x + token * stride + part * size, weight, eps, size,
                (T*)normed + token * normed_stride + part * size);
    });
}

template <typename T>
inline void rotate(T* head, const float* cos_sin, int half, float factor) {
    for (int i = 0; i < half; i++) {
        const float a = widened(head[i]), b = widened(head[half + i]), cos = cos_sin[i], sin = cos_sin[half + i];
        narrow(head + i, (a * cos - b * sin) * factor);
        narrow(head + half + i, (b * cos + a * sin) * factor);
    }
}

template <typename T, typename K>
inline void copy(const T* from, int size, float factor, K* to) {
    for (int i = 0; i < size; i += WIDTH) store(to + i, times(load(from + i), splat(factor)));
}

// Factors of keys and values before they are stored: 1, except for an e4m3 pool.
struct Factors {
    float key, value;
};

// `cos_sin` [max_len, D], or null to leave queries and keys unchanged. `query_scales` [max_len]: factors of the rotated
// queries, or null.
template <typename T, typename K>
inline void rotate_and_store_row(
    const Step& step, T* row, const float* cos_sin, const float* query_scales, K* pool, Factors factors,
    int64_t token) {
    const int D = step.head_dim, kv_size = step.num_kv_heads * D;
    const int num_rotated = cos_sin ? step.num_heads + step.num_kv_heads : 0;
    const float of_queries = query_scales ? query_scales[step.positions[token]] : 1.0f;
    for (int head = 0; head < num_rotated; head++) {
        const float factor = head < step.num_heads ? of_queries : 1.0f;
        rotate(row + head * D, cos_sin + step.positions[token] * D, D / 2, factor);
    }
    const int64_t block = step.slots[token] / step.block_size, offset = step.slots[token] % step.block_size;
    const T* key = row + (int64_t)step.num_heads * D;
    for (int head = 0; head < step.num_kv_heads; head++) {
        K* to = pool + block * step.block_stride + (head * step.block_size + offset) * D;
        copy(key + head * D, D, factors.key, to);
        copy(key + kv_size + head * D, D, factors.value, to + step.value_offset);
    }
}

template <typename T, typename K>
void rotate_and_store(
    const Step& of_step, void* qkv, int64_t stride, const float* cos_sin, const float* query_scales, void* pool,
    Factors factors) {
    const Step* step = &of_step;
    const int64_t rows = step->num_tokens;
    const int num_threads = threads_for(rows * stride, step->num_threads);
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t token, uint8_t*) {
        rotate_and_store_row(*step, (T*)qkv + token * stride, cos_sin, query_scales, (K*)pool, factors, token);
    });
}

inline Vec sigmoid_input(Vec x, bool is_gelu) {
    const Vec cube = times(times(times(x, x), x), splat(0.044715f));
    return is_gelu ? times(x + cube, splat(1.5957691216057308f)) : x;  // 2 * sqrt(2 / pi)
}

template <typename T>
inline void gate_and_mul_row(const T* gate, int64_t size, T* to, bool is_gelu) {
    const T* up = gate + size;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        const Vec x = load(gate + i), input = sigmoid_input(x, is_gelu);
        store(to + i, times(x / (splat(1.0f) + exponential(splat(0.0f) - input)), load(up + i)));
    }
    for (; i < size; i++) {
        float input[WIDTH];
        const float x = widened(gate[i]);
        store(input, sigmoid_input(splat(x), is_gelu));
        narrow(to + i, x / (1.0f + exponential(-input[0])) * widened(up[i]));
    }
}

// gate_up [rows, 2 * size] -> silu(gate) * up [rows, size]; or tanh gelu, which is x * sigmoid(2 * u).
template <typename T>
void gate_and_mul(const void* gate_up, int64_t rows, int64_t size, void* output, int is_gelu, int num_threads) {
    num_threads = threads_for(rows * size, num_threads);
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        gate_and_mul_row((const T*)gate_up + row * 2 * size, size, (T*)output + row * size, is_gelu);
    });
}

// x [rows, size] *= factor.
template <typename T>
void multiply(void* x, float factor, int64_t rows, int64_t size, int num_threads) {
    num_threads = threads_for(rows * size, num_threads);
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        T* at = (T*)x + row * size;
        int64_t i = 0;
        for (; i + WIDTH <= size; i += WIDTH) store(at + i, times(load(at + i), splat(factor)));
        for (; i < size; i++) narrow(at + i, widened(at[i]) * factor);
    });
}

}  // namespace
