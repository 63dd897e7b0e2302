/* Decoding on a CPU, a few rows at a time: in float32 all of a layer, in bfloat16 what lies between its products.
 *
 * A step reads every weight once, so its floor is what memory delivers. A product of up to ROWS rows stays on that
 * floor here: every vector of weights is loaded once and multiplied by all rows before the next is needed, and lines
 * are asked for well ahead. What lies between two products is one call each, for after a product has streamed
 * megabytes through the caches every further operation starts cold.
 *
 * A row's result does not depend on how many rows come with it: every sum runs over its terms in one order. Logits of
 * a token are therefore the same bits whether it is decoded alone or verified among others.
 *
 * Built by library.py for the processor it runs on, with GCC's vector extensions. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 12 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 6 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 12 };
#else
enum { LANES = 4, ROWS = 6 };
#endif
enum { PANEL = 2 * LANES }; /* outputs computed together: two vectors */
enum { AHEAD = 1024 };      /* floats between what is multiplied and what is asked for: without it, a third slower */
enum { SMALL = 1 << 15 };   /* below so many operations a second thread costs more than it does */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t bfloat16;
typedef bfloat16 halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec all(float s) { return (vec){0} + s; }
static inline vec either(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
static inline long smaller(long a, long b) { return a < b ? a : b; }

static inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* bfloat16 is the upper half of a float32; back, to the nearest, even where two are as near, and NaN stays NaN. */
static inline vec widen(const bfloat16 *p) { return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16); }
static inline void narrow(bfloat16 *p, vec v) {
    const bits all_bits = (bits)v, rounded = (all_bits + 0x7fff + (all_bits >> 16 & 1)) >> 16;
    const bits broken = (bits)(v != v);
    *(halves *)p = __builtin_convertvector((broken & 0x7fc0) | (~broken & rounded), halves);
}

/* e^x to about one unit in the last place; 0 below -87.3, and no more than e^88. Cephes' polynomial. */
static inline vec exponential(vec x) {
    const float log2e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, rounder = 12582912.f;
    const ivec vanishes = x < all(-87.3f);
    x = either(x > all(88.f), all(88.f), either(vanishes, all(-87.3f), x));
    const vec shifted = x * log2e + rounder, n = shifted - rounder; /* adding 1.5 * 2^23 rounds to an integer */
    const vec r = x - n * ln2_high - n * ln2_low;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const vec mantissa = p * r * r + r + 1.f;
    const ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    return either(vanishes, all(0), mantissa * (vec)exponent);
}

/* y[m][0 .. PANEL) = sum over i < k of x[m][i] * w[i][0 .. PANEL), for a fixed number of rows m. On the way, lines from
 * `next` on are asked for, `pace` floats further every time. */
#define TILE(M)                                                                                                       \
    static void tile_##M(const float *w, long w_stride, const float *x, long x_stride, float *y, long y_stride, long k, \
                         const float *next, long pace) {                                                              \
        vec left[M], right[M];                                                                                        \
        for (int m = 0; m < M; m++) left[m] = right[m] = all(0);                                                      \
        for (long i = 0; i < k; i++, w += w_stride, next += pace) {                                                   \
            const vec a = load(w), b = load(w + LANES);                                                               \
            __builtin_prefetch(next);                                                                                 \
            __builtin_prefetch(next + LANES);                                                                         \
            _Pragma("GCC unroll 12") for (int m = 0; m < M; m++) {                                                    \
                left[m] += a * x[m * x_stride + i];                                                                   \
                right[m] += b * x[m * x_stride + i];                                                                  \
            }                                                                                                         \
        }                                                                                                             \
        for (int m = 0; m < M; m++) {                                                                                 \
            store(y + m * y_stride, left[m]);                                                                         \
            store(y + m * y_stride + LANES, right[m]);                                                                \
        }                                                                                                             \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)

