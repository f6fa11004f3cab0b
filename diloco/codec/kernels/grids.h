// e3m0, int2 and sign of blocks.py, a block at a time: only fp32 bits and whole numbers, so no floating-point operation
// rounds.

static constexpr int field_bits(int kind) { return kind == E3M0 ? 4 : kind == INT2 ? 2 : 1; }
static constexpr int scales_bytes(int kind) { return kind == E3M0 ? 1 : kind == INT2 ? 4 : 2; }
static constexpr int64_t FIELDS = BLOCK_LARGEST + 8;

// An integer with as many bytes as a byte has fields: one field in each byte when unpacked.
template <int BITS>
using Word = std::conditional_t<BITS == 4, uint16_t, std::conditional_t<BITS == 2, uint32_t, uint64_t>>;

template <int BITS>
static inline void pack(const uint8_t *fields, int64_t count, uint8_t *packed) {
    for (int64_t i = 0; i < (count * BITS + 7) / 8; i++) {
        Word<BITS> word;
        memcpy(&word, fields + i * sizeof word, sizeof word);
        // Each step joins neighbours: fields into pairs, pairs into fours, fours into eights.
        for (unsigned step = 8 - BITS; step < 4 * sizeof word; step *= 2) word |= (Word<BITS>)(word >> step);
        packed[i] = (uint8_t)word;
    }
}

template <int BITS>
static inline void unpack(const uint8_t *packed, int64_t count, uint8_t *fields) {
    constexpr Word<BITS> mask = (Word<BITS>)((Word<BITS>)~(Word<BITS>)0 / 255 * ((1 << BITS) - 1));
    for (int64_t i = 0; i < (count * BITS + 7) / 8; i++) {
        Word<BITS> word = packed[i];
        for (unsigned step = 4 * sizeof word - 4; step >= 8 - BITS; step /= 2) word |= (Word<BITS>)(word << step);
        word &= mask;
        memcpy(fields + i * sizeof word, &word, sizeof word);
    }
}

static inline int32_t power_level(int32_t magnitude) {
    const int32_t level = (magnitude + (1 << 22)) >> 23;
    return level > 254 ? 254 : level;
}

static inline Levels power_fields(const float *x, int64_t count, int32_t largest, uint8_t *fields) {
    const int32_t top = power_level(largest), lowest = top - 7;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = as_bits(x[i]);
        const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu), level = power_level(magnitude);
        const int32_t least = magnitude >> 23 >= lowest ? 1 : 0;
        int32_t code = level - lowest > least ? level - lowest : least;
        code = level > 0 ? code : 0;
        fields[i] = (uint8_t)(code | (code > 0 ? (int32_t)(bits >> 31) << 3 : 0));
    }
    return {top, 0};
}

static inline Levels mean_fields(int kind, const float *x, int64_t count, int32_t top, uint8_t *fields) {
    alignas(64) int32_t units[BLOCK_LARGEST];
    to_units(x, count, top, units);
    int64_t number;
    const int64_t sum = sum_above(units, count, -1, &number);
    if (kind == SIGN) {
        const int32_t level = mean_scale(sum, count, top);
        for (int64_t i = 0; i < count; i++) fields[i] = (as_bits(x[i]) > 0x80000000u) & (level > 0);
        return {level, 0};
    }
    int32_t bound = (int32_t)((5 * sum + 4 * count - 1) / (4 * count));
    const int64_t sum_big = sum_above(units, count, bound, &number);
    const Levels found = two_levels(sum, count, sum_big, number, top);
    bound = found.high > 0 ? bound : 1 << 24;
    for (int64_t i = 0; i < count; i++) {
        const bool big = units[i] > bound, negative = as_bits(x[i]) > 0x80000000u;
        fields[i] = (uint8_t)(big | (negative & (big | (found.low > 0))) << 1);
    }
    return found;
}

template <int KIND>
static inline void grid_values(Levels of, const uint8_t *fields, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t field = fields[i], code = field & 7;
        if (KIND == E3M0) {
            const uint32_t power = (uint32_t)(of.low - 7 + (int32_t)code) << 23;
            out[i] = as_float(code ? power | (field & 8) << 28 : 0u);
        } else if (KIND == INT2) {
            out[i] = level_value(field & 1 ? of.high : of.low, field & 2);
        } else {
            out[i] = level_value(of.low, field);
        }
    }
}

