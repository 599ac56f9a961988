/* Threads that do the pieces of one work at the same time.

   hfusion/device/team.py compiles this file at first use, and brings the threads: each of them stays in `team_work`,
   without Python's lock, until the team is closed. Pieces are taken in order by whichever thread is free, so that
   nothing but the time depends on how many threads there are. */

#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define ROOM 2048

/* Does piece `index` of a work; not 0 if it fails, with what went wrong in `message`. */
typedef int (*Piece)(void *work, int64_t index, char *message, int64_t room);

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, over;
    int64_t threads; /* that have not left */
    int closed;
    Piece piece;
    void *work;
    int64_t next, pieces, active; /* the piece to be taken next, how many there are, how many are being done */
    fenv_t modes;                 /* of who asked: rounding, and what is done with denormal numbers */
    int64_t failed;               /* the first piece that failed, or -1 */
    char message[ROOM];
} Team;

void *team_make(int64_t threads) {
    Team *team = calloc(1, sizeof *team);
    if (!team) return 0;
    team->threads = threads;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->begun, 0);
    pthread_cond_init(&team->over, 0);
    return team;
}

/* What a thread of the team does; the last one that leaves frees it. */
void team_work(void *address) {
    Team *team = address;
    char message[ROOM];
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->next >= team->pieces && !team->closed) pthread_cond_wait(&team->begun, &team->lock);
        if (team->closed) break;
        const int64_t index = team->next++;
        const Piece piece = team->piece;
        void *work = team->work;
        const fenv_t modes = team->modes;
        team->active++;
        pthread_mutex_unlock(&team->lock);
        fesetenv(&modes);
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
        if (!--team->active && team->next >= team->pieces) pthread_cond_signal(&team->over);
    }
    const int last = !--team->threads;
    pthread_mutex_unlock(&team->lock);
    if (last) {
        pthread_mutex_destroy(&team->lock);
        pthread_cond_destroy(&team->begun);
        pthread_cond_destroy(&team->over);
        free(team);
    }
}

/* Lets the threads leave. Nobody may ask the team for anything afterwards. */
void team_close(void *address) {
    Team *team = address;
    pthread_mutex_lock(&team->lock);
    team->closed = 1;
    pthread_cond_broadcast(&team->begun);
    pthread_mutex_unlock(&team->lock);
}

/* Does all pieces, one caller at a time, and returns when no thread is at one any more: -1, or the first piece that
   failed, with its `message`. */
int64_t team_run(void *address, Piece piece, void *work, int64_t pieces, char *message, int64_t room) {
    Team *team = address;
    pthread_mutex_lock(&team->lock);
    team->piece = piece;
    team->work = work;
    team->pieces = pieces;
    team->failed = -1;
    fegetenv(&team->modes);
    team->next = 0;
    pthread_cond_broadcast(&team->begun);
    while (team->next < team->pieces || team->active) pthread_cond_wait(&team->over, &team->lock);
    const int64_t failed = team->failed;
    if (failed >= 0) snprintf(message, room, "%s", team->message);
    pthread_mutex_unlock(&team->lock);
    return failed;
}

/* The rows [start, start + rows) of an array's step, by a program of that many members; see hfusion/step/entry.py. */
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
