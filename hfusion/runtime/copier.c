/* A thread that copies memory, job after job, without Python.

What goes back to the host is written past the caches where the processor can: nobody reads it soon, and a line that is
written whole need not be read first. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LARGE (1 << 18)
/* Somebody waits for what is loaded, while what goes back may have room left: loads come between pieces of that. */
#define PIECE (1 << 20)

/* To wake a thread takes whoever does it longer than to ask for a copy: after a job the thread looks for the next one
   by itself for a while (LOOKS pauses), and who waits for a job looks a moment (GLANCES) before it sleeps. */
#define PAUSE_NS 30000
#define LOOKS 300
#define GLANCES 2000

typedef struct {
    uint64_t target, source;
    int64_t size;
    double ended;
} row;

/* Words of 8 bytes, as copying.py writes them, who keeps them until the job is done. past: written past the caches, after
   all that is not. moved: the rows that are done, and one more when the thread has let go of the job; at: the bytes of
   the next one that are. */
typedef struct job {
    struct job *next;
    int64_t count, past, moved, at;
    double began;
    row rows[];
} job;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job *first[2], *last[2]; /* by past */
    int closed, sleeps, waiters;
} copier;

double copier_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void relax(void)
{
#ifdef __SSE2__
    __builtin_ia32_pause();
#endif
}

static void copy(char *target, const char *source, int64_t size, int64_t past)
{
#ifdef __AVX2__
    if (past && size >= LARGE) {
        int64_t head = -(int64_t)((uintptr_t)target & 31) & 31;
        memcpy(target, source, (size_t)head);
        target += head, source += head, size -= head;
        for (; size >= 32; target += 32, source += 32, size -= 32)
            _mm256_stream_si256((__m256i *)target, _mm256_loadu_si256((const __m256i *)source));
        _mm_sfence();
    }
#endif
    memcpy(target, source, (size_t)size);
}

static job *next_of(const copier *self)
{
    return self->first[0] ? self->first[0] : self->first[1];
}

/* Until there is work or the end; holds the lock before and after. */
static void look(copier *self)
{
    const struct timespec pause = {0, PAUSE_NS};
    for (int looks = 0; !next_of(self) && !self->closed && looks < LOOKS; looks++) {
        pthread_mutex_unlock(&self->lock);
        nanosleep(&pause, 0);
        pthread_mutex_lock(&self->lock);
    }
    while (!next_of(self) && !self->closed) {
        self->sleeps = 1;
        pthread_cond_wait(&self->work, &self->lock);
        self->sleeps = 0;
    }
}

/* So many moves of a job are done. Who waits counts itself before it looks, so one of the two sees the other. */
static void tell(copier *self, job *each, int64_t moved)
{
    __atomic_store_n(&each->moved, moved, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&self->waiters, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&self->lock);
        pthread_cond_broadcast(&self->done);
        pthread_mutex_unlock(&self->lock);
    }
}

/* A piece of a job that has rows left. */
static void advance(copier *self, job *each)
{
    row *next = &each->rows[each->moved];
    const int64_t left = next->size - each->at, size = left < PIECE ? left : PIECE;
    copy((char *)next->target + each->at, (const char *)next->source + each->at, size, each->past);
    each->at += size;
    if (each->at < next->size)
        return;
    each->at = 0;
    next->ended = copier_now();
    tell(self, each, each->moved + 1);
}

static void *run(void *argument)
{
    copier *self = argument;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        look(self);
        job *each = next_of(self);
        if (!each)
            break;
        pthread_mutex_unlock(&self->lock);
        if (!each->began)
            each->began = copier_now();
        if (each->moved < each->count)
            advance(self, each);
        pthread_mutex_lock(&self->lock);
        if (each->moved < each->count)
            continue;
        self->first[each->past] = each->next;
        __atomic_store_n(&each->moved, each->count + 1, __ATOMIC_RELEASE);
        if (self->waiters)
            pthread_cond_broadcast(&self->done);
    }
    pthread_mutex_unlock(&self->lock);
    return 0;
}

/* Null if there can be no thread. */
copier *copier_open(void)
{
    copier *self = calloc(1, sizeof *self);
    if (!self)
        return 0;
    pthread_mutex_init(&self->lock, 0);
    pthread_cond_init(&self->work, 0);
    pthread_cond_init(&self->done, 0);
    if (pthread_create(&self->thread, 0, run, self)) {
        free(self);
        return 0;
    }
    return self;
}

/* Ends the thread when all its jobs are done. */
void copier_close(copier *self)
{
    pthread_mutex_lock(&self->lock);
    self->closed = 1;
    pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    pthread_join(self->thread, 0);
    pthread_cond_destroy(&self->work);
    pthread_cond_destroy(&self->done);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Begins a job after all before it of its kind. */
void copier_submit(copier *self, job *each)
{
    pthread_mutex_lock(&self->lock);
    if (self->first[each->past])
        self->last[each->past]->next = each;
    else
        self->first[each->past] = each;
    self->last[each->past] = each;
    if (self->sleeps)
        pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
}

/* Until so many moves of a job are done, see moved. */
void copier_wait(copier *self, job *each, int64_t moved)
{
    for (int glances = 0; glances < GLANCES; glances++) {
        if (__atomic_load_n(&each->moved, __ATOMIC_ACQUIRE) >= moved)
            return;
        relax();
    }
    pthread_mutex_lock(&self->lock);
    __atomic_add_fetch(&self->waiters, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&each->moved, __ATOMIC_SEQ_CST) < moved)
        pthread_cond_wait(&self->done, &self->lock);
    __atomic_sub_fetch(&self->waiters, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&self->lock);
}
