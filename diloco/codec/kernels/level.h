// The arithmetic, once: kernels.cpp includes this file for every level of instructions, each time in a namespace of its
// own and with another target.  Everything works on tiles that stay in the first cache, in loops that a compiler turns
// into vectors; where that is not enough there is a variant for AVX-512.  Formats and orders of operations are those of
// the Python modules; every sum, product and quotient rounds by itself unless it says fmaf.

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

// The largest bits without the sign: of finite values those of the largest magnitude, beyond INFINITE for any other.
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

template <int BITS, bool HELD>
static inline void encode_block(const float *x, int64_t block, float scale, uint8_t *codes, float *decoded) {
    const float divisor = scale > 0 ? scale : 1.0f;
    const float held = HELD ? floorf(FP32_MAX / divisor) : 0.0f;
    alignas(64) int32_t whole[BLOCK_LARGEST];
    for (int64_t i = 0; i < block; i++) {
        float quotient = x[i] / divisor;
        if (HELD) {
            quotient = quotient + ROUNDER - ROUNDER;
            quotient = quotient > held ? held : quotient < -held ? -held : quotient;
        }
        whole[i] = (int32_t)as_bits(quotient + ROUNDER) - ROUNDER_BITS;
    }
    if (decoded)
        for (int64_t i = 0; i < block; i++) decoded[i] = (float)whole[i] * scale;
    if (BITS == 8) {
        for (int64_t i = 0; i < block; i++) codes[i] = (uint8_t)whole[i];
        return;
    }
    for (int64_t i = 0; i < block / 2; i++)
        codes[i] = (uint8_t)((whole[2 * i] + 8) | (whole[2 * i + 1] + 8) << 4);
}

template <int BITS>
static inline float largest_code() { return BITS == 8 ? 127.0f : 7.0f; }

#ifdef AVX512
#include "avx512.h"
#endif

// Encodes whole blocks; a block's scale is 0 only where all its values are.
template <int BITS, int FIXED>
static int encode_blocks(const float *x, int64_t blocks, int64_t size, uint8_t *scales, uint8_t *codes, float *decoded) {
    const int64_t block = FIXED ? FIXED : size;
#ifdef AVX512
    const Flow flow = {x, nullptr, nullptr, 0.0f, decoded};
    int status = DONE;
    if (encode_flow<BITS>(&flow, blocks, block, scales, codes, &status) == blocks) return status;
#endif
    alignas(64) uint32_t peaks[TILE / 2];
    alignas(64) float scale[TILE / 2];
    alignas(64) uint16_t words[TILE / 2];
    for (int64_t b = 0; b < blocks; b++) peaks[b] = largest_bits(x + b * block, block);
    uint32_t largest = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const float ratio = as_float(peaks[b]) / largest_code<BITS>();
        int32_t bits = (int32_t)((as_bits(ratio) + 0xFFFFu) & 0xFFFF0000u);
        bits = bits < SCALE_LEAST ? SCALE_LEAST : bits;
        bits = peaks[b] ? bits : 0;
        scale[b] = as_float((uint32_t)bits);
        words[b] = (uint16_t)((uint32_t)bits >> 16);
        largest = peaks[b] > largest ? peaks[b] : largest;
    }
    if (largest >= INFINITE) return NOT_FINITE;
    memcpy(scales, words, 2 * (size_t)blocks);
    const int64_t bytes = block * BITS / 8;
    if (as_float(largest) > FP32_MAX / 2) {
        for (int64_t b = 0; b < blocks; b++) {
            const bool held = scale[b] * largest_code<BITS>() > FP32_MAX;
            float *told = decoded ? decoded + b * block : nullptr;
            if (held) encode_block<BITS, true>(x + b * block, block, scale[b], codes + b * bytes, told);
            else encode_block<BITS, false>(x + b * block, block, scale[b], codes + b * bytes, told);
        }
        return DONE;
    }
    for (int64_t b = 0; b < blocks; b++)
        encode_block<BITS, false>(x + b * block, block, scale[b], codes + b * bytes, decoded ? decoded + b * block : nullptr);
    return DONE;
}

