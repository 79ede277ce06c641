// What compute capability 9.0 adds: barriers in shared memory that count bytes, copies that they
// count, and products that tensor cores read from shared memory by themselves.
//
// Such copies and products go through the asynchronous proxy. It sees what threads have written
// after each of them has said so (fence.proxy.async) and a barrier; threads see what it has written
// after they have waited for the phase of its barrier. Where things happen late, a copy lands when
// no thread can go on without it, and a product reads its operands when it is waited for.
#pragma once
#include "instructions.h"

namespace emulator {

// --- barriers in shared memory (mbarrier) and copies that they count (cp.async.bulk) ---

struct Arrivals {
  unsigned at;
  int expected, pending;
  long long bytes;
  int phase;  // phases that are complete
  unsigned epoch;
  int thread;  // that has made it
  unsigned long long made;
};

const int FLYING = 256;
static Arrivals* arrivals;
static int arrivals_made;

struct Bulk {
  unsigned to;
  int bytes, barrier;
  const void* from;
};
static Bulk* flying;
static int in_the_air;

Arrivals& arrivals_at(int line, unsigned at) {
  for (int k = 0; k < arrivals_made; ++k)
    if (arrivals[k].at == at) {
      Arrivals& found = arrivals[k];
      if (found.thread != current && found.epoch == epoch)
        fault("a barrier in shared memory (line %d) that thread %d has made, and no barrier between",
              line, found.thread);
      if (fences[found.thread] < found.made)
        fault("a barrier in shared memory (line %d) without a fence after it was made", line);
      return found;
    }
  fault("no barrier at %u of shared memory (line %d)", at, line);
}

void mbarrier_init(int line, unsigned at) {
  if (at % 8) fault("a barrier (line %d) at %u, which is not aligned", line, at);
  touch(&whole, window + at, 8, 8, true);
  if (arrivals_made == BARRIERS) fault("more than %d barriers", BARRIERS);
  for (int k = 0; k < arrivals_made; ++k)
    if (arrivals[k].at == at) fault("a barrier (line %d) that is made twice", line);
  arrivals[arrivals_made++] = {at, 1, 1, 0, 0, epoch, current, ++moment};
}

// What this thread has written, and the barriers that it has made, are there for the asynchronous
// proxy, once threads have met.
void fence(int) { fences[current] = ++moment; }

void completed(Arrivals& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  for (int t = 0; t < count; ++t)
    if (threads[t].state == AT_PHASE) threads[t].state = RUNS;
}

void mbarrier_expect(int line, unsigned at, int bytes) {
  Arrivals& barrier = arrivals_at(line, at);
  if (!barrier.pending) fault("more arrive at a barrier (line %d) than it waits for", line);
  --barrier.pending;
  barrier.bytes += bytes;
  completed(barrier);
}

void land_bulk(int which) {
  Bulk copy = flying[which];
  flying[which] = flying[--in_the_air];
  Arrivals& barrier = arrivals[copy.barrier];
  memcpy(window + copy.to, copy.from, copy.bytes);
  for (int b = 0; b < copy.bytes; ++b) {
    Shared& byte = stamps[copy.to + b];
    byte.flight = false;
    byte.barrier = copy.barrier + 1, byte.phase = barrier.phase + 1;
  }
  barrier.bytes -= copy.bytes;
  completed(barrier);
}

__attribute__((noinline)) void bulk_copy(int line, unsigned to, Pointer<const void> from, int bytes,
                                         unsigned at) {
  Arrivals& barrier = arrivals_at(line, at);
  if (bytes % 16) fault("copies %d bytes (line %d), which is no multiple of 16", bytes, line);
  touch(&whole, window + to, bytes, 16, true);
  touch(from.region, from.at, bytes, 1, false);
  if ((unsigned long long)from.at % 16) fault("copies (line %d) from where nothing is aligned", line);
  if (in_the_air == FLYING) fault("more than %d copies on their way (line %d)", FLYING, line);
  for (int b = 0; b < bytes; ++b) stamps[to + b].flight = true, stamps[to + b].moment = 0;
  if (late) memset(window + to, 0xff, bytes);
  flying[in_the_air++] = {to, bytes, (int)(&barrier - arrivals), from.at};
  if (!late) land_bulk(in_the_air - 1);
}

// Until the phase of that parity is complete.
__attribute__((noinline)) void mbarrier_wait(int line, unsigned at, int parity) {
  Arrivals& barrier = arrivals_at(line, at);
  int number = &barrier - arrivals;
  while ((barrier.phase & 1) == (parity & 1)) {
    Thread& me = threads[current];
    me.what = "a barrier in shared memory", me.line = line, me.state = AT_PHASE;
    leave();
  }
  seen[current][number] = barrier.phase;
}

// Whether something was on its way that now has landed: what threads wait for.
bool something_lands() {
  if (!in_the_air) return false;
  land_bulk(drawn(in_the_air));
  return true;
}

// --- products by warpgroups (wgmma) ---

const int GROUP = 4 * WARP, PENDING = 256;

struct Tile {
  unsigned at, leading, stride;  // bytes
  bool swizzled, turned;
};

// "Matrix Descriptor" of the PTX ISA.
Tile tile_of(int line, unsigned long long descriptor, int turned) {
  unsigned mode = descriptor >> 62;
  if (mode > 1 || (turned && !mode)) fault("a layout (line %d) that is not emulated", line);
  if (descriptor >> 49 & 7) fault("a tile (line %d) with a base offset", line);
  return {(unsigned)(descriptor & 0x3fff) << 4, (unsigned)(descriptor >> 16 & 0x3fff) << 4,
          (unsigned)(descriptor >> 32 & 0x3fff) << 4, mode == 1, turned != 0};
}

// Where element (row, k) of a tile of 16 bits is, of 64 or N rows by 16 positions. The canonical
// layouts: with a swizzle of 128 bytes the three bits above the lowest four are changed by those
// above the lowest seven, of the whole address.
unsigned place(const Tile& tile, int row, int k) {
  if (!tile.swizzled)  // pieces of 8 rows by 16 bytes
    return tile.at + row % 8 * 16 + row / 8 * tile.stride + k % 8 * 2 + k / 8 * tile.leading;
  unsigned at = tile.turned
      ? tile.at + row % 64 * 2 + row / 64 * tile.leading + k % 8 * 128 + k / 8 * tile.stride
      : tile.at + row % 8 * 128 + row / 8 * tile.stride + k * 2;
  return at ^ (at >> 7 & 7) << 4;
}

// Accumulators of a warpgroup while products are on their way to them.
struct Sums {
  int uses;
  float* at[GROUP][128];
  float value[GROUP][128];
};

struct Multiplication {
  Tile a, b;
  int columns, line;
  float (*of)(unsigned);
  Sums* sums;
};

const int HELD = 16;
struct Warpgroup {
  Multiplication pending[PENDING];
  Sums held[HELD];
  int begun, ends[GROUPS], groups;
  bool fenced;
};
static Warpgroup* warpgroups;

// Begins (1) or ends (-1) that a product may read a tile: it has to be there, for the asynchronous
// proxy.
void reads(const Tile& tile, int rows, int line, int step, int first) {
  for (int k = 0; k < rows * 32; ++k) {
    unsigned at = place(tile, k / 32, k % 32 / 2) + k % 2;
    if (at < (unsigned)window_base || at >= (unsigned)window_end)
      fault("a tile (line %d) beyond shared memory", line);
    Shared& byte = stamps[at];
    byte.products += step;
    if (step < 0) {
      byte.read = {epoch, 0, MANY};  // other warps may still be at it: only a barrier tells
      continue;
    }
    const char* form = "multiplies (line %d) byte %u, which thread %d %s";
    if (byte.flight) fault("multiplies (line %d) byte %u, to which a copy is on its way", line, at);
    if (byte.barrier) {
      for (int t = first; t < first + GROUP; ++t)
        if (seen[t][byte.barrier - 1] < byte.phase) fault(form, line, at, t, "has not waited for");
    } else if (byte.write.epoch == epoch) {
      fault(form, line, at, byte.write.thread, "wrote, and no barrier between");
    } else if (byte.write.epoch >= block_epoch && byte.moment > shown[byte.write.thread]) {
      fault(form, line, at, byte.write.thread, "wrote and has not shown");
    }
  }
}

// Adds a product to its sums. Thread t of a warpgroup has rows 16 (t / 32) + t % 32 / 4 and eight
// below, of every eight columns 2 (t % 4) and the next ("Register Fragments", matrix D).
void multiply_now(const Multiplication& mine) {
  static float a[64][16], b[256][16];
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row)
      a[row][k] = mine.of(*(unsigned short*)(window + place(mine.a, row, k)));
    for (int n = 0; n < mine.columns; ++n)
      b[n][k] = mine.of(*(unsigned short*)(window + place(mine.b, n, k)));
  }
  for (int t = 0; t < GROUP; ++t)
    for (int i = 0; i < mine.columns / 2; ++i) {
      int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
      mine.sums->value[t][i] += sum;
    }
}

