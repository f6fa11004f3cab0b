// The units of blocks.py: the magnitudes of a group as whole numbers, and the levels, which are means of them.

struct Levels {
    int32_t low, high;  // the upper halves of fp32 numbers; for e3m0 `low` is the exponent of the largest level
};

// Writes the units of values whose largest exponent is `top`; a subnormal has 0 units.
static inline void to_units(const float *x, int64_t count, int32_t top, int32_t *units) {
    if (top >= 24) {
        // The product is exact or below one unit, and the conversion truncates the bits that the definition shifts out.
        const float factor = as_float((uint32_t)(277 - top) << 23);
        for (int64_t i = 0; i < count; i++) units[i] = (int32_t)(as_float(as_bits(x[i]) & 0x7FFFFFFFu) * factor);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t magnitude = (int32_t)(as_bits(x[i]) & 0x7FFFFFFFu), exponent = magnitude >> 23;
        units[i] = (exponent > 0 ? (magnitude & 0x007FFFFF) | 0x00800000 : 0) >> (top - exponent);
    }
}

// Returns the sum of the units above `bound`, and their number.  A sum of 128 units fits into 32 bits.
static inline int64_t sum_above(const int32_t *units, int64_t count, int32_t bound, int64_t *number) {
    int64_t sum = 0;
    int32_t found = 0;
    for (int64_t start = 0; start < count; start += 128) {
        const int64_t stop = count - start < 128 ? count : start + 128;
        uint32_t part = 0;
        for (int64_t i = start; i < stop; i++) {
            part += units[i] > bound ? (uint32_t)units[i] : 0u;
            found += units[i] > bound;
        }
        sum += part;
    }
    *number = found;
    return sum;
}

// Returns the mean of units, rounded up, as a scale: the upper half of an fp32 number.
static inline int32_t mean_scale(int64_t sum, int64_t count, int32_t top) {
    const int64_t mean = (sum + count - 1) / count;
    if (mean == 0) return 0;
    const int32_t bits = (int32_t)(as_bits((float)mean) >> 16) + (top - 150) * 128;
    return bits < 0x0080 ? 0x0080 : bits;
}

// Returns the levels of `count` values with this sum, `num_big` of which have the sum `sum_big`.
static inline Levels two_levels(int64_t sum, int64_t count, int64_t sum_big, int64_t num_big, int32_t top) {
    const int32_t low = mean_scale(sum - sum_big, count - num_big, top);
    const int32_t high = mean_scale(sum_big, num_big ? num_big : 1, top);
    return {low, high > low ? high : 0};
}

static inline float level_value(int32_t level, bool negative) {
    return as_float((uint32_t)level << 16 | (negative ? 0x80000000u : 0u));
}

// Whether mean_scale can make the scale: never a negative, subnormal or non-finite one.
static inline bool legal_scale(int32_t word) { return word == 0 || (uint32_t)word - 0x0080u < 0x7F80u - 0x0080u; }

// Whether two_levels and its caller can make these levels with this number of big values among `count`.
static inline bool legal_levels(Levels of, int64_t num_big, int64_t count) {
    return of.high ? of.high > of.low && num_big > 0 && num_big < count : num_big == 0;
}