template <int BITS>
static inline uint32_t decode_block(const uint8_t *codes, int64_t block, float scale, float *out) {
    uint32_t bad = 0;
    if (BITS == 8) {
        for (int64_t i = 0; i < block; i++) {
            bad |= codes[i] == 0x80;
            out[i] = (float)(int8_t)codes[i] * scale;
        }
        return bad;
    }
    for (int64_t i = 0; i < block / 2; i++) {
        const int32_t low = codes[i] & 15, high = codes[i] >> 4;
        bad |= (low == 0) | (high == 0);
        out[2 * i] = (float)(low - 8) * scale;
        out[2 * i + 1] = (float)(high - 8) * scale;
    }
    return bad;
}

// Decodes whole blocks and refuses what encode_blocks never makes.
template <int BITS, int FIXED>
static int decode_blocks(const uint8_t *scales, const uint8_t *codes, int64_t blocks, int64_t size, float *out) {
    const int64_t block = FIXED ? FIXED : size;
    alignas(64) uint16_t words[TILE / 2];
    alignas(64) float scale[TILE / 2];
    memcpy(words, scales, 2 * (size_t)blocks);
    uint32_t illegal = 0, largest = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const uint32_t word = words[b];
        illegal |= (word != 0) & (word - 0x0080u >= 0x7F80u - 0x0080u);
        largest = word > largest ? word : largest;
        scale[b] = as_float(word << 16);
    }
    if (illegal) return BAD_SCALE;
    uint32_t bad = 0;
#ifdef AVX512
    if (FIXED) bad = decode_codes<BITS, FIXED>(codes, blocks, scale, out);
    else
#endif
    for (int64_t b = 0; b < blocks; b++)
        bad |= decode_block<BITS>(codes + b * (block * BITS / 8), block, scale[b], out + b * block);
    if (bad) return BAD_CODE;
    if (as_float(largest << 16) * largest_code<BITS>() > FP32_MAX && largest_bits(out, blocks * block) >= INFINITE)
        return BEYOND;
    return DONE;
}

template <int BITS>
static int encode_any(const float *x, int64_t blocks, int64_t size, uint8_t *scales, uint8_t *codes, float *decoded) {
    switch (size) {
    case 32: return encode_blocks<BITS, 32>(x, blocks, size, scales, codes, decoded);
    case 64: return encode_blocks<BITS, 64>(x, blocks, size, scales, codes, decoded);
    case 128: return encode_blocks<BITS, 128>(x, blocks, size, scales, codes, decoded);
    case 256: return encode_blocks<BITS, 256>(x, blocks, size, scales, codes, decoded);
    default: return encode_blocks<BITS, 0>(x, blocks, size, scales, codes, decoded);
    }
}

template <int BITS>
static int decode_any(const uint8_t *scales, const uint8_t *codes, int64_t blocks, int64_t size, float *out) {
    switch (size) {
    case 32: return decode_blocks<BITS, 32>(scales, codes, blocks, size, out);
    case 64: return decode_blocks<BITS, 64>(scales, codes, blocks, size, out);
    case 128: return decode_blocks<BITS, 128>(scales, codes, blocks, size, out);
    case 256: return decode_blocks<BITS, 256>(scales, codes, blocks, size, out);
    default: return decode_blocks<BITS, 0>(scales, codes, blocks, size, out);
    }
}

// ---------------------------------------------------------------------------------------------- tiles of any format

