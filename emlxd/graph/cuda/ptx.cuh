// What CUDA C++ has no words for, an instruction each.

namespace emlxd {

// Keeps the compiler from knowing where i comes from.
__device__ __forceinline__ int opaque(int i) {
  asm volatile("" : "+r"(i));
  return i;
}

// Adds 1; who reads the sum by ``load_acquire`` sees what this thread's block has written before.
__device__ __forceinline__ void increment_release(unsigned long long* p) {
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(p) : "memory");
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* p) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// Adds 1 in the order of both of these, and gives what was there before.
__device__ __forceinline__ unsigned fetch_increment(unsigned* p) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// Asks the second-level cache for 128 bytes.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Begins to copy 16 bytes to shared memory, and has AHEAD bytes around them brought to the second-level cache.
template <int AHEAD = 128>
__device__ __forceinline__ void copy(void* to, const void* from) {
  const unsigned address = __cvta_generic_to_shared(to);
  if constexpr (AHEAD == 256) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  }
}

// What this thread has begun to copy since the last time is a group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups but for the last N.
template <int N>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// c += a b, for a [16, 16] and b [16, 8], as PTX spreads them over a warp.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a & MASK | b, which the compiler would else make two of.
template <unsigned MASK>
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned b) {
  unsigned out;
  asm volatile("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "n"(MASK), "r"(b));
  return out;
}

}  // namespace emlxd
