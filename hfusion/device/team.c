/* Threads that do the pieces of one work at the same time.

   hfusion/device/team.py compiles this file at first use, and brings the threads: each of them stays in `team_work`,
   without Python's lock, until the team is closed. Pieces are taken in order by whichever thread is free, so that
   nothing but the time depends on how many threads there are.

   A thread that sleeps is late by what it takes to wake up, some ten microseconds on a machine of its own and a hundred
   on a virtual one. So threads look for work for a while before they sleep, where works follow each other so closely
   that this is likely to help; and who asks may do pieces himself. */

#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROOM 2048
/* What a thread that waits may spend: in times of what it takes to wake up, and in nanoseconds, as a machine that is
   busy wakes nobody up for long. */
#define PATIENCE 8
#define LONGEST 1000000
/* Of averages over the latest works: the weight of those before, to 1 of the new one. */
#define BEFORE 3

/* Does piece `index` of a work; not 0 if it fails, with what went wrong in `message`. */
typedef int (*Piece)(void *work, int64_t index, char *message, int64_t room);

/* How a thread is told how many threads of torch's its kernels may use; from team.py, what is 0 is not there. */
typedef struct {
    int (*threads)(void);
    void (*set_threads)(int);
    int (*set_mkl)(int); /* gives the number before */
} Setting;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, over;
    int64_t threads; /* that have not left */
    int closed;
    Setting setting;
    int inner; /* threads of torch's for each piece */
    Piece piece;
    void *work;
    int64_t next, pieces, active; /* the piece to be taken next, how many there are, how many are being done */
    fenv_t modes;                 /* of who asked: rounding, and what is done with denormal numbers */
    int64_t failed;               /* the first piece that failed, or -1 */
    char message[ROOM];
    /* Looked at without the lock, by who waits: works that were begun, and that ended; the team was closed. */
    atomic_uint_least64_t begins, ends;
    /* Nanoseconds: when the latest work was begun, and ended; averages of the time from the end of a work to the
       begin of the next, and of what it takes a thread that sleeps to wake up. */
    int64_t began, ended, pause, waking;
} Team;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int64_t average(int64_t before, int64_t found) {
    return before ? (before * BEFORE + found) / (BEFORE + 1) : found;
}

/* How long a thread looks for work before it sleeps. */
static int64_t patience(const Team *team) {
    const int64_t found = team->waking * PATIENCE;
    return found < LONGEST ? found : LONGEST;
}

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Looks for a change of `count` from `seen`, for at most so many nanoseconds. */
static void look(atomic_uint_least64_t *count, uint_least64_t seen, int64_t nanoseconds) {
    const int64_t until = now() + nanoseconds;
    while (atomic_load_explicit(count, memory_order_acquire) == seen) {
        for (int k = 0; k < 32; k++) rest();
        if (now() >= until) return;
    }
}

void *team_make(int64_t threads, int64_t inner, const Setting *setting) {
    Team *team = calloc(1, sizeof *team);
    if (!team) return 0;
    team->threads = threads;
    team->inner = inner;
    team->setting = *setting;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->begun, 0);
    pthread_cond_init(&team->over, 0);
    return team;
}

/* Takes pieces until there is none, and does them. With the lock, which it lets go of meanwhile. */
static void take(Team *team) {
    char message[ROOM];
    while (team->next < team->pieces) {
        const int64_t index = team->next++;
        const Piece piece = team->piece;
        void *work = team->work;
        team->active++;
        pthread_mutex_unlock(&team->lock);
        message[0] = 0;
        const int failed = piece(work, index, message, ROOM);
        pthread_mutex_lock(&team->lock);
        if (failed) {
            if (team->failed < 0 || index < team->failed) {
                team->failed = index;
                snprintf(team->message, ROOM, "%s", message);
            }
            team->next = team->pieces; /* what has not begun does not */
        }
        if (!--team->active && team->next >= team->pieces) {
            atomic_fetch_add_explicit(&team->ends, 1, memory_order_release);
            pthread_cond_signal(&team->over);
        }
    }
}

