// The threads of a block as fibers, and where they wait for each other.
//
// One runs until it waits; which one goes on is the schedule's choice. A block's fibers are made
// once and run block after block. A fault ends the launch with a message.
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

struct Coordinates {
  int x, y, z;
};
static Coordinates threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

const int MOST = 1024, WARP = 32, GROUPS = 32, STACK = 256 << 10;

enum Schedule { IN_ORDER, REVERSED, RANDOM, ONE_WARP_AHEAD, ONE_WARP_BEHIND };
enum State { RUNS, AT_BARRIER, AT_NAMED, AT_PHASE, AT_CLUSTER, IN_WARP, ENDED };

struct Thread {
  jmp_buf at;
  ucontext_t first;
  bool begun;
  State state;
  const char* what;  // it waits for
  int line;          // of the text, where it waits
  int barrier;       // by number
  bool waited;       // for the kernels before (griddepcontrol.wait)
  bool arrives;      // at a barrier of its cluster
};

struct Warp {
  int arrived, line;
  const char* what;
  unsigned epoch;  // how often its threads have met in __syncwarp
  void* operands[WARP];
};

// Of the block that runs (cluster.h).
static Thread* threads;
static Warp* warps;
static char* stacks;
static int current, count, arrived, ended, at_cluster;
static unsigned epoch = 1;   // grows at every barrier, and from block to block
static unsigned block_epoch;  // the first one of this block
static int schedule, favoured;
static unsigned long long chance;
static bool late;            // copies land when they are waited for, not when they are issued
static bool has_dependency;  // the kernel waits for those before it
static int left_out;         // line of a barrier that is not there: would it be missed?
static int more;             // groups of copies that a wait does not wait for, beside its own
static jmp_buf scheduler;
static char message[512];
static void (*body)(void);

[[noreturn]] __attribute__((format(printf, 1, 2), noinline)) void fault(const char* form, ...) {
  va_list values;
  va_start(values, form);
  int used = snprintf(message, sizeof message, "block %d, thread %d: ", blockIdx.x, threadIdx.x);
  vsnprintf(message + used, sizeof message - used, form, values);
  va_end(values);
  _longjmp(scheduler, 2);
}

__attribute__((noinline)) void leave() {
  if (!_setjmp(threads[current].at)) _longjmp(scheduler, 1);
}

void begin() {
  for (;;) {
    body();
    threads[current].state = ENDED;
    ++ended;
    leave();
  }
}

void enter(int t) {
  Thread& thread = threads[t];
  current = t;
  threadIdx.x = t;
  if (thread.begun) _longjmp(thread.at, 1);
  thread.begun = true;
  getcontext(&thread.first);
  thread.first.uc_stack.ss_sp = stacks + (long)t * STACK;
  thread.first.uc_stack.ss_size = STACK;
  thread.first.uc_link = nullptr;
  makecontext(&thread.first, begin, 0);
  setcontext(&thread.first);
}

int drawn(int below) {
  chance = chance * 6364136223846793005ull + 1442695040888963407ull;
  return (int)((chance >> 33) % below);
}

// The thread that goes on: -1 if none can.
int next() {
  int from = 0, step = 1;
  if (schedule == REVERSED) from = count - 1, step = count - 1;
  if (schedule == RANDOM) from = drawn(count);
  int other = -1;
  for (int k = 0, t = from; k < count; ++k, t = (t + step) % count) {
    if (threads[t].state != RUNS) continue;
    bool mine = t / WARP == favoured;
    if (schedule == ONE_WARP_AHEAD ? mine : schedule == ONE_WARP_BEHIND ? !mine : true) return t;
    if (other < 0) other = t;
  }
  return other;
}

[[noreturn]] void stuck() {
  int a = 0, b;
  while (threads[a].state == ENDED) ++a;
  for (b = a + 1; b < count - 1; ++b)
    if (threads[b].state != threads[a].state || threads[b].line != threads[a].line) break;
  Thread &one = threads[a], &two = threads[b < count ? b : a];
  threadIdx.x = a;
  fault("nothing goes on: it waits in %s (line %d), thread %d %s%s (line %d)", one.what, one.line,
        b, two.state == ENDED ? "has ended" : "in ", two.state == ENDED ? "" : two.what, two.line);
}

