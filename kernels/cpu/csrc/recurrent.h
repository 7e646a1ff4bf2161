// Layers with a recurrent state: each sequence token by token, so no sum depends on the step's chunks or other rows.
#pragma once

#include <vector>

#include "activations.h"
#include "rows.h"

// The sequences of a step, and a layer's part of the state pool. Block 0 is a state of zeros, which is not written.
struct Sequences {
    const int32_t* starts;  // [count + 1], first token of each
    const int32_t* blocks;  // [count]
    float* states;
    int64_t stride;  // elements between the states of two blocks
    int64_t count;
    int32_t num_threads;
    // Of states that know drafts (DraftedStates), else null: pending tokens of each, and after how many the state is kept.
    const int32_t *pending, *kept;

    int64_t num_pending(int64_t sequence) const { return pending ? pending[sequence] : 0; }
    // How many of the step's tokens the kept state has: all, or none if the step has drafts.
    int64_t num_kept(int64_t sequence) const {
        return kept ? kept[sequence] - pending[sequence] : starts[sequence + 1] - starts[sequence];
    }
};

// What the last step kept of its tokens, [num_blocks, P, ...]; blocks have the stride of the states.
struct Pending {
    const float *qkv, *gates;
};

struct StateHeads {
    int32_t num_key_heads, num_heads, key_dim, value_dim;
};

// Mamba-2 with `skip`, the gated delta rule without it. Then the gates of a token are beta, and the step `step_at` after it.
struct Recurrence {
    const float *decay, *step_bias, *skip;
    int64_t gate_stride, step_at;
};

namespace {

constexpr int64_t CHANNELS = 16 * WIDTH;  // of a convolution's part
constexpr int COLUMNS = 4;                // vectors of a state's row that are updated together

// The first `count` elements; the others are 0.
template <typename T>
inline Vec load_some(const T* at, int64_t count) {
    if (count >= WIDTH) return load(at);
    float values[WIDTH] = {};
    for (int64_t i = 0; i < count; i++) values[i] = widened(at[i]);
    return load(values);
}

template <typename T>
inline void store_some(T* at, Vec x, int64_t count) {
    if (count >= WIDTH) return store(at, x);
    float values[WIDTH];
    store(values, x);
    for (int64_t i = 0; i < count; i++) narrow(at + i, values[i]);
}

inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exponential(times(x, splat(-1.0f)))); }

// Inputs of `channels` before a sequence's new ones: history [width - 1, channels], oldest first, then those of pending
// tokens. weight [width, channels]. bias [channels], or null. With num_kept 0 the history ends with the pending tokens.
template <typename T>
void convolve_channels(
    const T* x, int64_t stride, int64_t num_tokens, const float* weight, const float* bias, int64_t channels,
    int64_t width, float* history, bool is_kept, int64_t num_pending, int64_t num_kept, int64_t first, int64_t end,
    T* out) {
    const auto input = [=](int64_t at, int64_t channel, int64_t count) {
        if (at >= 0) return load_some(x + at * stride + channel, count);
        return load_some(history + (at + width - 1 + num_pending) * channels + channel, count);
    };
    for (int64_t channel = first; channel < end; channel += WIDTH) {
        const int64_t count = end - channel;
        for (int64_t token = 0; token < num_tokens; token++) {
            Vec total = bias ? load_some(bias + channel, count) : splat(0.0f);
            for (int64_t tap = 0; tap < width; tap++)
                total = fma(
                    input(token - (width - 1) + tap, channel, count), load_some(weight + tap * channels + channel, count),
                    total);
            store_some(out + token * channels + channel, activated(total, SILU), count);
        }
        for (int64_t kept = 0; is_kept && kept < width - 1; kept++)
            store_some(
                history + kept * channels + channel, input(num_kept - (width - 1) + kept, channel, count), count);
    }
}

template <typename T>
void causal_conv(
    const Sequences& all, const void* x, int64_t stride, const float* weight, const float* bias, int64_t channels,
    int64_t width, void* out) {
    const int64_t parts = (channels + CHANNELS - 1) / CHANNELS;
    const Sequences own = all;
    perform_parts(own.count * parts, 1, own.num_threads, [=](int64_t part, uint8_t*) {
        const int64_t sequence = part / parts, first = part % parts * CHANNELS;
        const int64_t start = own.starts[sequence], num_tokens = own.starts[sequence + 1] - start;
        const int64_t block = own.blocks[sequence];
        if (num_tokens)
            convolve_channels(
                (const T*)x + start * stride, stride, num_tokens, weight, bias, channels, width,
                own.states + block * own.stride, block != 0, own.num_pending(sequence), own.num_kept(sequence), first,
                smaller<int64_t>(channels, first + CHANNELS), (T*)out + start * channels);
    });
}

