// A mixture of experts whose weights are in groups (linear.h), for the few tokens of a decode step: choose the experts,
// multiply, and add, as one list of operations that can be recorded.
//
// Experts are known only when the operations run, so there are parts for as many experts as there may be. A token and one
// of its experts are a pair. Pairs are ordered by expert, so an expert's weights are read once. Every product is that of
// linear(), and results are added in float32 in the order of the experts: an output depends only on its token. A shared
// expert follows the others, and every token has it in its last slot.
#pragma once

#include "linear.h"

namespace {

constexpr int MAX_EXPERTS = 1024, MAX_CHOSEN = 64;
constexpr float MIN_SUM = 1e-20f;      // added to a sum of sigmoids, as in transformers
constexpr int64_t ADDED_COLUMNS = 512;  // of a token's sum, per part

struct Router {
    const float* correction;  // [experts], added to the scores for the choice only; or null
    int64_t experts, chosen;
    float scale;
    int32_t is_sigmoid, renormalizes;  // scores are sigmoids, else softmaxes; the weights are divided by their sum
    int32_t has_shared, has_gate;      // the shared expert's weight is 1, or the sigmoid of a last logit

    int64_t slots() const { return chosen + has_shared; }
    int64_t logits() const { return experts + has_gate; }
};

struct Experts {  // of this rank
    const LinearWeight *first, *down;  // [count]; `first` is gated
    int64_t start, count;
};

// The experts of all tokens, in memory that is written when the operations run.
struct Choice {
    int32_t *experts, *places;  // [tokens, slots]: ascending experts; the place among the ordered pairs, or -1
    float* weights;             // [tokens, slots]
    int32_t* pairs;             // [tokens * slots]: this rank's, by expert
    int32_t *hit, *ends;        // [count]: the experts with pairs, and where their pairs end
    int32_t* sizes;             // the number of hit experts, and of pairs
};

inline Choice choice_in(int32_t* memory, int64_t pairs, int64_t count) {
    int32_t* after = memory + 4 * pairs;
    return {memory, memory + pairs, (float*)(memory + 2 * pairs), memory + 3 * pairs, after, after + count,
            after + 2 * count};
}

// Scores of one token's logits, and what ranks its experts.
inline void score(const Router& router, const float* logits, float* scores, float* ranks) {
    alignas(64) float padded[MAX_EXPERTS];
    float largest = logits[0], sum = 0.0f;
    for (int64_t e = 0; e < router.experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    const bool is_sigmoid = router.is_sigmoid;
    for (int64_t e = 0; e < MAX_EXPERTS && e < router.experts + WIDTH; e++)
        padded[e] = e < router.experts ? (is_sigmoid ? -logits[e] : logits[e] - largest) : 0.0f;
    for (int64_t e = 0; e < router.experts; e += WIDTH)
        store(padded + e, exponential_within(minimum(splat(88.0f), maximum(splat(-87.0f), load(padded + e)))));
    for (int64_t e = 0; e < router.experts; e++) sum += padded[e];
    for (int64_t e = 0; e < router.experts; e++) {
        scores[e] = is_sigmoid ? 1.0f / (1.0f + padded[e]) : padded[e] / sum;
        ranks[e] = (is_sigmoid ? scores[e] : logits[e]) + (router.correction ? router.correction[e] : 0.0f);
    }
}

// The best experts of one token in ascending order, of equal ones the lower, and their weights.
inline void choose(const Router& router, const float* logits, int32_t* experts, float* weights) {
    alignas(64) float scores[MAX_EXPERTS], ranks[MAX_EXPERTS];
    score(router, logits, scores, ranks);
    int32_t best[MAX_CHOSEN];
    for (int32_t e = 0, count = 0; e < router.experts; e++) {
        if (count == router.chosen && !(ranks[e] > ranks[best[count - 1]])) continue;
        int at = count < router.chosen ? count++ : count - 1;
        for (; at > 0 && ranks[e] > ranks[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = e;
    }
    for (int64_t i = 0; i < router.chosen; i++) {
        int64_t at = i;
        for (; at > 0 && experts[at - 1] > best[i]; at--) experts[at] = experts[at - 1];
        experts[at] = best[i];
    }
    float sum = router.is_sigmoid ? MIN_SUM : 0.0f;
    for (int64_t i = 0; i < router.chosen; i++) sum += scores[experts[i]];
    for (int64_t i = 0; i < router.chosen; i++)
        weights[i] = scores[experts[i]] / (router.renormalizes ? sum : 1.0f) * router.scale;
    if (!router.has_shared) return;
    experts[router.chosen] = (int32_t)router.experts;
    weights[router.chosen] = router.has_gate ? 1.0f / (1.0f + exponential(-logits[router.experts])) : 1.0f;
}

// Order the pairs by expert.
inline void order(const Choice& choice, int64_t pairs, int64_t start, int64_t count) {
    int32_t next[MAX_EXPERTS] = {}, ordered = 0, hit = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t expert = choice.experts[pair] - start;
        if (expert >= 0 && expert < count) next[expert]++;
    }
    for (int32_t expert = 0; expert < count; expert++) {
        const int32_t first = ordered;
        ordered += next[expert];
        if (next[expert]) choice.hit[hit] = expert, choice.ends[hit++] = ordered;
        next[expert] = first;
    }
    choice.sizes[0] = hit, choice.sizes[1] = ordered;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t expert = choice.experts[pair] - start;
        const bool is_own = expert >= 0 && expert < count;
        choice.places[pair] = is_own ? next[expert] : -1;
        if (is_own) choice.pairs[next[expert]++] = (int32_t)pair;
    }
}

// Quantize an ordered pair's row, which is at x + row * stride.
inline void quantize_pair(const LinearWeight& weight, bool is_whole, const void* x, int64_t stride, int type, int64_t row,
                          int64_t place, const Rows& rows) {
    if (type == FLOAT32)
        quantize_row((const float*)x + row * stride, weight.inputs, is_whole, rows, place);
    else
        quantize_row((const uint16_t*)x + row * stride, weight.inputs, is_whole, rows, place);
}

// One column of blocks of the product of hit expert number `number` and its rows.
template <class Set>
void multiply_hit(const Choice& choice, const LinearWeight* weights, int64_t number, int64_t block, const Rows& rows,
                  void* out, int64_t stride, int type) {
    if (number >= choice.sizes[0]) return;
    const int64_t first = number ? choice.ends[number - 1] : 0;
    compute_block<Set>(weights[choice.hit[number]], block, rows, first, choice.ends[number], (uint8_t*)out, stride, type);
}

inline float value_at(const void* from, int64_t index, int type) {
    if (type == FLOAT32) return ((const float*)from)[index];
    const uint32_t bits = (uint32_t)((const uint16_t*)from)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Columns `first` to `end` of the weighted sum of a token's experts.
inline void add_experts(const Choice& choice, int64_t token, int64_t slots, const void* outputs, int64_t width,
                        int64_t first, int64_t end, void* out, int type) {
    const int64_t size = type == FLOAT32 ? 4 : 2;
    for (int64_t column = first; column < end; column += OUTPUTS) {
        const int64_t count = end - column < OUTPUTS ? end - column : OUTPUTS;
        float sums[OUTPUTS] = {};
        for (int64_t i = token * slots; i < (token + 1) * slots; i++) {
            if (choice.places[i] < 0) continue;
            const int64_t at = choice.places[i] * width + column;
            for (int64_t lane = 0; lane < count; lane++)
                sums[lane] += value_at(outputs, at + lane, type) * choice.weights[i];
        }
        store(sums, count, (uint8_t*)out + (token * width + column) * size, type);
    }
}

// x [tokens, inputs] -> out [tokens, inputs], both of `type`; `hidden` and `outputs` have room for the rows of all
// pairs, and `memory` for a choice. Returns 0, or 1 if out of memory.
template <class Set>
int experts(const Experts& of_experts, const Router& of_router, const float* logits, const void* x, int64_t stride,
            int type, int64_t tokens, int32_t* memory, void* hidden, void* outputs, void* out, int num_threads) {
    if (tokens == 0) return 0;
    const Experts own = of_experts;
    const Router router = of_router;
    const LinearWeight first = own.first[0], down = own.down[0];
    const int64_t slots = router.slots(), pairs = tokens * slots, inner = down.inputs, width = down.outputs;
    const int64_t groups = (first.inputs + GROUP - 1) / GROUP, inner_groups = (inner + GROUP - 1) / GROUP;
    const int64_t blocks = (inner + OUTPUTS - 1) / OUTPUTS, down_blocks = (width + OUTPUTS - 1) / OUTPUTS;
    const int64_t most_hit = own.count < pairs ? own.count : pairs, parts = (width + ADDED_COLUMNS - 1) / ADDED_COLUMNS;
    const Choice choice = choice_in(memory, pairs, own.count);
    const bool is_whole = Set::has_whole_rows(first.format), is_whole_down = Set::has_whole_rows(down.format);
    auto choose_row = [=](int64_t token, uint8_t*) {
        choose(router, logits + token * router.logits(), choice.experts + token * slots, choice.weights + token * slots);
    };
    auto order_pairs = [=](int64_t, uint8_t*) { order(choice, pairs, own.start, own.count); };
    auto quantize = [=](int64_t place, uint8_t* shared) {
        if (place < choice.sizes[1])
            quantize_pair(own.first[0], is_whole, x, stride, type, choice.pairs[place] / slots, place,
                          rows_in(shared, pairs, groups));
    };
    auto multiply_first = [=](int64_t part, uint8_t* shared) {
        multiply_hit<Set>(choice, own.first, part / blocks, part % blocks, rows_in(shared, pairs, groups), hidden, inner,
                          type);
    };
    auto quantize_hidden = [=](int64_t place, uint8_t* shared) {
        if (place < choice.sizes[1])
            quantize_pair(own.down[0], is_whole_down, hidden, inner, type, place, place,
                          rows_in(shared, pairs, inner_groups));
    };
    auto multiply_down = [=](int64_t part, uint8_t* shared) {
        multiply_hit<Set>(choice, own.down, part / down_blocks, part % down_blocks, rows_in(shared, pairs, inner_groups),
                          outputs, width, type);
    };
    auto add = [=](int64_t part, uint8_t*) {
        const int64_t column = part % parts * ADDED_COLUMNS, left = width - column;
        add_experts(choice, part / parts, slots, outputs, width, column,
                    column + (left < ADDED_COLUMNS ? left : ADDED_COLUMNS), out, type);
    };
    const int64_t most_groups = groups > inner_groups ? groups : inner_groups, shares = num_threads * 8;
    const size_t shared_bytes = pairs * most_groups * (2 * GROUP + 12);
    const Operation operations[7] = {
        operation(tokens, tokens / (4 * num_threads), choose_row),
        operation(1, 1, order_pairs),
        operation(pairs, pairs / (4 * num_threads), quantize, shared_bytes),
        operation(most_hit * blocks, most_hit * blocks / shares, multiply_first, shared_bytes),
        operation(pairs, pairs / (4 * num_threads), quantize_hidden, shared_bytes),
        operation(most_hit * down_blocks, most_hit * down_blocks / shares, multiply_down, shared_bytes),
        operation(tokens * parts, tokens * parts / (4 * num_threads), add),
    };
    return perform(operations, 7, num_threads) ? 0 : 1;
}

}  // namespace

#define PAGESTREAM_EXPERTS(SUFFIX, SET)                                                                               \
    PAGESTREAM_EXPORT int pagestream_experts_##SUFFIX(                                                                \
        const Experts* of, const Router* router, const float* logits, const void* x, int64_t stride, int type,        \
        int64_t tokens, int32_t* memory, void* hidden, void* outputs, void* out, int num_threads) {                   \
        return experts<SET>(*of, *router, logits, x, stride, type, tokens, memory, hidden, outputs, out, num_threads); \
    }                                                                                                                 \
    PAGESTREAM_EXPORT void pagestream_choose_##SUFFIX(                                                                \
        const Router* of_router, const float* logits, int64_t tokens, int32_t* chosen, float* weights, int threads) { \
        const Router router = *of_router;                                                                             \
        perform_parts(tokens, tokens / (4 * threads), threads, [=](int64_t token, uint8_t*) {                         \
            choose(router, logits + token * router.logits(), chosen + token * router.slots(),                         \
                   weights + token * router.slots());                                                                 \
        });                                                                                                           \
    }
