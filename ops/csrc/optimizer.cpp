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
// where memory is slower, and a quarter more with AVX2.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

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

INLINE void dequantise(const State& state, int64_t at, int64_t count, float* __restrict to) {
    const uint8_t* codes = static_cast<const uint8_t*>(state.data) + at;
    const float* map = state.map;
    for (int64_t low = 0; low < count; low += SCALED) {
        const float scale = state.scale[(at + low) / SCALED];
        const int64_t high = std::min(low + SCALED, count);
        for (int64_t i = low; i < high; ++i) to[i] = map[codes[i]] * scale;
    }
}

INLINE void quantise(const State& state, int64_t at, int64_t count, const float* __restrict from) {
    uint8_t* __restrict codes = static_cast<uint8_t*>(state.data) + at;
    const bool with_sign = state.type == SIGNED8;
    const uint32_t* words = state.words;
    const int32_t first = state.first_cell, last = state.cells - 1;
    for (int64_t low = 0; low < count; low += SCALED) {
        const int64_t size = std::min(SCALED, count - low);
        const float* __restrict values = from + low;
        uint32_t top = 0;
        for (int64_t i = 0; i < size; ++i) top = std::max(top, bits_of(values[i]) & 0x7fffffff);
        const bool finite = top < 0x7f800000;
        const float divisor = finite && top ? float_of(top) : 1.0f;
        const uint32_t kept = finite ? 0xffffffff : 0;
        state.scale[(at + low) / SCALED] = float_of(finite ? top : 0x7fc00000);
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
            codes[low + i] = uint8_t(with_sign ? code : place);
        }
    }
}

// -- noise, and weights in bf16: see ops/rounding.py ---------------------------------------------------------------------

// The noise of elements `at .. at + count` of a tensor: 0 is the weight, from 1 on states.
INLINE void draw(const Step& step, int tensor, int64_t at, int64_t count, uint32_t* __restrict noise) {
    const uint32_t first = step.keys[tensor][0], second = step.keys[tensor][1];
    for (int64_t done = 0, size; done < count; done += size) {
        const int64_t here = step.start + at + done, row = step.row ? here / step.row : 0;
        const int64_t place = step.row ? row * step.whole_row + here - row * step.row + step.column : here;
        size = std::min(count - done, (int64_t(1) << 32) - (place & 0xffffffff));  // the upper half stays the same
        if (step.row) size = std::min(size, (row + 1) * step.row - here);
        const uint32_t low = uint32_t(place), other = uint32_t(place >> 32) * 0x9e3779b9u ^ first;
        uint32_t* __restrict to = noise + done;
        for (int32_t i = 0; i < int32_t(size); ++i) {
            uint32_t mixed = (low + uint32_t(i)) ^ other;
            mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
            mixed = ((mixed ^ mixed >> 15) + second) * 0x846ca68bu;
            to[i] = (mixed ^ mixed >> 16) & 0xffff;
        }
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
        alignas(64) uint32_t noise[BLOCK];
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
INLINE float* widen(const State& state, int64_t at, int64_t count, float* __restrict buffer) {
    if (state.type == NONE) return nullptr;
    if (state.type == FP32) return static_cast<float*>(state.data) + at;
    if (state.type == BF16) {
        const uint16_t* from = static_cast<const uint16_t*>(state.data) + at;
        for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(from[i]);
    } else {
        dequantise(state, at, count, buffer);
    }
    return buffer;
}

INLINE void narrow(const Step& step, int number, int64_t at, int64_t count, const float* __restrict buffer) {
    const State& state = step.states[number];
    if (state.type == BF16 && step.by_chance) {
        uint16_t* __restrict to = static_cast<uint16_t*>(state.data) + at;
        alignas(64) uint32_t noise[BLOCK];
        draw(step, 1 + number, at, count, noise);
        for (int64_t i = 0; i < count; ++i) to[i] = by_chance(buffer[i], noise[i]);
    } else if (state.type == BF16) {
        uint16_t* __restrict to = static_cast<uint16_t*>(state.data) + at;
        for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(buffer[i]);
    } else if (state.type != FP32 && state.type != NONE) {
        quantise(state, at, count, buffer);
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
template <bool coupled>
INLINE void adam(const Step& s, int64_t count, const float* __restrict gradient, float* __restrict weight,
                 float* __restrict first, float* __restrict second) {
    const double keep = whole(s.keep, s.keep_low), decay = whole(s.decay, s.decay_low), rate = whole(s.rate, s.rate_low);
    const float eps = s.eps, blend = s.blend, second_keep = s.second_keep, second_blend = s.second_blend;
    const bool from_first = blend > 0;
    for (int64_t i = 0; i < count; ++i) {
        const double decayed = gradient[i] + decay * weight[i];
        const float g = coupled ? float(decayed) : gradient[i];
        const float m = (from_first ? first[i] : g) + blend * (g - first[i]);
        // A square doubles the error of its root, so g is not rounded before.
        const float v = coupled ? float(double(second_keep) * second[i] + second_blend * (decayed * decayed))
                                : second_keep * second[i] + (second_blend * g) * g;
        const float quotient = m / (std::sqrt(v) + eps);
        first[i] = m;
        second[i] = v;
        weight[i] = float(keep * weight[i] - rate * quotient);
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

// -- a range of elements, for each instruction set ---------------------------------------------------------------------

INLINE void run(const Step& step, int64_t begin, int64_t end) {
    alignas(64) float gradient[BLOCK], wide[BLOCK], buffers[STATES][BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t count = std::min(BLOCK, end - at);
        float *weight = widen_weight(step, at, count, wide), *states[STATES];
        load(step, at, count, gradient);
#pragma GCC unroll 1
        for (int i = 0; i < STATES; ++i) states[i] = widen(step.states[i], at, count, buffers[i]);
        if (step.rule == ADAM && step.decay == 0) adam<false>(step, count, gradient, weight, states[0], states[1]);
        if (step.rule == ADAM && step.decay != 0) adam<true>(step, count, gradient, weight, states[0], states[1]);
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
__attribute__((target("avx2"))) void run_avx2(const Step& step, int64_t begin, int64_t end) { run(step, begin, end); }

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
void run_avx512(const Step& step, int64_t begin, int64_t end) { run(step, begin, end); }
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
    if (__builtin_cpu_supports("avx2")) return AVX2;
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
