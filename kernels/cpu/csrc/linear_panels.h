// linear.h for many rows (prompts and large batches): two blocks of outputs, a panel, at a time.
//
// A group's weights are widened to 16-bit words once for all rows of a pass, then multiplied with tiles of rows. A tile
// stores, per pair of inputs, the quants of all its rows. Integer sums of a group stay in registers, float sums in the
// L1
// cache. Every number is computed as in multiply_tile() and in the same order, so the bits are the same.
#pragma once

#include <utility>

#include "quantize_four.h"

namespace {

constexpr int PAIRS = GROUP / 2;        // pairs of inputs, in the order of store_whole()
constexpr int TILE_ROWS = 12;           // 24 of 32 registers hold their sums of two blocks
constexpr int TILES_PER_PASS = 11;        // their sums of a panel, 17 KB, fit the L1 cache beside their quants
constexpr int PANEL_BLOCKS = 2;         // gated: one of gate and one of up
constexpr int PANEL_OUTPUTS = PANEL_BLOCKS * OUTPUTS;
constexpr int64_t CACHE_LINE = 64;

// One group of a tile's rows.
struct TileGroup {
    int32_t quants[PAIRS][TILE_ROWS];  // two 16-bit numbers
    float scales[TILE_ROWS], scaled_sums[TILE_ROWS];
};

// One group of a panel's weights.
template <class Set>
struct PanelGroup {
    alignas(64) int16_t words[PAIRS][PANEL_OUTPUTS][2];  // minus the format's zero point
    typename Set::Floats scales[PANEL_BLOCKS], minima[PANEL_BLOCKS];
};

// Rows are spread evenly over the fewest tiles, and tiles over the fewest passes.
struct Tiles {
    int64_t rows, count, passes;