struct Begun {
  int at, line, columns;
  float* sums[128];
  unsigned long long tiles[2];
  int turned[2];
  float (*of)(unsigned);
  void take(float& sum) { sums[at++] = &sum; }
  void take(unsigned long long& tile) { tiles[at++ - columns / 2] = tile; }
  void take(int&& value) { turned[at++ - columns / 2 - 2] = value; }
};

Warpgroup& mine_of(int first) { return warpgroups[first / GROUP]; }

// Accumulators hold nothing while a product is on its way, where things happen late.
Sums* sums_of(Warpgroup& group, int columns, void** operands) {
  Sums* free = nullptr;
  float* first = static_cast<Begun*>(operands[0])->sums[0];
  for (Sums& sums : group.held) {
    if (sums.uses && sums.at[0][0] == first) return &sums;
    if (!sums.uses) free = &sums;
  }
  if (!free) fault("products are on their way to more than %d accumulators", HELD);
  for (int t = 0; t < GROUP; ++t)
    for (int i = 0; i < columns / 2; ++i) {
      float*& at = free->at[t][i] = static_cast<Begun*>(operands[t])->sums[i];
      free->value[t][i] = *at;
      if (late) *at = bits<float>(~0u);
    }
  return free;
}

void write_back(const Sums& sums, int columns) {
  for (int t = 0; t < GROUP; ++t)
    for (int i = 0; i < columns / 2; ++i) *sums.at[t][i] = sums.value[t][i];
}

