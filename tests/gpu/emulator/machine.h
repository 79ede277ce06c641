// Runs launches: what Python calls.
//
// The text is compiled without optimisation, which takes a quarter of the time; what is here is not.
#pragma once
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "hopper.h"

#define EMULATOR_CALL extern "C" __attribute__((visibility("default")))

namespace emulator {

typedef void (*Kernel)(Region* buffers);
static Kernel kernel;
static Region* buffers;

struct Launch {
  int blocks, copies, threads, shared_bytes, schedule, late, has_dependency, left_out, more;
  int shared_base;
  unsigned long long seed;
};

static char* reserved(long bytes) {
  return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

const unsigned CANARY = 0x5ca1ab1e;

void whole_kernel() {
  kernel(buffers);
  copies_are_done();
  all_is_done();
}

// What was wrong; null if nothing was.
EMULATOR_CALL const char* emulator_run(Kernel which, Region* given, const Launch* launch) {
  if (!stacks) {
    stacks = reserved((long)MOST * STACK);
    copies = (Copies*)reserved(MOST * sizeof(Copies));
  }
  kernel = which, buffers = given, body = whole_kernel;
  message[0] = 0;
  count = launch->threads;
  window_base = launch->shared_base, window_end = window_base + launch->shared_bytes;
  schedule = launch->schedule, late = launch->late, has_dependency = launch->has_dependency;
  left_out = launch->left_out, more = launch->more, chance = launch->seed;
  if (window_end > WINDOW) return "more shared memory than any card has";
  whole.base = window + window_base, whole.size = launch->shared_bytes;
  blockDim = {count, 1, 1}, gridDim = {launch->blocks, launch->copies, 1};
  for (int t = 0; t < count; ++t) *(unsigned*)(stacks + (long)t * STACK) = CANARY;
  for (int copy = launch->copies - 1; copy >= 0; --copy)  // in no order to rely on
    for (int block = 0; block < launch->blocks; ++block) {
      blockIdx = {schedule == REVERSED ? launch->blocks - 1 - block : block, copy, 0};
      favoured = drawn((count + WARP - 1) / WARP);
      poison_window();
      forget();
      run_block();
      if (message[0]) {  // fibers end where they are
        for (Thread& thread : threads) thread.begun = false;
        for (int t = 0; t < count; ++t) copies[t].begun = copies[t].groups = 0;
        for (Shared& byte : stamps) byte = Shared();
        return message;
      }
      for (int t = 0; t < count; ++t)
        if (*(unsigned*)(stacks + (long)t * STACK) != CANARY) return "a stack was too small";
    }
  return nullptr;
}

}  // namespace emulator
#pragma GCC pop_options
