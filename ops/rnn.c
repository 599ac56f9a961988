/* The LSTMs and GRUs of many members on a CPU, as operators of torch's dispatcher: every time step is one product of
   matrices and one pass over the memory. Nothing here needs Python, so that compiled steps call it on any thread.

   Rows are the samples of all members. Gates lie side by side in a row, each of `size` units: [i, f, g, o] of an LSTM,
   and [r, z, n, m] of a GRU, m being the sum over the hidden state that the candidate n takes. Where
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

static inline double expm1_double(double x) { return expm1(x); }

/* Beyond it e^x overflows. */
static const float most_float = 88.0f;
static const double most_double = 709;

/* What of torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h) is called: addresses, from rnn.py. A function
   gives 0 if all is well, and has printed why if not. */
typedef void *Handle;
static struct {
    int32_t (*double_type)(void), (*cpu)(void);
    int (*type)(Handle, int32_t *);
    int (*data)(Handle, void **);
    int (*dims)(Handle, int64_t *);
    int (*sizes)(Handle, int64_t **);
    int (*strides)(Handle, int64_t **);
    int (*empty)(int64_t, const int64_t *, const int64_t *, int32_t type, int32_t device, int32_t index, Handle *);
    int (*view)(Handle, int64_t, const int64_t *, const int64_t *, int64_t offset, Handle *);
    int (*bmm)(Handle out, Handle, Handle);
    int (*forget)(Handle);
    void (*check)(_Bool, const char *function, const char *file, uint32_t line, const char *message); /* throws */
    int (*library)(const char *name, const char *key, const char *file, uint32_t line, Handle *);
    int (*implement)(Handle library, const char *name, void (*)(uint64_t *, uint64_t, uint64_t));
    int (*threads)(void); /* of OpenMP's, for this thread */
} torch;

/* A tensor whose last dim lies together. */
typedef struct {
    Handle handle;
    char *data;
    int64_t dims, *sizes, *strides;
} Tensor;

#define PASTE(name, type) name##_##type
#define NAMED(name, type) PASTE(name, type)
#define NAME(name) NAMED(name, REAL)

#define REAL float
#include __FILE__
#undef REAL
#define REAL double
#include __FILE__
#undef REAL

static int look(Handle handle, Tensor *found) {
    void *data = 0;
    found->handle = handle;
    const int failed = torch.data(handle, &data) || torch.dims(handle, &found->dims) ||
                       torch.sizes(handle, &found->sizes) || torch.strides(handle, &found->strides);
    found->data = data;
    return failed;
}

/* A new tensor of four sizes, or of the last three where the first is 0. */
static int make(int64_t first, int64_t second, int64_t third, int64_t last, int32_t type, Tensor *found) {
    const int64_t sizes[] = {first, second, third, last};
    const int64_t strides[] = {second * third * last, third * last, last, 1};
    const int64_t skipped = !first;
    return torch.empty(4 - skipped, sizes + skipped, strides + skipped, type, torch.cpu(), 0, &found->handle) ||
           look(found->handle, found);
}

static int whole(const Tensor *tensor) {
    int64_t stride = 1;
    for (int64_t k = tensor->dims; k--; stride *= tensor->sizes[k])
        if (tensor->sizes[k] != 1 && tensor->strides[k] != stride) return 0;
    return 1;
}

/* to[B, N, M] = from[B, N, K] by[B, K, M]; `to` and `from` begin `at` elements into their tensors. */
static int multiply(Handle to, int64_t to_at, int64_t to_member, int64_t columns, Handle from, int64_t from_at,
                    int64_t from_member, int64_t inner, int64_t members, int64_t samples, Handle by) {
    const int64_t to_shape[] = {members, samples, columns}, to_strides[] = {to_member, columns, 1};
    const int64_t from_shape[] = {members, samples, inner}, from_strides[] = {from_member, inner, 1};
    Handle left = 0, right = 0;
    const int failed = torch.view(to, 3, to_shape, to_strides, to_at, &left) ||
                       torch.view(from, 3, from_shape, from_strides, from_at, &right) || torch.bmm(left, right, by);
    if (left) torch.forget(left);
    if (right) torch.forget(right);
    return failed;
}

/* Lets go of what an operator was given, and gives what it made, or throws. */
static void end(int failed, const char *name, uint64_t *stack, int given, const Tensor *made, int count) {
    for (int k = 0; k < given; k++) torch.forget((Handle)stack[k]);
    for (int k = 0; k < count; k++) {
        if (failed && made[k].handle) torch.forget(made[k].handle);
        stack[k] = (uint64_t)made[k].handle;
    }
    torch.check(!failed, name, __FILE__, __LINE__, failed == 2 ? "a tensor lies in memory otherwise than it must"
                                                              : "torch failed; what it printed says why");
}

