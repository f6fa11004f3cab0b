// The arithmetic, written once: kernels.cpp includes this file for every instruction level, each time in another namespace
// and with another target.  All code works on tiles that stay in the first-level cache, in loops that a compiler
// vectorizes, on x86 and AArch64 alike; where that is too slow there is a variant for AVX-512.  The Python modules define
// the formats and the order of operations; every sum, product and quotient is rounded unless the code says fmaf.

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

// Returns the largest bits without the sign: those of the largest magnitude, or at least INFINITE if a value is not finite.
static inline uint32_t largest_bits(const float *x, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t magnitude = (int32_t)(as_bits(x[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

// ---------------------------------------------------------------------------------------------- blocks: int8, int4

// Adding 1.5 * 2**23 rounds a quotient to a whole number, ties to even, and leaves it in the low bits.
static constexpr float ROUNDER = 12582912.0f;
static constexpr int32_t ROUNDER_BITS = 0x4B400000;

template <int BITS>
static inline float largest_code() { return BITS == 8 ? 127.0f : 7.0f; }

// Computes the scales of blocks with these peaks; returns the largest peak.  A scale is 0 only where all values are 0.
template <int BITS>
static inline uint32_t scales_of(const uint32_t *peaks, int64_t blocks, float *scales, uint16_t *words) {
    uint32_t largest = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const float ratio = as_float(peaks[b]) / largest_code<BITS>();
        int32_t bits = (int32_t)((as_bits(ratio) + 0xFFFFu) & 0xFFFF0000u);
        bits = bits < SCALE_LEAST ? SCALE_LEAST : bits;
        bits = peaks[b] ? bits : 0;
        scales[b] = as_float((uint32_t)bits);
        words[b] = (uint16_t)((uint32_t)bits >> 16);
        largest = peaks[b] > largest ? peaks[b] : largest;
    }
    return largest;
}

// Reads scales; returns false if scales_of never makes one of them.  `largest` receives the upper 16 bits of the largest.
static inline bool read_scales(const uint8_t *bytes, int64_t blocks, float *scales, uint32_t *largest) {
    alignas(64) uint16_t words[TILE / 2];
    memcpy(words, bytes, 2 * (size_t)blocks);
    uint32_t illegal = 0, most = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const uint32_t word = words[b];
        illegal |= (word != 0) & (word - 0x0080u >= 0x7F80u - 0x0080u);
        most = word > most ? word : most;
        scales[b] = as_float(word << 16);
    }
    *largest = most;
    return !illegal;
}

static inline void ask_for(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(x + i);
}

// The inputs and outputs of encoding; an absent one is null.
struct Flow {
    const float *a, *b;    // a - b
    float *residual;       // added, times beta; then receives the rounding error
    float beta;
    float *decoded;
};

// Where decoded values go, and the values that they are folded with.
struct Into {
    float *out;
    const float *held;
    float share;
};

#include "flow.h"

// Encodes whole blocks.  In those that encode_flow leaves, codes may have to be limited so that decoded values stay finite.
template <int BITS>
static int encode_blocks(const float *x, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, float *decoded) {
    const Flow flow = {x, nullptr, nullptr, 0.0f, decoded};
    int status = DONE;
    if (encode_flow<BITS>(&flow, blocks, block, scales, codes, &status) == blocks) return status;
    alignas(64) uint32_t peaks[TILE / 2];
    alignas(64) float scale[TILE / 2];
    alignas(64) uint16_t words[TILE / 2];
    for (int64_t b = 0; b < blocks; b++) peaks[b] = largest_bits(x + b * block, block);
    if (scales_of<BITS>(peaks, blocks, scale, words) >= INFINITE) return NOT_FINITE;
    memcpy(scales, words, 2 * (size_t)blocks);
    for (int64_t b = 0; b < blocks; b++) {
        const float divisor = scale[b] > 0 ? scale[b] : 1.0f, held = floorf(FP32_MAX / divisor);
        alignas(64) int32_t whole[BLOCK_LARGEST];
        for (int64_t i = 0; i < block; i++) {
            float quotient = x[b * block + i] / divisor + ROUNDER - ROUNDER;
            quotient = quotient > held ? held : quotient < -held ? -held : quotient;
            whole[i] = (int32_t)as_bits(quotient + ROUNDER) - ROUNDER_BITS;
            if (decoded) decoded[b * block + i] = (float)whole[i] * scale[b];
        }
        if (BITS == 8)
            for (int64_t i = 0; i < block; i++) *codes++ = (uint8_t)whole[i];
        else
            for (int64_t i = 0; i < block; i += 2) *codes++ = (uint8_t)((whole[i] + 8) | (whole[i + 1] + 8) << 4);
    }
    return DONE;
}

// Decodes whole blocks and refuses what encode_blocks never makes.
template <int BITS>
static int decode_blocks(const uint8_t *scales, const uint8_t *codes, int64_t blocks, int64_t block, float *out) {
    const Into into = {out, out, 0.0f};
    if (decode_flow<BITS>(scales, codes, blocks, block, &into, WRITE)) return DONE;
    alignas(64) float scale[TILE / 2];
    uint32_t largest = 0;
    if (!read_scales(scales, blocks, scale, &largest)) return BAD_SCALE;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = b * block; i < (b + 1) * block; i++) {
            const int32_t code = BITS == 8 ? (int8_t)codes[i] : (codes[i / 2] >> 4 * (i % 2) & 15) - 8;
            if (code == (BITS == 8 ? -128 : -8)) return BAD_CODE;
            out[i] = (float)code * scale[b];
        }
    return largest_bits(out, blocks * block) >= INFINITE ? BEYOND : DONE;
}

// ---------------------------------------------------------------------------------------------- tiles of any format

// Encodes the `count` values of a tile that begin at `start`.  The tile has room for whole blocks; zeros fill the last one.
template <int BITS>
static int encode_block_tile(const Format *format, float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    const int64_t block = format->block, blocks = (count + block - 1) / block, whole = blocks * block;
    uint8_t *scales = payload + start / block * 2;
    uint8_t *codes = payload + (format->numel + block - 1) / block * 2 + start * BITS / 8;
    if (whole == count) return encode_blocks<BITS>(x, blocks, block, scales, codes, decoded);
    alignas(64) uint8_t room[TILE];
    for (int64_t i = count; i < whole; i++) x[i] = 0.0f;
    alignas(64) float told[TILE];
    const int status = encode_blocks<BITS>(x, blocks, block, scales, room, decoded ? told : nullptr);
    memcpy(codes, room, (size_t)((count * BITS + 7) / 8));
    if (decoded) memcpy(decoded, told, 4 * (size_t)count);
    return status;
}

template <int BITS>
static int decode_block_tile(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    const int64_t block = format->block, blocks = (count + block - 1) / block, whole = blocks * block;
    const uint8_t *scales = payload + start / block * 2;
    const uint8_t *codes = payload + (format->numel + block - 1) / block * 2 + start * BITS / 8;
    if (whole == count) return decode_blocks<BITS>(scales, codes, blocks, block, out);
    alignas(64) uint8_t room[TILE];
    alignas(64) float values[TILE];
    const int64_t bytes = (count * BITS + 7) / 8;
    memset(room, BITS == 8 ? 0 : 0x88, (size_t)(whole * BITS / 8));
    memcpy(room, codes, (size_t)bytes);
    if (BITS == 4 && count % 2 && room[bytes - 1] >> 4 != 8) return BEHIND;
    const int status = decode_blocks<BITS>(scales, room, blocks, block, values);
    memcpy(out, values, 4 * (size_t)count);
    return status;
}

// Copies values and returns their largest bits.  A loop, because memcpy is slow for so few bytes at unaligned addresses.
static inline uint32_t copy_values(const uint8_t *from, int64_t count, uint8_t *to) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + 4 * i, 4);
        memcpy(to + 4 * i, &bits, 4);
        const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

