// What the text says in PTX, one function per instruction, written from the tables of the PTX ISA.
// The first argument is the line of the text; then come the instruction's operands in order.
#pragma once
#include "memory.h"
#include "types.h"

namespace emulator {

// --- copies that nobody waits for (cp.async) ---

struct Copy {
  unsigned to;
  int bytes, read;
  Pointer<const void> from;
  unsigned char now[16];
};

const int COPIES = 512;  // of a thread, on their way
struct Copies {
  Copy all[COPIES];
  int begun, ends[GROUPS], groups;  // ends: of groups that are committed
};
static Copies* copies;  // of each thread of the block

Region whole{window, 0, "shared memory", nullptr, 1};  // as much as a launch has of it

void land(Copies& mine, int count_) {
  for (int k = 0; k < count_; ++k) {
    Copy& copy = mine.all[k];
    for (int b = 0; b < copy.bytes; ++b) stamps[copy.to + b].flight = false;
    touch(&whole, window + copy.to, copy.bytes, 1, true);
    memset(window + copy.to, 0, copy.bytes);
    if (copy.read) memcpy(window + copy.to, late ? copy.from.at : copy.now, copy.read);
  }
  memmove(mine.all, mine.all + count_, sizeof(Copy) * (mine.begun - count_));
  mine.begun -= count_;
}

// `read` bytes of `bytes` from memory, zeros after them. Where copies land late, what was there is
// lost at once.
__attribute__((noinline)) void copy_async(int line, unsigned to, Pointer<const void> from,
                                          int bytes, int read) {
  Copies& mine = copies[current];
  if (mine.begun == COPIES) fault("more than %d copies on their way (line %d)", COPIES, line);
  Copy& copy = mine.all[mine.begun++];
  copy.to = to, copy.bytes = bytes, copy.read = read, copy.from = from;
  touch(&whole, window + to, bytes, bytes, true);
  if (read) {
    touch(from.region, from.at, read, bytes, false);
    memcpy(copy.now, from.at, read);
  }
  for (int b = 0; b < bytes; ++b) stamps[to + b].flight = true;
  if (late) memset(window + to, 0xff, bytes);
}

void copy_async_16(int line, unsigned to, Pointer<const void> from, int read) {
  copy_async(line, to, from, 16, read);
}

void copy_commit(int line) {
  Copies& mine = copies[current];
  if (mine.groups == GROUPS) fault("more than %d groups of copies (line %d)", GROUPS, line);
  mine.ends[mine.groups++] = mine.begun;
}

void copy_wait(int, int newer) {
  Copies& mine = copies[current];
  newer += more;
  int over = mine.groups - newer;
  if (over <= 0) return;
  int landed = mine.ends[over - 1];
  land(mine, landed);
  mine.groups = newer;
  for (int k = 0; k < newer; ++k) mine.ends[k] = mine.ends[k + over] - landed;
}

void copies_are_done() {
  if (copies[current].begun) fault("ends, and %d copies of its are on their way", copies[current].begun);
  copies[current].groups = 0;
}

// --- fragments (ldmatrix .m8n8 .b16) ---

struct Rows {
  unsigned at;
  unsigned* out[4];
};

// Matrix i has its rows where lanes 8 i to 8 i + 7 say. Of it a lane gets two neighbours of row
// lane / 4: columns 2 (lane % 4) and the next; of its transpose where TURNED says so.
template <int MATRICES, bool TURNED>
void load_matrices(int first, void** operands) {
  unsigned short held[MATRICES][8][8];
  for (int i = 0; i < MATRICES; ++i)
    for (int row = 0; row < 8; ++row) {
      current = threadIdx.x = first + i * 8 + row;
      char* from = window + static_cast<Rows*>(operands[i * 8 + row])->at;
      touch(&whole, from, 16, 16, false);
      memcpy(held[i][row], from, 16);
    }
  for (int lane = 0; lane < WARP; ++lane)
    for (int i = 0; i < MATRICES; ++i) {
      int row = lane / 4, column = lane % 4 * 2;
      unsigned low = TURNED ? held[i][column][row] : held[i][row][column];
      unsigned high = TURNED ? held[i][column + 1][row] : held[i][row][column + 1];
      *static_cast<Rows*>(operands[lane])->out[i] = low | high << 16;
    }
}

template <int MATRICES, bool TURNED>
__attribute__((noinline)) void ldmatrix(int line, Rows mine) {
  int me = current;
  meet("ldmatrix", line, &mine, load_matrices<MATRICES, TURNED>);
  current = threadIdx.x = me;
}

template <bool TURNED>
void ldmatrix_x4(int line, unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
  ldmatrix<4, TURNED>(line, {at, {&a, &b, &c, &d}});
}

template <bool TURNED>
void ldmatrix_x2(int line, unsigned& a, unsigned& b, unsigned at) {
  ldmatrix<2, TURNED>(line, {at, {&a, &b}});
}

// --- products (mma.sync .row.col, sums in float32) ---

struct F16 {
  static const int PACKED = 2;
  static float of(unsigned raw) { return (float)bits<half>((unsigned short)raw); }
};
struct BF16 {
  static const int PACKED = 2;
  static float of(unsigned raw) { return bits<float>(raw << 16); }
};
struct TF32 {
  static const int PACKED = 1;
  static float of(unsigned raw) {
    if (raw & 0x1fff) fault("an operand of tf32 has %x in its lower bits", raw & 0x1fff);
    return bits<float>(raw);
  }
};

struct Product {
  float* sums[4];
  unsigned a[4], b[2];
};

// With g = lane / 4 and t = lane % 4, registers of A hold rows g, g + 8, g, g + 8, the first two of
// the first half of K and the others of the second; registers of B column g, a half of K each.
// Of a half a lane has PACKED neighbours, from PACKED t on. Sums: rows g, g, g + 8, g + 8, columns
// 2 t and the next. Where K has one half only, so have the operands.
template <class Kind, int K>
void multiply(int first, void** operands) {
  const int PACKED = Kind::PACKED, HALF = 4 * PACKED, HALVES = K / HALF;
  float a[16][K], b[K][8];
  for (int lane = 0; lane < WARP; ++lane) {
    current = threadIdx.x = first + lane;
    const Product& mine = *static_cast<Product*>(operands[lane]);
    int g = lane / 4, t = lane % 4;
    for (int half_ = 0; half_ < HALVES; ++half_)
      for (int p = 0; p < PACKED; ++p) {
        int k = half_ * HALF + t * PACKED + p;
        unsigned mask = PACKED == 2 ? 0xffffu : ~0u;
        a[g][k] = Kind::of(mine.a[half_ * 2] >> 16 * p & mask);
        a[g + 8][k] = Kind::of(mine.a[half_ * 2 + 1] >> 16 * p & mask);
        b[k][g] = Kind::of(mine.b[half_] >> 16 * p & mask);
      }
  }
  for (int lane = 0; lane < WARP; ++lane) {
    const Product& mine = *static_cast<Product*>(operands[lane]);
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += a[row][k] * b[k][column];
      *mine.sums[i] += sum;
    }
  }
}

