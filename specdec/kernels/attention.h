/* Grouped-query attention over a cache, for any number of tokens.
 *
 * Keys are taken in spans of SPAN positions. What a span adds to a query is summed up apart, relative to the span's
 * highest score, and spans are merged in order; so threads share the spans of a long context, and what lies beyond a
 * query's sight adds zeros. Spans and vectors are laid out by position: a token that sees the same tokens gets the
 * same bits, alone, in a draft, in a tree or in a batch. */

enum { SPAN = 256, QUERIES = 192 }; /* with both, keys, values and scores of a span stay in the second-level cache */
enum { ITEMS = 128 };               /* spans of queries that are summed up before they are merged */

typedef struct {
    product qkv, output;
    const float *norms; /* [heads + kv_heads, width], or nothing */
    float eps;
    long heads, kv_heads, width;
} attention;

/* One forward pass over `tokens` new tokens of each of `batch` sequences. Sequence b holds starts[b] entries; entry e of
 * head h lies at slots[b] * slot_stride + h * head_stride + e * width. */
typedef struct {
    long batch, tokens;
    const long *slots, *starts;
    long slot_stride, head_stride;
    const float *cos, *sin; /* [batch, tokens, width]; the sines of the first half are negative */
    const uint8_t *tree;    /* [batch, tokens, nodes]: which of the last `nodes` entries it sees; or nothing: causal */
    long nodes;
} forward_pass;