static int encode_cast(const Format *format, const float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    if (format->kind == FP32) {
        const uint32_t largest = copy_values((const uint8_t *)x, count, payload + 4 * start);
        if (decoded && decoded != x) memcpy(decoded, x, 4 * (size_t)count);
        return largest >= INFINITE ? NOT_FINITE : DONE;
    }
    if (largest_bits(x, count) >= INFINITE) return NOT_FINITE;
    alignas(64) uint16_t codes[TILE];
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = as_bits(x[i]), sign = bits & 0x80000000u;
        uint32_t rounded = ((bits & 0x7FFFFFFFu) + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        rounded = rounded > 0x7F7Fu ? 0x7F7Fu : rounded;
        codes[i] = (uint16_t)(rounded | sign >> 16);
    }
    memcpy(payload + 2 * start, codes, 2 * (size_t)count);
    if (decoded)
        for (int64_t i = 0; i < count; i++) decoded[i] = as_float((uint32_t)codes[i] << 16);
    return DONE;
}

static int decode_cast(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    if (format->kind == FP32)
        return copy_values(payload + 4 * start, count, (uint8_t *)out) >= INFINITE ? NOT_FINITE : DONE;
    alignas(64) uint16_t codes[TILE];
    memcpy(codes, payload + 2 * start, 2 * (size_t)count);
    for (int64_t i = 0; i < count; i++) out[i] = as_float((uint32_t)codes[i] << 16);
    return largest_bits(out, count) >= INFINITE ? NOT_FINITE : DONE;
}

