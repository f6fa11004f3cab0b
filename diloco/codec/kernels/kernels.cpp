// The codecs' passes over memory, behind a plain C interface that diloco/codec/base.py calls.
//
// The Python modules define what is computed and have plain versions of all of it; the tests compare the bits.
// The library knows nothing of torch or Python, keeps no state and starts no threads: a call works only on the caller's
// memory.  One source is compiled for several instruction levels, and the caller chooses the level.
// Compile with -ffp-contract=off: a multiplication and an addition are two roundings unless the source says fmaf.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86_LEVELS 1
#define RUNS_ANYWHERE __attribute__((target("no-sse3,no-bmi,no-bmi2,no-lzcnt,no-popcnt")))
#include <immintrin.h>
#else
#define RUNS_ANYWHERE
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int64_t TILE = 4096;  // values: the most in a tile, so also the largest block
constexpr int64_t TILE_USUAL = 2048;
constexpr int64_t BLOCK_LARGEST = TILE;
constexpr int64_t SUM_BLOCK = 1024, SUM_LANES = 16;
constexpr float FP32_MAX = 3.40282346638528859811704183484516925e+38f;
constexpr uint32_t INFINITE = 0x7F800000u;
constexpr int32_t SCALE_LEAST = 0x00800000;

// Whether decoding prefetches: it is up to 1.5 times as fast with that on Sapphire Rapids, folding int4 1.2 times on Zen 3,
// and a quarter slower on Zen 4.
#ifdef X86_LEVELS
RUNS_ANYWHERE bool on_zen4_or_later() {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
}
const bool DECODES_AHEAD = !on_zen4_or_later();
#else
constexpr bool DECODES_AHEAD = false;
#endif

// The same numbers as in kernel_library.py.
enum Kind : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, TOPK = 4, E3M0 = 5, INT2 = 6, SIGN = 7 };
enum Status : int {
    DONE = 0,
    NOT_FINITE = 1,
    BAD_SCALE = 2,
    BAD_CODE = 3,
    BEHIND = 4,
    BEYOND = 5,
    THETA_NOT_FINITE = 6,
    PUBLISHED_NOT_FINITE = 7,
    BAD_INDEX = 8,
    BAD_LEVELS = 9,
    BAD_SIGN = 10,
    NOT_FIRST = 11,
    BEHIND_INDEX = 12,
    BAD_TOP = 13,
    SIGN_ALONE = 14,
    OTHER_TOP = 15,
    TOO_SMALL = 16,
    SIGN_OF_ZERO = 17,
};
enum Fold : int32_t { WRITE = 0, ADD = 1, TOWARDS = 2 };
enum Place : int32_t { IN_MEAN = 1, OPENS_SITE = 2, ENDS_SITE = 4 };
enum Rule : int32_t { WITHOUT_MOMENTUM = 0, HEAVY_BALL = 1, NESTEROV = 2, PART = 3 };

// Constants of XXH3: its default secret, the initial lanes, and primes.
constexpr int64_t STRIPE_BYTES = 64, BLOCK_BYTES = 1024, SECRET_BYTES = 192;
constexpr uint64_t PRIME_32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t PRIME_64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};
constexpr uint64_t FIRST_LANES[] = {PRIME_32[2], PRIME_64[0], PRIME_64[1], PRIME_64[2],
                                    PRIME_64[3], PRIME_32[1], PRIME_64[4], PRIME_32[0]};
constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

}  // namespace

// A payload's format: `numel` values in blocks of `block` (1 for casts); top-k keeps `kept` values of each.
struct Format {
    int32_t kind, block;
    int64_t numel, kept;
};

// A digest of `total` bytes, `done` of which are hashed; `high` and `low` are the result once all are.
struct Digest {
    int64_t total, done;
    uint64_t lanes[8], high, low;
    uint8_t tail[64];
};

// values - less[0] - less[1] ... + beta residual -> payload; residual <- the rounding error.
struct Encode {
    Format format;
    int64_t start, count;
    const float *values;
    const float *const *less;
    int64_t less_count;
    float *residual;
    uint8_t *payload;
    float *decoded;
    float beta;
};

// payload -> out, or folded with `held`, which may be `out`.
struct Decode {
    Format format;
    int64_t start, count;
    const uint8_t *payload;
    const float *held;
    float *out;
    int32_t fold;
    float share;
};

// Sums over the decoded values, which `out` and `digest` receive unless they are null.
struct Measure {
    Format format;
    int64_t start, count, tile;
    const uint8_t *payload;
    const float *against;
    float *out;
    double squares, products, against_squares;
    Digest *digest;
    float largest;
};

struct Update {
    Format format;
    const uint8_t *payload;
    int32_t place;
    float share;
};

