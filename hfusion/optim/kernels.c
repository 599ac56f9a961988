/* The steps of the fused optimizers on a CPU: one pass over the memory of all tensors of a group.

   hfusion/optim/native_kernels.py compiles this file at first use. Every function takes

     tensors, members, stride   tensors [members, size]; the columns of hyper-parameters are `stride` apart
     sizes                      elements of one member, for each tensor
     params, grads              the address of each tensor
     state                      the same, one list after the other, in the order the comment of the kernel says
     columns                    hyper-parameters [hyper][stride], in the order in which the optimizer lists them
     counts                     for each tensor, the number of this step for each member, from 1; none where no
                                kernel needs them
     flags                      the optimizer's flags, the first in the lowest bit
     threads                    at most so many are used
     share, shares              with several shares, only this one of the elements is computed, by this thread

   and returns 0, or 1 if there is no memory. Every element is computed by itself and, compiled with
   -ffp-contract=off, by the same operations in a vector and alone: a tensor may be cut anywhere, in threads
   or in shards, and gives the same bits. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Below this many elements a further thread costs more than it saves. */
#define GRAIN 16384
#define MAX_BUFFERS 3

#define ARGUMENTS                                                                                                  \
    int64_t tensors, int64_t members, int64_t stride, const int64_t *sizes, void *const *params,                    \
        void *const *grads, void *const *state, const double *columns, const float *const *counts, int64_t flags,   \
        int64_t threads, int64_t share, int64_t shares
#define PASSED tensors, members, stride, sizes, params, grads, state, columns, counts, flags, threads, share, shares

/* Updates `n` neighbouring elements of members with equal scalars. `at`: parameters, gradients, state. */
typedef void (*Row)(int64_t n, void *const *at, const void *scalars);

typedef struct {
    int64_t tensors, members;
    const int64_t *sizes;
    void *const *lists[2 + MAX_BUFFERS]; /* params, grads, state */
    int used;                            /* how many of the lists there are */
    int flush;                           /* whether 0 may be taken for denormal numbers */
    size_t element;
    Row row;
    const int64_t *first; /* for each tensor the first of its records, one for each member */
    const char *scalars;  /* the records; tensors with equal step counts have the same ones */
    size_t record;
    const int64_t *ends; /* for each record the end of the run of members with equal ones */
} Work;

/* Writes what a step takes of the numbers of each member; `counts`: of one tensor. */
typedef void (*Fill)(void *records, int64_t members, int64_t stride, const double *columns, const float *counts,
                     int64_t flags);

/* What this thread does with denormal numbers, below 1.2e-38 as floats: 0 for them if `flush`. The moments of a weight
   that gets no gradient decay to them and stay there, and a processor takes a hundred cycles for each. */
static uint64_t denormals(int flush) {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    if (flush) _mm_setcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (flush) __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24) : "memory");
    return before;
#else
    return flush;
#endif
}

static void restore(uint64_t before) {
#if defined(__SSE2__)
    _mm_setcsr(before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
#else
    (void)before;
#endif
}

/* From here on a denormal square adds nothing to the denominator that a float could tell. */
#define LEAST_EPS 1e-12

/* The elements [low, high) of all tensors laid end to end. */
static void walk(const Work *work, int64_t low, int64_t high) {
    const uint64_t before = denormals(work->flush);
    int64_t base = 0;
    for (int64_t tensor = 0; tensor < work->tensors && base < high; tensor++) {
        const int64_t size = work->sizes[tensor], total = size * work->members;
        const int64_t stop = high - base < total ? high - base : total;
        int64_t from = low > base ? low - base : 0;
        const int64_t *ends = work->ends + work->first[tensor];
        const char *scalars = work->scalars + work->first[tensor] * work->record;
        while (from < stop) {
            const int64_t member = from / size, end = ends[member] * size;
            const int64_t to = end < stop ? end : stop;
            void *at[2 + MAX_BUFFERS];
            for (int list = 0; list < work->used; list++)
                at[list] = (char *)work->lists[list][tensor] + from * work->element;
            work->row(to - from, at, scalars + member * work->record);
            from = to;
        }
        base += total;
    }
    restore(before);
}

/* Whether a tensor takes other scalars than the one before it: its members are at other steps. */
static int differs(int64_t tensor, int64_t members, const float *const *counts) {
    return !tensor || (counts && memcmp(counts[tensor], counts[tensor - 1], members * sizeof(float)));
}

/* For each of `members` the end of its run of members with equal records. */
static void find_ends(int64_t members, const char *records, size_t record, int64_t *ends) {
    for (int64_t member = members - 1; member >= 0; member--) {
        const char *own = records + member * record;
        const int joins = member + 1 < members && !memcmp(own, own + record, record);
        ends[member] = joins ? ends[member + 1] : member + 1;
    }
}

/* Makes the step of `row` on all elements, with as many threads as pay, or on a share of them. */
static void walk_all(const Work *work, int64_t threads, int64_t share, int64_t shares) {
    int64_t total = 0;
    for (int64_t tensor = 0; tensor < work->tensors; tensor++) total += work->sizes[tensor] * work->members;
    if (shares > 1) {
        walk(work, total * share / shares, total * (share + 1) / shares);
        return;
    }
    if (threads > total / GRAIN) threads = total / GRAIN;
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t team = omp_get_num_threads(), mine = omp_get_thread_num();
            walk(work, total * mine / team, total * (mine + 1) / team);
        }
        return;
    }
