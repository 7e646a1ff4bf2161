// linear.h for AVX-512 with VNNI: 16 outputs per register, four inputs per instruction.
#include "experts.h"
#include "linear_panels.h"

namespace {

constexpr int MIN_PANEL_ROWS = 6;  // from 6 rows on, panels take 0.9 of the time; with 5 they take longer

constexpr int E2M1_ZERO = 12;

inline __m512 halved_powers_of(const uint8_t* exponents) {
    const __m512i plus_127 = _mm512_cvtepu16_epi32(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)exponents)));
    const __m512i halved = _mm512_max_epi32(_mm512_sub_epi32(plus_127, _mm512_set1_epi32(1)), _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_slli_epi32(halved, 23));
}

inline __m512i unsigned_numbers() {
    const __m128i numbers = _mm_add_epi8(_mm_setr_epi8(E2M1_NUMBERS), _mm_set1_epi8(E2M1_ZERO));
    return _mm512_broadcast_i32x4(numbers);
}

struct Avx512 {
    using Floats = __m512;
    using Integers = __m512i;
    static constexpr int LANES = 16, MAX_ROWS = 8;
    static constexpr bool has_whole_rows(int) { return false; }
    static constexpr int parts(int) { return 1; }

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Floats load(const uint16_t* halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves)); }
    static Floats halved_powers(const uint8_t* exponents) { return halved_powers_of(exponents); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static void save(float* to, Floats from) { _mm512_storeu_ps(to, from); }

    static Integers line(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static Integers four(const int8_t* row) {  // four inputs of a row, repeated for each output
        int32_t quants;
        memcpy(&quants, row, sizeof quants);
        return _mm512_set1_epi32(quants);
    }

    static Integers joined(Integers upper, Integers lower) {
        return _mm512_add_epi32(_mm512_sub_epi32(_mm512_slli_epi32(upper, 8), upper), lower);
    }

    // dpbusd multiplies unsigned by signed bytes and adds four products in 32 bits, so nothing saturates.
    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        Integers halves[2 * ROWS][PARTS];  // upper and lower bytes, each like a row
        dot_halves<FORMAT, 2 * ROWS, PARTS>(quants, row, stride, halves);
        for (int r = 0; r < ROWS; r++) sum[r][0] = joined(halves[2 * r][0], halves[2 * r + 1][0]);
    }

    template <int FORMAT, int ROWS, int PARTS>
    static inline void dot_halves(const uint8_t* quants, const int8_t* row, int64_t stride, Integers (&sum)[ROWS][PARTS]) {
        for (int r = 0; r < ROWS; r++) sum[r][0] = _mm512_setzero_si512();
        if (FORMAT == INT8) {
            // -128..127 become 0..255, which adds 128 times the quants to the joined sum; without_zero() subtracts it.
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
            const Integers both = line(quants + quad * LINE);
            const Integers low = unsigned_of<FORMAT>(_mm512_and_si512(both, half_bytes));
            const Integers high = unsigned_of<FORMAT>(_mm512_and_si512(_mm512_srli_epi16(both, 4), half_bytes));
            for (int r = 0; r < ROWS; r++) {
                const int8_t* at = row + r / 2 * stride + r % 2 * GROUP + quad * 4;
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], low, four(at));
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], high, four(at + GROUP / 2));
            }
        }
    }

    // 4-bit numbers as bytes without a sign: those of E2M1 plus E2M1_ZERO.
    template <int FORMAT>
    static Integers unsigned_of(Integers half_bytes) {
        return FORMAT == E2M1 ? _mm512_shuffle_epi8(unsigned_numbers(), half_bytes) : half_bytes;
    }

    // The group's integer sum as a float, minus the format's zero point times `row_sum`.
    template <int FORMAT>
    static Floats without_zero(Integers sum, int32_t row_sum) {
        if (FORMAT == E2M1) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(E2M1_ZERO * row_sum));
        if (FORMAT == INT8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * row_sum));
        if (FORMAT == INT4_ZERO_8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(8 * row_sum));
        return _mm512_cvtepi32_ps(sum);
    }
};

// Panels of many rows with 16-bit quants: sums need no joining, and weights are widened once per pass.
struct Avx512Words {
    using Floats = __m512;
    using Integers = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Floats load(const uint16_t* halves) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves)); }
    static Floats halved_powers(const uint8_t* exponents) { return halved_powers_of(exponents); }
    static Floats load(const float* at) { return _mm512_loadu_ps(at); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats floats(Integers from) { return _mm512_cvtepi32_ps(from); }
    static void save(float* to, Floats from) { _mm512_storeu_ps(to, from); }

    static Integers no_sum() { return _mm512_setzero_si512(); }
    static Integers all(int32_t pair) { return _mm512_set1_epi32(pair); }
    static Integers line(const void* at) { return _mm512_loadu_si512(at); }
    // dpwssd adds two products of 16 bits in 32 bits, so nothing saturates.
    static void add_products(Integers& sum, Integers a, Integers b) {
        sum = _mm512_dpwssd_epi32(sum, a, b);
#ifdef __AVX512VNNI__  // not where AVX-512 is emulated
        asm("" : "+v"(sum));  // keep the sum in its register: GCC 12 would also copy it to memory
#endif
    }

    // 4-bit numbers in words, as unsigned ones: the upper bytes, which are 0, must stay so.
    template <int FORMAT>
    static Integers unsigned_of(Integers words) {
        if (FORMAT != E2M1) return words;
        return _mm512_and_si512(_mm512_shuffle_epi8(unsigned_numbers(), words), _mm512_set1_epi16(0xff));
    }

    // Widen a group of a block to pairs of inputs in the order of store_whole(), `stride` words apart.
    template <int FORMAT>
    static void widen(const uint8_t* quants, int16_t* to, int stride) {
        auto keep = [=](int pair, Integers words) { _mm512_storeu_si512(to + pair * stride, words); };
        if (FORMAT == INT8) {
            for (int quad = 0; quad < QUADS; quad++) {
                const Integers bytes = line(quants + quad * LINE);
                keep(2 * quad, _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8));
                keep(2 * quad + 1, _mm512_srai_epi16(bytes, 8));
            }
            return;
        }
        const Integers half_bytes = _mm512_set1_epi16(15);
        const Integers zero = _mm512_set1_epi16(FORMAT == INT4_ZERO_8 ? 8 : FORMAT == E2M1 ? E2M1_ZERO : 0);
        for (int quad = 0; quad < QUADS / 2; quad++) {
            const Integers both = line(quants + quad * LINE);
            const Integers words[4] = {
                _mm512_and_si512(both, half_bytes), _mm512_and_si512(_mm512_srli_epi16(both, 8), half_bytes),
                _mm512_and_si512(_mm512_srli_epi16(both, 4), half_bytes), _mm512_srli_epi16(both, 12)};
            for (int i = 0; i < 4; i++)
                keep(i / 2 * QUADS + 2 * quad + i % 2, _mm512_sub_epi16(unsigned_of<FORMAT>(words[i]), zero));
        }
    }
};

}  // namespace

PAGESTREAM_EXPORT int pagestream_linear_avx512(const LinearWeight* weight, const void* x, int64_t x_stride, int x_type,
                                               int64_t num_rows, void* out, int64_t out_stride, int out_type,
                                               int num_threads) {
    const auto product = num_rows >= MIN_PANEL_ROWS ? linear_by_panels<Avx512Words> : linear<Avx512>;
    return product(*weight, x, x_stride, x_type, num_rows, out, out_stride, out_type, num_threads);
}
PAGESTREAM_EXPERTS(avx512, Avx512)