// Encodes the `count` values of a tile that stand at `start`.  The tile has room for whole blocks: the last is filled up.
template <int BITS>
static int encode_block_tile(const Format *format, float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    const int64_t block = format->block, blocks = (count + block - 1) / block, whole = blocks * block;
    uint8_t *scales = payload + start / block * 2;
    uint8_t *codes = payload + (format->numel + block - 1) / block * 2 + start * BITS / 8;
    if (whole == count) return encode_any<BITS>(x, blocks, block, scales, codes, decoded);
    alignas(64) uint8_t room[TILE];
    for (int64_t i = count; i < whole; i++) x[i] = 0.0f;
    alignas(64) float told[TILE];
    const int status = encode_any<BITS>(x, blocks, block, scales, room, decoded ? told : nullptr);
    memcpy(codes, room, (size_t)((count * BITS + 7) / 8));
    if (decoded) memcpy(decoded, told, 4 * (size_t)count);
    return status;
}

template <int BITS>
static int decode_block_tile(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    const int64_t block = format->block, blocks = (count + block - 1) / block, whole = blocks * block;
    const uint8_t *scales = payload + start / block * 2;
    const uint8_t *codes = payload + (format->numel + block - 1) / block * 2 + start * BITS / 8;
    if (whole == count) return decode_any<BITS>(scales, codes, blocks, block, out);
    alignas(64) uint8_t room[TILE];
    alignas(64) float values[TILE];
    const int64_t bytes = (count * BITS + 7) / 8;
    memset(room, BITS == 8 ? 0 : 0x88, (size_t)(whole * BITS / 8));
    memcpy(room, codes, (size_t)bytes);
    if (BITS == 4 && count % 2 && room[bytes - 1] >> 4 != 8) return BEHIND;
    const int status = decode_any<BITS>(scales, room, blocks, block, values);
    memcpy(out, values, 4 * (size_t)count);
    return status;
}

static int encode_cast(const Format *format, const float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    if (largest_bits(x, count) >= INFINITE) return NOT_FINITE;
    if (format->kind == FP32) {
        memcpy(payload + 4 * start, x, 4 * (size_t)count);
        if (decoded && decoded != x) memcpy(decoded, x, 4 * (size_t)count);
        return DONE;
    }
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
    if (format->kind == FP32) {
        memcpy(out, payload + 4 * start, 4 * (size_t)count);
    } else {
        alignas(64) uint16_t codes[TILE];
        memcpy(codes, payload + 2 * start, 2 * (size_t)count);
        for (int64_t i = 0; i < count; i++) out[i] = as_float((uint32_t)codes[i] << 16);
    }
    return largest_bits(out, count) >= INFINITE ? NOT_FINITE : DONE;
}

static int encode_tile(const Format *format, float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    switch (format->kind) {
    case INT4: return encode_block_tile<4>(format, x, start, count, payload, decoded);
    case INT8: return encode_block_tile<8>(format, x, start, count, payload, decoded);
    default: return encode_cast(format, x, start, count, payload, decoded);
    }
}

static int decode_tile(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    switch (format->kind) {
    case INT4: return decode_block_tile<4>(format, payload, start, count, out);
    case INT8: return decode_block_tile<8>(format, payload, start, count, out);
    default: return decode_cast(format, payload, start, count, out);
    }
}

// What merge.py and contract.py call adding and moving towards: two and three roundings.
static inline void add(float *out, const float *held, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = held[i] + x[i];
}

static inline void move_towards(float *out, const float *held, const float *x, float share, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = held[i] - (held[i] - x[i]) * share;
}

// sums.py: lanes, rows, halves.  `total` goes on from block to block.
static double sum_products(const float *a, const float *b, int64_t count, double total) {
    for (int64_t start = 0; start < count; start += SUM_BLOCK) {
        alignas(64) double lanes[SUM_LANES] = {};
        const int64_t size = count - start < SUM_BLOCK ? count - start : SUM_BLOCK, rows = size / SUM_LANES;
        const float *x = a + start, *y = b + start;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t lane = 0; lane < SUM_LANES; lane++)
                lanes[lane] += (double)x[row * SUM_LANES + lane] * (double)y[row * SUM_LANES + lane];
        for (int64_t i = rows * SUM_LANES; i < size; i++) lanes[i - rows * SUM_LANES] += (double)x[i] * (double)y[i];
        for (int64_t width = SUM_LANES / 2; width > 0; width /= 2)
            for (int64_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
        total += lanes[0];
    }
    return total;
}

