// Memory that is watched: extents, alignment, and who touched what since threads last met.
//
// Pointers know what they point into, and an access goes through `Seen`. Two accesses of one byte
// of shared memory by two threads, one of them a write, need a barrier between them: that is
// checked by what happened, so that no order of the threads hides it. In global memory they need
// another launch.
#pragma once
#include "threads.h"

namespace emulator {

struct Touch {   // of one byte of shared memory
  unsigned epoch, warp_epoch;
  int thread;    // or one of these
};
const int MANY = -1, MANY_OF_WARP = -2;  // and less: of warp -2 - thread

struct Shared {
  Touch write, read;
  bool flight;                // a copy is on its way to it
  unsigned long long moment;  // of the last write by a thread
  int products;               // on their way, that read it
  int remote;                 // after which meeting of a cluster another block has read it
  int barrier, phase;         // that counts what the asynchronous proxy wrote; the barrier from 1
};

struct Global {
  unsigned writer, reader;  // thread of the grid, from 1
};

struct Region {
  char* base;
  long long size;
  const char* name;
  Global* touched;  // null: what a launch only reads
  int writable;
};

const unsigned ALL = ~0u;
const int WINDOW = 260 << 10, BARRIERS = 64;
alignas(1024) static char window[WINDOW];  // the block's shared memory
static Shared* stamps;
static int window_base, window_end;  // what of it a launch has
static unsigned long long moment;    // counts writes and fences
static unsigned long long *fences, *shown;  // the last of each thread: now, and at a barrier
static int (*seen)[BARRIERS];               // phases that a thread knows to be complete
static int meetings = 1;                    // of clusters

unsigned grid_thread() {
  return ((unsigned)(blockIdx.y * gridDim.x + blockIdx.x)) * count + current + 1;
}

bool ordered(const Touch& before) {
  if (before.epoch != epoch || before.thread == current) return true;
  if (before.thread == MANY) return false;
  int warp = before.thread >= 0 ? before.thread / WARP : MANY_OF_WARP - before.thread;
  return warp == current / WARP && before.warp_epoch < warps[warp].epoch;
}

const char* who(const Touch& before) {
  static char text[40];
  if (before.thread < 0) return "several threads";
  snprintf(text, sizeof text, "thread %d", before.thread);
  return text;
}

Touch mine() { return {epoch, warps[current / WARP].epoch, current}; }

void touch_shared(long long at, int size, bool write, const char* name) {
  for (long long k = at; k < at + size; ++k) {
    Shared& byte = stamps[k];
    const char* does = write ? "writes" : "reads";
    if (byte.flight)
      fault("%s byte %lld of %s, to which a copy is on its way", does, k - at, name);
    if (byte.barrier && seen[current][byte.barrier - 1] < byte.phase)
      fault("%s byte %lld of %s, and has not waited for what was copied to it", does, k - at, name);
    if (write && byte.remote == meetings)
      fault("writes byte %lld of %s, which another block may read", k - at, name);
    if (write && byte.products)
      fault("writes byte %lld of %s, which a product on its way may read", k - at, name);
    if (!ordered(byte.write))
      fault("%s %s at %lld of shared memory, which %s wrote, and no barrier between", does, name, k,
            who(byte.write));
    if (write) {
      if (!ordered(byte.read))
        fault("writes %s at %lld of shared memory, which %s read, and no barrier between", name, k,
              who(byte.read));
      byte.write = mine();
      byte.moment = ++moment;
      byte.barrier = 0;
    } else if (byte.read.epoch != epoch) {
      byte.read = mine();
    } else if (byte.read.thread != current || byte.read.warp_epoch != mine().warp_epoch) {
      int before = byte.read.thread, warp = current / WARP;
      int of = before >= 0 ? before / WARP : MANY_OF_WARP - before;
      bool same = before != MANY && of == warp;
      byte.read = mine();
      if (before != current) byte.read.thread = same ? MANY_OF_WARP - warp : MANY;
    }
  }
}

void touch_global(Region* region, long long at, int size, bool write) {
  if (has_dependency && !threads[current].waited)
    fault("%s %s before the kernel has waited for those before it", write ? "writes" : "reads",
          region->name);
  if (write && !region->writable) fault("writes %s, which is an input", region->name);
  if (!region->touched) return;
  unsigned me = grid_thread();
  for (long long k = at; k < at + size; ++k) {
    Global& byte = region->touched[k];
    if (byte.writer && byte.writer != me)
      fault("%s byte %lld of %s, which thread %u of the grid wrote", write ? "writes" : "reads", k,
            region->name, byte.writer - 1);
    if (write && byte.reader && byte.reader != me)
      fault("writes byte %lld of %s, which another thread of the grid read", k, region->name);
    if (write) byte.writer = me;
    else byte.reader = byte.reader && byte.reader != me ? ALL : me;
  }
}

__attribute__((noinline)) void touch(Region* region, const void* address, int size, int alignment,
                                     bool write) {
  long long at = (const char*)address - region->base;
  const char* does = write ? "writes" : "reads";
  if (at < 0 || at + size > region->size)
    fault("%s %d bytes at %lld of %s, which has %lld", does, size, at, region->name, region->size);
  if ((unsigned long long)address % alignment)
    fault("%s %d bytes at %lld of %s, which is not aligned", does, size, at, region->name);
  if (region->base >= window && region->base < window + WINDOW)
    touch_shared((const char*)address - window, size, write, region->name);
  else
    touch_global(region, at, size, write);
}

// An element in memory: read where a value is asked for, written where one is assigned.
template <class T>
struct Seen;

template <class T>
struct Pointer {
  T* at;
  Region* region;  // null: registers, which nobody watches
  Pointer(T* at_, Region* region_) : at(at_), region(region_) {}
  Pointer(T* registers) : at(registers), region(nullptr) {}
  Pointer(Region& whole) : at((T*)whole.base), region(&whole) {}
  template <class U>
  Pointer(const Pointer<U>& other) : at(static_cast<T*>(other.at)), region(other.region) {}
  Pointer operator+(long long n) const { return {at + n, region}; }
  Seen<T> operator[](long long n) const { return {at + n, region}; }
};

template <>
struct Pointer<const void> {
  const void* at;
  Region* region;
  Pointer(const void* at_, Region* region_) : at(at_), region(region_) {}
  Pointer(Region& whole) : at(whole.base), region(&whole) {}
  template <class U>
  Pointer(const Pointer<U>& other) : at(other.at), region(other.region) {}
};

template <>
struct Pointer<void> {
  void* at;
  Region* region;
  Pointer() : at(nullptr), region(nullptr) {}
  Pointer(void* at_, Region* region_) : at(at_), region(region_) {}
  Pointer(Region& whole) : at(whole.base), region(&whole) {}
  template <class U>
  Pointer(const Pointer<U>& other) : at(other.at), region(other.region) {}
};

template <class T>
struct Plain {
  typedef T type;
};
template <class T>
struct Plain<const T> {
  typedef T type;
};

template <class T>
struct Seen {
  typedef typename Plain<T>::type Value;
  T* at;
  Region* region;
  operator Value() const {
    if (region) touch(region, at, sizeof(T), alignof(T), false);
    return *at;
  }
  const Seen& operator=(const Value& value) const {
    if (region) touch(region, at, sizeof(T), alignof(T), true);
    *at = value;
    return *this;
  }
  const Seen& operator=(const Seen& other) const { return *this = (Value)other; }
  Pointer<T> operator&() const { return {at, region}; }
};

// A vector where scalars lie: *(float4*)(p) of the text.
template <class To, class From>
Seen<To> as(Pointer<From> from) {
  return {(To*)from.at, from.region};
}
template <class To, class From>
To& as(From* from) {
  return *(To*)from;
}

void poison_window() { memset(window + window_base, 0xff, window_end - window_base); }

}  // namespace emulator

template <class T>
unsigned long long __cvta_generic_to_shared(const emulator::Pointer<T>& pointer) {
  return (const char*)pointer.at - emulator::window;
}
