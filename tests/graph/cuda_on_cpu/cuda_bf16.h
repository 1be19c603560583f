// CUDA's words and types for a C++ compiler, as far as the decode kernel uses them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __shared__ static thread_local  // a block is a thread of the operating system

using std::max;
using std::min;

struct uint4 {  // not aligned: MLX's arrays on a CPU begin at multiples of 8
  unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  uint16_t bits;
};

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned bits = __float_as_uint(value);
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rd(float x) { return (int)std::floor(x); }
inline int min(int a, unsigned b) { return std::min(a, (int)b); }
inline unsigned max(unsigned a, int b) { return std::max(a, (unsigned)b); }

template <class T>
T __ldg(const T* p) {
  return *p;
}

template <class T>
T __ldcg(const T* p) {
  return *p;
}