#endif
    walk(work, 0, total);
}

/* Makes the step of `row` with records of `record` bytes that `fill` writes. */
static int run(Work *work, size_t element, Row row, Fill fill, size_t record, ARGUMENTS) {
    int64_t sets = 0, set = -1;
    for (int64_t tensor = 0; tensor < tensors; tensor++) sets += differs(tensor, members, counts);
    char *records = calloc(sets * members, record);
    int64_t *ends = malloc((sets * members + tensors) * sizeof *ends), *first = ends + sets * members;
    if (!records || !ends) {
        free(records);
        free(ends);
        return 1;
    }
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        if (differs(tensor, members, counts)) {
            char *own = records + ++set * members * record;
            fill(own, members, stride, columns, counts ? counts[tensor] : 0, flags);
            find_ends(members, own, record, ends + set * members);
        }
        first[tensor] = set * members;
    }
    work->element = element;
    work->row = row;
    work->first = first;
    work->scalars = records;
    work->record = record;
    work->ends = ends;
    walk_all(work, threads, share, shares);
    free(records);
    free(ends);
    return 0;
}

static Work work_of(int64_t tensors, int64_t members, const int64_t *sizes, void *const *params, void *const *grads,
                    void *const *state, int buffers) {
    Work work = {.tensors = tensors, .members = members, .sizes = sizes, .used = 2 + buffers, .flush = 1};
    work.lists[0] = params;
    work.lists[1] = grads;
    for (int buffer = 0; buffer < buffers; buffer++) work.lists[2 + buffer] = state + buffer * tensors;
    return work;
}

typedef struct {
    int (*kernel)(ARGUMENTS);
    int64_t tensors, members, stride;
    const int64_t *sizes;
    void *const *params, *const *grads, *const *state;
    const double *columns;
    const float *const *counts;
    int64_t flags, shares;
} SharedStep;

/* Share `index` of a step, as a piece of the work of a team (hfusion/device/team.c). */
int step_share(void *work, int64_t index, char *message, int64_t room) {
    const SharedStep *s = work;
    const int failed = s->kernel(s->tensors, s->members, s->stride, s->sizes, s->params, s->grads, s->state, s->columns,
                                 s->counts, s->flags, 1, index, s->shares);
    if (failed) snprintf(message, room, "no memory for the scalars of %lld members", (long long)s->members);
    return failed;
}

/* Whether `spans` pieces of memory hold what others hold, each so many bytes. */
int same(int64_t spans, const void *const *these, const void *const *those, const int64_t *bytes) {
    for (int64_t span = 0; span < spans; span++)
        if (memcmp(these[span], those[span], bytes[span])) return 0;
    return 1;
}

/* Adds `by`, one number for each member, to the counts of each tensor. */
void advance(int64_t tensors, int64_t members, float *const *counts, const float *by) {
    for (int64_t tensor = 0; tensor < tensors; tensor++)
        for (int64_t member = 0; member < members; member++) counts[tensor][member] += by[member];
}

