// Optimizer updates of flat tensors in one pass over memory: gradient to fp32, decay, update, rounded weight.
//
// States are fp32, bf16, or one byte per element with a scale for each 256 of them (ops/state_format.py says how). Weights
// are fp32 or bf16, alone or with a rest (ops/rounding.py). The rules work on fp32: what has another format is widened into a
// buffer before, and rounded from there.
//
// A plain C interface without torch headers, so that it builds in a second and fits every torch version. ops/native.py is
// the only caller and mirrors struct Step.
//
// The work goes in blocks that stay in the first-level cache: the gradients of a block are converted, the block is updated,
// and the new weights are converted from there. So each loop is short, has no branches and is vectorised by the compiler,
// and memory is still passed once. Streaming stores for `out` were tried and were not faster. The same loops are compiled
// for each instruction set. Nothing is contracted to fused multiply-adds (-ffp-contract=off), divisions and square roots
// are rounded correctly: all instruction sets, places in the tensor, numbers of threads and compilers give the same bits
// (signs and payloads of NaN aside). Denormal numbers are treated as the calling thread's torch.set_flush_denormal says.
//
// Results are within 2 units of fp32's epsilon, relative to the sizes of the terms. Where five or more roundings of half a
// unit would come together, the cheap operations are done in double: the step of Adam and Adagrad is a rounded root, sum and
// quotient, and is taken off the weight with one more rounding, the fourth. Double was measured to cost no time with AVX-512,
// where memory is slower, and a quarter more with AVX2. It would cost time where all is bf16: see [Note: bf16 in pairs].

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MEMBER inline __attribute__((always_inline))
#define INLINE static MEMBER

namespace {

enum Type : int32_t { NONE = 0, FP32 = 1, BF16 = 2, FP16 = 3, SIGNED8 = 4, UNSIGNED8 = 5, REMAINDER = 6 };
enum Rule : int32_t { ADAM = 0, ADAGRAD = 1, LION = 2, SGD = 3, ADAM_SAGE = 4, SOPHIA = 5, CURVATURE = 6 };
enum Isa : int32_t { SCALAR = 0, AVX2 = 1, AVX512 = 2 };

constexpr int STATES = 3;  // a rule has at most

struct State {
    void* data;             // [numel] of type; for SIGNED8 and UNSIGNED8 the codes
    float* scale;           // [numel / 256, rounded up]; like the rest, only for SIGNED8 and UNSIGNED8
    const float* map;       // [256] the number of each code
    const uint32_t* words;  // [cells] see ops/state_format.py, likewise for the next two
    int32_t first_cell;
    int32_t cells;
    Type type;  // NONE if the rule has no such state
};

struct Step {
    void* weight;          // [numel] of weight_type
    const void* gradient;  // [numel] of gradient_type
    State states[STATES];  // see each rule
    void* out;             // [numel] of out_type: the new weight, rounded to nearest even; null for NONE
    void* rest;            // [numel] of rest_type: what a weight in BF16 leaves out; null for NONE
    int64_t numel;
    int64_t start;         // see ops/rounding.py, like the next three and the keys
    int64_t row;
    int64_t whole_row;
    int64_t column;
    Type weight_type;      // FP32 or BF16
    Type rest_type;        // NONE, BF16 (to be added), or REMAINDER
    int32_t by_chance;     // whether states in BF16 are rounded by chance, and a weight in BF16 without a rest
    uint32_t keys[1 + STATES][2];
    Type gradient_type;
    Type out_type;
    Rule rule;
    Isa isa;
    int32_t threads;
    float coefficient;   // multiplies the gradient
    float keep;          // multiplies the weight: decoupled decay
    float keep_low;      // what fp32 leaves out of keep; both together have 48 bits. Likewise the next two
    float decay;         // of the weight, added to the gradient: coupled decay
    float decay_low;
    float rate;          // learning rate, corrected for bias (Adam: of both states)
    float rate_low;
    float momentum;      // see each rule, as for the next three
    float blend;
    float second_keep;
    float second_blend;
    float eps;         // added to the root of the sum of squares or, corrected like it, of the second state; see SOPHIA
    float third_keep;  // see ADAM_SAGE, as for the rest
    float third_keep_low;
    float third_past;
    float third_past_low;
    float third_eps;
    float third_eps_low;
    int32_t nesterov;
};

constexpr int64_t BLOCK = 1024;            // elements; 28 KB with all its tensors
constexpr int64_t SCALED = 256;            // elements that share a scale; BLOCK is a multiple of it
constexpr int64_t THREAD_NUMEL = 1 << 14;  // least work worth a thread: about 10 us, and waking one takes 1 to 5 us

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// -- 16-bit types, without branches ------------------------------------------------------------------------------------

INLINE float from_bf16(uint16_t half) { return float_of(uint32_t(half) << 16); }

INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;  // rounding could carry a NaN's mantissa away
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// Away from zero if the lower 16 bits and `noise`, of as many bits, make a carry.
INLINE uint16_t by_chance(float value, uint32_t noise) {
    const uint32_t bits = bits_of(value);
    const uint32_t quiet = (bits >> 16) | 0x40;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : (bits + noise) >> 16);
}

INLINE float from_fp16(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;       // exponent and mantissa where fp32 has them
    const uint32_t normal = magnitude + ((127 - 15) << 23);  // other bias
    const uint32_t special = normal + ((128 - 16) << 23);    // inf and NaN have the highest exponent in fp32, too
    const float tiny = float_of(magnitude + (113 << 23)) - float_of(113 << 23);  // denormal: 2^-14 (1 + m) - 2^-14
    const uint32_t small = bits_of(tiny);
    const uint32_t other = magnitude >= (31u << 23) ? special : normal;
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    return float_of((magnitude < (1u << 23) ? small : other) | sign);
}

INLINE uint16_t to_fp16(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // the sum rounds at 2^-24, fp16's smallest
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < (113u << 23) ? small : normal;
    return uint16_t((magnitude >= (143u << 23) ? special : finite) | (bits >> 16 & 0x8000));
}

