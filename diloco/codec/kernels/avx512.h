// Encodes blocks of 32 to 256 values, sixteen at a time, about 5 % faster than the loops of flow.h compiled for AVX-512
// (Zen 5).  The codes and values are those of the loops.

template <bool CARRIES>
static inline __m512 flow_in(const Flow *flow, int64_t i) {
    __m512 x = _mm512_loadu_ps(flow->a + i);
    if (flow->b) x = _mm512_sub_ps(x, _mm512_loadu_ps(flow->b + i));
    if (CARRIES)
        x = _mm512_add_ps(x, _mm512_mul_ps(_mm512_loadu_ps(flow->residual + i), _mm512_set1_ps(flow->beta)));
    return x;
}

// Encodes whole blocks, each in registers from its values to its codes; returns how many blocks are done: all, unless one
// has values so large that codes may have to be limited, which is left with the rest to the loops.
template <int BITS, int BLOCK, bool CARRIES>
static int64_t encode_each(const Flow *flow, int64_t blocks, uint8_t *scales, uint8_t *codes, int *status) {
    // With 8 more, the low four bits of the sum are the code plus 8; 8 is even, so ties round as before.
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
                // Move the later value's four bits above those of the earlier value.
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