/* x [(B,) T, N, I], h and c [(B,) N, H], weights [B, K, 4 H], K = I + H or, with biases, I + H + 1; reverse ->
   rows [B, T, N, K], hidden states [B, T, N, H], gates [T, B, N, 4 H], cells [T + 1, B, N, H]. */
void lstm_steps(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    Tensor x, h, c, weights, made[4] = {{0}};
    Tensor *rows = made, *y = made + 1, *gates = made + 2, *cells = made + 3;
    const int64_t reverse = (int64_t)stack[4];
    (void)inputs, (void)outputs;
    int32_t type = 0;
    int failed = look((Handle)stack[0], &x) || look((Handle)stack[1], &h) || look((Handle)stack[2], &c) ||
                 look((Handle)stack[3], &weights) || torch.type(x.handle, &type);
    if (!failed) {
        const int64_t steps = x.sizes[x.dims - 3], samples = x.sizes[x.dims - 2], features = x.sizes[x.dims - 1];
        const int64_t members = weights.sizes[0], width = weights.sizes[1], size = h.sizes[h.dims - 1];
        failed = make(members, steps, samples, width, type, rows) || make(members, steps, samples, size, type, y) ||
                 make(steps, members, samples, 4 * size, type, gates) ||
                 make(steps + 1, members, samples, size, type, cells);
        const Tensor *given[] = {&x, &h, &c};
        for (int k = 0; !failed && k < 3; k++)
            if (given[k]->sizes[given[k]->dims - 1] != 1 && given[k]->strides[given[k]->dims - 1] != 1) failed = 2;
        if (!failed && !whole(&weights)) failed = 2;
        if (!failed && type == torch.double_type())
            lstm_fill_double(&x, &h, &c, rows, cells, members, steps, samples, features, size, width, reverse);
        else if (!failed)
            lstm_fill_float(&x, &h, &c, rows, cells, members, steps, samples, features, size, width, reverse);
        for (int64_t step = 0; !failed && step < steps; step++) {
            const int64_t time = reverse ? steps - 1 - step : step;
            failed = multiply(gates->handle, step * members * samples * 4 * size, samples * 4 * size, 4 * size,
                              rows->handle, time * samples * width, steps * samples * width, width, members, samples,
                              weights.handle);
            if (failed) break;
            const int64_t next = step + 1 < steps ? (reverse ? time - 1 : time + 1) : -1;
            if (type == torch.double_type())
                lstm_step_double(rows, y, gates, cells, members, steps, samples, features, size, width, step, time, next);
            else
                lstm_step_float(rows, y, gates, cells, members, steps, samples, features, size, width, step, time, next);
        }
    }
    end(failed, "hfusion_lstm::steps", stack, 4, made, 4);
}

/* gates, cells, as above, w_hidden [B, 4 H, H], gradients of the hidden states [B, T, N, H] and of the last states
   [B, N, H]; reverse, to_the_first -> those of the sums [B, T, N, 4 H] and of the first states [B, N, H]. */
void lstm_steps_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    Tensor given[6], made[3] = {{0}};
    Tensor *gates = given, *cells = given + 1, *w_hidden = given + 2, *d_y = given + 3;
    Tensor *sums = made, *hidden = made + 1, *carry = made + 2;
    const int64_t reverse = (int64_t)stack[6], to_the_first = (int64_t)stack[7];
    (void)inputs, (void)outputs;
    int32_t type = 0;
    int failed = torch.type((Handle)stack[0], &type);
    for (int k = 0; !failed && k < 6; k++) failed = look((Handle)stack[k], given + k);
    for (int k = 0; !failed && k < 6; k++) failed = whole(given + k) ? 0 : 2;
    if (!failed) {
        const int64_t steps = gates->sizes[0], members = gates->sizes[1], samples = gates->sizes[2];
        const int64_t size = w_hidden->sizes[2], state = members * samples * size;
        const size_t width = type == torch.double_type() ? sizeof(double) : sizeof(float);
        failed = make(members, steps, samples, 4 * size, type, sums) || make(0, members, samples, size, type, hidden) ||
                 make(0, members, samples, size, type, carry);
        if (!failed) {
            memcpy(hidden->data, given[4].data, state * width);
            memcpy(carry->data, given[5].data, state * width);
        }
        for (int64_t step = steps; !failed && step--;) {
            const int64_t time = reverse ? steps - 1 - step : step;
            if (type == torch.double_type())
                lstm_back_double(gates, cells, d_y, hidden, carry, sums, members, steps, samples, size, step, time);
            else
                lstm_back_float(gates, cells, d_y, hidden, carry, sums, members, steps, samples, size, step, time);
            if (step || to_the_first)
                failed = multiply(hidden->handle, 0, samples * size, size, sums->handle, time * samples * 4 * size,
                                  steps * samples * 4 * size, 4 * size, members, samples, w_hidden->handle);
        }
    }
    end(failed, "hfusion_lstm::steps_backward", stack, 6, made, 3);
}

