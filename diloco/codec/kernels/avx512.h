// Blocks of 32 to 256 values sixteen at a time; the same codes and values as encode_block and decode_block.

template <int BITS, int BLOCK>
static inline void encode_codes(const float *x, int64_t blocks, const float *scale, uint8_t *codes, float *decoded) {
    // With 8 on top the low four bits of the sum are the code plus 8; the added 8 is even and moves no tie.
    const __m512 rounder = _mm512_set1_ps(BITS == 8 ? ROUNDER : ROUNDER + 8.0f);
    const __m512i low = _mm512_set1_epi64(0x0F);
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, codes += BLOCK * BITS / 8) {
        const __m512 factor = _mm512_set1_ps(scale[b]);
        const __mmask16 some = _mm512_cmp_ps_mask(factor, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        const __m512 divisor = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), some, factor);
        for (int i = 0; i < BLOCK; i += 16) {
            const __m512 sum = _mm512_add_ps(_mm512_div_ps(_mm512_loadu_ps(x + i), divisor), rounder);
            const __m512i bits = _mm512_castps_si512(sum);
            if (BITS == 8) {
                _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(bits));
            } else {
                // Of two neighbours the later one's four bits come to stand behind the earlier one's.
                const __m512i later = _mm512_srli_epi64(bits, 28);
                const __m512i pairs = _mm512_ternarylogic_epi64(low, bits, later, 0xCA);
                _mm_storel_epi64((__m128i *)(codes + i / 2), _mm512_cvtepi64_epi8(pairs));
            }
            if (decoded) _mm512_storeu_ps(decoded + i, _mm512_mul_ps(_mm512_sub_ps(sum, rounder), factor));
        }
        if (decoded) decoded += BLOCK;
    }
}

template <int BITS, int BLOCK>
static inline uint32_t decode_codes(const uint8_t *codes, int64_t blocks, const float *scale, float *out) {
    const int64_t bytes = blocks * BLOCK * BITS / 8;
    __mmask64 bad = 0;
    for (int64_t at = 0; at < bytes; at += 64) {
        const __mmask64 there = bytes - at < 64 ? (1ull << (bytes - at)) - 1 : ~0ull;
        const __m512i part = _mm512_maskz_loadu_epi8(there, codes + at);
        if (BITS == 8) bad |= _mm512_cmpeq_epi8_mask(part, _mm512_set1_epi8(-128));
        else
            bad |= there & (_mm512_testn_epi8_mask(part, _mm512_set1_epi8(0x0F)) |
                            _mm512_testn_epi8_mask(part, _mm512_set1_epi8((char)0xF0)));
    }
    const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    for (int64_t b = 0; b < blocks; b++, out += BLOCK, codes += BLOCK * BITS / 8) {
        const __m512 factor = _mm512_set1_ps(scale[b]);
        const __m512 table = _mm512_mul_ps(values, factor);
        for (int i = 0; i < BLOCK; i += 16) {
            if (BITS == 8) {
                const __m512i whole = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
                _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), factor));
            } else {
                const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
                const __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
                _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(index, table));
            }
        }
    }
    return bad != 0;
}