template <class Kind, int K>
__attribute__((noinline)) void mma(int line, Product mine) {
  int me = current;
  meet("mma", line, &mine, multiply<Kind, K>);
  current = threadIdx.x = me;
}

template <class Kind, int K>
void mma_two(int line, float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
             unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  mma<Kind, K>(line, {{&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1}});
}

template <class Kind, int K>
void mma_one(int line, float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
             unsigned b0) {
  mma<Kind, K>(line, {{&c0, &c1, &c2, &c3}, {a0, a1, 0, 0}, {b0, 0}});
}

// To ten bits of mantissa, ties away from zero.
void cvt_rna_tf32(int, unsigned& out, float value) {
  unsigned raw = bits<unsigned>(value);
  out = (raw & 0x7f800000) == 0x7f800000 ? raw & ~0x1fffu : (raw + 0x1000) & ~0x1fffu;
}

unsigned short rounded_bf16(float value) {
  unsigned raw = bits<unsigned>(value);
  if ((raw & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<unsigned short>((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
}

void cvt_rn_bf16x2(int, unsigned& out, float high, float low) {
  out = static_cast<unsigned>(rounded_bf16(high)) << 16 | rounded_bf16(low);
}

// --- shuffles ---

struct Shuffled {
  unsigned long long raw;
  int from;
};

void exchange(int, void** operands) {
  unsigned long long values[WARP];
  for (int k = 0; k < WARP; ++k) values[k] = static_cast<Shuffled*>(operands[k])->raw;
  for (int k = 0; k < WARP; ++k) {
    Shuffled& mine = *static_cast<Shuffled*>(operands[k]);
    mine.raw = values[mine.from];
  }
}

template <class T>
T shuffle(int line, unsigned mask, T value, int from) {
  if (mask != ~0u) fault("a shuffle (line %d) in a part of a warp", line);
  Shuffled mine{0, from};
  memcpy(&mine.raw, &value, sizeof value);
  meet("a shuffle", line, &mine, exchange);
  memcpy(&value, &mine.raw, sizeof value);
  return value;
}

inline int lane() { return current % WARP; }
// Lanes that do not exist in the segment of `width` leave a lane its own value.
inline int within(int from, int width) {
  int start = lane() / width * width;
  return from >= start && from < start + width ? from : lane();
}

inline void nothing(int, float&) {}

// --- launches that begin before the one before has ended ---

void dependency_wait(int) { threads[current].waited = true; }

// Nothing is read: lines come to a cache that has what others write to memory, whenever they do.
void asked_early(int line, const Pointer<const void>& from, int bytes) {
  if (!from.region) fault("asks for what is no memory (line %d)", line);
  const Region& region = *from.region;
  long long at = (const char*)from.at - region.base;
  if (at < 0 || at + bytes > region.size)
    fault("asks for %d bytes at %lld of %s (line %d), which has %lld", bytes, at, region.name, line,
          region.size);
  if (region.writable) fault("asks early for %s (line %d), which is written", region.name, line);
  if (has_dependency && threads[current].waited)
    fault("asks early for %s (line %d), and has waited before", region.name, line);
}
void early_line(int line, Pointer<const void> from) { asked_early(line, from, 1); }
void early_piece(int line, Pointer<const void> from, int bytes) {
  if (bytes % 16 || (unsigned long long)from.at % 16)
    fault("asks for %d bytes (line %d), not by sixteen", bytes, line);
  asked_early(line, from, bytes);
}

// What follows relies on it that this one has waited for all before.
void dependency_launch(int line) {
  if (!threads[current].waited) fault("lets others go (line %d), but has not waited itself", line);
}

}  // namespace emulator

#define __shfl_sync(mask, value, from) emulator::shuffle(__LINE__, mask, value, (from) & 31)
#define __shfl_xor_sync(mask, value, with) \
  emulator::shuffle(__LINE__, mask, value, emulator::within(emulator::lane() ^ (with), 32))
#define __shfl_down_sync(mask, value, by) \
  emulator::shuffle(__LINE__, mask, value, emulator::within(emulator::lane() + (by), 32))
#define __shfl_up_sync(mask, value, by) \
  emulator::shuffle(__LINE__, mask, value, emulator::within(emulator::lane() - (by), 32))