// ---------------------------------------------------------------------------------------------- what Python calls

#ifdef AVX512
// As much as can flow from the terms to the payload without a stop in between; how many values that are.
static int64_t encode_whole_blocks(const Encode *job, int *status) {
    const int64_t block = job->format.block, blocks = job->count / block;
    if (job->less_count > 1 || job->format.kind < INT8) return 0;
    const Flow flow = {job->values, job->less_count ? job->less[0] : nullptr, job->residual, job->beta, job->decoded};
    uint8_t *scales = job->payload + job->start / block * 2;
    uint8_t *codes = job->payload + (job->format.numel + block - 1) / block * 2;
    if (job->format.kind == INT8)
        return block * encode_flow<8>(&flow, blocks, block, scales, codes + job->start, status);
    return block * encode_flow<4>(&flow, blocks, block, scales, codes + job->start / 2, status);
}
#endif

static int encode(const Encode *job) {
    const int64_t step = tile_of(job->format.block);
    alignas(64) float x[TILE];
    int64_t begin = 0;
#ifdef AVX512
    int flowed = DONE;
    begin = encode_whole_blocks(job, &flowed);
    if (flowed != DONE) return flowed;
#endif
    for (int64_t at = begin; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        const float *a = job->values + at;
        if (job->less_count == 0) memcpy(x, a, 4 * (size_t)count);
        else {
            const float *b = job->less[0] + at;
            for (int64_t i = 0; i < count; i++) x[i] = a[i] - b[i];
        }
        for (int64_t k = 1; k < job->less_count; k++) {
            const float *b = job->less[k] + at;
            for (int64_t i = 0; i < count; i++) x[i] -= b[i];
        }
        if (job->residual) {
            const float *r = job->residual + at;
            for (int64_t i = 0; i < count; i++) x[i] = x[i] + r[i] * job->beta;
        }
        alignas(64) float room[TILE];
        float *told = job->decoded ? job->decoded + at : job->residual ? room : nullptr;
        const int status = encode_tile(&job->format, x, job->start + at, count, job->payload, told);
        if (status != DONE) return status;
        if (job->residual) {
            float *r = job->residual + at;
            for (int64_t i = 0; i < count; i++) r[i] = x[i] - told[i];
        }
    }
    return DONE;
}

static int decode(const Decode *job) {
    const int64_t step = tile_of(job->format.block);
    alignas(64) float x[TILE];
    for (int64_t at = 0; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        float *out = job->out + at;
        const float *held = job->held + at;
        const int status =
            decode_tile(&job->format, job->payload, job->start + at, count, job->fold == WRITE ? out : x);
        if (status != DONE) return status;
        if (job->fold == ADD) add(out, held, x, count);
        if (job->fold == TOWARDS) move_towards(out, held, x, job->share, count);
    }
    return DONE;
}

static int measure(Measure *job) {
    const int64_t step = job->tile;
    alignas(64) float room[TILE];
    uint32_t largest = 0;
    for (int64_t at = 0; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        float *x = job->out ? job->out + at : room;
        const int status = decode_tile(&job->format, job->payload, job->start + at, count, x);
        if (status != DONE) return status;
        const uint32_t bits = largest_bits(x, count);
        largest = bits > largest ? bits : largest;
        if (largest >= INFINITE) return NOT_FINITE;
        job->squares = sum_products(x, x, count, job->squares);
        if (job->against) {
            const float *m = job->against + at;
            job->products = sum_products(x, m, count, job->products);
            job->against_squares = sum_products(m, m, count, job->against_squares);
        }
    }
    job->largest = as_float(largest);
    return DONE;
}

