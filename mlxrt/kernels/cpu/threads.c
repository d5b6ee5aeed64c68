/* A pool of threads for many short loops. A waiting thread looks for the next loop for some microseconds, because a decode
 * step has hundreds of them; then it sleeps, and an idle process uses no CPU.
 *
 * `next` holds everything a thread needs to take a task: the loop's number, how many tasks it has, and the next one's
 * index. Whoever takes an index below the count owns that task, and the loop ends when all are finished; a thread that
 * comes late takes an index beyond the count and touches nothing else. */
#include "threads.h"
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MAX_THREADS = 256, LOOKS = 3000, COUNT_BITS = 20, MAX_TASKS = 1 << 19 };
#define LOOP_OF(v) ((v) >> (2 * COUNT_BITS))
#define COUNT_OF(v) ((int)((v) >> COUNT_BITS & ((1 << COUNT_BITS) - 1)))
#define INDEX_OF(v) ((int)((v) & ((1 << COUNT_BITS) - 1)))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static atomic_ullong next;
static atomic_int finished, sleeping, waiting; /* tasks of the loop; threads of the pool; the caller */
static atomic_int wanted;                      /* threads of the pool that the loop wants */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static void (*loop_task)(void *, int);
static void *loop_argument;
static int started; /* threads of the pool */
static pid_t owner; /* a forked process has none of them */

static void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_tasks(void) {
    for (;;) {
        const unsigned long long mine = atomic_fetch_add(&next, 1);
        const int count = COUNT_OF(mine);
        if (INDEX_OF(mine) >= count) return;
        loop_task(loop_argument, INDEX_OF(mine));
        if (atomic_fetch_add(&finished, 1) + 1 == count && atomic_load(&waiting)) {
            pthread_mutex_lock(&lock);
            pthread_cond_signal(&done);
            pthread_mutex_unlock(&lock);
        }
    }
}

static void *help(void *index) {
    const int me = (int)(long)index;
    unsigned long long seen = 0, now;
    for (;;) {
        int looks = 0;
        while ((now = LOOP_OF(atomic_load(&next))) == seen && looks++ < LOOKS) relax();
        if (now == seen) {
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&sleeping, 1);
            while ((now = LOOP_OF(atomic_load(&next))) == seen) pthread_cond_wait(&work, &lock);
            atomic_fetch_sub(&sleeping, 1);
            pthread_mutex_unlock(&lock);
        }
        seen = now;
        if (me < atomic_load(&wanted)) take_tasks();
    }
    return NULL;
}

static void start_threads(int count) {
    if (owner != getpid()) {
        pthread_mutex_init(&lock, NULL), pthread_cond_init(&work, NULL), pthread_cond_init(&done, NULL);
        owner = getpid(), started = 0;
        atomic_store(&sleeping, 0), atomic_store(&waiting, 0), atomic_store(&next, 0);
    }
    for (; started < count; started++) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &detached, help, (void *)(long)started);
        pthread_attr_destroy(&detached);
        if (failed) return; /* those there are do the work */
    }
}

static void run_loop(int threads, int count, void (*task)(void *, int), void *argument) {
    start_threads(threads - 1);
    /* Nobody reads these between two loops: all tasks of the last one are finished. */
    loop_task = task, loop_argument = argument;
    atomic_store(&finished, 0), atomic_store(&wanted, threads - 1);
    const unsigned long long number = LOOP_OF(atomic_load(&next)) + 1;
    atomic_store(&next, number << (2 * COUNT_BITS) | (unsigned long long)count << COUNT_BITS);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&work);
        pthread_mutex_unlock(&lock);
    }
    take_tasks();
    for (int i = 0; i < LOOKS && atomic_load(&finished) < count; i++) relax();
    if (atomic_load(&finished) == count) return;
    pthread_mutex_lock(&lock);
    atomic_store(&waiting, 1);
    while (atomic_load(&finished) < count) pthread_cond_wait(&done, &lock);
    atomic_store(&waiting, 0);
    pthread_mutex_unlock(&lock);
}

void parallel_for(int threads, int count, void (*task)(void *, int), void *argument) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > count) threads = count;
    if (threads > 1 && count <= MAX_TASKS && !atomic_flag_test_and_set(&busy)) {
        run_loop(threads, count, task, argument);
        atomic_flag_clear(&busy);
        return;
    }
    for (int i = 0; i < count; i++) task(argument, i);
}
