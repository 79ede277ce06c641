// Runs launches: what Python calls.
//
// The text is compiled without optimisation, which takes a quarter of the time; what is here is not.
#pragma once
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "cluster.h"

#define EMULATOR_CALL extern "C" __attribute__((visibility("default")))

namespace emulator {

typedef void (*Kernel)(Region* buffers);
static Kernel kernel;
static Region* buffers;

struct Launch {
  int blocks, copies, threads, shared_bytes, schedule, late, has_dependency, left_out, more;
  int shared_base, cluster;
  unsigned long long seed;
};

void whole_kernel() {
  kernel(buffers);
  copies_are_done();
  all_is_done();
}

// What was wrong; null if nothing was.
EMULATOR_CALL const char* emulator_run(Kernel which, Region* given, const Launch* launch) {
  kernel = which, buffers = given, body = whole_kernel;
  message[0] = 0;
  count = launch->threads;
  window_base = launch->shared_base, window_end = window_base + launch->shared_bytes;
  schedule = launch->schedule, late = launch->late, has_dependency = launch->has_dependency;
  left_out = launch->left_out, more = launch->more, chance = launch->seed;
  if (window_end > WINDOW) return "more shared memory than any card has";
  whole.base = window + window_base, whole.size = launch->shared_bytes;
  blockDim = {count, 1, 1}, gridDim = {launch->blocks, launch->copies, 1};
  int size = launch->cluster, clusters = launch->blocks / size;
  if (launch->blocks % size || size > CLUSTER) return "blocks that are no clusters";
  for (int copy = launch->copies - 1; copy >= 0; --copy)  // in no order to rely on
    for (int k = 0; k < clusters; ++k) {
      blockIdx = {0, copy, 0};
      run_cluster((schedule == REVERSED ? clusters - 1 - k : k) * size, size);
      if (message[0]) {
        drop_rooms();
        return message;
      }
    }
  return nullptr;
}

}  // namespace emulator
#pragma GCC pop_options
