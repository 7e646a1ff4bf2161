// The products of linear.h by AVX-512 and its VNNI: 16 outputs a register, four inputs an instruction.
#include "linear.h"

namespace {

constexpr int FEWEST_OF_WORDS = 12;  // rows

struct Avx512 {
    using Floats = __m512;
    using Integers = __m512i;
    static constexpr int LANES = 16, MOST_ROWS = 8;
    static constexpr bool has_whole_rows(int) { return false; }
    static constexpr int parts(int) { return 1; }

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Floats load(const uint16_t* halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves)); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static void save(float* to, Floats from) { _mm512_storeu_ps(to, from); }

    static Integers line(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static Integers four(const int8_t* row) {  // inputs of a row, for each output
        int32_t quants;
        memcpy(&quants, row, sizeof quants);
        return _mm512_set1_epi32(quants);
    }

    static Integers joined(Integers upper, Integers lower) {
        return _mm512_add_epi32(_mm512_sub_epi32(_mm512_slli_epi32(upper, 8), upper), lower);
    }

    // dpbusd multiplies unsigned by signed bytes and adds four products in 32 bits: nothing saturates.
    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        Integers halves[2 * ROWS][PARTS];  // of upper and lower bytes, which are like rows each
        dot_halves<FORMAT, 2 * ROWS, PARTS>(quants, row, stride, halves);
        for (int r = 0; r < ROWS; r++) sum[r][0] = joined(halves[2 * r][0], halves[2 * r + 1][0]);
    }

    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot_halves(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        for (int r = 0; r < ROWS; r++) sum[r][0] = _mm512_setzero_si512();
        if (FORMAT == INT8) {
            // -128..127 become 0..255. A byte's sum has 128 times the byte's own too much, and once the two are joined
            // that is 128 times the quants': without_zero() takes it away.
            const Integers sign = _mm512_set1_epi8((char)0x80);
            for (int quad = 0; quad < QUADS; quad++) {
                const Integers weight = _mm512_xor_si512(line(quants + quad * LINE), sign);
                for (int r = 0; r < ROWS; r++)
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], weight, four(row + r / 2 * stride + r % 2 * GROUP + quad * 4));
            }
            return;
        }
        const Integers half_bytes = _mm512_set1_epi8(15);
        for (int quad = 0; quad < QUADS / 2; quad++) {
            const Integers both = line(quants + quad * LINE), low = _mm512_and_si512(both, half_bytes);
            const Integers high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half_bytes);
            for (int r = 0; r < ROWS; r++) {
                const int8_t* at = row + r / 2 * stride + r % 2 * GROUP + quad * 4;
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], low, four(at));
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], high, four(at + GROUP / 2));
            }
        }
    }

    // The integer sum of a group as a float, `row_sum` times the format's zero less.
    template <int FORMAT>
    static Floats without_zero(Integers sum, int32_t row_sum) {
        if (FORMAT == INT8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * row_sum));
        if (FORMAT == INT4_ZERO_8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(8 * row_sum));
        return _mm512_cvtepi32_ps(sum);
    }
};

// The same for 4-bit weights and many rows, whole in 16 bits: their products need no joining. Half bytes take twice the
// work to become words, and as no row has a second sum, more rows share that.
struct Avx512Words : Avx512 {
    static constexpr int MOST_ROWS = 12;
    static constexpr bool has_whole_rows(int) { return true; }

    // dpwssd adds two products of 16 bits in 32: of four inputs the first and third, then the others.
    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        for (int r = 0; r < ROWS; r++) sum[r][0] = _mm512_setzero_si512();
        const Integers half_bytes = _mm512_set1_epi16(15);
        for (int quad = 0; quad < QUADS / 2; quad++) {
            const Integers both = line(quants + quad * LINE);
            const Integers words[4] = {
                _mm512_and_si512(both, half_bytes), _mm512_and_si512(_mm512_srli_epi16(both, 8), half_bytes),
                _mm512_and_si512(_mm512_srli_epi16(both, 4), half_bytes), _mm512_srli_epi16(both, 12)};
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < 4; i++) {
                    const int8_t* at = row + r * stride + quad * 8 + i / 2 * GROUP + i % 2 * 4;
                    sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], words[i], four(at));
                }
        }
    }
};

}  // namespace

PAGESTREAM_EXPORT int pagestream_linear_avx512(const LinearWeight* weight, const void* x, int64_t x_stride, int x_type,
                                               int64_t num_rows, void* out, int64_t out_stride, int out_type,
                                               int num_threads) {
    const bool has_words = weight->format != INT8 && num_rows >= FEWEST_OF_WORDS;
    const auto product = has_words ? linear<Avx512Words> : linear<Avx512>;
    return product(*weight, x, x_stride, x_type, num_rows, out, out_stride, out_type, num_threads);
}
