// A gated short convolution whose inputs stand in the pool, in the place of keys and values: channel by channel and token
// by token, so an output depends only on its own sequence.
#pragma once

#include "recurrent.h"

// The rows of a step: inputs are factor * value, and outputs are multiplied by the gate.
struct Convolved {
    const void *factor, *gate, *value;
    void* out;
    int64_t stride, out_stride, channels;
};

struct Filter {
    const void *weight, *bias;  // [channels, width], [channels] or null
    int64_t width;
};

namespace {

template <typename T>
inline Vec rounded(Vec x) {
    T values[WIDTH];
    store(values, x);
    return load(values);
}

// `count` channels from `first` on, which are those of one head of keys or values in the pool.
template <typename T, typename K>
void convolve_head(
    const Step& step, const Convolved& rows, const Filter& filter, K* head, int64_t first, int64_t count) {
    const int64_t size = step.block_size, width = filter.width;
    const auto inputs_at = [&](int64_t block, int64_t offset) {
        return head + block * step.block_stride + offset * step.head_dim;
    };
    const T *weight = (const T*)filter.weight + first * width, *bias = (const T*)filter.bias;
    for (int64_t sequence = 0, token = 0; token < step.num_tokens; sequence++) {
        const int32_t* table = step.block_tables + sequence * step.table_stride;
        for (; token < step.query_start_loc[sequence + 1]; token++) {
            const int64_t at = token * rows.stride + first, slot = step.slots[token], position = step.positions[token];
            K* own = inputs_at(slot / size, slot % size);
            for (int64_t c = 0; c < count; c += WIDTH) {
                const int64_t here = count - c;
                const Vec given = load_some((const T*)rows.factor + at + c, here);
                store_some(own + c, rounded<T>(times(given, load_some((const T*)rows.value + at + c, here))), here);
                Vec total = bias ? load_some(bias + first + c, here) : splat(0.0f);
                for (int64_t tap = smaller<int64_t>(width - 1, position); tap >= 0; tap--) {
                    const int64_t before = position - tap;
                    const K* input = tap ? inputs_at(table[before / size], before % size) : own;
                    float taps[WIDTH] = {};
                    for (int64_t lane = 0; lane < WIDTH && lane < here; lane++)
                        taps[lane] = widened(weight[(c + lane) * width + width - 1 - tap]);
                    total = fma(load_some(input + c, here), load(taps), total);
                }
                const Vec gate = load_some((const T*)rows.gate + at + c, here);
                store_some((T*)rows.out + token * rows.out_stride + first + c, times(gate, rounded<T>(total)), here);
            }
        }
    }
}

template <typename T, typename K>
void short_conv(const Step& of_step, const Convolved& of_rows, const Filter& of_filter, void* pool) {
    const Step* step = &of_step;
    const Convolved rows = of_rows;
    const Filter filter = of_filter;
    const int64_t size = step->head_dim, heads = (rows.channels + size - 1) / size;
    const int num_threads = threads_for(step->num_tokens * rows.channels * filter.width, step->num_threads);
    perform_parts(heads, 1, num_threads, [=](int64_t head, uint8_t*) {
        const int64_t is_value = head / step->num_kv_heads, first = head * size;
        K* at = (K*)pool + is_value * step->value_offset + head % step->num_kv_heads * step->block_size * size;
        convolve_head<T>(*step, rows, filter, at, first, smaller(rows.channels - first, size));
    });
}

}  // namespace