    int64_t first_row(int64_t tile) const { return rows * tile / count; }
    int rows_of(int64_t tile) const { return (int)(first_row(tile + 1) - first_row(tile)); }
    int64_t first_of_pass(int64_t pass) const { return count * pass / passes; }
    int64_t pass_of(int64_t tile) const { return ((tile + 1) * passes - 1) / count; }
};

inline Tiles tiles_of(int64_t rows) {
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return {rows, count, (count + TILES_PER_PASS - 1) / TILES_PER_PASS};
}

// Index of a group of a tile: pass by pass, in each the tiles of a group in order.
inline int64_t place(const Tiles& tiles, int64_t groups, int64_t tile, int64_t group) {
    const int64_t pass = tiles.pass_of(tile), first = tiles.first_of_pass(pass), end = tiles.first_of_pass(pass + 1);
    return first * groups + group * (end - first) + tile - first;
}

// If a tile has fewer rows than slots, its last row repeats; the copies are not stored.
template <class Element>
void quantize_tile(const Element* x, int64_t stride, int rows, TileGroup& to) {
    for (int first = 0; first < TILE_ROWS; first += FOUR) {
        const Element* of[FOUR];
        for (int row = 0; row < FOUR; row++) of[row] = x + (first + row < rows ? first + row : rows - 1) * stride;
        quantize_four(of, &to.quants[0][first], TILE_ROWS, to.scales + first, to.scaled_sums + first);
    }
}

// A row's last group, padded with zeros after `count` inputs.
template <class Element>
__attribute__((noinline)) void quantize_last(const Element* x, int64_t stride, int rows, int64_t count, TileGroup& to) {
    Element padded[TILE_ROWS][GROUP] = {};
    for (int row = 0; row < rows; row++) memcpy(padded[row], x + row * stride, count * sizeof(Element));
    quantize_tile(&padded[0][0], GROUP, rows, to);
}

template <class Element>
inline void quantize_group_of(const Element* x, int64_t stride, int rows, int64_t inputs, int64_t group, TileGroup& to) {
    const int64_t count = inputs - group * GROUP;
    if (count < GROUP) return quantize_last(x + group * GROUP, stride, rows, count, to);
    quantize_tile(x + group * GROUP, stride, rows, to);
}

// Add a group to the sums of a row and a block.
template <class Set, int FORMAT>
inline void add_exact(typename Set::Integers exact, typename Set::Floats scale, typename Set::Floats minimum,
                      const TileGroup& tile, int row, float* sums) {
    const typename Set::Floats factor = Set::multiply(scale, Set::all(tile.scales[row]));
    typename Set::Floats sum = Set::multiply_add(Set::floats(exact), factor, Set::load(sums));
    if (FORMAT == INT4_MINIMUM) sum = Set::multiply_add(minimum, Set::all(tile.scaled_sums[row]), sum);
    Set::save(sums, sum);
}

// Add a group to `sums` [TILE_ROWS][PANEL_OUTPUTS] for rows ROW. Unrolled by hand, because GCC 12 keeps arrays indexed
// by a
// loop in memory.
template <class Set, int FORMAT, size_t... ROW>
__attribute__((noinline)) void add_group(const PanelGroup<Set>& weight, const TileGroup& tile, float* sums, std::index_sequence<ROW...>) {
    typename Set::Integers first[] = {(void(ROW), Set::no_sum())...}, second[] = {(void(ROW), Set::no_sum())...};
    for (int pair = 0; pair < PAIRS; pair++) {
        const typename Set::Integers words[] = {Set::line(weight.words[pair][0]), Set::line(weight.words[pair][OUTPUTS])};
        typename Set::Integers quants;
        ((quants = Set::all(tile.quants[pair][ROW]), Set::add_products(first[ROW], words[0], quants),
          Set::add_products(second[ROW], words[1], quants)),
         ...);
    }
    const typename Set::Floats scales[] = {weight.scales[0], weight.scales[1]};
    const typename Set::Floats minima[] = {weight.minima[0], weight.minima[1]};
    (add_exact<Set, FORMAT>(first[ROW], scales[0], minima[0], tile, ROW, sums + ROW * PANEL_OUTPUTS), ...);
    (add_exact<Set, FORMAT>(second[ROW], scales[1], minima[1], tile, ROW, sums + ROW * PANEL_OUTPUTS + OUTPUTS), ...);
}

template <class Set, int FORMAT>
inline void add_group_of(int rows, const PanelGroup<Set>& weight, const TileGroup& tile, float* sums) {
    if (rows > 10) return add_group<Set, FORMAT>(weight, tile, sums, std::make_index_sequence<12>());
    if (rows > 8) return add_group<Set, FORMAT>(weight, tile, sums, std::make_index_sequence<10>());
    if (rows > 6) return add_group<Set, FORMAT>(weight, tile, sums, std::make_index_sequence<8>());
    add_group<Set, FORMAT>(weight, tile, sums, std::make_index_sequence<6>());
}

// The sums of a panel for tiles `first` to `end`, in sums[end - first][TILE_ROWS][PANEL_OUTPUTS].
template <class Set, int FORMAT>
void multiply_panel(const LinearWeight& weight, const int64_t (&blocks)[PANEL_BLOCKS], int64_t groups, const Tiles& tiles,
                    int64_t first, int64_t end, const TileGroup* rows, float* sums) {
    constexpr int64_t BYTES = FORMAT == INT8 ? QUADS * LINE : QUADS * LINE / 2;
    memset(sums, 0, (end - first) * TILE_ROWS * PANEL_OUTPUTS * sizeof(float));
    PanelGroup<Set> of_weight;
    int rows_of[TILES_PER_PASS];  // avoids a division per group
    for (int64_t tile = first; tile < end; tile++) rows_of[tile - first] = tiles.rows_of(tile);
    for (int64_t group = 0; group < groups; group++) {
        for (int block = 0; block < PANEL_BLOCKS; block++) {
            const int64_t at = blocks[block] * groups + group;
            Set::template widen<FORMAT>(weight.quants + at * BYTES, &of_weight.words[0][block * OUTPUTS][0],
                                        PANEL_OUTPUTS * 2);
            of_weight.scales[block] = scales_at<Set, FORMAT>(weight.scales, at * OUTPUTS);
            of_weight.minima[block] = FORMAT == INT4_MINIMUM ? Set::load(weight.minima + at * OUTPUTS) : Set::zero();
        }
        const TileGroup* of_tiles = rows + first * groups + group * (end - first);
        for (int64_t tile = 0; tile < end - first; tile++)
            add_group_of<Set, FORMAT>(rows_of[tile], of_weight, of_tiles[tile], sums + tile * TILE_ROWS * PANEL_OUTPUTS);
    }
}

template <class Set>
void multiply_panel_of(const LinearWeight& weight, const int64_t (&blocks)[PANEL_BLOCKS], int64_t groups, const Tiles& tiles,
                       int64_t first, int64_t end, const TileGroup* rows, float* sums) {
    switch (weight.format) {
        case INT8: return multiply_panel<Set, INT8>(weight, blocks, groups, tiles, first, end, rows, sums);
        case INT4_ZERO_8: return multiply_panel<Set, INT4_ZERO_8>(weight, blocks, groups, tiles, first, end, rows, sums);
        case E2M1: return multiply_panel<Set, E2M1>(weight, blocks, groups, tiles, first, end, rows, sums);
        default: return multiply_panel<Set, INT4_MINIMUM>(weight, blocks, groups, tiles, first, end, rows, sums);
    }
}

// Outputs of a row from the sums of a panel: one block of a gated weight, otherwise two.
inline void finish_row(const LinearWeight& weight, int64_t panel, float* sums, uint8_t* out, int out_type) {
    const int64_t width = weight.gate ? weight.outputs / 2 : weight.outputs, size = out_type == FLOAT32 ? 4 : 2;
    const int64_t at = panel * (weight.gate ? OUTPUTS : PANEL_OUTPUTS);
    for (int block = 0; block < PANEL_BLOCKS; block++) {
        const int64_t from = weight.gate ? at : at + block * OUTPUTS, left = width - from;
        const int64_t count = left < OUTPUTS ? left : OUTPUTS;
        float* of_block = sums + block * OUTPUTS;
        if (weight.bias && count > 0) add_bias(of_block, 1, weight.bias + from + (weight.gate ? block * width : 0), count);
        if (!weight.gate && count > 0) store(of_block, count, out + from * size, out_type);
    }
    if (!weight.gate) return;
    for (int i = 0; i < OUTPUTS; i += WIDTH)
        store(sums + i, gated(load(sums + i), load(sums + OUTPUTS + i), weight));
    store(sums, width - at < OUTPUTS ? width - at : OUTPUTS, out + at * size, out_type);
}

// finish_row() for `count` rows of a full panel without bias in float32, entirely in registers.
template <int GATE>
void finish_whole_rows(const float* sums, int count, uint8_t* out, int64_t stride) {
    for (int row = 0; row < count; row++, sums += PANEL_OUTPUTS, out += stride)
        for (int i = 0; i < OUTPUTS; i += WIDTH) {
            const Vec first = load(sums + i), second = load(sums + OUTPUTS + i);
            store((float*)out + i, GATE == NO_GATE ? first : times(activated(first, GATE), second));
            if (GATE == NO_GATE) store((float*)out + OUTPUTS + i, second);
        }
}

inline void finish_rows(const LinearWeight& weight, int64_t panel, float* sums, int count, uint8_t* out, int64_t stride,
                        int out_type) {
    const int64_t of_panel = weight.gate ? OUTPUTS : PANEL_OUTPUTS;
    const int64_t width = weight.gate ? weight.outputs / 2 : weight.outputs;
    if (out_type == FLOAT32 && !weight.bias && weight.gate != LIMITED_SILU && (panel + 1) * of_panel <= width) {
        out += panel * of_panel * sizeof(float);
        if (weight.gate == NO_GATE) return finish_whole_rows<NO_GATE>(sums, count, out, stride);
        if (weight.gate == SILU) return finish_whole_rows<SILU>(sums, count, out, stride);
        return finish_whole_rows<GELU_TANH>(sums, count, out, stride);
    }
    for (int row = 0; row < count; row++)
        finish_row(weight, panel, sums + row * PANEL_OUTPUTS, out + row * stride, out_type);
}

// Prefetch the destination of a panel's outputs for rows `first` to `end` while they are computed: a gated layer with
// 1500
// rows takes 10 % less time than if each store waits for its cache line.
inline void fetch_outputs(const LinearWeight& weight, int64_t panel, int64_t first, int64_t end, const uint8_t* out,
                          int64_t stride, int out_type) {
    const int64_t of_panel = (weight.gate ? OUTPUTS : PANEL_OUTPUTS) * (out_type == FLOAT32 ? 4 : 2);
    for (int64_t row = first; row < end; row++)
        for (int64_t at = 0; at < of_panel; at += CACHE_LINE)
            _mm_prefetch((const char*)out + row * stride + panel * of_panel + at, _MM_HINT_T0);
}

template <class Set>
void compute_panel(const LinearWeight& weight, int64_t panel, int64_t groups, const Tiles& tiles, int64_t pass,
                   const TileGroup* rows, uint8_t* out, int64_t out_stride, int out_type) {
    const int64_t first = tiles.first_of_pass(pass), end = tiles.first_of_pass(pass + 1);
    const int64_t last_block = (weight.outputs + OUTPUTS - 1) / OUTPUTS - 1, block = panel * PANEL_BLOCKS;
    // With an odd number of blocks the last one repeats; the copy is not stored.
    const int64_t blocks[PANEL_BLOCKS] = {block, weight.gate || block < last_block ? block + 1 : block};
    alignas(64) float sums[TILES_PER_PASS * TILE_ROWS * PANEL_OUTPUTS];
    const int64_t stride = out_stride * (out_type == FLOAT32 ? 4 : 2);
    fetch_outputs(weight, panel, tiles.first_row(first), tiles.first_row(end), out, stride, out_type);
    multiply_panel_of<Set>(weight, blocks, groups, tiles, first, end, rows, sums);
    for (int64_t tile = first; tile < end; tile++)
        finish_rows(weight, panel, sums + (tile - first) * TILE_ROWS * PANEL_OUTPUTS, tiles.rows_of(tile),
                    out + tiles.first_row(tile) * stride, stride, out_type);
}

// linear() for many rows.
template <class Set>
int linear_by_panels(const LinearWeight& of_weight, const void* x, int64_t x_stride, int x_type, int64_t num_rows,
                     void* out, int64_t out_stride, int out_type, int num_threads) {
    const LinearWeight weight = of_weight;
    const Tiles tiles = tiles_of(num_rows);
    const int64_t groups = (weight.inputs + GROUP - 1) / GROUP, inputs = weight.inputs;
    const int64_t width = weight.gate ? weight.outputs / 2 : weight.outputs, of_panel = weight.gate ? OUTPUTS : PANEL_OUTPUTS;
    const int64_t panels = (width + of_panel - 1) / of_panel;
    auto quantize = [=](int64_t part, uint8_t* shared) {
        const int64_t tile = part / groups, group = part % groups, at = tiles.first_row(tile) * x_stride;
        TileGroup& to = ((TileGroup*)shared)[place(tiles, groups, tile, group)];
        if (x_type == FLOAT32)
            quantize_group_of((const float*)x + at, x_stride, tiles.rows_of(tile), inputs, group, to);
        else
            quantize_group_of((const uint16_t*)x + at, x_stride, tiles.rows_of(tile), inputs, group, to);
    };
    auto multiply = [=](int64_t part, uint8_t* shared) {
        compute_panel<Set>(weight, part % panels, groups, tiles, part / panels, (const TileGroup*)shared, (uint8_t*)out,
                           out_stride, out_type);
    };
    const Operation operations[2] = {
        operation(tiles.count * groups, tiles.count * groups / (4 * num_threads), quantize),
        // Panels go to the next free thread: on a busy machine one thread may get half of a core.
        operation(tiles.passes * panels, panels / (num_threads * 8), multiply, tiles.count * groups * sizeof(TileGroup)),
    };
    return perform(operations, 2, num_threads) ? 0 : 1;
}

}  // namespace