typedef void tile_function(const float *, long, const float *, long, float *, long, long, const float *, long);
static tile_function *const tiles[] = {0,      tile_1, tile_2, tile_3,  tile_4,  tile_5, tile_6,
                                       tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

/* The same for any number of rows, in tiles of equal height as nearly as can be. One tile asks for what it will need
 * itself; of several, each asks for its share of the panel that follows this one. */
static void panel(const float *w, long w_stride, const float *x, long x_stride, float *y, long y_stride, long rows,
                  long k) {
    const long parts = (rows + ROWS - 1) / ROWS, pace = w_stride / parts;
    const float *next = parts == 1 ? w + AHEAD : w + k * w_stride;
    for (long left = parts, height; left > 0; left--, rows -= height, next += k * pace) {
        height = (rows + left - 1) / left;
        tiles[height](w, w_stride, x, x_stride, y, y_stride, k, next, pace);
        x += height * x_stride, y += height * y_stride;
    }
}

/* LANES rows of LANES floats turn into columns, in log2(LANES) rounds of exchanging halves. */
#define EXCHANGE(HALF)                                                                                                \
    for (int i = 0; i < LANES; i++)                                                                                   \
        if (!(i & HALF)) {                                                                                            \
            const ivec high = (lane & HALF) != 0;                                                                     \
            const vec a = row[i], b = row[i + HALF];                                                                  \
            row[i] = __builtin_shuffle(a, b, (high & (lane - HALF + LANES)) | (~high & lane));                        \
            row[i + HALF] = __builtin_shuffle(a, b, (high & (lane + LANES)) | (~high & (lane + HALF)));               \
        }
static inline void transpose(const float *from, long from_stride, float *to, long to_stride) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = load(from + i * from_stride);
    EXCHANGE(1)
    EXCHANGE(2)
    if (LANES > 4) { EXCHANGE(4 % LANES) }
    if (LANES > 8) { EXCHANGE(8 % LANES) }
    for (int i = 0; i < LANES; i++) store(to + i * to_stride, row[i]);
}

int specdec_panel(void) { return PANEL; }

typedef struct {
    const float *packed, *bias; /* [ceil(outputs / PANEL), inputs, PANEL]; [outputs] or nothing */
    long inputs, outputs;
} product;

/* y [m, outputs] = x [m, inputs] times the weight, plus its bias, plus onto [m, outputs] or nothing. */
void specdec_product(const product *w, const float *x, const float *onto, float *y, long m) {
    enum { TOGETHER = 480 }; /* rows whose x stays in the second-level cache while panels pass by */
    const long k = w->inputs, n = w->outputs, panels = (n + PANEL - 1) / PANEL;
    for (long first = 0; first < m; first += TOGETHER) {
        const long rows = smaller(TOGETHER, m - first);
        const float *in = x + first * k, *under = onto ? onto + first * n : NULL;
        float *out = y + first * n;
#pragma omp parallel for schedule(static) if (rows * k * n > SMALL)
        for (long p = 0; p < panels; p++) {
            const float *packed = w->packed + p * k * PANEL;
            const long column = p * PANEL, width = smaller(PANEL, n - column);
            if (width == PANEL) {
                panel(packed, PANEL, in, k, out + column, n, rows, k);
            } else {
                for (long r = 0; r < rows; r++) {
                    float whole[PANEL];
                    panel(packed, PANEL, in + r * k, k, whole, PANEL, 1, k);
                    memcpy(out + r * n + column, whole, width * sizeof(float));
                }
            }
            for (long r = 0; r < rows && (w->bias || under); r++)
                for (long c = column; c < column + width; c++) {
                    if (w->bias) out[r * n + c] += w->bias[c];
                    if (under) out[r * n + c] += under[r * n + c];
                }
        }
    }
}

/* y = x / sqrt(mean of x^2 + eps) * weight, of one row of d; y may be x. */
static inline void normalise(const float *x, const float *weight, float *y, long d, float eps) {
    vec squares = all(0);
    long i = 0;
    for (; i + LANES <= d; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < d; i++) total += x[i] * x[i];
    const float factor = 1.f / sqrtf(total / d + eps);
    for (i = 0; i < d; i++) y[i] = x[i] * factor * weight[i];
}

/* The same of every row of [m, d]. */
void specdec_rms_norm(const float *x, const float *weight, float *y, long m, long d, float eps) {
    for (long r = 0; r < m; r++) normalise(x + r * d, weight, y + r * d, d, eps);
}

