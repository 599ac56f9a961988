/* The walk of an optimizer's step over the memory of all tensors of a group, on a CPU.

   What is done to each row is generated from the optimizer's formula (hfusion/optim/native_kernels.py). Every element is
   computed by itself and, compiled with -ffp-contract=off, by the same operations in a vector and alone: a tensor may be
   cut anywhere, in threads or in shards, and gives the same bits. */

#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Below this many elements a further thread costs more than it saves. */
#define GRAIN 16384
#define MAX_LISTS 16
#define MAX_NUMBERS 8

/* Updates `n` neighbouring elements of members with equal scalars. `at`: parameters, gradients, state. */
typedef void (*Row)(int64_t n, void *const *at, const void *scalars);

/* Advances the numbers of one tensor, such as its step counts, and writes a record of scalars for each member. */
typedef void (*Fill)(int64_t members, int64_t stride, const double *columns, const float *advance,
                     void *const *numbers, void *records);

/* A step; the same struct as in hfusion/optim/native_kernels.py. */
typedef struct {
    int64_t tensors, members, lists, numbers; /* lists: parameters, gradients, and each state */
    int64_t element, record;                  /* bytes of an element, and of the scalars of a member */
    int64_t stride;                           /* between the columns of hyper-parameters */
    int64_t flush;                            /* whether 0 may be taken for denormal numbers */
    int64_t shares;                           /* in how many pieces threads of a team make it */
    const int64_t *sizes;                     /* elements of one member, for each tensor */
    void *const *stacks;                      /* addresses of tensors: parameters, then each state */
    void *const *grads;
    void *const *counts;                      /* addresses of the numbers of tensors, one list after the other */
    const int64_t *widths;                    /* bytes of each of these numbers */
    const double *columns;                    /* hyper-parameters [hyper][stride] */
    const float *advance;                     /* what a step adds to the step count of each member */
    Row row;
    Fill fill;
    int64_t *first; /* for each tensor the first of its records; tensors with equal numbers share them */
    int64_t *ends;  /* for each record the end of the run of members with equal ones */
    char *records;
} Step;

/* What this thread does with denormal numbers, below 1.2e-38 as floats: 0 for them if `flush`. The moments of a weight
   that gets no gradient decay to them and stay there, and a processor takes a hundred cycles for each. */
static uint64_t denormals(int64_t flush) {
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

/* The elements [low, high) of all tensors laid end to end. */
static void walk(const Step *step, int64_t low, int64_t high) {
    const uint64_t before = denormals(step->flush);
    int64_t base = 0;
    for (int64_t tensor = 0; tensor < step->tensors && base < high; tensor++) {
        const int64_t size = step->sizes[tensor], total = size * step->members;
        const int64_t stop = high - base < total ? high - base : total;
        int64_t from = low > base ? low - base : 0;
        const int64_t *ends = step->ends + step->first[tensor];
        const char *records = step->records + step->first[tensor] * step->record;
        while (from < stop) {
            const int64_t member = from / size, end = ends[member] * size;
            const int64_t to = end < stop ? end : stop;
            void *at[MAX_LISTS];
            for (int64_t list = 0; list < step->lists; list++) {
                void *first = list == 1 ? step->grads[tensor]
                                        : step->stacks[(list ? list - 1 : 0) * step->tensors + tensor];
                at[list] = (char *)first + from * step->element;
            }
            step->row(to - from, at, records + member * step->record);
            from = to;
        }
        base += total;
    }
    restore(before);
}

static int64_t elements(const Step *step) {
    int64_t total = 0;
    for (int64_t tensor = 0; tensor < step->tensors; tensor++) total += step->sizes[tensor] * step->members;
    return total;
}

/* Whether a tensor has other numbers than the one before it: its members are at other steps. */
static int differs(const Step *step, int64_t tensor) {
    for (int64_t number = 0; tensor && number < step->numbers; number++) {
        void *const *own = step->counts + number * step->tensors + tensor;
        if (memcmp(own[0], own[-1], step->members * step->widths[number])) return 1;
    }
    return !tensor;
}

/* Computes the scalars of a step, and advances the numbers in the state. */
void prepare(const Step *step) {
    int64_t set = -1;
    for (int64_t tensor = 0; tensor < step->tensors; tensor++) {
        set += differs(step, tensor);
        step->first[tensor] = set * step->members;
    }
    for (int64_t tensor = 0; tensor < step->tensors; tensor++) {
        const int64_t first = step->first[tensor];
        void *own[MAX_NUMBERS];
        for (int64_t number = 0; number < step->numbers; number++)
            own[number] = step->counts[number * step->tensors + tensor];
        if (tensor && first == step->first[tensor - 1]) {
            for (int64_t number = 0; number < step->numbers; number++)
                memcpy(own[number], step->counts[number * step->tensors + tensor - 1],
                       step->members * step->widths[number]);
            continue;
        }
        char *records = step->records + first * step->record;
        step->fill(step->members, step->stride, step->columns, step->advance, own, records);
        for (int64_t member = step->members - 1; member >= 0; member--) {
            const char *record = records + member * step->record;
            const int joins = member + 1 < step->members && !memcmp(record, record + step->record, step->record);
            step->ends[first + member] = joins ? step->ends[first + member + 1] : member + 1;
        }
    }
}

/* Makes a step with as many threads as pay, at most `threads`. */
void run(const Step *step, int64_t threads) {
    const int64_t total = elements(step);
    prepare(step);
    if (threads > total / GRAIN) threads = total / GRAIN;
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int64_t team = omp_get_num_threads(), mine = omp_get_thread_num();
            walk(step, total * mine / team, total * (mine + 1) / team);
        }
        return;
    }
#endif
    walk(step, 0, total);
}

/* Share `index` of a prepared step, as a piece of the work of a team (hfusion/device/team.c). */
int run_share(void *work, int64_t index, char *message, int64_t room) {
    const Step *step = work;
    const int64_t total = elements(step);
    walk(step, total * index / step->shares, total * (index + 1) / step->shares);
    (void)message, (void)room;
    return 0;
}

/* Whether all numbers of tensors are finite: the exponent of infinities and NaN is all ones. In blocks, which a compiler
   makes vectors of, and which end at the first that is not. */
#define FINITE(name, bits, exponent)                                                     \
    int name(int64_t tensors, const int64_t *sizes, const bits *const *at) {             \
        for (int64_t tensor = 0; tensor < tensors; tensor++)                             \
            for (int64_t from = 0; from < sizes[tensor]; from += 1024) {                 \
                const int64_t left = sizes[tensor] - from, n = left < 1024 ? left : 1024; \
                const bits *values = at[tensor] + from;                                  \
                bits bad = 0;                                                            \
                for (int64_t i = 0; i < n; i++) bad |= (values[i] & exponent) == exponent; \
                if (bad) return 0;                                                       \
            }                                                                            \
        return 1;                                                                        \
    }
FINITE(finite_float, uint32_t, 0x7f800000u)
FINITE(finite_double, uint64_t, 0x7ff0000000000000u)