void all_have_met();     // what follows for the asynchronous proxy
bool something_lands();  // of what threads wait for

void start_block() {
  for (int t = 0; t < count; ++t) threads[t].state = RUNS, threads[t].waited = threads[t].arrives = false;
  for (int w = 0; w <= (count - 1) / WARP; ++w) warps[w].arrived = 0;
  arrived = ended = at_cluster = 0;
  block_epoch = ++epoch;
}

// Until all of its threads have ended, or wait for other blocks.
void run_block() {
  for (;;) {
    int t = next();
    if (t < 0) {
      if (ended == count || at_cluster == count) return;
      if (something_lands()) continue;
      stuck();
    }
    if (!_setjmp(scheduler)) enter(t);
    if (message[0]) return;
  }
}

// Waits until all threads of the block do. Those that have ended never will.
__attribute__((noinline)) void barrier(int line) {
  if (line == left_out) return;
  Thread& me = threads[current];
  me.what = "__syncthreads", me.line = line, me.state = AT_BARRIER;
  if (ended) fault("__syncthreads (line %d), but some threads have ended", line);
  if (++arrived < count) return leave();
  for (int t = 0; t < count; ++t) {
    if (threads[t].line != line)
      fault("barriers at lines %d and %d (thread %d) meet", line, threads[t].line, t);
    threads[t].state = RUNS;
  }
  arrived = 0;
  ++epoch;
  all_have_met();
}

// Waits for the `size` threads that meet at one of the sixteen barriers of a block. No order of
// what they did in memory follows from it here, so that kernels are not held for safe by it.
__attribute__((noinline)) void named_barrier(int line, int number, int size) {
  if (number == 0 && size == count) return barrier(line);
  Thread& me = threads[current];
  me.what = "a named barrier", me.line = line, me.state = AT_NAMED, me.barrier = number;
  int here = 0;
  for (int t = 0; t < count; ++t)
    here += threads[t].state == AT_NAMED && threads[t].barrier == number;
  if (here < size) return leave();
  for (int t = 0; t < count; ++t)
    if (threads[t].state == AT_NAMED && threads[t].barrier == number) threads[t].state = RUNS;
}

// All lanes of a warp meet at one place of the text. The last one to come does `act` for all, on
// what each brings along; `group` warps that follow each other meet together.
typedef void (*Act)(int first, void** operands);
__attribute__((noinline)) void meet(const char* what, int line, void* operand, Act act,
                                    int group = 1) {
  int first = current / (WARP * group) * WARP * group, size = WARP * group;
  Warp& leader = warps[first / WARP];
  Thread& me = threads[current];
  if (first + size > count) fault("%s (line %d) in an incomplete warp", what, line);
  if (leader.arrived && (leader.line != line || leader.what != what))
    fault("a warp meets in %s (line %d) and in %s (line %d)", leader.what, leader.line, what, line);
  leader.line = line, leader.what = what;
  warps[current / WARP].operands[current % WARP] = operand;
  me.what = what, me.line = line, me.state = IN_WARP;
  if (++leader.arrived < size) return leave();
  leader.arrived = 0;
  void* all[4 * WARP];
  for (int k = 0; k < size; ++k) all[k] = warps[(first + k) / WARP].operands[(first + k) % WARP];
  act(first, all);
  for (int k = 0; k < size; ++k) threads[first + k].state = RUNS;
}

void sync_warp(int line, unsigned mask) {
  if (mask != 0xffffffffu) fault("__syncwarp (line %d) of a part of a warp", line);
  meet("__syncwarp", line, nullptr, [](int first, void**) { ++warps[first / WARP].epoch; });
}

}  // namespace emulator

#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp(...) emulator::sync_warp(__LINE__, 0xffffffffu)
