// XXH3 of 128 bits with its default secret, as the xxhash library computes it, over bytes that arrive tile by tile: a pass
// hashes its tile while that is in the first-level cache.  Only for at least 241 bytes (`BYTES_MIN` of base.py); the total
// must be known before the first tile, and every tile but the last must be whole blocks.

// Two lanes, which any processor with vector instructions adds at once.
typedef uint64_t Pair __attribute__((vector_size(16)));

static inline Pair product_of_halves(Pair value) {
    // One instruction each, which compilers do not find: with it the digest takes at most a third of the time.
#if defined(X86_LEVELS)
    return (Pair)_mm_mul_epu32((__m128i)value, (__m128i)(value >> 32));
#elif defined(__ARM_NEON)
    return (Pair)vmull_u32(vmovn_u64((uint64x2_t)value), vshrn_n_u64((uint64x2_t)value, 32));
#else
    return (value & 0xFFFFFFFFu) * (value >> 32);
#endif
}

// Eight lanes take each stripe of 64 bytes: a lane adds the product of its secret-mixed halves, and its neighbour unmixed.
static inline void take_stripes(uint64_t *lanes, const uint8_t *data, int64_t stripes, const uint8_t *secret) {
#ifdef AVX512
    __m512i sums = _mm512_loadu_si512(lanes);
    for (int64_t stripe = 0; stripe < stripes; stripe++) {
        const __m512i part = _mm512_loadu_si512(data + STRIPE_BYTES * stripe);
        const __m512i mixed = _mm512_xor_si512(part, _mm512_loadu_si512(secret + 8 * stripe));
        const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
        sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, _mm512_shuffle_epi32(part, (_MM_PERM_ENUM)0x4E)));
    }
    _mm512_storeu_si512(lanes, sums);
#else
    Pair sums[4];
    memcpy(sums, lanes, STRIPE_BYTES);
    for (int64_t stripe = 0; stripe < stripes; stripe++, data += STRIPE_BYTES, secret += 8)
        for (int at = 0; at < 4; at++) {
            Pair part, mixed;
            memcpy(&part, data + 16 * at, 16);
            memcpy(&mixed, secret + 16 * at, 16);
            sums[at] += product_of_halves(mixed ^ part) + Pair{part[1], part[0]};
        }
    memcpy(lanes, sums, STRIPE_BYTES);
#endif
}

static inline void mix_lanes(uint64_t *lanes) {
    for (int lane = 0; lane < 8; lane++) {
        const uint64_t value = lanes[lane] ^ lanes[lane] >> 47 ^ word_at(SECRET + SECRET_BYTES - STRIPE_BYTES + 8 * lane);
        lanes[lane] = value * PRIME_32[0];
    }
}

static inline uint64_t folded_product(uint64_t a, uint64_t b) {
    const uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), high = (a >> 32) * (b >> 32);
    const uint64_t left = (a >> 32) * (b & 0xFFFFFFFFu), right = (a & 0xFFFFFFFFu) * (b >> 32);
    const uint64_t cross = (low >> 32) + (left & 0xFFFFFFFFu) + right;
    return ((left >> 32) + (cross >> 32) + high) ^ (cross << 32 | (low & 0xFFFFFFFFu));
}

static inline uint64_t merged_lanes(const uint64_t *lanes, const uint8_t *secret, uint64_t sum) {
    for (int pair = 0; pair < 4; pair++)
        sum += folded_product(lanes[2 * pair] ^ word_at(secret + 16 * pair), lanes[2 * pair + 1] ^ word_at(secret + 16 * pair + 8));
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ull;
    return sum ^ sum >> 32;
}

static void finish_digest(Digest *digest, const uint8_t *rest, int64_t left) {
    const int64_t stripes = (left - 1) / STRIPE_BYTES;
    take_stripes(digest->lanes, rest, stripes, SECRET);
    uint8_t last[STRIPE_BYTES];  // The last 64 bytes of the whole input, which may begin in the previous tile.
    const int64_t before = left < STRIPE_BYTES ? STRIPE_BYTES - left : 0;
    memcpy(last, digest->tail + STRIPE_BYTES - before, (size_t)before);
    memcpy(last + before, rest + left - (STRIPE_BYTES - before), (size_t)(STRIPE_BYTES - before));
    take_stripes(digest->lanes, last, 1, SECRET + SECRET_BYTES - STRIPE_BYTES - 7);
    const uint64_t total = (uint64_t)digest->total;
    digest->low = merged_lanes(digest->lanes, SECRET + 11, total * PRIME_64[0]);
    digest->high = merged_lanes(digest->lanes, SECRET + SECRET_BYTES - STRIPE_BYTES - 11, ~(total * PRIME_64[1]));
}

static void take_bytes(Digest *digest, const uint8_t *data, int64_t count) {
    if (!digest || !count) return;
    if (digest->done == 0) memcpy(digest->lanes, FIRST_LANES, sizeof(FIRST_LANES));
    digest->done += count;
    const int64_t after = digest->total - digest->done;
    int64_t at = 0;
    // A block is mixed only when something follows it.
    for (; count - at + after > BLOCK_BYTES && count - at >= BLOCK_BYTES; at += BLOCK_BYTES) {
        take_stripes(digest->lanes, data + at, BLOCK_BYTES / STRIPE_BYTES, SECRET);
        mix_lanes(digest->lanes);
    }
    if (after == 0) {
        if (at >= STRIPE_BYTES) memcpy(digest->tail, data + at - STRIPE_BYTES, STRIPE_BYTES);
        finish_digest(digest, data + at, count - at);
    } else {
        memcpy(digest->tail, data + count - STRIPE_BYTES, STRIPE_BYTES);
    }
}
