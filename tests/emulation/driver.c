/* Runs one entry of kernels that are linked with it, on buffers from standard input.

   Takes `entry`, `buffers`, and of every buffer its bytes and whether they follow (0: it is filled
   with FILL); then those that follow. Gives of every buffer whether what lies around it is intact,
   and its bytes. Stands in for TVM's runtime: threads that meet at barriers, and workspaces. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if THREADS > 1
#include <pthread.h>
#endif

enum { ALIGNMENT = 64, FILL = 0xA5, GUARD = 4096, INTEGER = 1 };

typedef struct { int32_t type, zero; int64_t value; } Any;
typedef int Entry(void *self, const Any *arguments, int32_t count, Any *result);
typedef struct { void *barrier; int32_t tasks; } Group;
typedef int Body(int task, Group *group, void *closure);

extern Entry *const entries[];

#if THREADS > 1
typedef struct { Body *body; Group *group; void *closure; int task, status; } Task;

static void *run(void *given) {
  Task *task = given;
  task->status = task->body(task->task, task->group, task->closure);
  return NULL;
}

static int launch(Body *body, void *closure, int32_t tasks) {
  pthread_barrier_t barrier;
  pthread_t threads[THREADS];
  Task given[THREADS];
  Group group = {&barrier, tasks > 0 && tasks < THREADS ? tasks : THREADS};
  pthread_barrier_init(&barrier, NULL, group.tasks);
  for (int i = 0; i < group.tasks; i++) {
    given[i] = (Task){body, &group, closure, i, 0};
    if (pthread_create(&threads[i], NULL, run, &given[i])) abort();
  }
  int status = 0;
  for (int i = 0; i < group.tasks; i++) {
    pthread_join(threads[i], NULL);
    status |= given[i].status;
  }
  pthread_barrier_destroy(&barrier);
  return status;
}

static int meet(int task, Group *group) {
  (void)task;
  pthread_barrier_wait(group->barrier);
  return 0;
}
#else
static int launch(Body *body, void *closure, int32_t tasks) {
  (void)tasks;
  Group group = {NULL, 1};
  return body(0, &group, closure);
}

static int meet(int task, Group *group) {
  (void)task, (void)group;
  return 0;
}
#endif

static void *workspace(int device, int number, uint64_t bytes, int code, int bits) {
  (void)device, (void)number, (void)code, (void)bits;
  void *found = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  if (found) memset(found, FILL, bytes);
  return found;
}

static int release(int device, int number, void *memory) {
  (void)device, (void)number;
  free(memory);
  return 0;
}

/* Objects define these as weak and null. */
int (*__TVMBackendParallelLaunch)(Body *, void *, int32_t) = launch;
int (*__TVMBackendParallelBarrier)(int, Group *) = meet;
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = workspace;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = release;

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int i = 0; i < count; i++) fputs(parts[i] ? parts[i] : "", stderr);
  fputc('\n', stderr);
}

static void receive(void *to, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t got = read(0, (char *)to + at, bytes - at);
    if (got <= 0) exit(3);
    at += got;
  }
}

static void give(const void *from, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t put = write(1, (const char *)from + at, bytes - at);
    if (put <= 0) exit(4);
    at += put;
  }
}

int main(void) {
  int64_t head[2];
  receive(head, sizeof head);
  int64_t count = head[1], (*sizes)[2] = malloc(count * sizeof *sizes);
  unsigned char **raw = malloc(count * sizeof *raw);
  int64_t *table = malloc(count * sizeof *table);
  receive(sizes, count * sizeof *sizes);
  for (int64_t i = 0; i < count; i++) {
    size_t bytes = (sizes[i][0] + 2 * GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    raw[i] = aligned_alloc(ALIGNMENT, bytes);
    memset(raw[i], FILL, bytes);
    table[i] = (int64_t)(intptr_t)(raw[i] + GUARD);
    if (sizes[i][1]) receive(raw[i] + GUARD, sizes[i][0]);
  }
  Any argument = {INTEGER, 0, (int64_t)(intptr_t)table}, result = {0, 0, 0};
  if (entries[head[0]](NULL, &argument, 1, &result)) return 2;
  for (int64_t i = 0; i < count; i++) {
    int64_t intact = 1;
    for (int k = 0; k < GUARD; k++)
      intact &= raw[i][k] == FILL && raw[i][GUARD + sizes[i][0] + k] == FILL;
    give(&intact, sizeof intact);
    give(raw[i] + GUARD, sizes[i][0]);
  }
  return 0;
}