/* Waits for a work, or until the team is closed. With the lock, which it lets go of meanwhile. */
static void await(Team *team) {
    if (team->next < team->pieces || team->closed) return;
    const int64_t nanoseconds = patience(team);
    if (team->pause < nanoseconds) {
        const uint_least64_t seen = atomic_load(&team->begins);
        pthread_mutex_unlock(&team->lock);
        look(&team->begins, seen, nanoseconds);
        pthread_mutex_lock(&team->lock);
    }
    while (team->next >= team->pieces && !team->closed) {
        pthread_cond_wait(&team->begun, &team->lock);
        if (team->next < team->pieces) team->waking = average(team->waking, now() - team->began);
    }
}

/* Lets go of the lock, and of the team if that was the last who has to do with it. */
static void leave(Team *team, int last) {
    pthread_mutex_unlock(&team->lock);
    if (!last) return;
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->begun);
    pthread_cond_destroy(&team->over);
    free(team);
}

/* What a thread of the team does; the last one that leaves frees it. */
void team_work(void *address) {
    Team *team = address;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        await(team);
        if (team->closed) break;
        const fenv_t modes = team->modes;
        fesetenv(&modes);
        take(team);
    }
    leave(team, !--team->threads);
}

/* Lets the threads leave. Nobody may ask the team for anything afterwards. */
void team_close(void *address) {
    Team *team = address;
    pthread_mutex_lock(&team->lock);
    team->closed = 1;
    atomic_fetch_add_explicit(&team->begins, 1, memory_order_release);
    pthread_cond_broadcast(&team->begun);
    leave(team, !team->threads);
}

/* Does all pieces, one caller at a time, and returns when no thread is at one any more: -1, or the first piece that
   failed, with its `message`. `joins`: the caller does pieces, too. */
int64_t team_run(void *address, Piece piece, void *work, int64_t pieces, int joins, char *message, int64_t room) {
    Team *team = address;
    if (pieces <= 0) return -1;
    pthread_mutex_lock(&team->lock);
    team->piece = piece;
    team->work = work;
    team->pieces = pieces;
    team->failed = -1;
    fegetenv(&team->modes);
    team->next = 0;
    team->began = now();
    if (team->ended) team->pause = average(team->pause, team->began - team->ended);
    const uint_least64_t seen = atomic_load(&team->ends);
    atomic_fetch_add_explicit(&team->begins, 1, memory_order_release);
    pthread_cond_broadcast(&team->begun);
    if (joins) {
        const Setting *its = &team->setting;
        const int before = its->threads(), mkl = its->set_mkl ? its->set_mkl(team->inner) : 0;
        if (before != team->inner) its->set_threads(team->inner);
        take(team);
        if (before != team->inner) its->set_threads(before);
        if (its->set_mkl) its->set_mkl(mkl);
        if (team->active) {
            const int64_t nanoseconds = patience(team);
            pthread_mutex_unlock(&team->lock);
            look(&team->ends, seen, nanoseconds);
            pthread_mutex_lock(&team->lock);
        }
    }
    while (team->next < team->pieces || team->active) pthread_cond_wait(&team->over, &team->lock);
    team->ended = now();
    const int64_t failed = team->failed;
    if (failed >= 0) snprintf(message, room, "%s", team->message);
    pthread_mutex_unlock(&team->lock);
    return failed;
}

/* The rows [start, start + rows) of an array's step, by a program of that many members; see hfusion/torch_private/inductor.py. */
typedef int (*Program)(void *const *tensors, const char *stacked, int64_t inputs, int64_t start, int64_t rows,
                       char *const *outputs, const int64_t *bytes, int64_t count, char *message, int64_t room);

typedef struct {
    Program program;
    int64_t start, rows;
} Block;

typedef struct {
    const Block *blocks;
    void *const *tensors;
    const char *stacked;
    int64_t inputs;
    char *const *outputs;
    const int64_t *bytes;
    int64_t count;
} Step;

/* A piece: block `index` of a step. */
int step_block(void *work, int64_t index, char *message, int64_t room) {
    const Step *step = work;
    const Block *block = step->blocks + index;
    return block->program(step->tensors, step->stacked, step->inputs, block->start, block->rows, step->outputs,
                          step->bytes, step->count, message, room);
}
