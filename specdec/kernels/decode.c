/* Decoding on a CPU: all of a layer, in float32; weights may be stored in bfloat16.
 *
 * A step reads every weight once, so its floor is what memory delivers. A product of up to ROWS rows stays on that
 * floor here: every vector of weights is loaded once and multiplied by all rows before the next is needed, and lines
 * are asked for well ahead. What lies between two products is one call each, for after a product has streamed
 * megabytes through the caches every further operation starts cold.
 *
 * A row's result does not depend on how many rows come with it: every sum runs over its terms in one order. Logits of
 * a token are therefore the same bits whether it is decoded alone or verified among others.
 *
 * Built by library.py for the processor it runs on. */

#include "vectors.h"

#include "product.h"

int specdec_panel(void) { return PANEL; }

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
#pragma omp parallel for schedule(static) if (m * d > SMALL)
    for (long r = 0; r < m; r++) normalise(x + r * d, weight, y + r * d, d, eps);
}

#include "attention.h"

#include "logits.h"

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

/* y [m, outputs of down] = down(silu(gate(x)) * up(x)) + onto, TOGETHER rows at a time: what lies between the products
 * stays near. Returns whether there was memory for it. */
int specdec_feed_forward(const product *gate_up, const product *down, const float *x, const float *onto, float *y,
                         long m) {
    enum { TOGETHER = 192 };
    const long inner = down->inputs, most = smaller(m, TOGETHER);
    float *both = malloc(3 * most * inner * sizeof(float)), *gated = both + 2 * most * inner;
    if (!both) return 0;
    for (long first = 0; first < m; first += most) {
        const long rows = smaller(most, m - first), at = first * down->outputs;
        specdec_product(gate_up, x + first * gate_up->inputs, NULL, both, rows);
#pragma omp parallel for schedule(static) if (rows * inner > SMALL / 2)
        for (long r = 0; r < rows; r++) {
            const float *gate = both + 2 * r * inner;
            swiglu(gate, gate + inner, gated + r * inner, inner);
        }
        specdec_product(down, gated, onto + at, y + at, rows);
    }
    free(both);
    return 1;
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
