// What CUDA C has built in, for a compiler of C++: vectors, qualifiers, intrinsics of numbers.
#pragma once
#include <math.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

typedef _Float16 half;

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "other bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Aligned as CUDA aligns them, which the addresses of vectors in memory are checked against.
#define EMULATOR_VECTORS(name, type)                                                            \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                      \
  struct name##3 { type x, y, z; };                                                             \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; };   \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                              \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
struct alignas(4) half2 { half x, y; };
inline half2 make_half2(half x, half y) { return {x, y}; }

inline float __int_as_float(int raw) { return bits<float>(raw); }
inline int __float_as_int(float value) { return bits<int>(value); }
inline float __uint_as_float(unsigned raw) { return bits<float>(raw); }
inline unsigned __float_as_uint(float value) { return bits<unsigned>(value); }
inline double __longlong_as_double(long long raw) { return bits<double>(raw); }
inline long long __double_as_longlong(double value) { return bits<long long>(value); }
inline half __float2half_rn(float value) { return (half)value; }
inline float __half2float(half value) { return (float)value; }
inline unsigned short __half_as_ushort(half value) { return bits<unsigned short>(value); }
inline half __ushort_as_half(unsigned short raw) { return bits<half>(raw); }
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
