#ifndef MLXRT_THREADS_H
#define MLXRT_THREADS_H
/* Calls task(argument, i) for every i < count, on up to `threads` threads; the caller is one of them, and the only one
 * while the pool works for another caller. */
void parallel_for(int threads, int count, void (*task)(void *, int), void *argument);
#endif