template <typename T>
inline void unit(const T* x, int size, float scale, float* normed) {
    const float factor = scale / sqrtf(sum_of_squares(x, size) + 1e-6f);
    for (int i = 0; i < size; i++) normed[i] = widened(x[i]) * factor;
}

// `vectors` columns of one state [key_dim, value_dim]: decay, write `share` of the value for the key, or of its error, and
// read by the query; `skip` of the value is added.
template <int VECTORS, bool IS_DELTA, typename T>
inline void update_columns(
    float* state, int64_t row_stride, int64_t count, int key_dim, const float* query, const float* key, const T* value,
    float decay, float share, float skip, T* out) {
    const Vec factor = splat(decay);
    Vec written[VECTORS], mixed[VECTORS];
    for (int v = 0; v < VECTORS; v++) written[v] = splat(0.0f);
    for (int k = 0; IS_DELTA && k < key_dim; k++)
        for (int v = 0; v < VECTORS; v++)
            written[v] = fma(
                times(load_some(state + k * row_stride + v * WIDTH, count - v * WIDTH), factor), splat(key[k]), written[v]);
    for (int v = 0; v < VECTORS; v++) {
        const Vec given = load_some(value + v * WIDTH, count - v * WIDTH);
        written[v] = times(given - written[v], splat(share));
        mixed[v] = times(given, splat(skip));
    }
    for (int k = 0; k < key_dim; k++)
        for (int v = 0; v < VECTORS; v++) {
            float* at = state + k * row_stride + v * WIDTH;
            const Vec updated = fma(splat(key[k]), written[v], times(load_some(at, count - v * WIDTH), factor));
            mixed[v] = fma(updated, splat(query[k]), mixed[v]);
            store_some(at, updated, count - v * WIDTH);
        }
    for (int v = 0; v < VECTORS; v++) store_some(out + v * WIDTH, mixed[v], count - v * WIDTH);
}

template <typename T>
inline void widen_all(const T* x, int size, float* wide) {
    for (int i = 0; i < size; i++) wide[i] = widened(x[i]);
}

template <bool IS_DELTA, typename T>
void recurrent_head(
    const StateHeads& heads, const Recurrence& rule, const T* qkv, int64_t stride, const T* gates, int64_t gate_stride,
    int64_t num_tokens, int head, float* state, T* out, int64_t out_stride) {
    const int key_dim = heads.key_dim, value_dim = heads.value_dim, size = heads.num_key_heads * key_dim;
    const int key_head = head / (heads.num_heads / heads.num_key_heads);
    thread_local std::vector<float> query_and_key;
    query_and_key.resize(2 * key_dim);
    float *query = query_and_key.data(), *key = query + key_dim;
    for (int64_t token = 0; token < num_tokens; token++) {
        const T* row = qkv + token * stride;
        const T *queries = row + key_head * key_dim, *keys = queries + size;
        if (IS_DELTA) {
            unit(queries, key_dim, 1.0f / sqrtf((float)key_dim), query);
            unit(keys, key_dim, 1.0f, key);
        } else {
            widen_all(queries, key_dim, query);
            widen_all(keys, key_dim, key);
        }
        const T* gate = gates + token * gate_stride + head;
        const float x = widened(gate[rule.step_at]) + rule.step_bias[head];
        const float step = x > 20.0f ? x : log1pf(expf(x)), factor = expf(rule.decay[head] * step);
        const float share = IS_DELTA ? 1.0f / (1.0f + expf(-widened(gate[0]))) : step;
        const float skip = IS_DELTA ? 0.0f : rule.skip[head];
        const T* value = row + 2 * size + head * value_dim;
        T* to = out + token * out_stride;
        int column = 0;
        for (; column + COLUMNS * WIDTH <= value_dim; column += COLUMNS * WIDTH)
            update_columns<COLUMNS, IS_DELTA>(
                state + column, value_dim, COLUMNS * WIDTH, key_dim, query, key, value + column, factor, share, skip,
                to + column);
        for (; column < value_dim; column += WIDTH)
            update_columns<1, IS_DELTA>(
                state + column, value_dim, value_dim - column, key_dim, query, key, value + column, factor, share, skip,
                to + column);
    }
}

// Apply the pending tokens, whose outputs are known.
template <bool IS_DELTA>
void apply_pending(
    const StateHeads& heads, const Recurrence& rule, const Pending& old, int64_t num_pending, int head, float* state) {
    const int64_t channels = 2 * heads.num_key_heads * heads.key_dim + heads.num_heads * heads.value_dim;
    const int64_t num_gates = heads.num_heads + rule.step_at;
    thread_local std::vector<float> outputs;
    outputs.resize(heads.value_dim);
    recurrent_head<IS_DELTA>(
        heads, rule, old.qkv, channels, old.gates, num_gates, num_pending, head, state, outputs.data(), 0);
}