// -- 8-bit states -------------------------------------------------------------------------------------------------------
//
// [Note: codes by lines]
// Lookups are slow in vectors, so AVX2 and AVX-512 compute whole blocks. A magnitude has a *place* in its map: 0 is the first, at
// 0, and 1 the last. The numbers of a decade are equally far apart, and their places, plus 1 in maps without a sign, are
// those from one power of two to the next. So the exponent of a place says which decade it is, and one fused multiply-add
// gives the number, to the last bit: ops/state_format.py defines the maps so.
//
// The other way, each decade has a line, from quotients to places. A number is the middle of its part of the decade, so its
// thresholds are on whole places, and the code is what is before the point. There are three exceptions:
//   - The upper 16 bits of an fp32 number are its logarithm, to 0.09 of an octave, and one product of them selects the line.
//     That is precise enough, because a line may begin anywhere from the threshold of its decade's first number to the next.
//     Up to there the line of the decade below goes on.
//   - On that one, the first number of the next decade is at `end`. Its threshold is at end + 1, and all above have its code.
//   - The threshold of 1 is below the last place of its line. A line through it is twice as steep.
// Constants are rounded, and the product with an inverse is not the quotient, so places may be off by some units of 2^-16.
// Those within NEAR units of a threshold are not sure. If one of 32 is not, as in one of 200 cases, the table decides.

void codes_by_table(const State& state, const float* __restrict values, int64_t size, float divisor, uint32_t kept,
                    uint8_t* __restrict codes) {
    const bool with_sign = state.type == SIGNED8;
    const uint32_t* words = state.words;
    const int32_t first = state.first_cell, last = state.cells - 1;
    alignas(64) uint32_t magnitudes[SCALED], found[SCALED];
    alignas(64) int32_t cells[SCALED];
    for (int64_t i = 0; i < size; ++i) {
        magnitudes[i] = bits_of(values[i] / divisor) & 0x7fffffff & kept;
        cells[i] = std::min(std::max(int32_t(magnitudes[i] >> 16) - first, 0), last);
    }
    for (int64_t i = 0; i < size; ++i) found[i] = words[cells[i]];
    for (int64_t i = 0; i < size; ++i) {
        const int32_t place = int32_t(found[i] >> 16) + int32_t((magnitudes[i] & 0xffff) > (found[i] & 0xffff));
        const int32_t code = int32_t(bits_of(values[i]) & kept) < 0 ? 127 - std::min(place, 127) : 127 + place;
        codes[i] = uint8_t(with_sign ? code : place);
    }
}

#ifdef __x86_64__
#define WIDE __attribute__((target("avx2,fma")))

constexpr double DECADES[] = {1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
constexpr int NEAR = 5;
constexpr uint8_t ORDER[] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};  // of bytes that were packed alternately

struct Lines {
    float low[8], step[8];      // of a decade, by the lower 3 bits of its places' exponent
    float slope[8], offset[8];  // of a line, like the next two; line 0 is below all decades
    uint8_t end[16], most[16];
    float last_slope, last_offset;
    int16_t first, factor;  // a number with the upper bits u has the line (u - first) * factor / 2^16
};

constexpr Lines lines(bool with_sign) {
    Lines found{};
    const int shift = with_sign ? 0 : 1, last_place = with_sign ? 128 : 255;
    for (int decade = 0; decade < 7; ++decade) {
        const int count = 1 << (decade + shift), at = (127 + decade + shift) % 8, next = 2 * count - shift;
        found.low[at] = float(DECADES[decade]);
        found.step[at] = float(0.9 * DECADES[decade + 1] / count);
        found.slope[decade + 1] = float(0x1p16 * count / (0.9 * DECADES[decade + 1]));
        found.offset[decade + 1] = float(0x1p16 * (count * 8 / 9.0 - shift) + NEAR);
        found.end[decade + 1] = uint8_t(decade < 6 ? next : 0);
        found.most[decade + 1] = uint8_t(decade < 6 ? next : 255);
    }
    found.step[with_sign ? 6 : 7] = 2;  // of both the first place, which is 0 steps from 0, and the last, half a step
    const double least = DECADES[0] + 0.45 * DECADES[1] / (1 << shift), last = 1 - 0.225 / (64 << shift);
    found.slope[0] = float(0x1p16 / least);  // from 1/2 at 0 to 1 at half of the least number
    found.offset[0] = float(0x1p15 + NEAR);
    found.end[0] = found.most[0] = 255;
    found.last_slope = 2 * found.slope[7];
    found.last_offset = float(0x1p16 * last_place + NEAR - last * found.last_slope);
    found.first = with_sign ? 13068 : 12958;  // with these two, all lines begin where they may
    found.factor = with_sign ? 166 : 160;
    return found;
}

template <bool with_sign>
constexpr Lines LINES = lines(with_sign);

template <bool with_sign>
WIDE void values_by_lines(const uint8_t* codes, float scale, float* to) {
    const __m256 low = _mm256_loadu_ps(LINES<with_sign>.low), step = _mm256_loadu_ps(LINES<with_sign>.step);
    const __m256 exponents = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)), minus = _mm256_set1_ps(-0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < SCALED; i += 8) {
        __m256i place = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        __m256 factor = _mm256_set1_ps(scale);
        if (with_sign) {
            place = _mm256_sub_epi32(place, _mm256_set1_epi32(127));
            factor = _mm256_xor_ps(factor, _mm256_and_ps(_mm256_castsi256_ps(place), minus));
            place = _mm256_abs_epi32(place);
        }
        const __m256 middle = _mm256_add_ps(_mm256_cvtepi32_ps(place), _mm256_set1_ps(with_sign ? 0.5f : 1.5f));
        __m256 begin = _mm256_and_ps(middle, exponents);
        if (!with_sign) begin = _mm256_max_ps(begin, _mm256_set1_ps(1.5f));  // the middle of place 0: its number is 0
        const __m256i line = _mm256_srli_epi32(_mm256_castps_si256(middle), 23);
        const __m256 along = _mm256_sub_ps(middle, begin);
        const __m256 number =
            _mm256_fmadd_ps(along, _mm256_permutevar8x32_ps(step, line), _mm256_permutevar8x32_ps(low, line));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(number, factor));
    }
}

// The upper halves of the 32-bit elements of two vectors, alternately.
WIDE INLINE __m256i upper_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}

WIDE INLINE __m256i both_lanes(const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

WIDE uint32_t largest_magnitude(const float* values) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int64_t i = 0; i < SCALED; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
        top = _mm256_max_epu32(top, _mm256_and_si256(bits, magnitude));
    }
    const __m128i half = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    const __m128i pair = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(pair, _mm_shuffle_epi32(pair, 0xb1))));
}