/* sums over the inputs [B, T, N, 3 H], h [(B,) N, H], weights [B, K, 3 H], K = H or, with biases, H + 1; reverse ->
   hidden states before each step [B, T, N, K], and after it [B, T, N, H], gates [T, B, N, 4 H]. */
void gru_steps(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    Tensor sums, h, weights, hidden = {0}, made[3] = {{0}};
    Tensor *rows = made, *y = made + 1, *gates = made + 2;
    const int64_t reverse = (int64_t)stack[3];
    (void)inputs, (void)outputs;
    int32_t type = 0;
    int failed = look((Handle)stack[0], &sums) || look((Handle)stack[1], &h) || look((Handle)stack[2], &weights) ||
                 torch.type(sums.handle, &type);
    if (!failed && !(whole(&sums) && whole(&h) && whole(&weights))) failed = 2;
    if (!failed) {
        const int64_t members = sums.sizes[0], steps = sums.sizes[1], samples = sums.sizes[2];
        const int64_t width = weights.sizes[1], size = weights.sizes[2] / 3;
        failed = make(members, steps, samples, width, type, rows) || make(members, steps, samples, size, type, y) ||
                 make(steps, members, samples, 4 * size, type, gates) ||
                 make(0, members, samples, 3 * size, type, &hidden);
        for (int64_t step = -1; !failed && step < steps; step++) {
            const int64_t time = reverse ? steps - 1 - step : step, next = reverse ? time - 1 : time + 1;
            if (step >= 0)
                failed = multiply(hidden.handle, 0, samples * 3 * size, 3 * size, rows->handle, time * samples * width,
                                  steps * samples * width, width, members, samples, weights.handle);
            if (failed) break;
            if (type == torch.double_type())
                gru_step_double(&sums, &h, &hidden, rows, y, gates, members, steps, samples, size, width, step, time, next);
            else
                gru_step_float(&sums, &h, &hidden, rows, y, gates, members, steps, samples, size, width, step, time, next);
        }
    }
    if (hidden.handle) torch.forget(hidden.handle);
    end(failed, "hfusion_gru::steps", stack, 3, made, 3);
}

/* gates and hidden states before each step, as above, w_hidden [B, 3 H, H], gradients of the hidden states [B, T, N, H]
   and of the last one [B, N, H]; reverse -> those of the sums over inputs and over the hidden state [B, T, N, 3 H], and
   two [B, N, H] whose sum is that of the first state. */
void gru_steps_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    Tensor given[5], made[4] = {{0}};
    Tensor *gates = given, *rows = given + 1, *w_hidden = given + 2, *d_y = given + 3;
    Tensor *sums = made, *own = made + 1, *hidden = made + 2, *carry = made + 3;
    const int64_t reverse = (int64_t)stack[5];
    (void)inputs, (void)outputs;
    int32_t type = 0;
    int failed = torch.type((Handle)stack[0], &type);
    for (int k = 0; !failed && k < 5; k++) failed = look((Handle)stack[k], given + k);
    for (int k = 0; !failed && k < 5; k++) failed = whole(given + k) ? 0 : 2;
    if (!failed) {
        const int64_t steps = gates->sizes[0], members = gates->sizes[1], samples = gates->sizes[2];
        const int64_t size = w_hidden->sizes[2], width = rows->sizes[3], state = members * samples * size;
        const size_t bytes = state * (type == torch.double_type() ? sizeof(double) : sizeof(float));
        failed = make(members, steps, samples, 3 * size, type, sums) || make(members, steps, samples, 3 * size, type, own) ||
                 make(0, members, samples, size, type, hidden) || make(0, members, samples, size, type, carry);
        if (!failed) {
            memcpy(hidden->data, given[4].data, bytes);
            memset(carry->data, 0, bytes);
        }
        for (int64_t step = steps; !failed && step--;) {
            const int64_t time = reverse ? steps - 1 - step : step;
            if (type == torch.double_type())
                gru_back_double(gates, rows, d_y, hidden, carry, sums, own, members, steps, samples, size, width, step, time);
            else
                gru_back_float(gates, rows, d_y, hidden, carry, sums, own, members, steps, samples, size, width, step, time);
            failed = multiply(hidden->handle, 0, samples * size, size, own->handle, time * samples * 3 * size,
                              steps * samples * 3 * size, 3 * size, members, samples, w_hidden->handle);
        }
    }
    end(failed, "hfusion_gru::steps_backward", stack, 5, made, 4);
}

