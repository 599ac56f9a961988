/* One time step of the LSTMs of many members on a CPU, without their products of matrices: one pass over the memory.

   Rows are the samples of all members. Gates lie side by side in a row, [i, f, g, o], each of `size` units. Where
   the samples of a member lie together but members apart, `member` is the distance between two members and `row`
   that between two samples, in elements; there are `samples` of a member. Compiled by hfusion/device/native.py. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Below this many units a further thread costs more than it saves. */
#define GRAIN 8192

/* Where a processor adds to a product in one operation it takes as long as either. */
#ifdef __FMA__
#define ADDED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define ADDED(a, b, c) ((a) * (b) + (c))
#endif

/* e^x - 1 to the last bit or two, in operations that a compiler can do on vectors. */
static inline float expm1_float(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: added, it rounds to whole numbers */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + magic, whole = shifted - magic;
    const float r = ADDED(whole, 2.12194440e-4f, ADDED(whole, -0.693359375f, x));
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    float tail = ADDED(1.0f / 5040, r, 1.0f / 720);
    tail = ADDED(tail, r, 1.0f / 120);
    tail = ADDED(tail, r, 1.0f / 24);
    tail = ADDED(tail, r, 1.0f / 6);
    tail = ADDED(tail, r, 0.5f);
    return ADDED(power, ADDED(r * r, tail, r), power - 1);
}

static inline double expm1_double(double x) { return expm1(x > 700 ? 700 : x); }

#define PASTE(name, type) name##_##type
#define NAMED(name, type) PASTE(name, type)
#define NAME(name) NAMED(name, REAL)

#define REAL float
#include __FILE__
#undef REAL
#define REAL double
#include __FILE__

#else

static inline REAL NAME(sigmoid)(REAL x) { return 1 / (2 + NAME(expm1)(-x)); }

static inline REAL NAME(tanh)(REAL x) {
    /* Far from 0 it is 1 or -1, and the quotient below would be of infinities. */
    x = x < -20 ? -20 : x;
    x = x > 20 ? 20 : x;
    const REAL e = NAME(expm1)(2 * x);
    return e / (e + 2);
}

/* gates [rows, 4 size]: sums, in place made values. cells, before: [rows, size]. The hidden state is written to
   `hidden`, where members are `member` apart, and to `next`, if any, with `next_member` and `next_row`. */
void NAME(lstm_forward)(int64_t rows, int64_t samples, int64_t size, REAL *gates, const REAL *before, REAL *cells,
                        REAL *hidden, int64_t member, REAL *next, int64_t next_member, int64_t next_row,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        REAL *restrict i = gates + row * 4 * size, *restrict f = i + size, *restrict g = f + size;
        REAL *restrict o = g + size, *restrict cell = cells + row * size;
        const REAL *restrict old = before + row * size;
        REAL *restrict out = hidden + row / samples * member + row % samples * size;
#pragma omp simd simdlen(16)
        for (int64_t k = 0; k < size; k++) {
            i[k] = NAME(sigmoid)(i[k]);
            f[k] = NAME(sigmoid)(f[k]);
            g[k] = NAME(tanh)(g[k]);
            o[k] = NAME(sigmoid)(o[k]);
            cell[k] = f[k] * old[k] + i[k] * g[k];
            out[k] = o[k] * NAME(tanh)(cell[k]);
        }
        if (next) memcpy(next + row / samples * next_member + row % samples * next_row, out, size * sizeof(REAL));
    }
}

/* From the gradients of this step's output (`grads`, if any) and of its hidden and cell state (`hidden`, `carry`,
   [rows, size]) those of the sums (`sums`, [4 size] in a row) and, in `carry`, of the cell state before. */
void NAME(lstm_backward)(int64_t rows, int64_t samples, int64_t size, const REAL *gates, const REAL *before,
                         const REAL *cells, const REAL *grads, int64_t grad_member, int64_t grad_row,
                         const REAL *hidden, REAL *carry, REAL *sums, int64_t member, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *restrict i = gates + row * 4 * size, *restrict f = i + size, *restrict g = f + size;
        const REAL *restrict o = g + size, *restrict cell = cells + row * size, *restrict old = before + row * size;
        const REAL *restrict from = hidden + row * size;
        const REAL *restrict grad = grads ? grads + row / samples * grad_member + row % samples * grad_row : 0;
        REAL *restrict kept = carry + row * size;
        REAL *restrict to = sums + row / samples * member + row % samples * 4 * size;
#pragma omp simd simdlen(16)
        for (int64_t k = 0; k < size; k++) {
            const REAL h = grad ? from[k] + grad[k] : from[k], t = NAME(tanh)(cell[k]);
            const REAL c = kept[k] + h * o[k] * (1 - t * t);
            to[k] = c * g[k] * i[k] * (1 - i[k]);
            to[size + k] = c * old[k] * f[k] * (1 - f[k]);
            to[2 * size + k] = c * i[k] * (1 - g[k] * g[k]);
            to[3 * size + k] = h * t * o[k] * (1 - o[k]);
            kept[k] = c * f[k];
        }
    }
}

#endif