/* y = silu(gate) * up, of one row each; silu(g) = g / (1 + e^-g). */
static void swiglu(const float *gate, const float *up, float *y, long inner) {
    long i = 0;
    for (; i + LANES <= inner; i += LANES) {
        const vec g = load(gate + i);
        store(y + i, g / (1.f + exponential(-g)) * load(up + i));
    }
    if (i < inner) {
        float last[LANES] = {0};
        memcpy(last, gate + i, (inner - i) * sizeof(float));
        const vec g = load(last), silu = g / (1.f + exponential(-g));
        for (long j = i; j < inner; j++) y[j] = silu[j - i] * up[j];
    }
}

/* The same two for m rows in bfloat16, computed in float32; widths are multiples of LANES. */
void specdec_rms_norm_bfloat16(const bfloat16 *x, const float *weight, bfloat16 *y, long m, long d, float eps) {
    for (long r = 0; r < m; r++, x += d, y += d) {
        vec squares = all(0);
        for (long i = 0; i < d; i += LANES) squares += widen(x + i) * widen(x + i);
        const float factor = 1.f / sqrtf(sum(squares) / d + eps);
        for (long i = 0; i < d; i += LANES) narrow(y + i, widen(x + i) * factor * load(weight + i));
    }
}

void specdec_swiglu_bfloat16(const bfloat16 *gate_up, bfloat16 *y, long m, long inner) {
#pragma omp parallel for schedule(static) if (m * inner > SMALL / 2)
    for (long r = 0; r < m; r++) {
        const bfloat16 *gate = gate_up + 2 * r * inner, *up = gate + inner;
        for (long i = 0; i < inner; i += LANES) {
            const vec g = widen(gate + i);
            narrow(y + r * inner + i, g / (1.f + exponential(-g)) * widen(up + i));
        }
    }
}

/* y [m, outputs of down] = down(silu(gate(x)) * up(x)) + onto. Returns whether there was memory for it. */
int specdec_feed_forward(const product *gate_up, const product *down, const float *x, const float *onto, float *y,
                         long m) {
    const long inner = down->inputs;
    float *both = malloc(3 * m * inner * sizeof(float)), *gated = both + 2 * m * inner;
    if (!both) return 0;
    specdec_product(gate_up, x, NULL, both, m);
#pragma omp parallel for schedule(static) if (m * inner > SMALL / 2)
    for (long r = 0; r < m; r++) {
        const float *gate = both + 2 * r * inner;
        swiglu(gate, gate + inner, gated + r * inner, inner);
    }
    specdec_product(down, gated, onto, y, m);
    free(both);
    return 1;
}

/* The vector at x, of which `left` floats are there; the rest are as good as not. */
static inline vec load_some(const float *x, long left) {
    if (left >= LANES) return load(x);
    vec some = all(-INFINITY);
    memcpy(&some, x, left * sizeof(float));
    return some;
}

static inline float largest(vec v) {
    float found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
}

static inline int any(ivec mask) {
    int found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found;
}

enum { BLOCK = 1024 };

/* For every row of x [m, n], the index of its first largest value, or of its first NaN. */
void specdec_argmax(const float *x, int64_t *found, long m, long n) {
#pragma omp parallel for schedule(static) if (m > 1)
    for (long r = 0; r < m; r++) {
        const float *row = x + r * n;
        float best = -INFINITY;
        long at = 0; /* the block it lies in */
        ivec broken = {0};
        for (long first = 0; first < n; first += BLOCK) {
            const long end = smaller(first + BLOCK, n);
            vec high = all(-INFINITY);
            for (long i = first; i < end; i += LANES) {
                const vec v = load_some(row + i, end - i);
                high = either(v > high, v, high);
                broken |= v != v;
            }
            const float highest = largest(high);
            if (highest > best) best = highest, at = first;
        }
        if (any(broken))
            for (at = 0; row[at] == row[at];) at++;
        else
            while (row[at] != best) at++;
        found[r] = at;
    }
}

/* Entropy in nats of the softmax of every row of x [m, n]: log Z - sum of p * (x - largest). NaN where a value is NaN or
 * +inf, or none is finite. Sums are kept in double from block to block. */