// False if the block is zero, not finite, or so small or large that an inverse would not be precise: nothing is done then.
template <bool with_sign>
WIDE bool codes_by_lines(const State& state, const float* values, float* scale, uint8_t* codes) {
    const float divisor = float_of(largest_magnitude(values));
    if (!(divisor > 0x1p-100f && divisor < 0x1p100f)) return false;
    *scale = divisor;
    constexpr const Lines& all = LINES<with_sign>;
    const __m256 slope = _mm256_loadu_ps(all.slope), last_slope = _mm256_set1_ps(all.last_slope);
    const __m256 offset = _mm256_loadu_ps(all.offset), last_offset = _mm256_set1_ps(all.last_offset);
    const __m256i first_upper = _mm256_set1_epi16(all.first), factor = _mm256_set1_epi16(all.factor);
    const __m256i last_upper = _mm256_set1_epi16(all.first + 0x7ffff / all.factor);  // the last line is 7
    const __m256 inverse = _mm256_set1_ps(1 / divisor), minus = _mm256_set1_ps(-0.0f);
    const __m256i ends = both_lanes(all.end), mosts = both_lanes(all.most);
    const __m256i in_lanes = both_lanes(ORDER), over_lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t at = 0; at < SCALED; at += 32) {
        __m256i uppers[2], line[2], places[2], nearest = _mm256_set1_epi32(-1);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m256 quotient[2];
            __m256i place[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
                quotient[i] = _mm256_mul_ps(_mm256_loadu_ps(values + at + 16 * half + 8 * i), inverse);
            uppers[half] = upper_halves(_mm256_castps_si256(quotient[0]), _mm256_castps_si256(quotient[1]));
            const __m256i upper = _mm256_and_si256(uppers[half], _mm256_set1_epi16(0x7fff));
            const __m256i above = _mm256_subs_epu16(_mm256_min_epu16(upper, last_upper), first_upper);
            line[half] = _mm256_mulhi_epu16(above, factor);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const __m256i which = i ? _mm256_srli_epi32(line[half], 16) : line[half];  // its lower 3 bits are read
                const __m256 magnitude = _mm256_andnot_ps(minus, quotient[i]);
                const __m256 on_line = _mm256_fmadd_ps(magnitude, _mm256_permutevar8x32_ps(slope, which),
                                                       _mm256_permutevar8x32_ps(offset, which));
                const __m256 on_last = _mm256_fmadd_ps(magnitude, last_slope, last_offset);
                place[i] = _mm256_cvtps_epi32(_mm256_max_ps(on_line, on_last));
                nearest = _mm256_min_epu16(nearest, place[i]);
            }
            places[half] = upper_halves(place[0], place[1]);
        }
        const __m256i of_line = _mm256_packus_epi16(line[0], line[1]);
        __m256i code = _mm256_packus_epi16(places[0], places[1]);
        code = _mm256_add_epi8(code, _mm256_cmpeq_epi8(code, _mm256_shuffle_epi8(ends, of_line)));
        code = _mm256_min_epu8(code, _mm256_shuffle_epi8(mosts, of_line));
        if (with_sign) {
            const __m256i zero = _mm256_set1_epi8(127);
            code = _mm256_blendv_epi8(_mm256_add_epi8(zero, code), _mm256_subs_epu8(zero, code),
                                      _mm256_packs_epi16(uppers[0], uppers[1]));
        }
        code = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(code, in_lanes), over_lanes);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + at), code);
        const __m256i unsure = _mm256_subs_epu16(_mm256_set1_epi16(2 * NEAR), nearest);
        if (!_mm256_testz_si256(unsure, _mm256_set1_epi32(0xffff)))
            codes_by_table(state, values + at, 32, divisor, 0xffffffff, codes + at);
    }
    return true;
}
// The same with vectors of 16: less than half as many instructions for an element.
#define WIDEST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

WIDEST INLINE __m512 twice(const float* numbers) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(numbers)); }

template <bool with_sign>
WIDEST void values_by_long_lines(const uint8_t* codes, float scale, float* to) {
    const __m512 low = twice(LINES<with_sign>.low), step = twice(LINES<with_sign>.step);
    const __m512i exponents = _mm512_set1_epi32(0x7f800000), minus = _mm512_set1_epi32(INT32_MIN);
#pragma GCC unroll 4
    for (int64_t i = 0; i < SCALED; i += 16) {
        __m512i place = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        __m512 factor = _mm512_set1_ps(scale);
        if (with_sign) {
            place = _mm512_sub_epi32(place, _mm512_set1_epi32(127));
            factor = _mm512_xor_ps(factor, _mm512_castsi512_ps(_mm512_and_si512(place, minus)));
            place = _mm512_abs_epi32(place);
        }
        const __m512 middle = _mm512_add_ps(_mm512_cvtepi32_ps(place), _mm512_set1_ps(with_sign ? 0.5f : 1.5f));
        __m512 begin = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(middle), exponents));
        if (!with_sign) begin = _mm512_max_ps(begin, _mm512_set1_ps(1.5f));
        const __m512i line = _mm512_srli_epi32(_mm512_castps_si512(middle), 23);
        const __m512 number = _mm512_fmadd_ps(_mm512_sub_ps(middle, begin), _mm512_permutexvar_ps(line, step),
                                              _mm512_permutexvar_ps(line, low));
        _mm512_storeu_ps(to + i, _mm512_mul_ps(number, factor));
    }
}

WIDEST INLINE __m512i long_upper_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

