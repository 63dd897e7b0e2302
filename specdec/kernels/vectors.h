/* Vectors as wide as the processor's, with GCC's extensions, and what all kernels do with them. */

#include <float.h>
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
enum { SMALL = 1 << 15 };   /* below so many operations a second thread costs more than it does */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec all(float s) { return (vec){0} + s; }
static inline vec either(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

static inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
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

static inline float largest(vec v) {
    float found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
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