void specdec_entropy(const float *x, double *nats, long m, long n) {
#pragma omp parallel for schedule(static) if (m > 1)
    for (long r = 0; r < m; r++) {
        const float *row = x + r * n;
        vec high = all(-INFINITY);
        for (long i = 0; i < n; i += LANES) {
            const vec v = load_some(row + i, n - i);
            high = either(v > high, v, high);
        }
        const float highest = largest(high);
        double mass = 0, weighted = 0;
        for (long first = 0; first < n; first += BLOCK) {
            const long end = smaller(first + BLOCK, n);
            vec masses = all(0), products = all(0);
            for (long i = first; i < end; i += LANES) {
                const vec below = load_some(row + i, end - i) - highest, e = exponential(below);
                masses += e;
                products += e * either(below < all(-200), all(-200), below); /* no mass: not 0 * -inf */
            }
            mass += sum(masses), weighted += sum(products);
        }
        nats[r] = log(mass) - weighted / mass;
    }
}

typedef struct {
    product qkv, output;
    const float *norms; /* [heads + kv_heads, width], or nothing */
    float eps;
    long heads, kv_heads, width; /* the width is a multiple of PANEL */
} attention;

/* One forward pass over `tokens` new tokens of each of `batch` sequences. Sequence b holds starts[b] entries; entry e of
 * head h lies at slots[b] * slot_stride + h * head_stride + e * width. */
typedef struct {
    long batch, tokens;
    const long *slots, *starts;
    long slot_stride, head_stride;
    const float *cos, *sin; /* [batch, tokens, width]; the sines of the first half are negative */
    const float *mask;      /* added to the scores: mask[b * mask_row + t * mask_token + e]; or nothing: causal */
    long mask_row, mask_token;
} forward_pass;

