/* Threads that live for one call only, so that fork() is safe between calls. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "pass.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
/* Treat denormal numbers as zero: they are slow and irrelevant here. */
static unsigned enter(void) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0); /* exceptions masked, round to nearest, flush to zero, denormals are zero */
  return before;
}
static void leave(unsigned before) { _mm_setcsr(before); }
#else
static unsigned enter(void) { return 0; }
static void leave(unsigned before) { (void)before; }
#endif

struct job {
  void (*work)(void *, int);
  void *context;
  int index;
  pthread_t thread;
};

static void *start(void *argument) {
  struct job *job = argument;
  unsigned before = enter();
  job->work(job->context, job->index);
  leave(before);
  return 0;
}

/* The caller runs job 0, and the jobs for which no thread could be created. */
void plsc_parallel(void (*work)(void *, int), void *context, int count) {
  struct job here = {work, context, 0, 0};
  struct job *jobs = count > 1 ? calloc((size_t)count, sizeof *jobs) : 0;
  int started = 1;
  if (jobs) {
    /* Only the calling thread handles signals. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started < count; started++) {
      jobs[started] = (struct job){work, context, started, 0};
      if (pthread_create(&jobs[started].thread, 0, start, &jobs[started])) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
  }
  start(&here);
  for (here.index = started; here.index < count; here.index++) start(&here);
  for (int i = 1; i < started; i++) pthread_join(jobs[i].thread, 0);
  free(jobs);
}
