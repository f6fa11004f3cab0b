// Encodes blocks of int8 and int4 from the inputs to the payload, and decodes them, in one pass without a copy of the tile.
// GCC and Clang vectorize these loops at the level's width: where a loop is split in two with a small array in between, or
// is not unrolled, they vectorize it only in that form.  For blocks of 32, which are short, the size must be a constant of
// the template (BLOCK); for other sizes BLOCK is 0 and the size is an argument.

// An output may be the same memory as an input, value by value; they overlap in no other way.
#if defined(__clang__)
#define IN_ANY_ORDER _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
#else
#define IN_ANY_ORDER _Pragma("GCC ivdep")
#endif

// Prefetch distance in values: 2 KiB.  Encoding with half of it is up to a tenth slower, with twice three tenths (Zen 4).
static constexpr int64_t AHEAD = 512;

// Values whose peaks are found before the first is encoded: so few that memory is requested almost continuously.
static constexpr int64_t GROUP_VALUES = 256, GROUP_BLOCKS = 8;

// The pointers of one block, copied: if they stayed in memory, the compiler would assume that each store changes them.
template <bool LESS, bool CARRIES>
struct Terms {
    const float *a, *b, *residual;
    float beta;

    Terms(const Flow *flow, int64_t at)
        : a(flow->a + at), b(LESS ? flow->b + at : nullptr), residual(CARRIES ? flow->residual + at : nullptr), beta(flow->beta) {}

    float operator[](int64_t i) const {
        const float x = LESS ? a[i] - b[i] : a[i];
        return CARRIES ? x + residual[i] * beta : x;
    }
};

