// linear.h for AVX2: 8 outputs per register.
#include "experts.h"

namespace {

struct Avx2 {
    using Floats = __m256;
    using Integers = __m256i;
    static constexpr int LANES = 8, MAX_ROWS = 4;
    static constexpr bool has_whole_rows(int format) { return format == INT8 || format == E2M1; }
    static constexpr int parts(int rows) { return rows == 1 ? 2 : 1; }  // sums that fit 16 registers

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Floats load(const uint16_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves)); }
    static Floats halved_powers(const uint8_t* exponents) {
        const Integers plus_127 = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)exponents));
        const Integers halved = _mm256_max_epi32(_mm256_sub_epi32(plus_127, _mm256_set1_epi32(1)), _mm256_setzero_si256());
        return _mm256_castsi256_ps(_mm256_slli_epi32(halved, 23));
    }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static void save(float* to, Floats from) { _mm256_storeu_ps(to, from); }

    static Integers line(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
    static Integers four(const int8_t* row) {  // four inputs of a row, repeated for each output
        int32_t quants;
        memcpy(&quants, row, sizeof quants);
        return _mm256_set1_epi32(quants);
    }

    // Combine the sums of upper and lower bytes, pairs of 16 bits.
    static Integers joined(Integers upper, Integers lower) {
        const Integers base = _mm256_set1_epi16(BASE), ones = _mm256_set1_epi16(1);
        return _mm256_add_epi32(_mm256_madd_epi16(upper, base), _mm256_madd_epi16(lower, ones));
    }

    // Keep the compiler from reordering this chain: reordered, products would spill to memory.
    static void in_order(Integers& sum) { asm("" : "+x"(sum)); }

    // Eight outputs of a quad as bytes.
    template <int FORMAT>
    static Integers bytes(const uint8_t* quants, int quad, int part) {
        if (FORMAT == INT8) return line(quants + quad * LINE + part * 32);
        const Integers both = line(quants + quad % (QUADS / 2) * LINE + part * 32), half_bytes = _mm256_set1_epi8(15);
        const Integers numbers = _mm256_setr_epi8(E2M1_NUMBERS, E2M1_NUMBERS);
        const Integers upper = quad < QUADS / 2 ? both : _mm256_srli_epi16(both, 4);
        return _mm256_shuffle_epi8(numbers, _mm256_and_si256(upper, half_bytes));
    }

    // Bytes are widened, because two products of a byte and 16 bits fit 32 bits: the row's quants are whole.
    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot_bytes(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < PARTS; part++) sum[r][part] = _mm256_setzero_si256();
        for (int quad = 0; quad < QUADS; quad++)
            for (int part = 0; part < PARTS; part++) {
                const Integers weight = bytes<FORMAT>(quants, quad, part);
                const Integers even = _mm256_srai_epi16(_mm256_slli_epi16(weight, 8), 8), odd = _mm256_srai_epi16(weight, 8);
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* at = row + r * stride + quad * 8;
                    sum[r][part] = _mm256_add_epi32(sum[r][part], _mm256_madd_epi16(even, four(at)));
                    in_order(sum[r][part]);
                    sum[r][part] = _mm256_add_epi32(sum[r][part], _mm256_madd_epi16(odd, four(at + 4)));
                    in_order(sum[r][part]);
                }
            }
    }

    // Half bytes times bytes: 8 * 2 * 15 * 127 = 30,480, so a whole group fits 16 bits.
    template <int ROWS, int PARTS>
    static inline void dot_half_bytes(
        const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        Integers upper[ROWS][PARTS], lower[ROWS][PARTS];
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < PARTS; part++) upper[r][part] = lower[r][part] = _mm256_setzero_si256();
        const Integers half_bytes = _mm256_set1_epi8(15);
        for (int quad = 0; quad < QUADS / 2; quad++)
            for (int part = 0; part < PARTS; part++) {
                const Integers both = line(quants + quad * LINE + part * 32);
                const Integers low = _mm256_and_si256(both, half_bytes);
                const Integers high = _mm256_and_si256(_mm256_srli_epi16(both, 4), half_bytes);
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* at = row + r * stride + quad * 4;
                    add_products(upper[r][part], low, high, at);
                    add_products(lower[r][part], low, high, at + GROUP);
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int part = 0; part < PARTS; part++) sum[r][part] = joined(upper[r][part], lower[r][part]);
    }

    static void add_products(Integers& sum, Integers low, Integers high, const int8_t* at) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(low, four(at)));
        in_order(sum);
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(high, four(at + GROUP / 2)));
        in_order(sum);
    }

    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        if (has_whole_rows(FORMAT))
            dot_bytes<FORMAT, ROWS, PARTS>(quants, row, stride, sum);
        else
            dot_half_bytes<ROWS, PARTS>(quants, row, stride, sum);
    }

    // The group's integer sum as a float, minus the format's zero point times `row_sum`.
    template <int FORMAT>
    static Floats without_zero(Integers sum, int32_t row_sum) {
        if (FORMAT == INT4_ZERO_8) sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(8 * row_sum));
        return _mm256_cvtepi32_ps(sum);
    }
};

}  // namespace

PAGESTREAM_LINEAR(pagestream_linear_avx2, Avx2)
PAGESTREAM_EXPERTS(avx2, Avx2)
