// The exported functions of a step for one instruction set; NAME(f) appends its suffix.
//
// `dtype` is that of activations, `kv_dtype` that of the pool: 0 is float32, 1 bfloat16, 2 e4m3 (pool only).
#include "dense.h"
#include "processor.h"
#include "recurrent.h"
#include "rows.h"
#include "short_conv.h"

#define BY_TYPE(dtype, call, ...) ((dtype) ? call<Bf16>(__VA_ARGS__) : call<float>(__VA_ARGS__))
#define BY_TYPES(dtype, kv_dtype, call, ...)                                               \
    ((dtype) ? ((kv_dtype) ? call<Bf16, Bf16>(__VA_ARGS__) : call<Bf16, float>(__VA_ARGS__)) \
             : ((kv_dtype) ? call<float, Bf16>(__VA_ARGS__) : call<float, float>(__VA_ARGS__)))

#define BY_POOL(dtype, kv_dtype, call, ...)                                                        \
    ((kv_dtype) != 2 ? BY_TYPES(dtype, kv_dtype, call, __VA_ARGS__)                                \
                     : (dtype) ? call<Bf16, E4m3>(__VA_ARGS__) : call<float, E4m3>(__VA_ARGS__))

PAGESTREAM_EXPORT void NAME(pagestream_attend)(
    const Step* step, const Rules* rules, const Item* items, int64_t num_items, const void* query,
    int64_t query_stride, const void* pool, void* output, int dtype, int kv_dtype) {
    BY_POOL(dtype, kv_dtype, attend, *step, *rules, items, num_items, query, query_stride, pool, output);
}

PAGESTREAM_EXPORT void NAME(pagestream_rotate_and_store)(
    const Step* step, void* qkv, int64_t stride, const float* cos_sin, const float* query_scales, void* pool,
    float key_factor, float value_factor, int dtype, int kv_dtype) {
    const Factors factors = {key_factor, value_factor};
    BY_POOL(dtype, kv_dtype, rotate_and_store, *step, qkv, stride, cos_sin, query_scales, pool, factors);
}

PAGESTREAM_EXPORT void NAME(pagestream_short_conv)(
    const Step* step, const Convolved* rows, const Filter* filter, void* pool, int dtype, int kv_dtype) {
    BY_TYPES(dtype, kv_dtype, short_conv, *step, *rows, *filter, pool);
}

PAGESTREAM_EXPORT void NAME(pagestream_add_rms_norm)(
    void* x, const void* residual, const float* weight, float eps, int64_t rows, int64_t size, void* normed,
    int num_threads, int dtype) {
    BY_TYPE(dtype, add_rms_norm, x, residual, weight, eps, rows, size, normed, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_rms_norm)(
    const void* x, const float* weight, float eps, int64_t tokens, int64_t stride, int64_t parts, int64_t size,
    void* normed, int64_t normed_stride, int num_threads, int dtype) {
    BY_TYPE(dtype, rms_norm, x, weight, eps, tokens, stride, parts, size, normed, normed_stride, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_gate_and_mul)(
    const void* gate_up, int64_t rows, int64_t size, void* output, int is_gelu, int num_threads, int dtype) {
    BY_TYPE(dtype, gate_and_mul, gate_up, rows, size, output, is_gelu, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_multiply)(
    void* x, float factor, int64_t rows, int64_t size, int num_threads, int dtype) {
    BY_TYPE(dtype, multiply, x, factor, rows, size, num_threads);
}

// Outputs per panel.
PAGESTREAM_EXPORT int64_t NAME(pagestream_dense_panel)() { return PANEL; }

PAGESTREAM_EXPORT void NAME(pagestream_pack_dense)(
    const void* weight, int64_t outputs, int64_t inputs, void* packed, int num_threads, int dtype, int packed_dtype) {
    BY_TYPES(dtype, packed_dtype, pack_dense, weight, outputs, inputs, packed, num_threads);
}

// `dtype` is that of the packed weight, `output_dtype` that of the output; inputs and bias are float32.
PAGESTREAM_EXPORT void NAME(pagestream_multiply_dense)(
    const float* x, int64_t rows, const void* packed, const float* bias, int64_t outputs, int64_t inputs,
    void* output, int num_threads, int dtype, int output_dtype) {
    BY_TYPES(dtype, output_dtype, multiply_dense, x, rows, packed, bias, outputs, inputs, output, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_causal_conv)(
    const Sequences* sequences, const void* x, int64_t stride, const float* weight, const float* bias,
    int64_t channels, int64_t width, void* out, int dtype) {
    BY_TYPE(dtype, causal_conv, *sequences, x, stride, weight, bias, channels, width, out);
}

PAGESTREAM_EXPORT void NAME(pagestream_recurrence)(
    const Sequences* sequences, const StateHeads* heads, const Recurrence* rule, const Pending* pending,
    const void* qkv, int64_t stride, const void* gates, float* scratch, void* out, int dtype) {
    BY_TYPE(dtype, recurrence, *sequences, *heads, *rule, *pending, qkv, stride, gates, scratch, out);
}

PAGESTREAM_EXPORT void NAME(pagestream_gated_rms_norm)(
    const void* x, const void* gate, int64_t gate_stride, const float* weight, float eps, int64_t rows, int64_t parts,
    int64_t size, void* out, int num_threads, int dtype) {
    BY_TYPE(dtype, gated_rms_norm, x, gate, gate_stride, weight, eps, rows, parts, size, out, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_rms_norm_of_gated)(
    const void* x, const void* gate, int64_t gate_stride, const float* weight, float eps, int64_t rows, int64_t parts,
    int64_t size, void* out, int num_threads, int dtype) {
    BY_TYPE(dtype, rms_norm_of_gated, x, gate, gate_stride, weight, eps, rows, parts, size, out, num_threads);
}

PAGESTREAM_EXPORT void NAME(pagestream_multiply_sigmoid)(
    void* x, const void* gate, int64_t gate_stride, int64_t rows, int64_t size, int num_threads, int dtype) {
    BY_TYPE(dtype, multiply_sigmoid, x, gate, gate_stride, rows, size, num_threads);
}