/* x * cos + (x with its halves exchanged) * sin; y may be x. */
static inline void turn(const float *x, const float *cos, const float *sin, float *y, long d) {
    for (long i = 0, half = d / 2; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = a * cos[i] + b * sin[i];
        y[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* The same for all heads of m tokens in bfloat16, into y [m, heads, d]; x has a stride between tokens, d / 2 is a multiple
 * of LANES. */
void specdec_turn_bfloat16(const bfloat16 *x, const bfloat16 *cos, const bfloat16 *sin, bfloat16 *y, long m, long stride,
                           long heads, long d) {
    const long half = d / 2;
    for (long r = 0; r < m; r++, x += stride, cos += d, sin += d)
        for (long h = 0; h < heads; h++, y += d)
            for (long i = 0; i < half; i += LANES) {
                const vec a = widen(x + h * d + i), b = widen(x + h * d + i + half);
                narrow(y + i, a * widen(cos + i) + b * widen(sin + i));
                narrow(y + i + half, b * widen(cos + i + half) + a * widen(sin + i + half));
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

/* Scores [padded] of one query become their softmax: over all that it sees, in one order of summation. */
static float softmax(float *scores, long seen, long padded, const float *mask) {
    if (mask)
        for (long l = 0; l < seen; l++) scores[l] += mask[l];
    for (long l = seen; l < padded; l++) scores[l] = -INFINITY;
    vec high = load(scores), total = all(0);
    for (long l = LANES; l < padded; l += LANES) high = either(load(scores + l) > high, load(scores + l), high);
    const float highest = largest(high);
    for (long l = 0; l < padded; l += LANES) {
        const vec e = exponential(load(scores + l) - highest);
        store(scores + l, e);
        total += e;
    }
    return sum(total);
}

static long padded_length(long length) { return (length + PANEL - 1) / PANEL * PANEL; }

/* Sequence b's tokens from `token` on, `count` of them, by all query heads that share one key head, against its keys and
 * values; queries and out lie as in the product and in [tokens, heads, width]. */
static void attend(const attention *w, const forward_pass *p, long b, long head, long token, long count,
                   const float *queries, const float *keys, const float *values, float *out, float *scratch) {
    const long group = w->heads / w->kv_heads, rows = group * count, d = w->width;
    const long length = p->starts[b] + p->tokens, padded = padded_length(length);
    const long stride = (w->heads + 2 * w->kv_heads) * d;
    float *scores = scratch, *scaled = scores + rows * padded, *mixed = scaled + rows * d, *block = mixed + rows * d;
    const float scale = 1.f / sqrtf(d);

    for (long r = 0; r < rows; r++)
        for (long i = 0; i < d; i++)
            scaled[r * d + i] = queries[(token + r / group) * stride + (head * group + r % group) * d + i] * scale;

    for (long first = 0; first < length; first += PANEL) { /* PANEL keys, turned on their side */
        const long here = smaller(PANEL, length - first);
        if (here < PANEL) memset(block, 0, d * PANEL * sizeof(float));
        for (long c = 0; c + LANES <= here; c += LANES)
            for (long i = 0; i < d; i += LANES)
                transpose(keys + (first + c) * d + i, d, block + i * PANEL + c, PANEL);
        for (long c = here / LANES * LANES; c < here; c++)
            for (long i = 0; i < d; i++) block[i * PANEL + c] = keys[(first + c) * d + i];
        panel(block, PANEL, scaled, d, scores + first, padded, rows, d);
    }
    for (long r = 0; r < rows; r++) {
        const long t = token + r / group, seen = p->mask ? length : p->starts[b] + t + 1;
        const float *mask = p->mask ? p->mask + b * p->mask_row + t * p->mask_token : NULL;
        scaled[r * d] = softmax(scores + r * padded, seen, padded, mask); /* the query has done its part */
    }
    for (long c = 0; c < d; c += PANEL) panel(values + c, d, scores, padded, mixed + c, d, rows, length);
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < d; i++)
            out[((token + r / group) * w->heads + head * group + r % group) * d + i] = mixed[r * d + i] / scaled[r * d];
}

/* Grouped-query attention: y [batch, tokens, outputs] = output(attention(qkv(x))) + onto. The new entries are written to
 * keys and values. Returns whether there was memory for it; if not, nothing may be read. */
int specdec_self_attention(const attention *w, const forward_pass *p, float *keys, float *values, const float *x,
                           const float *onto, float *y) {
    const long m = p->batch * p->tokens, d = w->width, stride = w->qkv.outputs, inner = w->heads * d;
    float *qkv = malloc(m * (stride + inner) * sizeof(float)), *mixed = qkv + m * stride;
    if (!qkv) return 0;
    specdec_product(&w->qkv, x, NULL, qkv, m);

    long longest = 0;
    for (long b = 0; b < p->batch; b++) {
        for (long t = 0; t < p->tokens; t++) place(w, p, b, t, qkv + (b * p->tokens + t) * stride, keys, values);
        longest = p->starts[b] > longest ? p->starts[b] : longest;
    }

    /* Tokens of a head are split so that no thread waits long for another's last task. */
    const long group = w->heads / w->kv_heads, most = padded_length(longest + p->tokens);
    const long together = (ROWS + group - 1) / group, parts = (p->tokens + together - 1) / together;
    const long tasks = p->batch * w->kv_heads * parts;
    const long room = together * group * (most + 2 * d) + d * PANEL;
    int complete = 1;
#pragma omp parallel for schedule(dynamic) reduction(& : complete) if (tasks * group * most * d > SMALL)
    for (long task = 0; task < tasks; task++) {
        const long b = task / parts / w->kv_heads, head = task / parts % w->kv_heads;
        const long token = task % parts * together, count = smaller(together, p->tokens - token);
        const long at = p->slots[b] * p->slot_stride + head * p->head_stride;
        float *scratch = malloc(room * sizeof(float));
        if (scratch)
            attend(w, p, b, head, token, count, qkv + b * p->tokens * stride, keys + at, values + at,
                   mixed + b * p->tokens * inner, scratch);
        else
            complete = 0;
        free(scratch);
    }
    if (complete) specdec_product(&w->output, mixed, onto, y, m);
    free(qkv);
    return complete;
}

typedef struct {
    const float *attention_norm, *feed_forward_norm;
    float attention_eps, feed_forward_eps;
    const attention *attention;
    const product *gate_up, *down;
} layer;

/* A whole layer: x [batch, tokens, d] plus attention of its norm, and that plus the feed-forward of its norm. Returns
 * whether there was memory for it. */
int specdec_layer(const layer *w, const forward_pass *p, float *keys, float *values, const float *x, float *y) {
    const long m = p->batch * p->tokens, d = w->down->outputs;
    float *normed = malloc(2 * m * d * sizeof(float)), *middle = normed + m * d;
    if (!normed) return 0;
    specdec_rms_norm(x, w->attention_norm, normed, m, d, w->attention_eps);
    int complete = specdec_self_attention(w->attention, p, keys, values, normed, x, middle);
    if (complete) {
        specdec_rms_norm(middle, w->feed_forward_norm, normed, m, d, w->feed_forward_eps);
        complete = specdec_feed_forward(w->gate_up, w->down, normed, middle, y, m);
    }
    free(normed);
    return complete;
}
