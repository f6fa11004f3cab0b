// The functions that Python calls, at the level of the file that includes this one: each is a loop over tiles.

// Encodes as many of `count` values from `start` on as encode_flow can in whole blocks; returns how many values that is.
static int64_t encode_whole_blocks(const Format *format, const Flow *flow, int64_t start, int64_t count, uint8_t *payload, int *status) {
    const int64_t block = format->block, blocks = count / block;
    uint8_t *scales = payload + start / block * 2;
    uint8_t *codes = payload + (format->numel + block - 1) / block * 2;
    if (format->kind == INT8) return block * encode_flow<8>(flow, blocks, block, scales, codes + start, status);
    if (format->kind == INT4) return block * encode_flow<4>(flow, blocks, block, scales, codes + start / 2, status);
    return 0;
}

static int encode(const Encode *job) {
    const int64_t step = tile_of(job->format.block);
    alignas(64) float x[TILE];
    const Flow flow = {job->values, job->less_count ? job->less[0] : nullptr, job->residual, job->beta, job->decoded};
    int flowed = DONE;
    const int64_t begin =
        job->less_count > 1 ? 0 : encode_whole_blocks(&job->format, &flow, job->start, job->count, job->payload, &flowed);
    if (flowed != DONE) return flowed;
    for (int64_t at = begin; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        const float *a = job->values + at;
        if (job->less_count == 0) memcpy(x, a, 4 * (size_t)count);
        else {
            const float *b = job->less[0] + at;
            for (int64_t i = 0; i < count; i++) x[i] = a[i] - b[i];
        }
        for (int64_t k = 1; k < job->less_count; k++) {
            const float *b = job->less[k] + at;
            for (int64_t i = 0; i < count; i++) x[i] -= b[i];
        }
        if (job->residual) {
            const float *r = job->residual + at;
            for (int64_t i = 0; i < count; i++) x[i] = x[i] + r[i] * job->beta;
        }
        alignas(64) float room[TILE];
        float *told = job->decoded ? job->decoded + at : job->residual ? room : nullptr;
        const int status = encode_tile(&job->format, x, job->start + at, count, job->payload, told);
        if (status != DONE) return status;
        if (job->residual) {
            float *r = job->residual + at;
            for (int64_t i = 0; i < count; i++) r[i] = x[i] - told[i];
        }
    }
    return DONE;
}

static int decode(const Decode *job) {
    const int64_t step = tile_of(job->format.block);
    alignas(64) float x[TILE];
    for (int64_t at = 0; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        const int status = fold_tile(&job->format, job->payload, job->start + at, count, job->fold, job->share,
                                     job->held + at, job->out + at, x);
        if (status != DONE) return status;
    }
    return DONE;
}

// Adds to all three sums, two blocks at a time: each value is loaded and widened to fp64 once.
static void sum_both(Measure *job, const float *x, const float *m, int64_t count) {
    int64_t at = 0;
    for (; at + 2 * SUM_BLOCK <= count; at += 2 * SUM_BLOCK) {
        alignas(64) double lanes[3][2 * SUM_LANES];
        add_two_blocks_of_both(x + at, m + at, lanes);
        double *totals[] = {&job->squares, &job->products, &job->against_squares};
        for (int k = 0; k < 3; k++) {
            *totals[k] += halves(lanes[k]);
            *totals[k] += halves(lanes[k] + SUM_LANES);
        }
    }
    job->squares = sum_products(x + at, x + at, count - at, job->squares);
    job->products = sum_products(x + at, m + at, count - at, job->products);
    job->against_squares = sum_products(m + at, m + at, count - at, job->against_squares);
}

static int measure(Measure *job) {
    const int64_t step = job->tile;
    alignas(64) float room[TILE];
    uint32_t largest = 0;
    for (int64_t at = 0; at < job->count; at += step) {
        const int64_t count = job->count - at < step ? job->count - at : step;
        float *x = job->out ? job->out + at : room;
        const int status = fold_tile(&job->format, job->payload, job->start + at, count, WRITE, 0.0f, x, x, x);
        if (status != DONE) return status;
        const uint32_t bits = largest_bits(x, count);
        largest = bits > largest ? bits : largest;
        if (largest >= INFINITE) return NOT_FINITE;
        take_bytes(job->digest, (const uint8_t *)x, 4 * count);
        if (job->against) sum_both(job, x, job->against + at, count);
        else job->squares = sum_products(x, x, count, job->squares);
    }
    job->largest = as_float(largest);
    return DONE;
}

