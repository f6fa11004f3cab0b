// The format of topk.py, a chunk at a time; it uses only whole numbers, so no floating-point operation rounds.

static inline int64_t kept_of(const Format *format, int64_t count) {
    const int64_t kept = (count * format->kept + 4 * format->block - 1) / (4 * format->block) * 4;
    return kept < count ? kept : count;
}

static inline int64_t kept_before(const Format *format, int64_t start) {
    return start / format->block * format->kept + kept_of(format, start % format->block);
}

struct TopK {
    uint8_t *levels, *indices, *fields;
    int64_t kept;
};

// Returns where the chunk at `start` has its bytes: whole bytes, because all chunks but the last keep a multiple of four.
static inline TopK place_of(const Format *format, uint8_t *payload, int64_t start, int64_t count) {
    const int64_t bits = format->block == 256 ? 8 : 12, before = kept_before(format, start);
    uint8_t *indices = payload + 4 * ((format->numel + format->block - 1) / format->block);
    uint8_t *fields = indices + (kept_before(format, format->numel) * bits + 7) / 8;
    return {payload + start / format->block * 4, indices + before * bits / 8, fields + before / 4, kept_of(format, count)};
}

static constexpr int32_t FIRST_BITS_END = 1 << 17;

// Returns the largest number that at least `kept` of the units reach, with the bits below `last` left 0.
static inline int32_t least_units(const int32_t *units, int64_t count, int64_t kept, int32_t last) {
    int32_t least = 0;
    for (int32_t bit = 1 << 23; bit >= last; bit >>= 1) {
        int32_t reach = 0;
        for (int64_t i = 0; i < count; i++) reach += units[i] >= (least | bit);
        if (reach >= kept) least |= bit;
    }
    return least;
}

// Returns a number of units that all kept values reach; more may reach it.  With the chunk as rows, the peaks of `kept`
// columns reach it, so as many values do.  Peaks are searched, not values, where columns far outnumber the kept values.
static inline int32_t near_least(const int32_t *units, int64_t count, int64_t kept) {
    alignas(64) int32_t peaks[TILE];
    int64_t columns = count;
    while (columns >= 16 * kept) columns /= 4;
    memcpy(peaks, units, 4 * (size_t)columns);
    for (int64_t row = columns; row + columns <= count; row += columns)
        for (int64_t i = 0; i < columns; i++) peaks[i] = units[row + i] > peaks[i] ? units[row + i] : peaks[i];
    return least_units(peaks, columns, kept, FIRST_BITS_END);
}

// Writes the units of at least `least` and their positions, in order; returns their number.
static inline int64_t reaching(const int32_t *units, int64_t count, int32_t least, int32_t *reached, int32_t *places) {
    int64_t found = 0, i = 0;
#ifdef AVX512
    __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= count; i += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(16))) {
        const __m512i here = _mm512_load_si512(units + i);
        const __mmask16 reach = _mm512_cmpge_epi32_mask(here, _mm512_set1_epi32(least));
        if (!reach) continue;
        _mm512_storeu_si512(reached + found, _mm512_maskz_compress_epi32(reach, here));
        _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(reach, place));
        found += __builtin_popcount(reach);
    }
#endif
    alignas(64) uint8_t reach[TILE + 8];
    for (int64_t j = i; j < count; j++) reach[j] = units[j] >= least;
    memset(reach + count, 0, 8);
    for (; i < count; i += 8) {
        if (word_at(reach + i) == 0) continue;
        for (int64_t j = i; j < i + 8; j++) {
            reached[found] = units[j];
            places[found] = (int32_t)j;
            found += reach[j];
        }
    }
    return found;
}