// One range of a version; `culprit` is the update that was refused, or -1.
struct Outer {
    int64_t start, stop, tile;
    const Update *updates;
    int64_t updates_count;
    const float *theta, *published, *momentum;
    float *theta_after, *published_after, *momentum_after;
    Format down;
    uint8_t *payload;
    int32_t lossless, rule, fused;
    float minus_lr, momentum_factor, momentum_by_g, theta_by_momentum;
    double squares;
    int64_t culprit;
};

// A fragment's values in place, piece after piece; `ends` are the numbers of values up to the end of each piece.
struct Pieces {
    float *const *values;
    const int64_t *ends;
    int64_t count;
};

// base - local - sent... -> payload, for values from `start` to `stop`; unless `digest` is null, also the digest and the
// sum of squares of the decoded values.
struct Seal {
    Format format;
    int64_t start, stop, tile;
    Pieces local;
    const float *base;
    const Update *sent;
    int64_t sent_count;
    uint8_t *payload;
    Digest *digest;
    double squares;
};

// held + parts... -> out, or only the last part where each is `whole`; digest of the result.
struct Follow {
    int64_t start, stop, tile;
    const float *held;
    const Update *parts;
    int64_t parts_count;
    float *out;
    Digest *digest;
    int32_t whole;
};

// new_base - (old_base - local - merged...) -> local
struct Take {
    int64_t start, stop, tile;
    Pieces local;
    const float *old_base, *new_base;
    const Update *merged;
    int64_t merged_count;
};

namespace {

int64_t tile_of(int64_t block) { return block >= TILE_USUAL ? block : TILE_USUAL / block * block; }

namespace baseline {
#include "level.h"
}

#ifdef X86_LEVELS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")
#endif
namespace avx2 {
#include "level.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define AVX512 1
namespace avx512 {
#include "level.h"
}
#undef AVX512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

}  // namespace

#ifdef X86_LEVELS
#define AT_LEVEL(level, call) ((level) == 2 ? avx512::call : (level) == 1 ? avx2::call : baseline::call)
#else
#define AT_LEVEL(level, call) ((void)(level), baseline::call)
#endif

// Raise this number with every change of a structure or its meaning: kernel_library.py uses only libraries with its own.
EXPORT int32_t diloco_interface() { return 5; }

// Returns the best level that this processor has; all below it work too.  -1: the library was compiled (with -march=native,
// say) for instructions that this processor lacks.  This function itself runs on any x86-64.
EXPORT RUNS_ANYWHERE int32_t diloco_level() {
#ifdef X86_LEVELS
    __builtin_cpu_init();
#define NEEDS(name) if (!__builtin_cpu_supports(name)) return -1
#ifdef __SSE4_2__
    NEEDS("sse4.2");
#endif
#ifdef __POPCNT__
    NEEDS("popcnt");
#endif
#ifdef __AVX2__
    NEEDS("avx2");
#endif
#ifdef __FMA__
    NEEDS("fma");
#endif
#ifdef __BMI2__
    NEEDS("bmi2");
#endif
#ifdef __FMA4__
    NEEDS("fma4");
#endif
#ifdef __AVX512F__
    NEEDS("avx512f");
#endif
#ifdef __AVX512VL__
    NEEDS("avx512vl");
#endif
#ifdef __AVX512VNNI__
    NEEDS("avx512vnni");
#endif
#undef NEEDS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 1;
#endif
    return 0;
}

EXPORT int32_t diloco_encode(int32_t level, const Encode *job) { return AT_LEVEL(level, encode(job)); }

EXPORT int32_t diloco_decode(int32_t level, const Decode *job) { return AT_LEVEL(level, decode(job)); }

EXPORT int32_t diloco_measure(int32_t level, Measure *job) { return AT_LEVEL(level, measure(job)); }

EXPORT int32_t diloco_outer(int32_t level, Outer *job) { return AT_LEVEL(level, outer(job)); }

EXPORT int32_t diloco_seal(int32_t level, Seal *job) { return AT_LEVEL(level, seal(job)); }

EXPORT int32_t diloco_follow(int32_t level, Follow *job) { return AT_LEVEL(level, follow(job)); }

EXPORT int32_t diloco_take(int32_t level, const Take *job) { return AT_LEVEL(level, take(job)); }

EXPORT void diloco_digest(int32_t level, Digest *digest, const uint8_t *data, int64_t count) {
    AT_LEVEL(level, take_bytes(digest, data, count));
}

EXPORT double diloco_sum_products(int32_t level, const float *a, const float *b, int64_t count, double total) {
    return AT_LEVEL(level, sum_products(a, b, count, total));
}

// Returns the size of a structure, which must equal the size in kernel_library.py.
EXPORT int64_t diloco_size(int32_t which) {
    const int64_t sizes[] = {sizeof(Format), sizeof(Encode), sizeof(Decode), sizeof(Measure),
                             sizeof(Update), sizeof(Outer),  sizeof(Digest), sizeof(Pieces),
                             sizeof(Seal),   sizeof(Follow), sizeof(Take)};
    return which >= 0 && which < 11 ? sizes[which] : -1;
}