#include "units.h"
#include "grids.h"
#include "topk.h"

static int encode_tile(const Format *format, float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    switch (format->kind) {
    case INT4: return encode_block_tile<4>(format, x, start, count, payload, decoded);
    case INT8: return encode_block_tile<8>(format, x, start, count, payload, decoded);
    case E3M0: return grid_tile<E3M0>(format, x, start, count, payload, decoded);
    case INT2: return grid_tile<INT2>(format, x, start, count, payload, decoded);
    case SIGN: return grid_tile<SIGN>(format, x, start, count, payload, decoded);
    case TOPK: return encode_topk(format, x, start, count, payload, decoded);
    default: return encode_cast(format, x, start, count, payload, decoded);
    }
}

static int decode_tile(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    switch (format->kind) {
    case INT4: return decode_block_tile<4>(format, payload, start, count, out);
    case INT8: return decode_block_tile<8>(format, payload, start, count, out);
    case E3M0: return grid_tile<E3M0>(format, nullptr, start, count, const_cast<uint8_t *>(payload), out);
    case INT2: return grid_tile<INT2>(format, nullptr, start, count, const_cast<uint8_t *>(payload), out);
    case SIGN: return grid_tile<SIGN>(format, nullptr, start, count, const_cast<uint8_t *>(payload), out);
    case TOPK: return decode_topk(format, payload, start, count, out);
    default: return decode_cast(format, payload, start, count, out);
    }
}

// `ADD` and `TOWARDS` of `Fold`, codec/kernel_library.py: out = held + x in one rounding, and held - share (held - x) in three.
static inline void add(float *out, const float *held, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = held[i] + x[i];
}

static inline void move_towards(float *out, const float *held, const float *x, float share, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = held[i] - (held[i] - x[i]) * share;
}

// Decodes one tile and folds it with `held`; `x` is scratch memory for a tile.
static int fold_tile(const Format *format, const uint8_t *payload, int64_t start, int64_t count, int fold, float share,
                     const float *held, float *out, float *x) {
    const int64_t block = format->block;
    if ((format->kind == INT8 || format->kind == INT4) && count % block == 0) {
        const Into into = {out, held, share};
        const uint8_t *scales = payload + start / block * 2;
        const uint8_t *codes = payload + (format->numel + block - 1) / block * 2;
        if (format->kind == INT8 ? decode_flow<8>(scales, codes + start, count / block, block, &into, fold)
                                 : decode_flow<4>(scales, codes + start / 2, count / block, block, &into, fold))
            return DONE;
    }
    const int status = decode_tile(format, payload, start, count, fold == WRITE ? out : x);
    if (status != DONE) return status;
    if (fold == ADD) add(out, held, x, count);
    if (fold == TOWARDS) move_towards(out, held, x, share, count);
    return DONE;
}

static inline void add_rows(double *lanes, const float *x, const float *y) {
    for (int64_t lane = 0; lane < SUM_LANES; lane++) lanes[lane] += (double)x[lane] * (double)y[lane];
}

