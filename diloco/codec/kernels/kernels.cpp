// The codecs' passes over memory, behind a plain C interface that diloco/codec/native.py calls.
//
// What is computed is defined by the Python modules, which have plain versions of all of it; the tests compare the bits.
// The library knows nothing of torch or Python, keeps no state and starts no threads: a call works on the memory that
// it is given.  One source is compiled for several levels of instructions, and the caller says which one to use.
// Compile with -ffp-contract=off: a multiplication and an addition are two roundings unless the source says fmaf.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86_LEVELS 1
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int64_t TILE = 4096;  // values, a multiple of every block that is handled
constexpr int64_t TILE_USUAL = 2048;
constexpr int64_t BLOCK_LARGEST = TILE;
constexpr int64_t SUM_BLOCK = 1024, SUM_LANES = 16;
constexpr float FP32_MAX = 3.40282346638528859811704183484516925e+38f;
constexpr uint32_t INFINITE = 0x7F800000u;
constexpr int32_t SCALE_LEAST = 0x00800000;

// The same numbers as in native.py.
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
enum Rule : int32_t { WITHOUT_MOMENTUM = 0, HEAVY_BALL = 1, NESTEROV = 2 };

}  // namespace

// A payload's format: of `numel` values, in blocks of `block` (1 for casts), of which top-k keeps `kept` values each.
struct Format {
    int32_t kind, block;
    int64_t numel, kept;
};

// values - less[0] - less[1] ... + beta residual -> payload; residual <- that less what was decoded.
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

// Sums over the decoded values, which `out` receives unless it is null.
struct Measure {
    Format format;
    int64_t start, count, tile;
    const uint8_t *payload;
    const float *against;
    float *out;
    double squares, products, against_squares;
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
    float minus_lr, momentum_factor;
    double squares;
    int64_t culprit;
};

struct Rebase {
    int64_t count;
    const float *local, *old_base, *new_base;
    const float *const *merged;
    int64_t merged_count;
    float *out;
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

// Raised with every change of a structure or a meaning: native.py uses no library with another number.
EXPORT int32_t diloco_interface() { return 3; }

// The best level that this processor has; all below it work too.
EXPORT int32_t diloco_level() {
#ifdef X86_LEVELS
    __builtin_cpu_init();
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

EXPORT void diloco_rebase(int32_t level, const Rebase *job) { AT_LEVEL(level, rebase(job)); }

EXPORT double diloco_sum_products(int32_t level, const float *a, const float *b, int64_t count, double total) {
    return AT_LEVEL(level, sum_products(a, b, count, total));
}

// What native.py takes a structure's size to be must be what it is here.
EXPORT int64_t diloco_size(int32_t which) {
    const int64_t sizes[] = {sizeof(Format), sizeof(Encode), sizeof(Decode), sizeof(Measure),
                             sizeof(Update), sizeof(Outer),  sizeof(Rebase)};
    return which >= 0 && which < 7 ? sizes[which] : -1;
}