/* Lets torch call all. 0 if that works. */
int rnn_register(const void *functions) {
    static Handle lstm, gru;
    memcpy(&torch, functions, sizeof torch);
    return torch.library("hfusion_lstm", "CPU", __FILE__, __LINE__, &lstm) ||
           torch.implement(lstm, "steps", lstm_steps) || torch.implement(lstm, "steps_backward", lstm_steps_backward) ||
           torch.library("hfusion_gru", "CPU", __FILE__, __LINE__, &gru) ||
           torch.implement(gru, "steps", gru_steps) || torch.implement(gru, "steps_backward", gru_steps_backward);
}

#else

static inline REAL NAME(sigmoid)(REAL x) {
    /* Exactly 0 far below, as torch's: its derivative times an infinite input is NaN, not infinite. */
    return x < -NAME(most) ? 0 : 1 / (2 + NAME(expm1)(-x));
}

static inline REAL NAME(tanh)(REAL x) {
    /* Far from 0 it is 1 or -1, and the quotient below would be of infinities. */
    x = x < -20 ? -20 : x;
    x = x > 20 ? 20 : x;
    const REAL e = NAME(expm1)(2 * x);
    return e / (e + 2);
}

/* gates [rows, 4 size]: sums, in place made values. cells, before: [rows, size]. The hidden state is written to
   `hidden`, where members are `member` apart, and to `next`, if any, with `next_member` and `next_row`. */