WIDEST INLINE __m512i four_lanes(const uint8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

template <bool with_sign>
WIDEST bool codes_by_long_lines(const State& state, const float* values, float* scale, uint8_t* codes) {
    const float divisor = float_of(largest_magnitude(values));
    if (!(divisor > 0x1p-100f && divisor < 0x1p100f)) return false;
    *scale = divisor;
    constexpr const Lines& all = LINES<with_sign>;
    const __m512 slope = twice(all.slope), last_slope = _mm512_set1_ps(all.last_slope);
    const __m512 offset = twice(all.offset), last_offset = _mm512_set1_ps(all.last_offset);
    const __m512i first_upper = _mm512_set1_epi16(all.first), factor = _mm512_set1_epi16(all.factor);
    const __m512i last_upper = _mm512_set1_epi16(all.first + 0x7ffff / all.factor);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), upper_magnitude = _mm512_set1_epi16(0x7fff);
    const __m512 inverse = _mm512_set1_ps(1 / divisor);
    const __m512i ends = four_lanes(all.end), mosts = four_lanes(all.most), zero = _mm512_set1_epi8(127);
    const __m512i in_lanes = four_lanes(ORDER);
    const __m512i over_lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t at = 0; at < SCALED; at += 64) {
        __m512i uppers[2], line[2], places[2];
        bool unsure[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m512i quotient[2], place[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
                quotient[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(values + at + 32 * half + 16 * i), inverse));
            uppers[half] = long_upper_halves(quotient[0], quotient[1]);
            const __m512i upper = _mm512_min_epu16(_mm512_and_si512(uppers[half], upper_magnitude), last_upper);
            line[half] = _mm512_mulhi_epu16(_mm512_subs_epu16(upper, first_upper), factor);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const __m512i which = i ? _mm512_srli_epi32(line[half], 16) : line[half];  // its lower 4 bits are read
                const __m512 size = _mm512_castsi512_ps(_mm512_and_si512(quotient[i], magnitude));
                const __m512 on_line =
                    _mm512_fmadd_ps(size, _mm512_permutexvar_ps(which, slope), _mm512_permutexvar_ps(which, offset));
                const __m512 on_last = _mm512_fmadd_ps(size, last_slope, last_offset);
                place[i] = _mm512_cvtps_epi32(_mm512_max_ps(on_line, on_last));
            }
            const __m512i nearest = _mm512_min_epu16(place[0], place[1]);
            unsure[half] = _mm512_mask_cmplt_epu16_mask(0x55555555, nearest, _mm512_set1_epi16(2 * NEAR));
            places[half] = long_upper_halves(place[0], place[1]);
        }
        const __m512i of_line = _mm512_packus_epi16(line[0], line[1]);
        __m512i code = _mm512_packus_epi16(places[0], places[1]);
        const __mmask64 ended = _mm512_cmpeq_epi8_mask(code, _mm512_shuffle_epi8(ends, of_line));
        code = _mm512_mask_sub_epi8(code, ended, code, _mm512_set1_epi8(1));
        code = _mm512_min_epu8(code, _mm512_shuffle_epi8(mosts, of_line));
        if (with_sign) {
            const __mmask64 below = _mm512_movepi8_mask(_mm512_packs_epi16(uppers[0], uppers[1]));
            code = _mm512_mask_subs_epu8(_mm512_add_epi8(zero, code), below, zero, code);
        }
        code = _mm512_permutexvar_epi32(over_lanes, _mm512_shuffle_epi8(code, in_lanes));
        _mm512_storeu_si512(codes + at, code);
        for (int half = 0; half < 2; ++half)
            if (unsure[half])
                codes_by_table(state, values + at + 32 * half, 32, divisor, 0xffffffff, codes + at + 32 * half);
    }
    return true;
}
#endif

void dequantise(const State& state, int64_t at, int64_t count, Isa isa, float* __restrict to) {
    const uint8_t* codes = static_cast<const uint8_t*>(state.data) + at;
    for (int64_t low = 0; low < count; low += SCALED) {
        const float scale = state.scale[(at + low) / SCALED];
        const int64_t high = std::min(low + SCALED, count);
#ifdef __x86_64__
        if (isa != SCALAR && high == low + SCALED) {
            const auto few = state.type == SIGNED8 ? values_by_lines<true> : values_by_lines<false>;
            const auto many = state.type == SIGNED8 ? values_by_long_lines<true> : values_by_long_lines<false>;
            (isa == AVX512 ? many : few)(codes + low, scale, to + low);
            continue;
        }
#endif
        for (int64_t i = low; i < high; ++i) to[i] = state.map[codes[i]] * scale;
    }
}

void quantise(const State& state, int64_t at, int64_t count, Isa isa, const float* from) {
    for (int64_t low = 0; low < count; low += SCALED) {
        const int64_t size = std::min(SCALED, count - low);
        const float* values = from + low;
        float* scale = state.scale + (at + low) / SCALED;
        uint8_t* codes = static_cast<uint8_t*>(state.data) + at + low;
#ifdef __x86_64__
        const auto few = state.type == SIGNED8 ? codes_by_lines<true> : codes_by_lines<false>;
        const auto many = state.type == SIGNED8 ? codes_by_long_lines<true> : codes_by_long_lines<false>;
        if (isa != SCALAR && size == SCALED && (isa == AVX512 ? many : few)(state, values, scale, codes)) continue;
#endif
        uint32_t top = 0;
        for (int64_t i = 0; i < size; ++i) top = std::max(top, bits_of(values[i]) & 0x7fffffff);
        const bool finite = top < 0x7f800000;
        const float divisor = finite && top ? float_of(top) : 1.0f;
        *scale = float_of(finite ? top : 0x7fc00000);
        codes_by_table(state, values, size, divisor, finite ? 0xffffffff : 0, codes);
    }
}

// -- noise, and weights in bf16: see ops/rounding.py ---------------------------------------------------------------------

// Two 16-bit numbers, of neighbours in a tensor: the first is the lower half. They may begin at any of its elements.
using Word = uint32_t __attribute__((may_alias, aligned(2)));

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
INLINE uint32_t in_order(uint32_t word) { return word << 16 | word >> 16; }
#else
INLINE uint32_t in_order(uint32_t word) { return word; }
#endif

// Neighbours in a parameter, so that the noise of two of them is one hash: `position` is that of the first in the whole
// parameter, and `numel` of them follow on each other. The upper half of the numbers of their pairs is the same.
struct Stretch {
    int64_t position, numel;
    MEMBER uint32_t upper() const { return uint32_t(position >> 33) * 0x9e3779b9u; }
    MEMBER uint32_t pair() const { return uint32_t(position >> 1); }
    MEMBER bool begins_inside() const { return position & 1; }  // a pair
};