template <bool LESS, bool CARRIES>
static inline uint32_t peak_of(const Flow *flow, int64_t at, int64_t block) {
    const Terms<LESS, CARRIES> terms(flow, at);
    int32_t largest = 0;
    IN_ANY_ORDER
    for (int64_t i = 0; i < block; i++) {
        const int32_t magnitude = (int32_t)(as_bits(terms[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

// Writes a byte for each value: the code of int8, or the code of int4 plus 8.
template <int BITS, bool LESS, bool CARRIES, bool TELLS>
static inline void encode_codes(const Flow *flow, int64_t at, int64_t block, float scale, uint8_t *codes) {
    // With 8 more, the low four bits of the sum are the code plus 8; 8 is even, so ties round as before.
    const float rounder = BITS == 8 ? ROUNDER : ROUNDER + 8.0f, divisor = scale > 0 ? scale : 1.0f;
    const Terms<LESS, CARRIES> terms(flow, at);
    float *residual = CARRIES ? flow->residual + at : nullptr, *decoded = TELLS ? flow->decoded + at : nullptr;
    // Prefetch here, where the divisions take as long as the memory needs, and not where peaks are found.
    ask_for(terms.a + AHEAD, block);
    if (LESS) ask_for(terms.b + AHEAD, block);
    if (CARRIES) ask_for(terms.residual + AHEAD, block);
    IN_ANY_ORDER
    for (int64_t i = 0; i < block; i++) {
        const float value = terms[i], sum = value / divisor + rounder, told = (sum - rounder) * scale;
        codes[i] = (uint8_t)(as_bits(sum) & (BITS == 8 ? 255u : 15u));
        if (TELLS) decoded[i] = told;
        if (CARRIES) residual[i] = value - told;
    }
}

static inline void pack_pairs(const uint8_t *fields, int64_t bytes, uint8_t *codes) {
    for (int64_t i = 0; i < bytes; i++) {
        uint16_t pair;
        memcpy(&pair, fields + 2 * i, 2);
        codes[i] = (uint8_t)(pair | pair >> 4);
    }
}

// Encodes whole blocks in groups; returns how many blocks are done: all, unless a group has values so large that codes may
// have to be limited, which is left with the rest to the loops.
template <int BITS, int BLOCK, bool LESS, bool CARRIES, bool TELLS>
static int64_t encode_groups(const Flow *flow, int64_t blocks, int64_t size, uint8_t *scales, uint8_t *codes, int *status) {
    const int64_t block = BLOCK ? BLOCK : size, fitting = block < GROUP_VALUES ? GROUP_VALUES / block : 1;
    const int64_t group = fitting < GROUP_BLOCKS ? fitting : GROUP_BLOCKS;
    alignas(64) uint32_t peaks[GROUP_BLOCKS];
    alignas(64) float scale[GROUP_BLOCKS];
    alignas(64) uint16_t words[GROUP_BLOCKS];
    alignas(64) uint8_t fields[TILE];
    for (int64_t done = 0; done < blocks; done += group) {
        const int64_t here = blocks - done < group ? blocks - done : group;
        for (int64_t b = 0; b < here; b++) peaks[b] = peak_of<LESS, CARRIES>(flow, (done + b) * block, block);
        const uint32_t largest = scales_of<BITS>(peaks, here, scale, words);
        if (largest >= INFINITE) {
            *status = NOT_FINITE;
            return blocks;
        }
        if (largest > as_bits(FP32_MAX / 2)) return done;
        for (int64_t b = 0; b < here; b++) memcpy(scales + 2 * (done + b), words + b, 2);
        uint8_t *bytes = BITS == 8 ? codes + done * block : fields;
        for (int64_t b = 0; b < here; b++)
            encode_codes<BITS, LESS, CARRIES, TELLS>(flow, (done + b) * block, block, scale[b], bytes + b * block);
        if (BITS == 4) pack_pairs(fields, here * block / 2, codes + done * block / 2);
    }
    return blocks;
}

template <int BITS>
static int64_t encode_flow(const Flow *flow, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, int *status) {
    const auto run = [&](auto less, auto carries, auto tells) {
        return block == 32 ? encode_groups<BITS, 32, less, carries, tells>(flow, blocks, block, scales, codes, status)
                           : encode_groups<BITS, 0, less, carries, tells>(flow, blocks, block, scales, codes, status);
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (flow->residual && flow->b) return flow->decoded ? run(yes, yes, yes) : run(yes, yes, no);
    if (flow->residual) return flow->decoded ? run(no, yes, yes) : run(no, yes, no);
    if (flow->b) return flow->decoded ? run(yes, no, yes) : run(yes, no, no);
    return flow->decoded ? run(no, no, yes) : run(no, no, no);
}

// Writes the codes of int4 as bytes, like those of int8; returns true if an encoder never makes one of them.
static inline bool unpack_pairs(const uint8_t *codes, int64_t bytes, uint8_t *fields) {
    for (int64_t i = 0; i < bytes; i++) {
        const uint16_t pair = (uint16_t)((codes[i] | codes[i] << 4) & 0x0F0F);
        memcpy(fields + 2 * i, &pair, 2);
    }
    uint8_t bad = 0;
    for (int64_t i = 0; i < 2 * bytes; i++) {
        bad |= fields[i] == 0;
        fields[i] = (uint8_t)(fields[i] - 8);
    }
    return bad;
}

static inline bool any_illegal(const uint8_t *codes, int64_t count) {
    uint8_t bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= codes[i] == 0x80;
    return bad;
}

template <int BLOCK, int FOLD>
static inline void decode_codes(const uint8_t *codes, int64_t blocks, int64_t size, const float *scales, const Into *into) {
    const float share = into->share;
    const int64_t block = BLOCK ? BLOCK : size;
    for (int64_t b = 0; b < blocks; b++, codes += block) {
        const float scale = scales[b], *held = into->held + b * block;
        float *out = into->out + b * block;
        if (DECODES_AHEAD) ask_for((FOLD == WRITE ? out : held) + AHEAD, block);
        IN_ANY_ORDER
        for (int64_t i = 0; i < block; i++) {
            float value = (float)(int8_t)codes[i] * scale;
            if (FOLD == ADD) value = held[i] + value;
            if (FOLD == TOWARDS) value = held[i] - (held[i] - value) * share;
            out[i] = value;
        }
    }
}

template <int BLOCK>
static void decode_fold(const uint8_t *codes, int64_t blocks, int64_t block, const float *scales, const Into *into, int fold) {
    if (fold == WRITE) decode_codes<BLOCK, WRITE>(codes, blocks, block, scales, into);
    else if (fold == ADD) decode_codes<BLOCK, ADD>(codes, blocks, block, scales, into);
    else decode_codes<BLOCK, TOWARDS>(codes, blocks, block, scales, into);
}

// Decodes and folds whole blocks; returns false where the loops must do it, as they do for all payloads that are refused.
template <int BITS>
static bool decode_flow(const uint8_t *scales, const uint8_t *codes, int64_t blocks, int64_t block, const Into *into, int fold) {
    alignas(64) float scale[TILE / 2];
    uint32_t largest = 0;
    if (!read_scales(scales, blocks, scale, &largest) || as_float(largest << 16) * largest_code<BITS>() > FP32_MAX) return false;
    alignas(64) uint8_t fields[TILE];
    if (BITS == 8 ? any_illegal(codes, blocks * block) : unpack_pairs(codes, blocks * block / 2, fields)) return false;
    if (BITS == 4) codes = fields;
    if (block == 32) decode_fold<32>(codes, blocks, block, scale, into, fold);
    else decode_fold<0>(codes, blocks, block, scale, into, fold);
    return true;
}