static void NAME(lstm_forward)(int64_t rows, int64_t samples, int64_t size, REAL *gates, const REAL *before, REAL *cells,
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
static void NAME(lstm_backward)(int64_t rows, int64_t samples, int64_t size, const REAL *gates, const REAL *before,
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

/* The rows that are multiplied, but for hidden states after the first, and the first cell state. */
static void NAME(lstm_fill)(const Tensor *x, const Tensor *h, const Tensor *c, Tensor *rows, Tensor *cells,
                            int64_t members, int64_t steps, int64_t samples, int64_t features, int64_t size,
                            int64_t width, int64_t reverse) {
    const int64_t of_x = x->dims == 4 ? x->strides[0] : 0, of_h = h->dims == 3 ? h->strides[0] : 0;
    const int64_t of_c = c->dims == 3 ? c->strides[0] : 0, first = reverse ? steps - 1 : 0;
    const int64_t x_time = x->strides[x->dims - 3], x_row = x->strides[x->dims - 2];
    const int64_t h_row = h->strides[h->dims - 2], c_row = c->strides[c->dims - 2];
    const REAL *from = (REAL *)x->data, *hidden = (REAL *)h->data, *cell = (REAL *)c->data;
    for (int64_t b = 0; b < members; b++) {
        for (int64_t t = 0; t < steps; t++)
            for (int64_t n = 0; n < samples; n++) {
                REAL *to = (REAL *)rows->data + ((b * steps + t) * samples + n) * width;
                memcpy(to, from + b * of_x + t * x_time + n * x_row, features * sizeof(REAL));
                if (t == first) memcpy(to + features, hidden + b * of_h + n * h_row, size * sizeof(REAL));
                for (int64_t k = features + size; k < width; k++) to[k] = 1;
            }
        for (int64_t n = 0; n < samples; n++)
            memcpy((REAL *)cells->data + (b * samples + n) * size, cell + b * of_c + n * c_row, size * sizeof(REAL));
    }
}

/* What follows on the product of step `step`, which is at `time`; the hidden state goes to the rows at `next`, too. */
static void NAME(lstm_step)(Tensor *rows, Tensor *y, Tensor *gates, Tensor *cells, int64_t members, int64_t steps,
                            int64_t samples, int64_t features, int64_t size, int64_t width, int64_t step, int64_t time,
                            int64_t next) {
    const int64_t state = members * samples * size;
    REAL *beside = next < 0 ? 0 : (REAL *)rows->data + next * samples * width + features;
    NAME(lstm_forward)(members * samples, samples, size, (REAL *)gates->data + step * 4 * state,
                       (REAL *)cells->data + step * state, (REAL *)cells->data + (step + 1) * state,
                       (REAL *)y->data + time * samples * size, steps * samples * size, beside,
                       steps * samples * width, width, torch.threads());
}

static void NAME(lstm_back)(Tensor *gates, Tensor *cells, Tensor *d_y, Tensor *hidden, Tensor *carry, Tensor *sums,
                            int64_t members, int64_t steps, int64_t samples, int64_t size, int64_t step, int64_t time) {
    const int64_t state = members * samples * size, rows = steps * samples;
    NAME(lstm_backward)(members * samples, samples, size, (REAL *)gates->data + step * 4 * state,
                        (REAL *)cells->data + step * state, (REAL *)cells->data + (step + 1) * state,
                        (REAL *)d_y->data + time * samples * size, rows * size, size, (REAL *)hidden->data,
                        (REAL *)carry->data, (REAL *)sums->data + time * samples * 4 * size, rows * 4 * size,
                        torch.threads());
}

/* From the sums of step `step`, which is at `time`, its gates and hidden state, which goes to the rows at `next`, too:
   before the first step, -1, only the first state does. */
static void NAME(gru_step)(const Tensor *sums, const Tensor *h, const Tensor *hidden, Tensor *rows, Tensor *y,
                           Tensor *gates, int64_t members, int64_t steps, int64_t samples, int64_t size, int64_t width,
                           int64_t step, int64_t time, int64_t next) {
    const int64_t shared = h->dims == 2, count = members * samples, threads = torch.threads();
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * size > GRAIN)
    for (int64_t row = 0; row < count; row++) {
        const int64_t first = row / samples * steps * samples + row % samples, place = first + time * samples;
        const REAL *from = (REAL *)h->data + (shared ? row % samples : row) * size;
        if (step >= 0) {
            const REAL *restrict in = (REAL *)sums->data + place * 3 * size;
            const REAL *restrict own = (REAL *)hidden->data + row * 3 * size;
            const REAL *restrict old = (REAL *)rows->data + place * width;
            REAL *restrict r = (REAL *)gates->data + (step * count + row) * 4 * size, *restrict z = r + size;
            REAL *restrict n = z + size, *restrict m = n + size, *restrict out = (REAL *)y->data + place * size;
#pragma omp simd simdlen(16)
            for (int64_t k = 0; k < size; k++) {
                r[k] = NAME(sigmoid)(in[k] + own[k]);
                z[k] = NAME(sigmoid)(in[size + k] + own[size + k]);
                m[k] = own[2 * size + k];
                n[k] = NAME(tanh)(in[2 * size + k] + r[k] * m[k]);
                out[k] = n[k] + z[k] * (old[k] - n[k]);
            }
            from = out;
        }
        if (next < 0 || next >= steps) continue;
        REAL *to = (REAL *)rows->data + (first + next * samples) * width;
        memcpy(to, from, size * sizeof(REAL));
        if (width > size) to[size] = 1;
    }
}

/* From the gradients of this step's output and of its hidden state (`hidden`, and `carry` beside the product) those of
   both sums and, in `carry`, of the state before it beside the product. */
static void NAME(gru_back)(const Tensor *gates, const Tensor *rows, const Tensor *d_y, const Tensor *hidden, Tensor *carry,
                           Tensor *sums, Tensor *own, int64_t members, int64_t steps, int64_t samples, int64_t size,
                           int64_t width, int64_t step, int64_t time) {
    const int64_t count = members * samples, threads = torch.threads();
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * size > GRAIN)
    for (int64_t row = 0; row < count; row++) {
        const int64_t place = (row / samples * steps + time) * samples + row % samples;
        const REAL *restrict r = (REAL *)gates->data + (step * count + row) * 4 * size, *restrict z = r + size;
        const REAL *restrict n = z + size, *restrict m = n + size, *restrict old = (REAL *)rows->data + place * width;
        const REAL *restrict grad = (REAL *)d_y->data + place * size, *restrict from = (REAL *)hidden->data + row * size;
        REAL *restrict kept = (REAL *)carry->data + row * size, *restrict to = (REAL *)sums->data + place * 3 * size;
        REAL *restrict by_state = (REAL *)own->data + place * 3 * size;
#pragma omp simd simdlen(16)
        for (int64_t k = 0; k < size; k++) {
            const REAL h = grad[k] + from[k] + kept[k], c = h * (1 - z[k]) * (1 - n[k] * n[k]);
            by_state[k] = to[k] = c * m[k] * r[k] * (1 - r[k]);
            by_state[size + k] = to[size + k] = h * (old[k] - n[k]) * z[k] * (1 - z[k]);
            to[2 * size + k] = c;
            by_state[2 * size + k] = c * r[k];
            kept[k] = h * z[k];
        }
    }
}

#endif