// The stretch that begins with element `at` of the tensor, and has at most `count` of them.
INLINE Stretch stretch(const Step& step, int64_t at, int64_t count) {
    const int64_t here = step.start + at, row = step.row ? here / step.row : 0;
    const int64_t position = step.row ? row * step.whole_row + here - row * step.row + step.column : here;
    int64_t numel = std::min(count, (int64_t(1) << 33) - (position & ((int64_t(1) << 33) - 1)));
    if (step.row) numel = std::min(numel, (row + 1) * step.row - here);
    return {position, numel};
}

// The upper bits mixed into the lower ones. It goes with exclusive or, so that what tensors have in common is folded once.
INLINE uint32_t folded(uint32_t word) { return word ^ word >> 16; }

// The noise of a pair: 16 bits for each of the two. `pair` and `first` are folded, and their exclusive or is hashed.
INLINE uint32_t noise_of(uint32_t pair, uint32_t first, uint32_t second) {
    uint32_t mixed = (pair ^ first) * 0x7feb352du;
    mixed = ((mixed ^ mixed >> 15) + second) * 0x846ca68bu;
    return folded(mixed);
}

// The noise of elements `at .. at + count` of a tensor: 0 is the weight, from 1 on states.
INLINE void draw(const Step& step, int tensor, int64_t at, int64_t count, uint16_t* __restrict noise) {
    for (int64_t done = 0; done < count;) {
        const Stretch found = stretch(step, at + done, count - done);
        const uint32_t first = folded(step.keys[tensor][0] ^ found.upper()), second = step.keys[tensor][1];
        uint16_t* to = noise + done;
        uint32_t pair = found.pair();
        done += found.numel;
        if (found.begins_inside()) *to++ = uint16_t(noise_of(folded(pair++), first, second) >> 16);
        const int32_t pairs = int32_t(noise + done - to) / 2;
        Word* __restrict words = reinterpret_cast<Word*>(to);
        for (int32_t i = 0; i < pairs; ++i) words[i] = in_order(noise_of(folded(pair + uint32_t(i)), first, second));
        pair += uint32_t(pairs);
        if (to + 2 * pairs < noise + done) to[2 * pairs] = uint16_t(noise_of(folded(pair), first, second));
    }
}