static inline double halves(double *lanes) {
    for (int64_t width = SUM_LANES / 2; width > 0; width /= 2)
        for (int64_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

#ifdef AVX512
static inline __m512d wide(const float *x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }

// Two blocks of 1024, a row of each at a time.  The product of two fp32 is exact in fp64, so a fused multiply-add rounds
// as the plain sum does.
static inline void add_two_blocks(const float *a, const float *b, double *lanes, double *others) {
    __m512d low = _mm512_setzero_pd(), high = low, other_low = low, other_high = low;
    for (int64_t i = 0; i < SUM_BLOCK; i += SUM_LANES) {
        low = _mm512_fmadd_pd(wide(a + i), wide(b + i), low);
        high = _mm512_fmadd_pd(wide(a + i + 8), wide(b + i + 8), high);
        other_low = _mm512_fmadd_pd(wide(a + i + SUM_BLOCK), wide(b + i + SUM_BLOCK), other_low);
        other_high = _mm512_fmadd_pd(wide(a + i + SUM_BLOCK + 8), wide(b + i + SUM_BLOCK + 8), other_high);
    }
    _mm512_store_pd(lanes, low);
    _mm512_store_pd(lanes + 8, high);
    _mm512_store_pd(others, other_low);
    _mm512_store_pd(others + 8, other_high);
}

// The same for x x, x m and m m; the lanes of the first block come before those of the second.
static inline void add_two_blocks_of_both(const float *x, const float *m, double lanes[3][2 * SUM_LANES]) {
    __m512d sums[3][4] = {};
    for (int64_t i = 0; i < SUM_BLOCK; i += SUM_LANES) {
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + (k & 1) * 8 + (k >> 1) * SUM_BLOCK;  // Prefetches this position of the next two blocks.
            if (k % 2 == 0) ask_for(m + at + 2 * SUM_BLOCK, 16);
            const __m512d a = wide(x + at), b = wide(m + at);
            sums[0][k] = _mm512_fmadd_pd(a, a, sums[0][k]);
            sums[1][k] = _mm512_fmadd_pd(a, b, sums[1][k]);
            sums[2][k] = _mm512_fmadd_pd(b, b, sums[2][k]);
        }
    }
    for (int k = 0; k < 3; k++)
        for (int part = 0; part < 4; part++) _mm512_store_pd(lanes[k] + 8 * part, sums[k][part]);
}
#else
static inline void add_two_blocks(const float *a, const float *b, double *lanes, double *others) {
    for (int64_t i = 0; i < SUM_BLOCK; i += SUM_LANES) {
        add_rows(lanes, a + i, b + i);
        add_rows(others, a + i + SUM_BLOCK, b + i + SUM_BLOCK);
    }
}

static inline void add_two_blocks_of_both(const float *x, const float *m, double lanes[3][2 * SUM_LANES]) {
    for (int64_t part = 0; part < 2 * SUM_LANES; part += 4) {
        double squares[4] = {}, products[4] = {}, against[4] = {};
        const float *a = x + part / SUM_LANES * SUM_BLOCK + part % SUM_LANES, *b = m + (a - x);
        for (int64_t i = 0; i < SUM_BLOCK; i += SUM_LANES)
            for (int lane = 0; lane < 4; lane++) {
                const double one = a[i + lane], other = b[i + lane];
                squares[lane] += one * one;
                products[lane] += one * other;
                against[lane] += other * other;
            }
        memcpy(lanes[0] + part, squares, sizeof squares);
        memcpy(lanes[1] + part, products, sizeof products);
        memcpy(lanes[2] + part, against, sizeof against);
    }
}
#endif

// The order of merging.py: rows into lanes, then halves; each block's sum is added to `total` in order.  Two blocks at a
// time, because the additions of one block depend on each other.
static double sum_products(const float *a, const float *b, int64_t count, double total) {
    int64_t start = 0;
    for (; start + 2 * SUM_BLOCK <= count; start += 2 * SUM_BLOCK) {
        alignas(64) double lanes[SUM_LANES] = {}, others[SUM_LANES] = {};
        add_two_blocks(a + start, b + start, lanes, others);
        total += halves(lanes);
        total += halves(others);
    }
    for (; start < count; start += SUM_BLOCK) {
        alignas(64) double lanes[SUM_LANES] = {};
        const int64_t stop = count - start < SUM_BLOCK ? count : start + SUM_BLOCK;
        int64_t i = start;
        for (; i + SUM_LANES <= stop; i += SUM_LANES) add_rows(lanes, a + i, b + i);
        for (int64_t lane = 0; i + lane < stop; lane++) lanes[lane] += (double)a[i + lane] * (double)b[i + lane];
        total += halves(lanes);
    }
    return total;
}

// Writes values that are not read again soon, past the caches where the level allows: their lines are then not read first.
static inline void write_out(float *out, const float *values, int64_t count) {
    int64_t i = 0;
#if defined(AVX512)
    if (((uintptr_t)out & 63) == 0)
        for (; i + 16 <= count; i += 16) _mm512_stream_ps(out + i, _mm512_loadu_ps(values + i));
#elif defined(X86_LEVELS)
    if (((uintptr_t)out & 15) == 0)
        for (; i + 4 <= count; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(values + i));
#endif
    for (; i < count; i++) out[i] = values[i];
}

static inline void written_out() {
#ifdef X86_LEVELS
    _mm_sfence();
#endif
}

#include "digest.h"
#include "passes.h"
#include "site.h"