// Returns why the levels and fields are refused: for what no encoder makes; DONE if they are valid.
template <int KIND>
static inline int grid_fault(Levels of, const uint8_t *fields, int64_t count) {
    if (KIND == E3M0) {
        uint8_t most = 0, least = 7, alone = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint8_t code = fields[i] & 7, some = code ? code : 7;
            alone |= fields[i] == 8;
            most = code > most ? code : most;
            least = some < least ? some : least;
        }
        if (of.low > 254) return BAD_TOP;
        if (alone) return SIGN_ALONE;
        if (most != (of.low ? 7 : 0)) return OTHER_TOP;
        return of.low && of.low - 7 + least < 1 ? TOO_SMALL : DONE;
    }
    if (!legal_scale(of.low) || !legal_scale(of.high)) return BAD_SCALE;
    int32_t signs = 0, num_big = 0;  // signs of values that are not big
    for (int64_t i = 0; i < count; i++) {
        signs += KIND == SIGN ? fields[i] : fields[i] == 2;
        num_big += KIND == SIGN ? 0 : fields[i] & 1;
    }
    if (!legal_levels(of, num_big, count)) return BAD_LEVELS;
    return of.low || !signs ? DONE : KIND == SIGN ? SIGN_OF_ZERO : BAD_SIGN;
}

template <int KIND>
static int encode_grid(const float *x, int64_t count, uint8_t *scales, uint8_t *packed, float *decoded) {
    const uint32_t largest = largest_bits(x, count);
    if (largest >= INFINITE) return NOT_FINITE;
    alignas(64) uint8_t fields[FIELDS];
    memset(fields + count, 0, 8);
    const Levels found = KIND == E3M0 ? power_fields(x, count, (int32_t)largest, fields)
                                      : mean_fields(KIND, x, count, (int32_t)(largest >> 23), fields);
    const uint32_t words = (uint32_t)found.low | (uint32_t)found.high << 16;
    memcpy(scales, &words, scales_bytes(KIND));
    pack<field_bits(KIND)>(fields, count, packed);
    if (decoded) grid_values<KIND>(found, fields, count, decoded);
    return DONE;
}

template <int KIND>
static int decode_grid(const uint8_t *scales, const uint8_t *packed, int64_t count, float *out) {
    uint32_t words = 0;
    memcpy(&words, scales, scales_bytes(KIND));
    const Levels of = {(int32_t)(words & 0xFFFFu), (int32_t)(words >> 16)};
    alignas(64) uint8_t fields[FIELDS];
    unpack<field_bits(KIND)>(packed, count, fields);
    constexpr int64_t together = 8 / field_bits(KIND);
    for (int64_t i = count; i % together; i++)
        if (fields[i]) return BEHIND;
    const int fault = grid_fault<KIND>(of, fields, count);
    if (fault == DONE) grid_values<KIND>(of, fields, count, out);
    return fault;
}

// Encodes or, where `x` is null, decodes all blocks of a tile.
template <int KIND>
static int grid_tile(const Format *format, const float *x, int64_t start, int64_t count, uint8_t *payload, float *out) {
    constexpr int64_t usual = KIND == INT2 ? 256 : 128;
    const int64_t block = format->block;
    uint8_t *scales = payload + start / block * scales_bytes(KIND);
    uint8_t *codes = payload + (format->numel + block - 1) / block * scales_bytes(KIND) + start * field_bits(KIND) / 8;
    for (int64_t at = 0; at < count; at += block, scales += scales_bytes(KIND), codes += block * field_bits(KIND) / 8) {
        const int64_t here = count - at < block ? count - at : block;
        float *decoded = out ? out + at : nullptr;
        // Where the size is a constant, GCC unrolls the loops over a block: a tenth faster, but not for e3m0.
        const int status = !x                                  ? decode_grid<KIND>(scales, codes, here, decoded)
                           : KIND != E3M0 && here == usual ? encode_grid<KIND>(x + at, usual, scales, codes, decoded)
                                                               : encode_grid<KIND>(x + at, here, scales, codes, decoded);
        if (status != DONE) return status;
    }
    return DONE;
}
