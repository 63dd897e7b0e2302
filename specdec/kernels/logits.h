/* What is read off logits. */

/* The vector at x, of which `left` floats are there; the rest are as good as not. */
static inline vec load_some(const float *x, long left) {
    if (left >= LANES) return load(x);
    vec some = all(-INFINITY);
    memcpy(&some, x, left * sizeof(float));
    return some;
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