/* Whether none of `members` has an eps so small that denormal numbers count. */
static int may_flush(int64_t members, const double *eps) {
    for (int64_t member = 0; member < members; member++)
        if (eps[member] < LEAST_EPS) return 0;
    return 1;
}

/* What follows, once for each type. */
#define PASTE(name, type) name##_##type
#define NAMED(name, type) PASTE(name, type)
#define NAME(name) NAMED(name, REAL)
#define INLINE static inline __attribute__((always_inline)) void

/* A row with `mode` known to the compiler, so that no loop has a branch. */
#define CASE(form, mode) \
    case mode: form(n, at, s, mode); break;

enum { SGD_DECAY = 1, SGD_MOMENTUM = 2, SGD_FIRST = 4, SGD_NESTEROV = 8 };
enum { ADAM_DECAY = 1, ADAM_AMSGRAD = 2, ADAM_NEAR = 4 };
enum { ADADELTA_DECAY = 1 };

#define REAL float
#define SQRT sqrtf
#define BITS uint32_t
#define EXPONENT 0x7f800000u
#include __FILE__
#undef REAL
#undef SQRT
#undef BITS
#undef EXPONENT
#define REAL double
#define SQRT sqrt
#define BITS uint64_t
#define EXPONENT 0x7ff0000000000000u
#include __FILE__

#else

/* Whether numbers are finite: the exponent of infinities and NaN is all ones. In blocks, which a compiler makes vectors
   of, and which end at the first that is not. */
static int NAME(finite_run)(const BITS *values, int64_t n) {
    while (n > 0) {
        const int64_t block = n < 1024 ? n : 1024;
        BITS bad = 0;
        for (int64_t i = 0; i < block; i++) bad |= (values[i] & EXPONENT) == EXPONENT;
        if (bad) return 0;
        values += block;
        n -= block;
    }
    return 1;
}

/* Whether all numbers of `tensors`, each of `sizes` elements, are finite. */
int NAME(finite)(int64_t tensors, const int64_t *sizes, const void *const *at) {
    for (int64_t tensor = 0; tensor < tensors; tensor++)
        if (!NAME(finite_run)(at[tensor], sizes[tensor])) return 0;
    return 1;
}

/* SGD (torch.optim.SGD). hyper-parameters: lr, momentum, dampening, weight_decay; flags: nesterov, maximize;
   state: the momentum buffer, which members without momentum do not touch. */

typedef struct {
    int64_t mode;
    REAL sign, lr, decay, momentum, fresh;
} NAME(Sgd);

INLINE NAME(sgd_form)(int64_t n, void *const *at, const NAME(Sgd) *s, const int mode) {
    REAL *restrict param = at[0], *restrict buffer = mode & SGD_MOMENTUM ? at[2] : 0;
    const REAL *restrict grad = at[1];
    const REAL sign = s->sign, lr = s->lr, decay = s->decay, momentum = s->momentum, fresh = s->fresh;
    for (int64_t i = 0; i < n; i++) {
        REAL step = sign * grad[i];
        /* Without decay no product with 0: it would carry the NaN of a parameter into the gradient. */
        if (mode & SGD_DECAY) step = step + decay * param[i];
        if (mode & SGD_MOMENTUM) {
            const REAL mean = mode & SGD_FIRST ? step : momentum * buffer[i] + fresh * step;
            buffer[i] = mean;
            step = mode & SGD_NESTEROV ? step + momentum * mean : mean;
        }
        param[i] = param[i] - lr * step;
    }
}

static void NAME(sgd_row)(int64_t n, void *const *at, const void *scalars) {
    const NAME(Sgd) *s = scalars;
    switch (s->mode) {
        CASE(NAME(sgd_form), 0)
        CASE(NAME(sgd_form), SGD_DECAY)
        CASE(NAME(sgd_form), SGD_MOMENTUM)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_DECAY)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_FIRST)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_FIRST | SGD_DECAY)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_NESTEROV)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_NESTEROV | SGD_DECAY)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_NESTEROV | SGD_FIRST)
        CASE(NAME(sgd_form), SGD_MOMENTUM | SGD_NESTEROV | SGD_FIRST | SGD_DECAY)
    }
}

