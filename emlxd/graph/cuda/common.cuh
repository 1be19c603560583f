// What all parts of the decode kernel use.

#include <cuda_bf16.h>

namespace emlxd {

using bf16 = __nv_bfloat16;
using bf162 = __nv_bfloat162;

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * 32;

// Opaque to the compiler, which would else compute what all phases need ahead of the loop over them, and so run out of
// registers for the weights on their way.
__device__ __forceinline__ int thread_index() { return opaque(threadIdx.x); }

__device__ __forceinline__ float bf16_round(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Where element k of a row lies in the buffers that a matrix is multiplied with. Eight elements that begin at a
// multiple of eight stay together.
template <int BITS, int GROUP>
__device__ __forceinline__ int order(int k) {
  if (BITS == 16) return k;
  // Four threads share a group of 4-bit weights, and unpack element i of each 8 together with element i + 4.
  int thread = k % GROUP / (GROUP / 4), word = k % 128 / GROUP * (GROUP / 32) + k % (GROUP / 4) / 8;
  return (k & ~127) | word << 5 | thread << 3 | (k & 3) << 1 | (k >> 2 & 1);
}

// Eight elements as ``order`` has them.
template <int BITS>
__device__ __forceinline__ uint4 ordered(const float (&v)[8]) {
  constexpr int STEP = BITS == 16 ? 2 : 1, APART = BITS == 16 ? 1 : 4;
  uint4 out;
  bf162* pairs = reinterpret_cast<bf162*>(&out);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(v[i * STEP], v[i * STEP + APART]);
  return out;
}

// All blocks wait for each other. The counter only grows, by the number of blocks a barrier. ``target`` is in shared
// memory, and what thread 0 alone knows of it costs the others no registers.
struct Barrier {
  unsigned long long* counter;
  unsigned long long* target;

  __device__ Barrier(unsigned long long* counter_, unsigned long long* target_) : counter(counter_), target(target_) {
    if (threadIdx.x == 0) {
      // Nobody passes the first barrier before this block has come, so the others have added less than a round.
      unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(counter);
      *target = seen / gridDim.x * gridDim.x;
    }
  }

  __device__ __forceinline__ void wait() {
    __syncthreads();
    if (threadIdx.x == 0) {
      const unsigned long long all = *target += gridDim.x;
      increment_release(counter);
      while (load_acquire(counter) < all) {
      }
    }
    __syncthreads();
  }
};

// a / b, for numbers below 2^19: a division of integers takes several times as long.
__device__ __forceinline__ int quotient(int a, int b) { return __float2int_rd(__fdividef(a + 0.5f, b)); }

}  // namespace emlxd