// A part is one head of one sequence. `scratch` has a state for each sequence that must not write to its own.
template <typename T>
void recurrence(
    const Sequences& all, const StateHeads& of_layer, const Recurrence& of_rule, const Pending& of_pending,
    const void* qkv, int64_t stride, const void* gates, float* scratch, void* out) {
    const Sequences own = all;
    const StateHeads heads = of_layer;
    const Recurrence rule = of_rule;
    const Pending kept_inputs = of_pending;
    perform_parts(own.count * heads.num_heads, 1, own.num_threads, [=](int64_t part, uint8_t*) {
        const int64_t sequence = part / heads.num_heads, head = part % heads.num_heads;
        const int64_t start = own.starts[sequence], num_tokens = own.starts[sequence + 1] - start;
        const int64_t block = own.blocks[sequence], size = (int64_t)heads.key_dim * heads.value_dim;
        float* state = own.states + block * own.stride + head * size;
        if (num_tokens == 0) return;
        if (const int64_t num_pending = own.num_pending(sequence)) {
            const Pending old = {kept_inputs.qkv + block * own.stride, kept_inputs.gates + block * own.stride};
            const auto apply = rule.skip ? apply_pending<false> : apply_pending<true>;
            apply(heads, rule, old, num_pending, (int)head, state);
        }
        if (block == 0 || own.num_kept(sequence) == 0) {
            memcpy(scratch + part * size, state, size * sizeof(float));
            state = scratch + part * size;
        }
        const auto run = rule.skip ? recurrent_head<false, T> : recurrent_head<true, T>;
        const int64_t out_stride = heads.num_heads * heads.value_dim;
        run(heads, rule, (const T*)qkv + start * stride, stride, (const T*)gates + start * rule.gate_stride,
            rule.gate_stride, num_tokens, (int)head, state, (T*)out + start * out_stride + head * heads.value_dim,
            out_stride);
    });
}

template <typename T>
void gated_rms_norm(
    const void* x, const void* gate, int64_t gate_stride, const float* weight, float eps, int64_t rows, int64_t parts,
    int64_t size, void* out, int num_threads) {
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        for (int64_t part = 0; part < parts; part++) {
            const int64_t at = row * parts * size + part * size;
            const T *from = (const T*)x + at, *gates = (const T*)gate + row * gate_stride + part * size;
            const Vec factor = splat(1.0f / sqrtf(sum_of_squares(from, size) / size + eps));
            for (int64_t i = 0; i < size; i += WIDTH) {
                const Vec normed = times(times(load_some(from + i, size - i), factor), load_some(weight + i, size - i));
                store_some((T*)out + at + i, times(normed, activated(load_some(gates + i, size - i), SILU)), size - i);
            }
        }
    });
}

// Each part [size] of a row of x, times silu(gate), is normed; weight [parts, size].
template <typename T>
void rms_norm_of_gated(
    const void* x, const void* gate, int64_t gate_stride, const float* weight, float eps, int64_t rows, int64_t parts,
    int64_t size, void* out, int num_threads) {
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        for (int64_t part = 0; part < parts; part++) {
            const int64_t at = (row * parts + part) * size;
            const T *from = (const T*)x + at, *gates = (const T*)gate + row * gate_stride + part * size;
            const auto gated = [=](int64_t i) {
                return times(load_some(from + i, size - i), activated(load_some(gates + i, size - i), SILU));
            };
            Vec squares = splat(0.0f);
            for (int64_t i = 0; i < size; i += WIDTH) squares = fma(gated(i), gated(i), squares);
            const Vec factor = splat(1.0f / sqrtf(sum(squares) / size + eps));
            for (int64_t i = 0; i < size; i += WIDTH)
                store_some(
                    (T*)out + at + i, times(times(gated(i), factor), load_some(weight + part * size + i, size - i)),
                    size - i);
        }
    });
}

// x [rows, size] *= sigmoid(gate).
template <typename T>
void multiply_sigmoid(void* x, const void* gate, int64_t gate_stride, int64_t rows, int64_t size, int num_threads) {
    perform_parts(rows, rows / (4 * num_threads), num_threads, [=](int64_t row, uint8_t*) {
        T* to = (T*)x + row * size;
        const T* gates = (const T*)gate + row * gate_stride;
        for (int64_t i = 0; i < size; i += WIDTH)
            store_some(to + i, times(load_some(to + i, size - i), sigmoid(load_some(gates + i, size - i))), size - i);
    });
}

}  // namespace