static void NAME(sgd_fill)(void *records, int64_t members, int64_t stride, const double *columns, const float *counts,
                           int64_t flags) {
    const double *lr = columns, *momentum = lr + stride, *dampening = momentum + stride, *decay = dampening + stride;
    for (int64_t member = 0; member < members; member++) {
        NAME(Sgd) *s = (NAME(Sgd) *)records + member;
        s->mode = decay[member] != 0 ? SGD_DECAY : 0;
        if (momentum[member] != 0)
            s->mode |= SGD_MOMENTUM | (counts[member] == 1 ? SGD_FIRST : 0) | (flags & 1 ? SGD_NESTEROV : 0);
        s->sign = flags & 2 ? -1 : 1;
        s->lr = lr[member];
        s->decay = decay[member];
        s->momentum = momentum[member];
        s->fresh = 1 - dampening[member];
    }
}

int NAME(sgd)(ARGUMENTS) {
    const double *momentum = columns + stride;
    int buffers = 0;
    for (int64_t member = 0; member < members; member++) buffers |= momentum[member] != 0;
    Work work = work_of(tensors, members, sizes, params, grads, state, buffers);
    return run(&work, sizeof(REAL), NAME(sgd_row), NAME(sgd_fill), sizeof(NAME(Sgd)), PASSED);
}

/* Adam and AdamW (torch.optim.Adam, AdamW). hyper-parameters: lr, betas[0], betas[1], eps, weight_decay;
   flags: amsgrad, maximize; state: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq. */

typedef struct {
    int64_t mode;
    REAL sign, decay, shrink, toward, beta2, fresh, scale, eps, step;
} NAME(Adam);

INLINE NAME(adam_form)(int64_t n, void *const *at, const NAME(Adam) *s, const int mode) {
    REAL *restrict param = at[0], *restrict mean = at[2], *restrict square = at[3];
    REAL *restrict highest = mode & ADAM_AMSGRAD ? at[4] : 0;
    const REAL *restrict grad = at[1];
    const REAL sign = s->sign, decay = s->decay, shrink = s->shrink, toward = s->toward, beta2 = s->beta2;
    const REAL fresh = s->fresh, scale = s->scale, eps = s->eps, step = s->step;
    for (int64_t i = 0; i < n; i++) {
        REAL g = sign * grad[i];
        /* Without decay no product with 0: it would carry the NaN of a parameter into the gradient. */
        if (mode & ADAM_DECAY) g = g + decay * param[i];
        /* torch.lerp: from the nearer end. */
        const REAL m = (mode & ADAM_NEAR ? mean[i] : g) + toward * (g - mean[i]);
        REAL v = beta2 * square[i] + fresh * g * g;
        mean[i] = m;
        square[i] = v;
        if (mode & ADAM_AMSGRAD) {
            const REAL high = highest[i];
            /* torch.maximum: a NaN on either side stays. */
            v = v > high || v != v ? v : high;
            highest[i] = v;
        }
        param[i] = shrink * param[i] - step * m / (SQRT(v) * scale + eps);
    }
}

static void NAME(adam_row)(int64_t n, void *const *at, const void *scalars) {
    const NAME(Adam) *s = scalars;
    switch (s->mode) {
        CASE(NAME(adam_form), 0)
        CASE(NAME(adam_form), ADAM_DECAY)
        CASE(NAME(adam_form), ADAM_AMSGRAD)
        CASE(NAME(adam_form), ADAM_AMSGRAD | ADAM_DECAY)
        CASE(NAME(adam_form), ADAM_NEAR)
        CASE(NAME(adam_form), ADAM_NEAR | ADAM_DECAY)
        CASE(NAME(adam_form), ADAM_NEAR | ADAM_AMSGRAD)
        CASE(NAME(adam_form), ADAM_NEAR | ADAM_AMSGRAD | ADAM_DECAY)
    }
}

INLINE NAME(adams_fill)(void *records, int64_t members, int64_t stride, const double *columns, const float *counts,
                        int64_t flags, int decoupled) {
    const double *lr = columns, *beta1 = lr + stride, *beta2 = beta1 + stride, *eps = beta2 + stride;
    const double *decay = eps + stride;
    for (int64_t member = 0; member < members; member++) {
        NAME(Adam) *s = (NAME(Adam) *)records + member;
        const int near = 1 - beta1[member] < 0.5;
        s->mode = (decay[member] != 0 && !decoupled ? ADAM_DECAY : 0) | (flags & 1 ? ADAM_AMSGRAD : 0) |
                  (near ? ADAM_NEAR : 0);
        s->sign = flags & 2 ? -1 : 1;
        s->decay = decay[member];
        s->shrink = decoupled ? 1 - lr[member] * decay[member] : 1;
        s->toward = near ? 1 - beta1[member] : -beta1[member];
        s->beta2 = beta2[member];
        s->fresh = 1 - beta2[member];
        s->scale = 1 / sqrt(1 - pow(beta2[member], counts[member]));
        s->eps = eps[member];
        s->step = lr[member] / (1 - pow(beta1[member], counts[member]));
    }
}

