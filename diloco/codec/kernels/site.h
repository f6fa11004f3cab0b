// A site's passes over its fragment, which the model stores in pieces: encoding an update, following the down-link, and
// taking a version.  Updates in flight are decoded tile by tile from their payloads, never into a whole tensor.

// Returns the values of a tile: in place if one piece has all of them, otherwise copied into `room`.
static const float *gathered(const Pieces *pieces, int64_t *piece, int64_t at, int64_t count, float *room) {
    while (at >= pieces->ends[*piece]) ++*piece;
    const int64_t begins = *piece ? pieces->ends[*piece - 1] : 0;
    if (at + count <= pieces->ends[*piece]) return pieces->values[*piece] + (at - begins);
    for (int64_t done = 0, k = *piece; done < count; k++) {
        const int64_t first = k ? pieces->ends[k - 1] : 0, end = pieces->ends[k];
        const int64_t here = (end < at + count ? end : at + count) - (at + done);
        if (here > 0) memcpy(room + done, pieces->values[k] + (at + done - first), 4 * (size_t)here);
        done += here > 0 ? here : 0;
    }
    return room;
}

static void scattered(const Pieces *pieces, int64_t piece, int64_t at, int64_t count, const float *values) {
    for (int64_t done = 0, k = piece; done < count; k++) {
        const int64_t first = k ? pieces->ends[k - 1] : 0, end = pieces->ends[k];
        const int64_t here = (end < at + count ? end : at + count) - (at + done);
        if (here > 0) memcpy(pieces->values[k] + (at + done - first), values + done, 4 * (size_t)here);
        done += here > 0 ? here : 0;
    }
}

// x = base - local - the updates in `sent`
static inline int less_sent(const float *base, const float *local, const Update *sent, int64_t sent_count, int64_t at, int64_t count, float *x) {
    alignas(64) float told[TILE];
    for (int64_t i = 0; i < count; i++) x[i] = base[i] - local[i];
    for (int64_t k = 0; k < sent_count; k++) {
        const int status = fold_tile(&sent[k].format, sent[k].payload, at, count, WRITE, 0.0f, told, told, told);
        if (status != DONE) return status;
        for (int64_t i = 0; i < count; i++) x[i] -= told[i];
    }
    return DONE;
}

// Encodes the tile by encode_flow; returns false where the loops must do it.
static inline bool flows(const Seal *job, const float *local, int64_t at, int64_t count, float *told, int *status) {
    if (job->sent_count || count % job->format.block) return false;
    const Flow flow = {job->base + at, local, nullptr, 0.0f, told};
    return encode_whole_blocks(&job->format, &flow, at, count, job->payload, status) == count;
}

static int seal(Seal *job) {
    alignas(64) float x[TILE], room[TILE], told[TILE];
    int64_t piece = 0;
    for (int64_t at = job->start; at < job->stop; at += job->tile) {
        const int64_t count = job->stop - at < job->tile ? job->stop - at : job->tile;
        const float *local = gathered(&job->local, &piece, at, count, room);
        float *out = job->digest ? told : nullptr;
        int status = DONE;
        if (!flows(job, local, at, count, out, &status)) {
            status = less_sent(job->base + at, local, job->sent, job->sent_count, at, count, x);
            if (status == DONE) status = encode_tile(&job->format, x, at, count, job->payload, out);
        }
        if (status != DONE) return status;
        if (!job->digest) continue;
        take_bytes(job->digest, (const uint8_t *)told, 4 * count);
        job->squares = sum_products(told, told, count, job->squares);
    }
    return DONE;
}

static int follow(Follow *job) {
    alignas(64) float x[TILE], sum[TILE];
    for (int64_t at = job->start; at < job->stop; at += job->tile) {
        const int64_t count = job->stop - at < job->tile ? job->stop - at : job->tile;
        const float *held = job->held + at;
        for (int64_t k = 0; k < job->parts_count; k++, held = sum) {
            const Update *part = job->parts + k;
            const int status = fold_tile(&part->format, part->payload, at, count, job->whole ? WRITE : ADD, 0.0f, held, sum, x);
            if (status != DONE) return status;
        }
        take_bytes(job->digest, (const uint8_t *)held, 4 * count);
        write_out(job->out + at, held, count);
    }
    written_out();
    return DONE;
}

static int take(const Take *job) {
    alignas(64) float unsent[TILE], room[TILE];
    int64_t piece = 0;
    for (int64_t at = job->start; at < job->stop; at += job->tile) {
        const int64_t count = job->stop - at < job->tile ? job->stop - at : job->tile;
        const float *local = gathered(&job->local, &piece, at, count, room), *fresh = job->new_base + at;
        const int status = less_sent(job->old_base + at, local, job->merged, job->merged_count, at, count, unsent);
        if (status != DONE) return status;
        if (local == room) {
            for (int64_t i = 0; i < count; i++) unsent[i] = fresh[i] - unsent[i];
            scattered(&job->local, piece, at, count, unsent);
        } else {
            float *out = const_cast<float *>(local);
            for (int64_t i = 0; i < count; i++) out[i] = fresh[i] - unsent[i];
        }
    }
    return DONE;
}
