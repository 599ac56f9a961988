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

/* To wake a thread takes whoever does it longer than to ask for a copy: after a job the thread looks for the next one
   by itself for a while (LOOKS pauses), and who waits for a job looks a moment (GLANCES) before it sleeps. */
#define PAUSE_NS 30000
#define LOOKS 300
#define GLANCES 2000

/* As in copying.py; the maker keeps it and the arrays until it is done. */
typedef struct job {
    struct job *next;
    int64_t count;
    const uint64_t *targets, *sources;
    const int64_t *sizes;
    double began, ended;
    int32_t past, done;
} job;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job *first, *last;
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

static void move(char *target, const char *source, int64_t size, int past)
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

/* Until there is work or the end; holds the lock before and after. */
static void look(copier *self)
{
    const struct timespec pause = {0, PAUSE_NS};
    for (int looks = 0; !self->first && !self->closed && looks < LOOKS; looks++) {
        pthread_mutex_unlock(&self->lock);
        nanosleep(&pause, 0);
        pthread_mutex_lock(&self->lock);
    }
    while (!self->first && !self->closed) {
        self->sleeps = 1;
        pthread_cond_wait(&self->work, &self->lock);
        self->sleeps = 0;
    }
}

static void *run(void *argument)
{
    copier *self = argument;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        look(self);
        job *each = self->first;
        if (!each)
            break;
        self->first = each->next;
        pthread_mutex_unlock(&self->lock);
        each->began = copier_now();
        for (int64_t i = 0; i < each->count; i++)
            move((char *)each->targets[i], (const char *)each->sources[i], each->sizes[i], each->past);
        each->ended = copier_now();
        pthread_mutex_lock(&self->lock);
        __atomic_store_n(&each->done, 1, __ATOMIC_RELEASE);
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

/* Begins a job after all before it. */
void copier_submit(copier *self, job *each)
{
    pthread_mutex_lock(&self->lock);
    if (self->first)
        self->last->next = each;
    else
        self->first = each;
    self->last = each;
    if (self->sleeps)
        pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
}

void copier_wait(copier *self, job *each)
{
    for (int glances = 0; glances < GLANCES; glances++) {
        if (__atomic_load_n(&each->done, __ATOMIC_ACQUIRE))
            return;
        relax();
    }
    pthread_mutex_lock(&self->lock);
    self->waiters++;
    while (!each->done)
        pthread_cond_wait(&self->done, &self->lock);
    self->waiters--;
    pthread_mutex_unlock(&self->lock);
}