static void NAME(adam_fill)(void *records, int64_t members, int64_t stride, const double *columns, const float *counts,
                            int64_t flags) {
    NAME(adams_fill)(records, members, stride, columns, counts, flags, 0);
}

static void NAME(adamw_fill)(void *records, int64_t members, int64_t stride, const double *columns,
                             const float *counts, int64_t flags) {
    NAME(adams_fill)(records, members, stride, columns, counts, flags, 1);
}

static int NAME(adams)(ARGUMENTS, Fill fill) {
    Work work = work_of(tensors, members, sizes, params, grads, state, flags & 1 ? 3 : 2);
    work.flush = may_flush(members, columns + 3 * stride);
    return run(&work, sizeof(REAL), NAME(adam_row), fill, sizeof(NAME(Adam)), PASSED);
}

int NAME(adam)(ARGUMENTS) { return NAME(adams)(PASSED, NAME(adam_fill)); }

int NAME(adamw)(ARGUMENTS) { return NAME(adams)(PASSED, NAME(adamw_fill)); }

/* Adadelta (torch.optim.Adadelta). hyper-parameters: lr, rho, eps, weight_decay; flags: maximize; state:
   square_avg, acc_delta. */

typedef struct {
    int64_t mode;
    REAL sign, lr, decay, rho, fresh, eps;
} NAME(Adadelta);

INLINE NAME(adadelta_form)(int64_t n, void *const *at, const NAME(Adadelta) *s, const int mode) {
    REAL *restrict param = at[0], *restrict square = at[2], *restrict moved = at[3];
    const REAL *restrict grad = at[1];
    const REAL sign = s->sign, lr = s->lr, decay = s->decay, rho = s->rho, fresh = s->fresh, eps = s->eps;
    for (int64_t i = 0; i < n; i++) {
        REAL g = sign * grad[i];
        /* Without decay no product with 0: it would carry the NaN of a parameter into the gradient. */
        if (mode & ADADELTA_DECAY) g = g + decay * param[i];
        const REAL v = rho * square[i] + fresh * g * g;
        const REAL delta = SQRT(moved[i] + eps) / SQRT(v + eps) * g;
        square[i] = v;
        moved[i] = rho * moved[i] + fresh * delta * delta;
        param[i] = param[i] - lr * delta;
    }
}

static void NAME(adadelta_row)(int64_t n, void *const *at, const void *scalars) {
    const NAME(Adadelta) *s = scalars;
    switch (s->mode) {
        CASE(NAME(adadelta_form), 0)
        CASE(NAME(adadelta_form), ADADELTA_DECAY)
    }
}

static void NAME(adadelta_fill)(void *records, int64_t members, int64_t stride, const double *columns,
                                const float *counts, int64_t flags) {
    const double *lr = columns, *rho = lr + stride, *eps = rho + stride, *decay = eps + stride;
    (void)counts;
    for (int64_t member = 0; member < members; member++) {
        NAME(Adadelta) *s = (NAME(Adadelta) *)records + member;
        s->mode = decay[member] != 0 ? ADADELTA_DECAY : 0;
        s->sign = flags & 1 ? -1 : 1;
        s->lr = lr[member];
        s->decay = decay[member];
        s->rho = rho[member];
        s->fresh = 1 - rho[member];
        s->eps = eps[member];
    }
}

int NAME(adadelta)(ARGUMENTS) {
    Work work = work_of(tensors, members, sizes, params, grads, state, 2);
    work.flush = may_flush(members, columns + 2 * stride);
    return run(&work, sizeof(REAL), NAME(adadelta_row), NAME(adadelta_fill), sizeof(NAME(Adadelta)), PASSED);
}

#endif