// The weights from element `at` on: where they are if they are fp32, else in `buffer`.
INLINE float* widen_weight(const Step& step, int64_t at, int64_t count, float* __restrict buffer) {
    if (step.weight_type == FP32) return static_cast<float*>(step.weight) + at;
    const uint16_t* from = static_cast<const uint16_t*>(step.weight) + at;
    const uint16_t* rest = static_cast<const uint16_t*>(step.rest) + at;
    if (step.rest_type == REMAINDER) {
        for (int64_t i = 0; i < count; ++i)
            buffer[i] = float_of((uint32_t(from[i]) << 16) + uint32_t(int32_t(int16_t(rest[i]))));
    } else if (step.rest_type == BF16) {
        for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(from[i]) + from_bf16(rest[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(from[i]);
    }
    return buffer;
}

// Rounds the weights in `buffer`, which are then those that are kept.
INLINE void narrow_weight(const Step& step, int64_t at, int64_t count, float* __restrict buffer) {
    if (step.weight_type == FP32) return;
    uint16_t* __restrict to = static_cast<uint16_t*>(step.weight) + at;
    uint16_t* __restrict rest = static_cast<uint16_t*>(step.rest) + at;
    if (step.rest_type == REMAINDER) {
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = bits_of(buffer[i]), special = (bits & 0x7fffffff) > 0x7f800000;
            to[i] = uint16_t(special ? (bits >> 16) | 0x40 : (bits + 0x8000) >> 16);
            rest[i] = uint16_t(special ? 0 : bits);
        }
    } else if (step.rest_type == BF16) {
        for (int64_t i = 0; i < count; ++i) {
            to[i] = to_bf16(buffer[i]);
            const uint16_t left = to_bf16(buffer[i] - from_bf16(to[i]));
            rest[i] = uint16_t(left - (to_bf16(from_bf16(to[i]) + from_bf16(left)) != to[i]));
        }
    } else if (step.by_chance) {
        alignas(64) uint16_t noise[BLOCK];
        draw(step, 0, at, count, noise);
        for (int64_t i = 0; i < count; ++i) to[i] = by_chance(buffer[i], noise[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(buffer[i]);
    }
    if (step.out_type != NONE)
        for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(to[i]);
}

// -- one block ----------------------------------------------------------------------------------------------------------

// The values of a state from element `at` on: where they are if they are fp32, else in `buffer`. Null if there is no state.
INLINE float* widen(const Step& step, int number, int64_t at, int64_t count, float* __restrict buffer) {
    const State& state = step.states[number];
    if (state.type == NONE) return nullptr;
    if (state.type == FP32) return static_cast<float*>(state.data) + at;
    if (state.type == BF16) {
        const uint16_t* from = static_cast<const uint16_t*>(state.data) + at;
        for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(from[i]);
    } else {
        dequantise(state, at, count, step.isa, buffer);
    }
    return buffer;
}

INLINE void narrow(const Step& step, int number, int64_t at, int64_t count, const float* __restrict buffer) {
    const State& state = step.states[number];
    if (state.type == BF16 && step.by_chance) {
        uint16_t* __restrict to = static_cast<uint16_t*>(state.data) + at;
        alignas(64) uint16_t noise[BLOCK];
        draw(step, 1 + number, at, count, noise);
        for (int64_t i = 0; i < count; ++i) to[i] = by_chance(buffer[i], noise[i]);
    } else if (state.type == BF16) {
        uint16_t* __restrict to = static_cast<uint16_t*>(state.data) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(buffer[i]);
    } else if (state.type != FP32 && state.type != NONE) {
        quantise(state, at, count, step.isa, buffer);
    }
}

INLINE void load(const Step& step, int64_t at, int64_t count, float* __restrict to) {
    const float coefficient = step.coefficient;
    if (step.gradient_type == FP32) {
        const float* from = static_cast<const float*>(step.gradient) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = from[i] * coefficient;
    } else if (step.gradient_type == BF16) {
        const uint16_t* from = static_cast<const uint16_t*>(step.gradient) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = from_bf16(from[i]) * coefficient;
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(step.gradient) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = from_fp16(from[i]) * coefficient;
    }
}

INLINE void store(const Step& step, int64_t at, int64_t count, const float* __restrict from) {
    if (step.out_type == FP32) {
        std::memcpy(static_cast<float*>(step.out) + at, from, size_t(count) * sizeof(float));
    } else if (step.out_type == BF16) {
        uint16_t* __restrict to = static_cast<uint16_t*>(step.out) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
    } else if (step.out_type == FP16) {
        uint16_t* __restrict to = static_cast<uint16_t*>(step.out) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = to_fp16(from[i]);
    }
}

// A constant from its two parts: Triton, whose kernels give the same bits, takes constants as fp32 only.
INLINE double whole(float high, float low) { return double(high) + low; }

// Adam and AdamW (arXiv:1412.6980, 1711.05101): first is exp_avg, second is exp_avg_sq; second_keep = beta2,
// second_blend = 1 - beta2; blend = 1 - beta1, or -beta1 if that is nearer to 0: like torch's lerp, from the nearer end.
// The correction of exp_avg_sq is in rate and eps: sqrt(v) * c + eps = c * (sqrt(v) + eps / c).
// A weight in bf16 alone (`rough`) is rounded so coarsely that fp32 is enough. What it shrinks by is a factor of its own
// there: in fp32, 1 - 1e-6 is wrong by 1 % of what matters.
template <bool coupled, bool rough>
struct Adam {
    double keep, decay, rate;
    float eps, blend, second_keep, second_blend, shrink, rough_rate;
    uint32_t from_first;  // all bits or none: of a condition, compilers make two quotients, one for each case

    MEMBER explicit Adam(const Step& s)
        : keep(whole(s.keep, s.keep_low)), decay(whole(s.decay, s.decay_low)), rate(whole(s.rate, s.rate_low)), eps(s.eps),
          blend(s.blend), second_keep(s.second_keep), second_blend(s.second_blend), shrink(float(1 - keep)),
          rough_rate(s.rate), from_first(s.blend > 0 ? ~0u : 0u) {}

    MEMBER void operator()(float gradient, float& weight, float& first, float& second) const {
        const double decayed = gradient + decay * weight;
        const float g = coupled ? float(decayed) : gradient;
        const float nearer = float_of((bits_of(first) & from_first) | (bits_of(g) & ~from_first));
        const float m = nearer + blend * (g - first);
        // A square doubles the error of its root, so g is not rounded before.
        const float v = coupled ? float(double(second_keep) * second + second_blend * (decayed * decayed))
                                : second_keep * second + (second_blend * g) * g;
        const float quotient = m / (std::sqrt(v) + eps);
        first = m;
        second = v;
        weight = rough ? weight - (shrink * weight + rough_rate * quotient) : float(keep * weight - rate * quotient);
    }
};

template <bool coupled, bool rough>
INLINE void adam(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                 float* __restrict first, float* __restrict second) {
    const Adam<coupled, rough> rule(s);
    for (int64_t i = 0; i < count; ++i) {
        float w = weight[i], m = first[i], v = second[i];
        rule(gradient[i], w, m, v);
        weight[i] = w;
        first[i] = m;
        second[i] = v;
    }
}

// Adagrad (Duchi et al. 2011): first is the sum of squares. A gradient with decay is never rounded to fp32, which takes a
// product with an inverse in place of a quotient.
INLINE void adagrad(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                    float* __restrict first) {
    const double decay = whole(s.decay, s.decay_low), rate = whole(s.rate, s.rate_low);
    const float eps = s.eps;
    const bool coupled = s.decay != 0;
    for (int64_t i = 0; i < count; ++i) {
        const double decayed = gradient[i] + decay * weight[i];
        const double g = coupled ? decayed : gradient[i];
        const float sum = float(first[i] + g * g);
        const float inverse = 1 / (std::sqrt(sum) + eps);
        first[i] = sum;
        weight[i] = float(weight[i] - rate * g * inverse);
    }
}

// Lion (arXiv:2302.06675, Alg. 2): first is exp_avg; momentum = beta1, blend = 1 - beta1; second_keep = beta2,
// second_blend = 1 - beta2.
INLINE void lion(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                 float* __restrict first) {
    const float keep = s.keep, rate = s.rate, momentum = s.momentum, blend = s.blend;
    const float second_keep = s.second_keep, second_blend = s.second_blend;
    for (int64_t i = 0; i < count; ++i) {
        const float g = gradient[i];
        const float direction = momentum * first[i] + blend * g;
        const float up = direction > 0 ? rate : 0.0f, down = direction < 0 ? rate : 0.0f;  // NaN has sign 0, as in torch
        weight[i] = keep * weight[i] - (up - down);
        first[i] = second_keep * first[i] + second_blend * g;
    }
}

// SGD as torch.optim has it: first is the momentum buffer, or null; blend = 1 - dampening.
INLINE void sgd(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                float* __restrict first) {
    const float decay = s.decay, rate = s.rate, momentum = s.momentum, blend = s.blend;
    const bool coupled = decay != 0, nesterov = s.nesterov != 0;
    if (!first) {
        for (int64_t i = 0; i < count; ++i) {
            const float decayed = gradient[i] + decay * weight[i];
            weight[i] = weight[i] - rate * (coupled ? decayed : gradient[i]);
        }
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const float decayed = gradient[i] + decay * weight[i];
        const float g = coupled ? decayed : gradient[i];
        const float buffer = momentum * first[i] + blend * g;
        const float ahead = g + momentum * buffer;
        first[i] = buffer;
        weight[i] = weight[i] - rate * (nesterov ? ahead : buffer);
    }
}

// AdamW-SAGE (Liang et al., ICLR 2022): first, second and their constants as for AdamW; third is exp_avg_sensitivity, the
// average of I = |w g|. The step is AdamW's times |I - J| / (J + eps^2), where J is the average corrected for its bias.
// third_keep = beta3; third_past = 1 - beta3^(t-1); third_eps = eps sqrt(1 - beta3^t). Both terms are multiplied by
// 1 - beta3^t, and the difference is written by the average before this step: it is 0 at the first step, without rounding.
// I is the product of two fp32 numbers, which double holds exactly.
INLINE void adam_sage(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                      float* __restrict first, float* __restrict second, float* __restrict third) {
    const double keep = whole(s.keep, s.keep_low), rate = whole(s.rate, s.rate_low);
    const double third_keep = whole(s.third_keep, s.third_keep_low), past = whole(s.third_past, s.third_past_low);
    const double third_eps = whole(s.third_eps, s.third_eps_low), least = third_eps * third_eps;
    const double third_blend = 1 - third_keep;
    const float eps = s.eps, blend = s.blend, second_keep = s.second_keep, second_blend = s.second_blend;
    const bool from_first = blend > 0;
    for (int64_t i = 0; i < count; ++i) {
        const float g = gradient[i];
        const float m = (from_first ? first[i] : g) + blend * (g - first[i]);
        const float v = second_keep * second[i] + (second_blend * g) * g;
        const double sensitivity = std::fabs(double(weight[i]) * g), before = third[i];
        const double average = third_keep * before + third_blend * sensitivity;
        const double apart = third_keep * std::fabs(past * sensitivity - before);
        const float root = std::sqrt(v) + eps;
        first[i] = m;
        second[i] = v;
        third[i] = float(average);
        weight[i] = float(keep * weight[i] - rate * (m * apart / (root * (average + least))));
    }
}

// Sophia-G (arXiv:2305.14342, Alg. 3): first is exp_avg, blend as for Adam; second is the average of squared gradients that
// CURVATURE fills, second_keep = rho times the number of tokens of a step, which makes a curvature of it.
INLINE void sophia(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                   float* __restrict first, const float* __restrict second) {
    const double keep = whole(s.keep, s.keep_low), rate = whole(s.rate, s.rate_low);
    const double eps = s.eps, second_keep = s.second_keep;
    const float blend = s.blend;
    const bool from_first = blend > 0;
    for (int64_t i = 0; i < count; ++i) {
        const float g = gradient[i];
        const float m = (from_first ? first[i] : g) + blend * (g - first[i]);
        const double quotient = m / (second_keep * second[i] + eps);
        const double below = quotient > 1 ? 1 : quotient;  // a NaN stays
        first[i] = m;
        weight[i] = float(keep * weight[i] - rate * (below < -1 ? -1 : below));
    }
}

// The curvature for Sophia-G: first is an average of squares, second_keep = beta2, second_blend = 1 - beta2. The weight stays.
INLINE void curvature(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict first) {
    const float second_keep = s.second_keep, second_blend = s.second_blend;
    for (int64_t i = 0; i < count; ++i) first[i] = second_keep * first[i] + (second_blend * gradient[i]) * gradient[i];
}

// -- pairs --------------------------------------------------------------------------------------------------------------
//
// [Note: bf16 in pairs]
// Where everything is bf16, as little is moved as 14 bytes for an element, and what takes time is computing: conversions,
// noise, root and quotient. So Adam takes such tensors by words, of two neighbours: an fp32 number is made of either half,
// and the results become a word again, each by one or two operations of whole vectors, where widening halves to vectors of
// words takes shuffles. One hash is the noise of both. It is one loop, so that the divider works beside the rest, and the
// memory beside both: what comes AHEAD is asked for, because processors do not look into the next page.
//
// NaN needs no care when it is rounded: it comes from a bf16, or is the processor's own, or the coefficient, so its lower
// half is zero, and what is added there does not reach the upper one.

constexpr int64_t AHEAD = 2048;  // elements
constexpr int32_t PAIRS = 64;    // in one go, between which memory is asked for
constexpr int64_t LINE = 32;     // elements

struct Pair {
    float low, high;
};

INLINE Pair widen_pair(uint32_t word) { return {float_of(word << 16), float_of(word & 0xffff0000)}; }

// The bits of a number, of which the upper half is the rounded one; `noise` as for by_chance.
template <bool chance>
INLINE uint32_t rounded_bits(float value, uint32_t noise) {
    const uint32_t bits = bits_of(value);
    return bits + (chance ? noise : 0x7fff + ((bits >> 16) & 1));
}

template <bool chance>
INLINE uint32_t narrow_pair(Pair pair, uint32_t noise) {
    const uint32_t low = rounded_bits<chance>(pair.low, noise & 0xffff) >> 16;
    return low | (rounded_bits<chance>(pair.high, noise >> 16) & 0xffff0000);
}

// Updates stretches of tensors that all are bf16, which begin with the same element.
template <bool chance, typename Rule>
struct Pairs {
    Rule rule;
    float coefficient;
    uint32_t first_keys[3], second_keys[3];  // of the stretch
    const uint16_t* gradient;
    uint16_t *weight, *first, *second;

    MEMBER Pairs(const Step& step, int64_t at, const Stretch& found)
        : rule(step), coefficient(step.coefficient == step.coefficient ? step.coefficient : float_of(0x7fc00000)),
          gradient(static_cast<const uint16_t*>(step.gradient) + at), weight(static_cast<uint16_t*>(step.weight) + at),
          first(static_cast<uint16_t*>(step.states[0].data) + at),
          second(static_cast<uint16_t*>(step.states[1].data) + at) {
        for (int i = 0; i < 3; ++i) {
            first_keys[i] = folded(step.keys[i][0] ^ found.upper());
            second_keys[i] = step.keys[i][1];
        }
    }

    MEMBER void update(uint32_t pair, uint32_t of_gradient, uint32_t& of_weight, uint32_t& of_first,
                       uint32_t& of_second) const {
        const Pair g = widen_pair(of_gradient);
        Pair w = widen_pair(of_weight), m = widen_pair(of_first), v = widen_pair(of_second);
        rule(g.low * coefficient, w.low, m.low, v.low);
        rule(g.high * coefficient, w.high, m.high, v.high);
        const uint32_t hashed = folded(pair);
        of_weight = narrow_pair<chance>(w, chance ? noise_of(hashed, first_keys[0], second_keys[0]) : 0);
        of_first = narrow_pair<chance>(m, chance ? noise_of(hashed, first_keys[1], second_keys[1]) : 0);
        of_second = narrow_pair<chance>(v, chance ? noise_of(hashed, first_keys[2], second_keys[2]) : 0);
    }

    // Element `i` alone, which is the first or the second of its pair.
    MEMBER void update_half(int64_t i, uint32_t pair, bool is_second) const {
        const int shift = is_second ? 16 : 0;
        uint32_t w = uint32_t(weight[i]) << shift, m = uint32_t(first[i]) << shift, v = uint32_t(second[i]) << shift;
        update(pair, uint32_t(gradient[i]) << shift, w, m, v);
        weight[i] = uint16_t(w >> shift);
        first[i] = uint16_t(m >> shift);
        second[i] = uint16_t(v >> shift);
    }

    // `count` pairs, from element `at` on.
    MEMBER void update_pairs(int64_t at, uint32_t pair, int32_t count) const {
        const Pairs own = *this;  // words may alias what others can see
        const Word* __restrict g = reinterpret_cast<const Word*>(gradient + at);
        Word *__restrict w = reinterpret_cast<Word*>(weight + at), *__restrict m = reinterpret_cast<Word*>(first + at);
        Word* __restrict v = reinterpret_cast<Word*>(second + at);
        for (int32_t i = 0; i < count; ++i) {
            uint32_t of_weight = in_order(w[i]), of_first = in_order(m[i]), of_second = in_order(v[i]);
            own.update(pair + uint32_t(i), in_order(g[i]), of_weight, of_first, of_second);
            w[i] = in_order(of_weight);
            m[i] = in_order(of_first);
            v[i] = in_order(of_second);
        }
    }

    MEMBER void ask_for(int64_t at) const {
        for (int64_t i = at; i < at + 2 * PAIRS; i += LINE) {
            __builtin_prefetch(gradient + i);
            __builtin_prefetch(weight + i, 1);
            __builtin_prefetch(first + i, 1);
            __builtin_prefetch(second + i, 1);
        }
    }
};

template <bool chance, typename Rule>
INLINE void run_pairs(const Step& step, int64_t begin, int64_t end) {
    for (int64_t at = begin, numel; at < end; at += numel) {
        const Stretch found = stretch(step, at, end - at);
        const Pairs<chance, Rule> pairs(step, at, found);
        numel = found.numel;
        uint32_t pair = found.pair();
        int64_t done = 0;
        if (found.begins_inside()) pairs.update_half(done++, pair++, true);
        for (; done + 2 * PAIRS <= numel; done += 2 * PAIRS, pair += PAIRS) {
            pairs.ask_for(done + AHEAD);
            pairs.update_pairs(done, pair, PAIRS);
        }
        const int32_t left = int32_t(numel - done) / 2;
        pairs.update_pairs(done, pair, left);
        if (done + 2 * left < numel) pairs.update_half(done + 2 * left, pair + uint32_t(left), false);
    }
}

INLINE bool all_in_bf16(const Step& step) {
    const bool alone = step.weight_type == BF16 && step.rest_type == NONE && step.out_type == NONE;
    return alone && step.gradient_type == BF16 && step.states[0].type == BF16 && step.states[1].type == BF16;
}

// -- a range of elements, for each instruction set ---------------------------------------------------------------------

INLINE void run(const Step& step, int64_t begin, int64_t end) {
    if (step.rule == ADAM && all_in_bf16(step)) {
        if (step.by_chance && step.decay == 0) return run_pairs<true, Adam<false, true>>(step, begin, end);
        if (step.by_chance) return run_pairs<true, Adam<true, true>>(step, begin, end);
        if (step.decay == 0) return run_pairs<false, Adam<false, true>>(step, begin, end);
        return run_pairs<false, Adam<true, true>>(step, begin, end);
    }
    const bool rough = step.weight_type == BF16 && step.rest_type == NONE;
    alignas(64) float gradient[BLOCK], wide[BLOCK], buffers[STATES][BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t count = std::min(BLOCK, end - at);
        float *weight = widen_weight(step, at, count, wide), *states[STATES];
        load(step, at, count, gradient);
#pragma GCC unroll 1
        for (int i = 0; i < STATES; ++i) states[i] = widen(step, i, at, count, buffers[i]);
        if (step.rule == ADAM && step.decay == 0) {
            if (rough) adam<false, true>(step, count, gradient, weight, states[0], states[1]);
            else adam<false, false>(step, count, gradient, weight, states[0], states[1]);
        } else if (step.rule == ADAM) {
            if (rough) adam<true, true>(step, count, gradient, weight, states[0], states[1]);
            else adam<true, false>(step, count, gradient, weight, states[0], states[1]);
        }
        if (step.rule == ADAGRAD) adagrad(step, count, gradient, weight, states[0]);
        if (step.rule == LION) lion(step, count, gradient, weight, states[0]);
        if (step.rule == ADAM_SAGE) adam_sage(step, count, gradient, weight, states[0], states[1], states[2]);
        if (step.rule == SOPHIA) sophia(step, count, gradient, weight, states[0], states[1]);
        if (step.rule == CURVATURE) curvature(step, count, gradient, states[0]);
        if (step.rule == SGD) sgd(step, count, gradient, weight, states[0]);
#pragma GCC unroll 1
        for (int i = 0; i < STATES; ++i) narrow(step, i, at, count, buffers[i]);
        if (step.rule != CURVATURE) narrow_weight(step, at, count, weight);
        store(step, at, count, weight);
    }
}

void run_scalar(const Step& step, int64_t begin, int64_t end) { run(step, begin, end); }

#ifdef __x86_64__
WIDE void run_avx2(const Step& step, int64_t begin, int64_t end) { run(step, begin, end); }

WIDEST void run_avx512(const Step& step, int64_t begin, int64_t end) { run(step, begin, end); }
#endif

void run_range(const Step& step, int64_t begin, int64_t end) {
#ifdef __x86_64__
    if (step.isa == AVX512) return run_avx512(step, begin, end);
    if (step.isa == AVX2) return run_avx2(step, begin, end);
#endif
    run_scalar(step, begin, end);
}

}  // namespace

extern "C" {

// The hash of this file that the build was given: a library of another version is not used.
const char* zerorun_source() { return ZERORUN_SOURCE; }

// The widest instruction set that this processor and its operating system have.
int32_t zerorun_isa() {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return SCALAR;
}

int32_t zerorun_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

// Updates the tensors of one step in place. They may start anywhere; none may overlap another.
void zerorun_update(const Step* step) {
    const int64_t most = (step->numel + THREAD_NUMEL - 1) / THREAD_NUMEL;
    const int threads = int(std::max<int64_t>(1, std::min<int64_t>(step->threads, most)));
    const int64_t share = ((step->numel + threads - 1) / threads + BLOCK - 1) / BLOCK * BLOCK;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
    for (int thread = 0; thread < threads; ++thread)
        run_range(*step, std::min(step->numel, thread * share), std::min(step->numel, (thread + 1) * share));
}
}