static int encode_chunk(const Format *format, const float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    const TopK at = place_of(format, payload, start, count);
    const uint32_t largest = largest_bits(x, count);
    if (largest >= INFINITE) return NOT_FINITE;
    const int32_t top = (int32_t)(largest >> 23);
    alignas(64) int32_t units[TILE];
    to_units(x, count, top, units);
    // Find the smallest kept units, bit by bit: the largest number that at least `kept` values reach.  After the first bits
    // only the values that reach the number found so far are searched.
    alignas(64) int32_t reached[TILE + 16];
    alignas(64) int32_t places[TILE + 16];
    const int64_t candidates = reaching(units, count, near_least(units, count, at.kept), reached, places);
    const int32_t least = least_units(reached, candidates, at.kept, 1);
    int64_t more = 0;
    for (int64_t i = 0; i < candidates; i++) more += reached[i] > least;
    int64_t equal = at.kept - more, found = 0, sum = 0;
    uint16_t index[TILE / 4 + 4];
    for (int64_t i = 0; found < at.kept; i++) {
        if (reached[i] < least || (reached[i] == least && equal-- <= 0)) continue;
        index[found++] = (uint16_t)places[i];
        sum += reached[i];
    }
    const int64_t mean = (sum + at.kept - 1) / at.kept;
    int64_t sum_big = 0, num_big = 0;
    for (int64_t j = 0; j < at.kept; j++)
        if (units[index[j]] > mean) sum_big += units[index[j]], num_big++;
    const auto [low, high] = two_levels(sum, at.kept, sum_big, num_big, top);
    const uint16_t words[2] = {(uint16_t)low, (uint16_t)high};
    memcpy(at.levels, words, 4);
    if (decoded) memset(decoded, 0, 4 * (size_t)count);
    memset(at.fields, 0, (size_t)((at.kept + 3) / 4));
    for (int64_t j = 0; j < at.kept; j++) {
        const int64_t i = index[j];
        const bool big = high > 0 && units[i] > mean;
        const uint32_t bits = as_bits(x[i]);
        const bool negative = bits > 0x80000000u && (big || low > 0);
        at.fields[j / 4] |= (uint8_t)((big | negative << 1) << 2 * (j % 4));
        if (decoded) decoded[i] = level_value(big ? high : low, negative);
        if (format->block == 256) at.indices[j] = (uint8_t)i;
        else if (j % 2 == 0) {
            at.indices[j / 2 * 3] = (uint8_t)i;
            at.indices[j / 2 * 3 + 1] = (uint8_t)(i >> 8);
        } else {
            at.indices[j / 2 * 3 + 1] |= (uint8_t)(i << 4);
            at.indices[j / 2 * 3 + 2] = (uint8_t)(i >> 4);
        }
    }
    return DONE;
}

static int decode_chunk(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    const TopK at = place_of(format, const_cast<uint8_t *>(payload), start, count);
    uint16_t words[2];
    memcpy(words, at.levels, 4);
    if (!legal_scale(words[0]) || !legal_scale(words[1])) return BAD_SCALE;
    const int32_t low = words[0], high = words[1];
    memset(out, 0, 4 * (size_t)count);
    int64_t num_big = 0, last = -1;
    for (int64_t j = 0; j < at.kept; j++) {
        const uint8_t *bytes = at.indices + j / 2 * 3;
        const int64_t i = format->block == 256 ? at.indices[j]
                          : j % 2 == 0         ? bytes[0] | (bytes[1] & 15) << 8
                                               : bytes[1] >> 4 | bytes[2] << 4;
        const int32_t field = at.fields[j / 4] >> 2 * (j % 4) & 3;
        const bool big = field & 1, negative = field & 2;
        if (i <= last || i >= count) return BAD_INDEX;
        if (!big && low == 0 && negative) return BAD_SIGN;
        if (!big && low == 0 && i != j) return NOT_FIRST;
        num_big += big;
        last = i;
        out[i] = level_value(big ? high : low, negative);
    }
    if (!legal_levels({low, high}, num_big, at.kept)) return BAD_LEVELS;
    if (format->block != 256 && at.kept % 2 && at.indices[at.kept / 2 * 3 + 1] >> 4) return BEHIND_INDEX;
    if (at.kept % 4 && at.fields[at.kept / 4] >> 2 * (at.kept % 4)) return BEHIND;
    return DONE;
}

static int encode_topk(const Format *format, const float *x, int64_t start, int64_t count, uint8_t *payload, float *decoded) {
    for (int64_t at = 0; at < count; at += format->block) {
        const int64_t here = count - at < format->block ? count - at : format->block;
        const int status = encode_chunk(format, x + at, start + at, here, payload, decoded ? decoded + at : nullptr);
        if (status != DONE) return status;
    }
    return DONE;
}

static int decode_topk(const Format *format, const uint8_t *payload, int64_t start, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at += format->block) {
        const int64_t here = count - at < format->block ? count - at : format->block;
        const int status = decode_chunk(format, payload, start + at, here, out + at);
        if (status != DONE) return status;
    }
    return DONE;
}
