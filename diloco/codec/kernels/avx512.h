// Blocks of 32 to 256 values sixteen at a time; the same codes and values as the loops of level.h.

template <bool CARRIES>
static inline __m512 flow_in(const Flow *flow, int64_t i) {
    __m512 x = _mm512_loadu_ps(flow->a + i);
    if (flow->b) x = _mm512_sub_ps(x, _mm512_loadu_ps(flow->b + i));
    if (CARRIES)
        x = _mm512_add_ps(x, _mm512_mul_ps(_mm512_loadu_ps(flow->residual + i), _mm512_set1_ps(flow->beta)));
    return x;
}

// Whole blocks; one stays in registers from its values to its codes.  Values so large that codes may have to be held are
// left to the loops: the answer is then how many blocks are done, which is all of them otherwise.
template <int BITS, int BLOCK, bool CARRIES>
static int64_t encode_each(const Flow *flow, int64_t blocks, uint8_t *scales, uint8_t *codes, int *status) {
    // With 8 on top the low four bits of the sum are the code plus 8; the added 8 is even and moves no tie.
    const __m512 rounder = _mm512_set1_ps(BITS == 8 ? ROUNDER : ROUNDER + 8.0f);
    const __m512i low = _mm512_set1_epi64(0x0F), magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    for (int64_t b = 0; b < blocks; b++, codes += BLOCK * BITS / 8) {
        __m512 values[BLOCK / 16];
        __m512i peaks = _mm512_setzero_si512();
        for (int i = 0; i < BLOCK / 16; i++) {
            const int64_t at = b * BLOCK + 16 * i;
            ask_for(flow->a + at + AHEAD, 16);
            if (flow->b) ask_for(flow->b + at + AHEAD, 16);
            if (CARRIES) ask_for(flow->residual + at + AHEAD, 16);
            values[i] = flow_in<CARRIES>(flow, at);
            peaks = _mm512_max_epu32(peaks, _mm512_and_si512(_mm512_castps_si512(values[i]), magnitude));
        }
        const uint32_t peak = _mm512_reduce_max_epu32(peaks);
        float scale;
        uint16_t word;
        if (scales_of<BITS>(&peak, 1, &scale, &word) >= INFINITE) {
            *status = NOT_FINITE;
            return blocks;
        }
        if (peak > as_bits(FP32_MAX / 2)) return b;
        memcpy(scales + 2 * b, &word, 2);
        const __m512 factor = _mm512_set1_ps(scale), divisor = _mm512_set1_ps(scale > 0 ? scale : 1.0f);
        for (int i = 0; i < BLOCK / 16; i++) {
            const int64_t at = b * BLOCK + 16 * i;
            const __m512 sum = _mm512_add_ps(_mm512_div_ps(values[i], divisor), rounder);
            const __m512i bits = _mm512_castps_si512(sum);
            if (BITS == 8) {
                _mm_storeu_si128((__m128i *)(codes + 16 * i), _mm512_cvtepi32_epi8(bits));
            } else {
                // Of two neighbours the later one's four bits come to stand behind the earlier one's.
                const __m512i later = _mm512_srli_epi64(bits, 28);
                const __m512i pairs = _mm512_ternarylogic_epi64(low, bits, later, 0xCA);
                _mm_storel_epi64((__m128i *)(codes + 8 * i), _mm512_cvtepi64_epi8(pairs));
            }
            if (!flow->decoded && !CARRIES) continue;
            const __m512 told = _mm512_mul_ps(_mm512_sub_ps(sum, rounder), factor);
            if (flow->decoded) _mm512_storeu_ps(flow->decoded + at, told);
            if (CARRIES) _mm512_storeu_ps(flow->residual + at, _mm512_sub_ps(values[i], told));
        }
    }
    return blocks;
}

template <int BITS, bool CARRIES>
static int64_t encode_sized(const Flow *flow, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, int *status) {
    switch (block) {
    case 32: return encode_each<BITS, 32, CARRIES>(flow, blocks, scales, codes, status);
    case 64: return encode_each<BITS, 64, CARRIES>(flow, blocks, scales, codes, status);
    case 128: return encode_each<BITS, 128, CARRIES>(flow, blocks, scales, codes, status);
    case 256: return encode_each<BITS, 256, CARRIES>(flow, blocks, scales, codes, status);
    default: return 0;
    }
}

template <int BITS>
static int64_t encode_flow(const Flow *flow, int64_t blocks, int64_t block, uint8_t *scales, uint8_t *codes, int *status) {
    return flow->residual ? encode_sized<BITS, true>(flow, blocks, block, scales, codes, status)
                          : encode_sized<BITS, false>(flow, blocks, block, scales, codes, status);
}

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
                ask_for((FOLD == WRITE ? into->out : into->held) + b * BLOCK + i + AHEAD, 16);
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