void begin_product(int first, void** operands) {
  Warpgroup& group = mine_of(first);
  Begun& lead = *static_cast<Begun*>(operands[0]);
  if (!group.fenced) fault("multiplies (line %d) without wgmma.fence", lead.line);
  if (group.begun == PENDING) fault("more than %d products on their way", PENDING);
  for (int t = 0; t < GROUP; ++t)
    if (memcmp(static_cast<Begun*>(operands[t])->tiles, lead.tiles, sizeof lead.tiles))
      fault("threads of a warpgroup multiply other tiles (line %d)", lead.line);
  Multiplication& mine = group.pending[group.begun++];
  mine.a = tile_of(lead.line, lead.tiles[0], lead.turned[0]);
  mine.b = tile_of(lead.line, lead.tiles[1], lead.turned[1]);
  mine.columns = lead.columns, mine.line = lead.line, mine.of = lead.of;
  mine.sums = sums_of(group, lead.columns, operands);
  ++mine.sums->uses;
  reads(mine.a, 64, lead.line, 1, first), reads(mine.b, mine.columns, lead.line, 1, first);
  if (late) return;
  multiply_now(mine);
  write_back(*mine.sums, mine.columns);
}

void end_product(int first, const Multiplication& mine) {
  if (late) multiply_now(mine);
  reads(mine.a, 64, mine.line, -1, first), reads(mine.b, mine.columns, mine.line, -1, first);
  if (--mine.sums->uses == 0) write_back(*mine.sums, mine.columns);
}

template <class Kind, int COLUMNS, class... Given>
__attribute__((noinline)) void wgmma(int line, Given&&... given) {
  Begun mine{0, line, COLUMNS, {}, {}, {}, Kind::of};
  (mine.take(static_cast<Given&&>(given)), ...);
  meet("wgmma", line, &mine, begin_product, 4);
}

void wgmma_fence(int line) {
  meet("wgmma.fence", line, nullptr, [](int first, void**) { mine_of(first).fenced = true; }, 4);
}

void wgmma_commit(int line) {
  meet("wgmma.commit_group", line, &line, [](int first, void**) {
    Warpgroup& group = mine_of(first);
    if (group.groups == GROUPS) fault("more than %d groups of products", GROUPS);
    group.ends[group.groups++] = group.begun;
  }, 4);
}

void wgmma_wait(int line, int newer) {
  meet("wgmma.wait_group", line, &newer, [](int first, void** operands) {
    Warpgroup& group = mine_of(first);
    group.fenced = false;
    int left = *static_cast<int*>(operands[0]) + more, over = group.groups - left;
    if (over <= 0) return;
    int done = group.ends[over - 1];
    for (int k = 0; k < done; ++k) end_product(first, group.pending[k]);
    memmove(group.pending, group.pending + done, sizeof(Multiplication) * (group.begun - done));
    group.begun -= done, group.groups = left;
    for (int k = 0; k < left; ++k) group.ends[k] = group.ends[k + over] - done;
  }, 4);
}

void all_have_met() {
  for (int t = 0; t < count; ++t) shown[t] = fences[t];
  for (int b = 0; b < arrivals_made; ++b) {
    int most = 0;
    for (int t = 0; t < count; ++t) most = max(most, seen[t][b]);
    for (int t = 0; t < count; ++t) seen[t][b] = most;
  }
}

// Before a block.
void forget() {
  if (arrivals_made || in_the_air) memset(seen, 0, sizeof(*seen) * MOST);
  arrivals_made = in_the_air = 0;
  for (int k = window_base; k < window_end; ++k) stamps[k].barrier = stamps[k].products = 0;
  for (int g = 0; g < MOST / GROUP; ++g) {
    warpgroups[g].begun = warpgroups[g].groups = warpgroups[g].fenced = 0;
    for (Sums& sums : warpgroups[g].held) sums.uses = 0;
  }
}

void all_is_done() {
  if (warpgroups[current / GROUP].begun) fault("ends, and products of its are on their way");
  if (in_the_air) fault("ends, and copies are on their way");
}

}  // namespace emulator
