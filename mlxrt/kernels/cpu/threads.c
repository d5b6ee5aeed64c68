/* A pool of threads for many short loops. A waiting thread looks for the next loop for some microseconds, because a decode
 * step has hundreds of them; then it sleeps, and an idle process uses no CPU. */
#include "threads.h"
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MAX_THREADS = 256, LOOKS = 3000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static atomic_uint loop;              /* its number: a new one is work */
static atomic_int next, last, helpers, running; /* indices of the loop; threads it wants, and those inside it */
static void (*loop_task)(void *, int);
static void *loop_argument;
static int started;  /* threads of the pool */
static pid_t owner;  /* a forked process has none of them */

static void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_tasks(void) {
    int i;
    while ((i = atomic_fetch_add(&next, 1)) < atomic_load(&last)) loop_task(loop_argument, i);
}

static void *help(void *index) {
    const int me = (int)(long)index;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < LOOKS && atomic_load_explicit(&loop, memory_order_acquire) == seen; i++) relax();
        pthread_mutex_lock(&lock);
        while (atomic_load(&loop) == seen) pthread_cond_wait(&work, &lock);
        seen = atomic_load(&loop);
        /* Joined under the lock, where the caller ends a loop too: nobody enters one that has ended. */
        const int joins = me < atomic_load(&helpers);
        if (joins) atomic_fetch_add(&running, 1);
        pthread_mutex_unlock(&lock);
        if (!joins) continue;
        take_tasks();
        if (atomic_fetch_sub(&running, 1) == 1) {
            pthread_mutex_lock(&lock);
            pthread_cond_signal(&done);
            pthread_mutex_unlock(&lock);
        }
    }
    return NULL;
}

static void start_threads(int wanted) {
    if (owner != getpid()) {
        pthread_mutex_init(&lock, NULL), pthread_cond_init(&work, NULL), pthread_cond_init(&done, NULL);
        owner = getpid(), started = 0;
        atomic_store(&loop, 0), atomic_store(&running, 0);
    }
    for (; started < wanted; started++) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &detached, help, (void *)(long)started);
        pthread_attr_destroy(&detached);
        if (failed) return; /* those there are do the work */
    }
}

void parallel_for(int threads, int count, void (*task)(void *, int), void *argument) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > count) threads = count;
    if (threads <= 1) {
        for (int i = 0; i < count; i++) task(argument, i);
        return;
    }
    start_threads(threads - 1);
    pthread_mutex_lock(&lock);
    loop_task = task, loop_argument = argument;
    atomic_store(&next, 0), atomic_store(&last, count), atomic_store(&helpers, threads - 1);
    atomic_fetch_add(&loop, 1);
    pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
    take_tasks();
    for (int i = 0; i < LOOKS && atomic_load(&running); i++) relax();
    pthread_mutex_lock(&lock);
    atomic_store(&helpers, 0); /* whoever has not joined yet need not */
    while (atomic_load(&running)) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
}
