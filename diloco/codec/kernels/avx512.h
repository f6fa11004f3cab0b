// Blocks of 32 to 256 values sixteen at a time; the same codes and values as the loops of level.h.

// Values by which int4 asks for memory before it needs it: what the processor foresees by itself is too little where
// results are written over what was read.  With int8, which moves more bytes a value, measured to gain nothing.
static constexpr int64_t AHEAD_ENCODE = 1024, AHEAD_DECODE = 4096;

static inline void ask_for(const float *x) { _mm_prefetch((const char *)x, _MM_HINT_T0); }

// Where values to encode come from and what becomes of them; null for what there is not.
struct Flow {
    const float *a, *b;    // a - b
    float *residual;       // added, times beta, and replaced by what got lost
    float beta;
    float *decoded;
};

template <bool CARRIES>
static inline __m512 flow_in(const Flow *flow, int64_t i) {
    __m512 x = _mm512_loadu_ps(flow->a + i);
    if (flow->b) x = _mm512_sub_ps(x, _mm512_loadu_ps(flow->b + i));
    if (CARRIES)
        x = _mm512_add_ps(x, _mm512_mul_ps(_mm512_loadu_ps(flow->residual + i), _mm512_set1_ps(flow->beta)));
    return x;
}

// Codes of one block from `at` on, whose values are computed again: what they come from is in the first cache, and a
// buffer in between could not be written while loads wait behind it.
template <int BITS, int BLOCK, bool CARRIES>
static inline void encode_codes(float scale, uint8_t *codes, const Flow *flow, int64_t at) {
    // With 8 on top the low four bits of the sum are the code plus 8; the added 8 is even and moves no tie.
    const __m512 rounder = _mm512_set1_ps(BITS == 8 ? ROUNDER : ROUNDER + 8.0f);
    const __m512i low = _mm512_set1_epi64(0x0F);
    const __m512 factor = _mm512_set1_ps(scale), divisor = _mm512_set1_ps(scale > 0 ? scale : 1.0f);
    for (int i = 0; i < BLOCK; i += 16) {
        if (CARRIES && BITS == 4) {
            ask_for(flow->a + at + i + AHEAD_ENCODE);
            ask_for(flow->b + at + i + AHEAD_ENCODE);
            ask_for(flow->residual + at + i + AHEAD_ENCODE);
        }
        const __m512 value = flow_in<CARRIES>(flow, at + i);
        const __m512 sum = _mm512_add_ps(_mm512_div_ps(value, divisor), rounder);
        const __m512i bits = _mm512_castps_si512(sum);
        if (BITS == 8) {
            _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(bits));
        } else {
            // Of two neighbours the later one's four bits come to stand behind the earlier one's.
            const __m512i later = _mm512_srli_epi64(bits, 28);
            const __m512i pairs = _mm512_ternarylogic_epi64(low, bits, later, 0xCA);
            _mm_storel_epi64((__m128i *)(codes + i / 2), _mm512_cvtepi64_epi8(pairs));
        }
        if (!flow->decoded && !CARRIES) continue;
        const __m512 told = _mm512_mul_ps(_mm512_sub_ps(sum, rounder), factor);
        if (flow->decoded) _mm512_storeu_ps(flow->decoded + at + i, told);
        if (CARRIES) _mm512_storeu_ps(flow->residual + at + i, _mm512_sub_ps(value, told));
    }
}

// Whole blocks, by groups of up to sixteen that share a vector of scales.  Values so large that codes may have to be
// held are left to the loops: the answer is then how many blocks are done, which is all of them otherwise.
template <int BITS, int BLOCK, bool CARRIES>
static int64_t encode_groups(const Flow *flow, int64_t blocks, uint8_t *scales, uint8_t *codes, int *status) {
    constexpr int GROUP = BLOCK <= 64 ? 16 : 1024 / BLOCK;
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    alignas(64) uint32_t peaks[16] = {};
    alignas(64) float scale[16];
    for (int64_t done = 0; done < blocks; done += GROUP) {
        const int here = blocks - done < GROUP ? (int)(blocks - done) : GROUP;
        for (int b = 0; b < here; b++) {
            __m512i peak = _mm512_setzero_si512();
            for (int i = b * BLOCK; i < (b + 1) * BLOCK; i += 16) {
                const __m512 value = flow_in<CARRIES>(flow, done * BLOCK + i);
                peak = _mm512_max_epu32(peak, _mm512_and_si512(_mm512_castps_si512(value), magnitude));
            }
            peaks[b] = _mm512_reduce_max_epu32(peak);
        }
        const __mmask16 there = (__mmask16)((1u << here) - 1);
        const __m512i peak = _mm512_maskz_load_epi32(there, peaks);
        if (_mm512_cmpge_epu32_mask(peak, _mm512_set1_epi32(INFINITE))) {
            *status = NOT_FINITE;
            return blocks;
        }
        if (_mm512_cmpgt_epu32_mask(peak, _mm512_set1_epi32((int)as_bits(FP32_MAX / 2)))) return done;
        const __m512 ratio = _mm512_div_ps(_mm512_castsi512_ps(peak), _mm512_set1_ps(largest_code<BITS>()));
        const __m512i up = _mm512_add_epi32(_mm512_castps_si512(ratio), _mm512_set1_epi32(0xFFFF));
        __m512i bits = _mm512_and_si512(up, _mm512_set1_epi32((int)0xFFFF0000u));
        bits = _mm512_max_epi32(bits, _mm512_set1_epi32(SCALE_LEAST));
        bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(peak, peak), bits);
        _mm512_store_si512(scale, bits);
        _mm512_mask_cvtepi32_storeu_epi16(scales + 2 * done, there, _mm512_srli_epi32(bits, 16));
        for (int b = 0; b < here; b++)
            encode_codes<BITS, BLOCK, CARRIES>(scale[b], codes + (done + b) * (BLOCK * BITS / 8), flow, (done + b) * BLOCK);
    }
    return blocks;
}