// One tile of merge_mean.
static int mean_tile(const Outer *job, int64_t start, int64_t count, float *mean, int64_t *culprit) {
    alignas(64) float x[TILE], site[TILE];
    for (int64_t k = 0; k < job->updates_count; k++) {
        const Update *update = job->updates + k;
        *culprit = k;
        float *sum = update->place & IN_MEAN ? mean : site;
        const bool opens = update->place & OPENS_SITE;
        const int status = decode_tile(&update->format, update->payload, start, count, opens ? sum : x);
        if (status != DONE) return status;
        if (!opens) add(sum, sum, x, count);
        if (sum == site && update->place & ENDS_SITE) move_towards(mean, mean, site, update->share, count);
    }
    *culprit = -1;
    return DONE;
}

// One tile of outer_step: the additions with a factor are torch's, one rounding where torch has one.
template <bool FUSED>
static inline void step_tile(const Outer *job, int64_t at, int64_t count, const float *g, float *theta) {
    const float mu = job->momentum_factor, minus_lr = job->minus_lr;
    const float *before = job->theta + at;
    const auto plus = [](float a, float b, float factor) { return FUSED ? __builtin_fmaf(b, factor, a) : a + b * factor; };
    if (job->rule == WITHOUT_MOMENTUM) {
        for (int64_t i = 0; i < count; i++) theta[i] = plus(before[i], g[i], minus_lr);
        return;
    }
    float *m = job->momentum_after + at;
    if (job->momentum) {
        const float *held = job->momentum + at;
        for (int64_t i = 0; i < count; i++) m[i] = held[i] * mu + g[i];
    } else {
        memcpy(m, g, 4 * (size_t)count);
    }
    if (job->rule == HEAVY_BALL)
        for (int64_t i = 0; i < count; i++) theta[i] = plus(before[i], m[i], minus_lr);
    else
        for (int64_t i = 0; i < count; i++) theta[i] = plus(before[i], plus(g[i], m[i], mu), minus_lr);
}

static int outer(Outer *job) {
    const int64_t step = job->tile;
    alignas(64) float g[TILE], x[TILE];
    for (int64_t at = job->start; at < job->stop; at += step) {
        const int64_t count = job->stop - at < step ? job->stop - at : step;
        int status = mean_tile(job, at, count, g, &job->culprit);
        if (status != DONE) return status;
        job->squares = sum_products(g, g, count, job->squares);
        float *theta = job->theta_after + at, *published = job->published_after + at;
        if (job->fused) step_tile<true>(job, at, count, g, theta);
        else step_tile<false>(job, at, count, g, theta);
        if (largest_bits(theta, count) >= INFINITE) return THETA_NOT_FINITE;
        const float *before = job->published + at;
        if (job->lossless) memcpy(x, theta, 4 * (size_t)count);
        else
            for (int64_t i = 0; i < count; i++) x[i] = theta[i] - before[i];
        status = encode_tile(&job->down, x, at, count, job->payload, published);
        if (status != DONE) return status;
        if (job->lossless) continue;
        for (int64_t i = 0; i < count; i++) published[i] = published[i] + before[i];
        if (largest_bits(published, count) >= INFINITE) return PUBLISHED_NOT_FINITE;
    }
    return DONE;
}

static void rebase(const Rebase *job) {
    alignas(64) float unsent[TILE];
    for (int64_t at = 0; at < job->count; at += TILE) {
        const int64_t count = job->count - at < TILE ? job->count - at : TILE;
        const float *base = job->old_base + at, *local = job->local + at, *fresh = job->new_base + at;
        for (int64_t i = 0; i < count; i++) unsent[i] = base[i] - local[i];
        for (int64_t k = 0; k < job->merged_count; k++) {
            const float *merged = job->merged[k] + at;
            for (int64_t i = 0; i < count; i++) unsent[i] -= merged[i];
        }
        float *out = job->out + at;
        for (int64_t i = 0; i < count; i++) out[i] = fresh[i] - unsent[i];
    }
}
