// Blocks that are launched together. One runs until all of its threads have ended or wait for the
// other blocks; then the next one does. What belongs to a block is its room.
#pragma once
#include "hopper.h"

namespace emulator {

struct Room {
  Thread threads[MOST];
  Warp warps[MOST / WARP];
  Shared stamps[WINDOW];
  unsigned long long fences[MOST], shown[MOST];
  int seen[MOST][BARRIERS];
  Copies copies[MOST];
  Warpgroup warpgroups[MOST / GROUP];
  Arrivals arrivals[BARRIERS];
  Bulk flying[FLYING];
  int arrived, ended, at_cluster, arrivals_made, in_the_air, block;
  unsigned block_epoch;
  char window[WINDOW], stacks[(long)MOST * STACK];
};

const int CLUSTER = 8;
const unsigned CANARY = 0x5ca1ab1e;
static Room* rooms[CLUSTER];
static int active = -1;
static unsigned last_meeting;  // the epoch after it
static int cluster_size;

void leave_room() {
  if (active < 0) return;
  Room& room = *rooms[active];
  memcpy(room.window + window_base, window + window_base, window_end - window_base);
  room.arrived = arrived, room.ended = ended, room.at_cluster = at_cluster;
  room.arrivals_made = arrivals_made, room.in_the_air = in_the_air;
  room.block_epoch = block_epoch;
  active = -1;
}

void enter_room(int which) {
  if (active == which) return;
  leave_room();
  if (!rooms[which])
    rooms[which] = (Room*)mmap(nullptr, sizeof(Room), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Room& room = *rooms[active = which];
  threads = room.threads, warps = room.warps, stamps = room.stamps, seen = room.seen;
  fences = room.fences, shown = room.shown, copies = room.copies, warpgroups = room.warpgroups;
  arrivals = room.arrivals, flying = room.flying, stacks = room.stacks;
  arrived = room.arrived, ended = room.ended, at_cluster = room.at_cluster;
  arrivals_made = room.arrivals_made, in_the_air = room.in_the_air;
  block_epoch = room.block_epoch, blockIdx.x = room.block;
  memcpy(window + window_base, room.window + window_base, window_end - window_base);
}

// After a fault, which leaves fibers where they are.
void drop_rooms() {
  active = -1;
  for (Room*& room : rooms) {
    if (room) munmap(room, sizeof(Room));
    room = nullptr;
  }
}

// What went wrong is in `message`.
void run_cluster(int first, int size) {
  cluster_size = size, last_meeting = epoch + 1;
  for (int r = 0; r < size; ++r) {
    enter_room(r);
    rooms[r]->block = blockIdx.x = first + (schedule == REVERSED ? size - 1 - r : r);
    for (int t = 0; t < count; ++t) *(unsigned*)(stacks + (long)t * STACK) = CANARY;
    favoured = drawn((count + WARP - 1) / WARP);
    poison_window();
    start_block();
    forget();
  }
  for (;;) {
    int over = 0;
    for (int r = 0; r < size && !message[0]; ++r) {
      enter_room(r);
      if (!_setjmp(scheduler)) run_block();
      over += ended == count;
    }
    if (message[0] || over == size) break;
    ++epoch, ++meetings, last_meeting = epoch;
    for (int r = 0; r < size; ++r) {
      enter_room(r);
      if (ended == count && !_setjmp(scheduler)) fault("a block has ended, and another waits for it");
      if (message[0]) return;
      for (int t = 0; t < count; ++t) threads[t].state = RUNS;
      at_cluster = 0;
      all_have_met();
    }
  }
  for (int t = 0; t < count && !message[0]; ++t)
    if (*(unsigned*)(stacks + (long)t * STACK) != CANARY) strcpy(message, "a stack was too small");
}

void cluster_arrive(int line) {
  if (threads[current].arrives) fault("arrives twice (line %d) before it waits", line);
  threads[current].arrives = true;
}

__attribute__((noinline)) void cluster_wait(int line) {
  Thread& me = threads[current];
  if (!me.arrives) fault("waits for its cluster (line %d) and has not arrived", line);
  me.what = "a barrier of its cluster", me.line = line, me.state = AT_CLUSTER, me.arrives = false;
  ++at_cluster;
  leave();
}

const int RANK = 24;  // bits of an address in a block

void map_address(int, unsigned& there, unsigned at, unsigned rank) { there = rank << RANK | at; }

// What a block of the cluster has at an address, which it wrote before the blocks last met, and
// does not write again before they meet next.
__attribute__((noinline)) void load_remote(int line, float& x, float& y, float& z, float& w,
                                           unsigned there) {
  int rank = there >> RANK, r = schedule == REVERSED ? cluster_size - 1 - rank : rank;
  int at = there & ((1 << RANK) - 1);
  if (rank >= cluster_size) fault("reads from block %d of %d (line %d)", rank, cluster_size, line);
  if (at % 16 || at < window_base || at + 16 > window_end)
    fault("reads 16 bytes at %d of another block's shared memory (line %d)", at, line);
  Room& room = *rooms[r];
  if (r != active && room.ended == count)
    fault("reads shared memory of a block that has ended (line %d)", line);
  for (int k = at; k < at + 16; ++k) {
    Shared& byte = room.stamps[k];
    if (byte.write.epoch >= last_meeting || byte.flight)
      fault("reads byte %d of block %d (line %d), written since blocks met", k, rank, line);
    byte.remote = meetings;
  }
  float found[4];
  memcpy(found, (r == active ? window : room.window) + at, 16);
  x = found[0], y = found[1], z = found[2], w = found[3];
}

void store_four(int, unsigned at, float x, float y, float z, float w) {
  float given[4] = {x, y, z, w};
  touch(&whole, window + at, 16, 16, true);
  memcpy(window + at, given, 16);
}

}  // namespace emulator
