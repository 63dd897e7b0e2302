/* Products with weights in float32 or bfloat16; everything else is float32.
 *
 * Of a bfloat16 weight two outputs share 32 bits, so that one shift and one mask widen two vectors: bfloat16 is the upper
 * half of a float32, and the product of widened weights is that of float32, bit for bit. */

enum { AHEAD = 1024 }; /* elements between what is multiplied and what is asked for: without it, a third slower */
enum { LINE = 16 };    /* elements of 4 bytes in a line of the cache */

#define WIDEN_float32(w) const vec a = load(w), b = load((w) + LANES);
#define WIDEN_bfloat16(w)                     \
    const bits both = *(const bits *)(w);     \
    const vec a = (vec)(both << 16), b = (vec)(both & 0xffff0000);

/* y[m][0 .. PANEL) = sum over i < k of x[m][i] * w[i][0 .. PANEL), for a fixed number of rows m. On the way, lines from
 * `next` on are asked for, `pace` elements further every time. */
#define TILE(KIND, WEIGHT, WIDTH, M)                                                                                  \
    static void KIND##_##M(const WEIGHT *w, long w_stride, const float *x, long x_stride, float *y, long y_stride,    \
                           long k, const WEIGHT *next, long pace) {                                                   \
        vec left[M], right[M];                                                                                        \
        for (int m = 0; m < M; m++) left[m] = right[m] = all(0);                                                      \
        for (long i = 0; i < k; i++, w += w_stride, next += pace) {                                                   \
            WIDEN_##KIND(w)                                                                                           \
            for (int line = 0; line < WIDTH; line += LINE) __builtin_prefetch(next + line);                           \
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

/* The same for any number of rows, in tiles of equal height as nearly as can be. Together they ask for as much as they
 * read, from `next` on. */
#define PANELS(KIND, WEIGHT, WIDTH)                                                                                   \
    TILE(KIND, WEIGHT, WIDTH, 1)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 2)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 3)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 4)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 5)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 6)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 7)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 8)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 9)                                                                                      \
    TILE(KIND, WEIGHT, WIDTH, 10)                                                                                     \
    TILE(KIND, WEIGHT, WIDTH, 11)                                                                                     \
    TILE(KIND, WEIGHT, WIDTH, 12)                                                                                     \
    typedef void KIND##_tile(const WEIGHT *, long, const float *, long, float *, long, long, const WEIGHT *, long);   \
    static KIND##_tile *const KIND##_tiles[] = {0,        KIND##_1, KIND##_2, KIND##_3,  KIND##_4,  KIND##_5,         \
                                                KIND##_6, KIND##_7, KIND##_8, KIND##_9, KIND##_10, KIND##_11,         \
                                                KIND##_12};                                                           \
    static void panel_##KIND(const WEIGHT *w, long w_stride, const float *x, long x_stride, float *y, long y_stride,  \
                             long rows, long k, const WEIGHT *next) {                                                 \
        const long parts = (rows + ROWS - 1) / ROWS, pace = (w_stride + parts - 1) / parts;                           \
        for (long left = parts, height; left > 0; left--, rows -= height, next += k * pace) {                         \
            height = (rows + left - 1) / left;                                                                        \
            KIND##_tiles[height](w, w_stride, x, x_stride, y, y_stride, k, next, pace);                               \
            x += height * x_stride, y += height * y_stride;                                                           \
        }                                                                                                             \
    }
PANELS(float32, float, PANEL)
PANELS(bfloat16, uint32_t, LANES)

/* packed: [ceil(outputs / PANEL), inputs, PANEL] float32; or [.., inputs, LANES] pairs of bfloat16, of which the lower
 * halves are the first LANES outputs of the panel. bias: [outputs] or nothing. */
typedef struct {
    const void *packed;
    const float *bias;
    long inputs, outputs, narrow;
} product;

/* One tile asks for what it will need itself; of several, each asks for its share of the panel that follows. */
static void panel_of(const product *w, long p, const float *x, float *y, long y_stride, long rows) {
    const long k = w->inputs, width = w->narrow ? LANES : PANEL, ahead = rows <= ROWS ? AHEAD : k * width;
    if (w->narrow) {
        const uint32_t *packed = (const uint32_t *)w->packed + p * k * width;
        panel_bfloat16(packed, width, x, k, y, y_stride, rows, k, packed + ahead);
    } else {
        const float *packed = (const float *)w->packed + p * k * width;
        panel_float32(packed, width, x, k, y, y_stride, rows, k, packed + ahead);
    }
}

/* Rows whose x stays in the second-level cache while panels pass by. So many at least that sweeping over the weights
 * again is hidden behind the multiplying. */
static long together(long k) { return larger((1 << 16) / k / ROWS, 8) * ROWS; }

/* y [m, outputs] = x [m, inputs] times the weight, plus its bias, plus onto [m, outputs] or nothing. */
void specdec_product(const product *w, const float *x, const float *onto, float *y, long m) {
    const long k = w->inputs, n = w->outputs, panels = (n + PANEL - 1) / PANEL, most = together(k);
    for (long first = 0; first < m; first += most) {
        const long rows = smaller(most, m - first);
        const float *in = x + first * k, *under = onto ? onto + first * n : NULL;
        float *out = y + first * n;
#pragma omp parallel for schedule(static) if (rows * k * n > SMALL)
        for (long p = 0; p < panels; p++) {
            const long column = p * PANEL, width = smaller(PANEL, n - column);
            if (width == PANEL) {
                panel_of(w, p, in, out + column, n, rows);
            } else {
                for (long r = 0; r < rows; r++) {
                    float whole[PANEL];
                    panel_of(w, p, in + r * k, whole, PANEL, 1);
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