// Computes one tile of merge_mean; `culprit` is the update being read, or -1 at the end.
static int mean_tile(const Outer *job, int64_t start, int64_t count, float *mean, int64_t *culprit) {
    alignas(64) float x[TILE], site[TILE];
    for (int64_t k = 0; k < job->updates_count; k++) {
        const Update *update = job->updates + k;
        *culprit = k;
        // The first site's sum becomes the mean; another site's sum is built in `site`, unless it has a single update.
        const bool opens = update->place & OPENS_SITE, ends = update->place & ENDS_SITE, in_mean = update->place & IN_MEAN;
        float *sum = in_mean || (opens && ends) ? mean : site;
        const int fold = !opens ? ADD : sum == mean && !in_mean ? TOWARDS : WRITE;
        const int status =
            fold_tile(&update->format, update->payload, start, count, fold, update->share, sum, sum, x);
        if (status != DONE) return status;
        if (sum == site && ends) move_towards(mean, mean, site, update->share, count);
    }
    *culprit = -1;
    return DONE;
}

// Computes one tile of outer_step.  An addition with a factor rounds once where torch's does (FUSED).  Returns the largest
// bits of theta, and writes theta minus the published values, which a lossy down-link encodes, into x.
template <bool FUSED, int RULE, bool FIRST>
static inline uint32_t step_tile(const Outer *job, int64_t at, int64_t count, const float *g, float *theta, float *momentum, float *x) {
    const float mu = job->momentum_factor, minus_lr = job->minus_lr;
    const float by_g = job->momentum_by_g, by_momentum = job->theta_by_momentum;
    const float *before = job->theta + at, *held = FIRST ? g : job->momentum + at, *published = job->published + at;
    const auto plus = [](float a, float b, float factor) { return FUSED ? __builtin_fmaf(b, factor, a) : a + b * factor; };
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        float direction = g[i];
        if (RULE == HEAVY_BALL || RULE == NESTEROV) {
            const float m = FIRST ? g[i] : held[i] * mu + g[i];
            momentum[i] = m;
            direction = RULE == HEAVY_BALL ? m : plus(g[i], m, mu);
        }
        float value = plus(before[i], direction, minus_lr);
        if (RULE == PART) {
            momentum[i] = FIRST ? g[i] * by_g : plus(g[i] * by_g, held[i], mu);
            value = FIRST ? value : plus(value, held[i], by_momentum);
        }
        const int32_t magnitude = (int32_t)(as_bits(value) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
        theta[i] = value;
        x[i] = value - published[i];
    }
    return (uint32_t)largest;
}

template <bool FUSED>
static uint32_t step_any(const Outer *job, int64_t at, int64_t count, const float *g, float *theta, float *momentum, float *x) {
    if (job->rule == WITHOUT_MOMENTUM)
        return step_tile<FUSED, WITHOUT_MOMENTUM, true>(job, at, count, g, theta, momentum, x);
    if (job->rule == HEAVY_BALL)
        return job->momentum ? step_tile<FUSED, HEAVY_BALL, false>(job, at, count, g, theta, momentum, x)
                             : step_tile<FUSED, HEAVY_BALL, true>(job, at, count, g, theta, momentum, x);
    if (job->rule == PART)
        return job->momentum ? step_tile<FUSED, PART, false>(job, at, count, g, theta, momentum, x)
                             : step_tile<FUSED, PART, true>(job, at, count, g, theta, momentum, x);
    return job->momentum ? step_tile<FUSED, NESTEROV, false>(job, at, count, g, theta, momentum, x)
                         : step_tile<FUSED, NESTEROV, true>(job, at, count, g, theta, momentum, x);
}

static int outer(Outer *job) {
    alignas(64) float g[TILE], x[TILE], theta[TILE], momentum[TILE], told[TILE];
    for (int64_t at = job->start; at < job->stop; at += job->tile) {
        const int64_t count = job->stop - at < job->tile ? job->stop - at : job->tile;
        int status = mean_tile(job, at, count, g, &job->culprit);
        if (status != DONE) return status;
        job->squares = sum_products(g, g, count, job->squares);
        const uint32_t largest = job->fused ? step_any<true>(job, at, count, g, theta, momentum, x)
                                            : step_any<false>(job, at, count, g, theta, momentum, x);
        if (largest >= INFINITE) return THETA_NOT_FINITE;
        write_out(job->theta_after + at, theta, count);
        if (job->rule != WITHOUT_MOMENTUM) write_out(job->momentum_after + at, momentum, count);
        status = encode_tile(&job->down, job->lossless ? theta : x, at, count, job->payload, told);
        if (status != DONE) return status;
        if (!job->lossless) {
            const float *before = job->published + at;
            for (int64_t i = 0; i < count; i++) told[i] = told[i] + before[i];
            if (largest_bits(told, count) >= INFINITE) return PUBLISHED_NOT_FINITE;
        }
        write_out(job->published_after + at, told, count);
    }
    written_out();
    return DONE;
}