template <int BITS, bool CARRIES>
static int64_t encode_sized(const Flow *flow, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, int *status) {
    switch (block) {
    case 32: return encode_groups<BITS, 32, CARRIES>(flow, blocks, scales, codes, status);
    case 64: return encode_groups<BITS, 64, CARRIES>(flow, blocks, scales, codes, status);
    case 128: return encode_groups<BITS, 128, CARRIES>(flow, blocks, scales, codes, status);
    case 256: return encode_groups<BITS, 256, CARRIES>(flow, blocks, scales, codes, status);
    default: return 0;
    }
}

template <int BITS>
static int64_t encode_flow(const Flow *flow, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, int *status) {
    return flow->residual ? encode_sized<BITS, true>(flow, blocks, block, scales, codes, status)
                          : encode_sized<BITS, false>(flow, blocks, block, scales, codes, status);
}

// Where decoded values go.
struct Into {
    float *out;
    const float *held;
    float share;
};

template <int FOLD>
static inline void flow_out(const Into *into, int64_t i, __m512 value) {
    if (FOLD != WRITE) {
        const __m512 held = _mm512_loadu_ps(into->held + i);
        if (FOLD == ADD) value = _mm512_add_ps(held, value);
        else value = _mm512_sub_ps(held, _mm512_mul_ps(_mm512_sub_ps(held, value), _mm512_set1_ps(into->share)));
    }
    _mm512_storeu_ps(into->out + i, value);
}

// Whether a byte of the codes is one that no encoder makes.
template <int BITS>
static inline bool any_illegal(const uint8_t *codes, int64_t bytes) {
    __mmask64 bad = 0;
    for (int64_t at = 0; at < bytes; at += 64) {
        const __mmask64 there = bytes - at < 64 ? (1ull << (bytes - at)) - 1 : ~0ull;
        const __m512i part = _mm512_maskz_loadu_epi8(there, codes + at);
        if (BITS == 8) bad |= _mm512_cmpeq_epi8_mask(part, _mm512_set1_epi8(-128));
        else
            bad |= there & (_mm512_testn_epi8_mask(part, _mm512_set1_epi8(0x0F)) |
                            _mm512_testn_epi8_mask(part, _mm512_set1_epi8((char)0xF0)));
    }
    return bad != 0;
}

template <int BITS, int BLOCK, int FOLD>
static inline void decode_codes(const uint8_t *codes, int64_t blocks, const float *scale, const Into *into) {
    const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    for (int64_t b = 0; b < blocks; b++, codes += BLOCK * BITS / 8) {
        const __m512 factor = _mm512_set1_ps(scale[b]);
        const __m512 table = _mm512_mul_ps(values, factor);
        for (int i = 0; i < BLOCK; i += 16) {
            if (BITS == 8) {
                const __m512i whole = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
                flow_out<FOLD>(into, b * BLOCK + i, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), factor));
            } else {
                ask_for((FOLD == WRITE ? into->out : into->held) + b * BLOCK + i + AHEAD_DECODE);
                const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
                const __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
                flow_out<FOLD>(into, b * BLOCK + i, _mm512_permutexvar_ps(index, table));
            }
        }
    }
}

template <int BITS, int BLOCK>
static void decode_fold(const uint8_t *codes, int64_t blocks, const float *scale, const Into *into, int fold) {
    if (fold == WRITE) decode_codes<BITS, BLOCK, WRITE>(codes, blocks, scale, into);
    else if (fold == ADD) decode_codes<BITS, BLOCK, ADD>(codes, blocks, scale, into);
    else decode_codes<BITS, BLOCK, TOWARDS>(codes, blocks, scale, into);
}

// Decodes and folds whole blocks of a usual size; false where it is left to the loops, as is all that is refused.
template <int BITS>
static bool decode_flow(const uint8_t *scales, const uint8_t *codes, int64_t blocks, int64_t block, const Into *into, int fold) {
    alignas(64) uint16_t words[TILE / 32];
    alignas(64) float scale[TILE / 32];
    if ((block != 32 && block != 64 && block != 128 && block != 256) || blocks > TILE / 32) return false;
    memcpy(words, scales, 2 * (size_t)blocks);
    uint32_t illegal = 0, largest = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const uint32_t word = words[b];
        illegal |= (word != 0) & (word - 0x0080u >= 0x7F80u - 0x0080u);
        largest = word > largest ? word : largest;
        scale[b] = as_float(word << 16);
    }
    if (illegal || as_float(largest << 16) * largest_code<BITS>() > FP32_MAX) return false;
    if (any_illegal<BITS>(codes, blocks * block * BITS / 8)) return false;
    switch (block) {
    case 32: decode_fold<BITS, 32>(codes, blocks, scale, into, fold); break;
    case 64: decode_fold<BITS, 64>(codes, blocks, scale, into, fold); break;
    case 128: decode_fold<BITS, 128>(codes, blocks, scale, into, fold); break;
    default: decode_fold<BITS, 256>(codes, blocks, scale, into, fold); break;
    }
    return true;
}