/* x * cos + (x with its halves exchanged) * sin; y may be x. */
static inline void turn(const float *x, const float *cos, const float *sin, float *y, long d) {
    for (long i = 0, half = d / 2; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = a * cos[i] + b * sin[i];
        y[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* What one token's product holds, heads and heads of keys and of values: queries turned where they lie, keys turned
 * into the cache, values copied there. */
static void place(const attention *w, const forward_pass *p, long b, long t, float *qkv, float *keys, float *values) {
    const long d = w->width, at = p->slots[b] * p->slot_stride + (p->starts[b] + t) * d;
    const float *cos = p->cos + (b * p->tokens + t) * d, *sin = p->sin + (b * p->tokens + t) * d;
    for (long h = 0; h < w->heads + w->kv_heads; h++) {
        float *x = qkv + h * d;
        if (w->norms) normalise(x, w->norms + h * d, x, d, w->eps);
        turn(x, cos, sin, h < w->heads ? x : keys + at + (h - w->heads) * p->head_stride, d);
    }
    for (long h = 0; h < w->kv_heads; h++)
        memcpy(values + at + h * p->head_stride, qkv + (w->heads + w->kv_heads + h) * d, d * sizeof(float));
}

/* Sequence b's tokens from `token` on, by all query heads that share one key head: rows, token by token. */
typedef struct {
    long b, head, token, rows;
    long since, length; /* entries that all of them see (in a tree), entries that some of them see */
} queries;

static queries queries_of(const attention *w, const forward_pass *p, long index, long parts, long most) {
    const long b = index / parts / w->kv_heads, token = index % parts * most, count = smaller(most, p->tokens - token);
    const long length = p->starts[b] + (p->tree ? p->tokens : token + count);
    return (queries){b,     index / parts % w->kv_heads, token, count * (w->heads / w->kv_heads), length - p->nodes,
                     length};
}

static long spans_of(long length) { return (length + SPAN - 1) / SPAN; }

/* Entries begin .. end hold the positions of a span from `first` on. The place of a tree's entry says nothing of its
 * position, so where a span may hold some of the tree's positions, it takes all of its entries. */
typedef struct {
    long first, begin, end;
} reach;

static reach reach_of(const forward_pass *p, const queries *q, long span) {
    const long first = span * SPAN, beyond = first + SPAN;
    if (p->tree) return (reach){first, smaller(first, q->since), beyond <= q->since ? beyond : q->length};
    return (reach){first, first, smaller(beyond, q->length)};
}

/* PANEL keys on their side, [d, PANEL]; those beyond `here` are zeros. Asks for their values on the way. */
static void turn_keys(const float *keys, const float *values, long here, long d, float *block) {
    if (here < PANEL) memset(block, 0, d * PANEL * sizeof(float));
    const long whole = here / LANES * LANES, wide = d / LANES * LANES;
    for (long c = 0; c < whole; c += LANES) {
        for (long i = 0; i < wide; i += LANES) {
            for (long l = 0; l < LANES * LANES; l += LINE) __builtin_prefetch(values + c * d + i * LANES + l);
            transpose(keys + c * d + i, d, block + i * PANEL + c, PANEL);
        }
        for (long l = c; l < c + LANES; l++)
            for (long i = wide; i < d; i++) block[i * PANEL + l] = keys[l * d + i];
    }
    for (long c = whole; c < here; c++)
        for (long i = 0; i < d; i++) block[i * PANEL + c] = keys[c * d + i];
}

/* The scores [padded] of one token's query within a span become exp(score - highest); returns their sum. Position n
 * adds to lane n % LANES, a tree's entry as well. */
static float weigh(const forward_pass *p, const queries *q, reach r, long t, long padded, float *scores, float *highest) {
    const long size = r.end - r.begin, seen = p->tree ? size : larger(0, smaller(size, p->starts[q->b] + t + 1 - r.begin));
    const long cached = p->tree ? smaller(size, q->since - r.begin) : size;
    const uint8_t *sees = p->tree ? p->tree + (q->b * p->tokens + t) * p->nodes : NULL;
    for (long l = seen; l < padded; l++) scores[l] = -INFINITY;
    for (long l = cached, n = q->since; l < size; n += sees[l++ - cached])
        if (!sees[l - cached] || n < r.first || n >= r.first + SPAN) scores[l] = -INFINITY;

    vec high = all(-FLT_MAX), totals = all(0);
    for (long l = 0; l < padded; l += LANES) high = either(load(scores + l) > high, load(scores + l), high);
    *highest = largest(high);
    const long whole = cached < size ? cached / LANES * LANES : padded;
    for (long l = 0; l < padded; l += LANES) {
        const vec e = exponential(load(scores + l) - *highest);
        store(scores + l, e);
        if (l < whole) totals += e;
    }
    for (long l = whole; l < cached; l++) totals[l % LANES] += scores[l];
    for (long l = cached, n = q->since; l < size; n += sees[l++ - cached]) totals[n % LANES] += scores[l];
    return sum(totals);
}

/* Columns c .. c + PANEL of values [size, d], those beyond d zeros, without what lies between: read from there they
 * share few places of the first-level cache. */
static void pack_values(const float *values, long size, long d, long c, float *block) {
    const long here = smaller(PANEL, d - c);
    if (here == PANEL)
        for (long l = 0; l < size; l++, block += PANEL) memcpy(block, values + l * d + c, PANEL * sizeof(float));
    else
        for (long l = 0; l < size; l++)
            for (long i = 0; i < PANEL; i++) block[l * PANEL + i] = i < here ? values[l * d + c + i] : 0;
}

/* mixed [rows, d] = weights [rows, padded] times values [size, d]. Asks for as many floats from `next` on. */
static void mix(const float *weights, long padded, const float *values, long size, long d, long rows, float *mixed,
                float *block, float *tail, const float *next) {
    for (long c = 0; c < d; c += PANEL) {
        const int fits = c + PANEL <= d;
        if (fits && rows <= 2 * ROWS) {
            panel_float32(values + c, d, weights, padded, mixed + c, d, rows, size, next + c);
            continue;
        }
        pack_values(values, size, d, c, block);
        panel_float32(block, PANEL, weights, padded, fits ? mixed + c : tail, fits ? d : PANEL, rows, size, next + c * size);
        for (long r = 0; r < rows && !fits; r++) memcpy(mixed + r * d + c, tail + r * PANEL, (d - c) * sizeof(float));
    }
}

static long padded_size(long size) { return (size + PANEL - 1) / PANEL * PANEL; }

/* What one span adds: found holds values mixed [rows, d], highest scores [rows] and sums of weights [rows]. asked lies
 * as in the product, keys and values as in the cache. */
static void attend(const attention *w, const forward_pass *p, const queries *q, reach r, const float *asked,
                   const float *keys, const float *values, float *found, float *scratch) {
    const long group = w->heads / w->kv_heads, d = w->width, rows = q->rows, size = r.end - r.begin;
    const long padded = padded_size(size), stride = (w->heads + 2 * w->kv_heads) * d;
    float *scaled = scratch, *tail = scaled + rows * d, *scores = tail + rows * PANEL, *block = scores + rows * padded;
    const float scale = 1.f / sqrtf(d);
    for (long i = 0; i < rows; i++)
        for (long c = 0; c < d; c++)
            scaled[i * d + c] = asked[(q->token + i / group) * stride + (q->head * group + i % group) * d + c] * scale;
    keys += r.begin * d, values += r.begin * d;
    for (long l = 0; l < size; l += PANEL) {
        turn_keys(keys + l * d, values + l * d, smaller(PANEL, size - l), d, block);
        panel_float32(block, PANEL, scaled, d, scores + l, padded, rows, d, keys + (l + 2 * PANEL) * d);
    }
    float *highest = found + rows * d, *totals = highest + rows;
    for (long i = 0; i < rows; i++)
        totals[i] = weigh(p, q, r, q->token + i / group, padded, scores + i * padded, highest + i);
    mix(scores, padded, values, size, d, rows, found, block, tail, keys + size * d);
}

/* What all spans found, each `room` floats, becomes the queries' rows of out [tokens, heads, d]. */
static void merge(const attention *w, const queries *q, const float *found, long room, float *out) {
    const long group = w->heads / w->kv_heads, d = w->width, rows = q->rows, spans = spans_of(q->length);
    for (long i = 0; i < rows; i++) {
        float *y = out + ((q->token + i / group) * w->heads + q->head * group + i % group) * d;
        const float *highest = found + rows * d + i, *totals = highest + rows;
        float peak = -FLT_MAX, total = 0;
        for (long s = 0; s < spans; s++) peak = highest[s * room] > peak ? highest[s * room] : peak;
        memset(y, 0, d * sizeof(float));
        for (long s = 0; s < spans; s++) {
            const float weight = exponential(all(highest[s * room] - peak))[0], *mixed = found + s * room + i * d;
            total += weight * totals[s * room];
            for (long c = 0; c < d; c++) y[c] += weight * mixed[c];
        }
        for (long c = 0; c < d; c++) y[c] /= total;
    }
}

/* Queries [batch, tokens, ..] that lie in the product, to out [batch, tokens, heads, d]. Returns whether there was
 * memory for it; if not, nothing may be read. */
static int attend_all(const attention *w, const forward_pass *p, const float *qkv, const float *keys,
                      const float *values, float *out) {
    const long d = w->width, group = w->heads / w->kv_heads, most = larger(1, QUERIES / group);
    const long parts = (p->tokens + most - 1) / most, each = (p->tokens + parts - 1) / parts;
    const long all_queries = p->batch * w->kv_heads * parts, rows = each * group, room = rows * (d + 2);
    long longest = 0;
    for (long b = 0; b < p->batch; b++) longest = larger(longest, p->starts[b] + p->tokens);
    const long spans = spans_of(longest), wave = smaller(all_queries, larger(1, ITEMS / spans));
    const long width = padded_size(smaller(longest, SPAN + p->nodes));
    float *found = malloc(wave * spans * room * sizeof(float));
    int complete = found != NULL;

#pragma omp parallel reduction(& : complete) if (all_queries * rows * longest * d > SMALL)
    {
        float *scratch = malloc((rows * (d + PANEL + width) + PANEL * larger(d, width)) * sizeof(float));
        complete = found && scratch;
        for (long first = 0; first < all_queries; first += wave) {
            const long here = smaller(wave, all_queries - first);
#pragma omp for schedule(dynamic, larger(1, here * spans / 16))
            for (long item = 0; item < here * spans; item++) {
                const queries q = queries_of(w, p, first + item / spans, parts, each);
                const long span = item % spans, at = p->slots[q.b] * p->slot_stride + q.head * p->head_stride;
                if (complete && span < spans_of(q.length))
                    attend(w, p, &q, reach_of(p, &q, span), qkv + q.b * p->tokens * w->qkv.outputs, keys + at,
                           values + at, found + item * room, scratch);
            }
#pragma omp for schedule(static)
            for (long i = 0; i < here; i++) {
                const queries q = queries_of(w, p, first + i, parts, each);
                if (complete) merge(w, &q, found + i * spans * room, room, out + q.b * p->tokens * w->heads * d);
            }
        }
        free(scratch);
    }
    free(found);
    return complete;
}

/* y [batch, tokens, outputs] = output(attention(qkv(x))) + onto. The new entries are written to keys and values. Returns
 * whether there was memory for it; if not, nothing may be read. */
int specdec_self_attention(const attention *w, const forward_pass *p, float *keys, float *values, const float *x,
                           const float *onto, float *y) {
    const long m = p->batch * p->tokens, stride = w->qkv.outputs, inner = w->heads * w->width;
    float *qkv = malloc(m * (stride + inner) * sizeof(float)), *mixed = qkv + m * stride;
    if (!qkv) return 0;
    specdec_product(&w->qkv, x, NULL, qkv, m);
#pragma omp parallel for schedule(static) if (m * stride > SMALL)
    for (long i = 0; i < m; i++) place(w, p, i / p->tokens, i % p->tokens, qkv + i * stride, keys, values);
    const int complete = attend_all(w, p, qkv, keys, values, mixed);
    if (complete) specdec_product(&w->output, mixed, onto, y, m);
    free(qkv);
    return complete;
}
