// A grid on a CPU: blocks are threads of the operating system, and a block's threads are fibers that take turns.
//
// A fiber goes on until it has to wait for others of its warp or block. A copy is made when it is waited for and no
// earlier, so that who reads it before finds something else. What a device's memory may reorder does not show.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_bf16.h"

struct Index {
  unsigned x;
};

inline thread_local Index threadIdx, blockIdx, gridDim;

namespace cpu {

constexpr int MOST_WARPS = 32, STACK = 1 << 16;

struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  std::unique_ptr<char[]> stack;
  jmp_buf here;
  bool begun = false, ended = false;
  unsigned told = 0;  // how often it has told its warp something
  std::deque<std::vector<Copy>> groups = {{}};  // of copies under way; the last is not yet ended
};

// Those who come wait until all are there.
struct Meeting {
  unsigned come = 0, held = 0;
};

struct Warp {
  Meeting meeting;
  unsigned words[2][32][6];  // what lanes tell each other, by turns
};

inline thread_local std::vector<Fiber> fibers;
inline thread_local jmp_buf scheduler;
inline thread_local Meeting block;
inline thread_local Warp warps[MOST_WARPS];
inline thread_local void (*work)();
inline thread_local ucontext_t first_context;

inline Fiber& own() { return fibers[threadIdx.x]; }

inline void rest() {
  if (!_setjmp(own().here)) _longjmp(scheduler, 1);
}

inline void meet(Meeting& meeting, unsigned all) {
  const unsigned number = meeting.held;
  if (++meeting.come == all) {
    meeting.come = 0;
    ++meeting.held;
  }
  while (meeting.held == number) rest();
}

inline Warp& own_warp() { return warps[threadIdx.x / 32]; }

// What each lane of the warp has told. The next time has the other place, so nobody overwrites what is still read.
template <int N>
const unsigned (*tell(const unsigned (&mine)[N]))[6] {
  Warp& warp = own_warp();
  auto& words = warp.words[own().told++ % 2];
  std::memcpy(words[threadIdx.x % 32], mine, sizeof(mine));
  meet(warp.meeting, 32);
  return words;
}

inline void begin() {
  work();
  own().ended = true;
  _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  fiber.stack.reset(new char[STACK]);
  getcontext(&first_context);
  first_context.uc_stack.ss_sp = fiber.stack.get();
  first_context.uc_stack.ss_size = STACK;
  makecontext(&first_context, begin, 0);
  setcontext(&first_context);
}

inline void run_block(unsigned index, unsigned blocks, unsigned threads, void (*kernel)()) {
  blockIdx.x = index;
  gridDim.x = blocks;
  work = kernel;
  fibers = std::vector<Fiber>(threads);
  for (unsigned left = threads; left > 0;) {
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].ended) continue;
      threadIdx.x = i;
      resume(fibers[i]);
      left -= fibers[i].ended;
    }
  }
}

inline unsigned char* shared_memory(size_t bytes) {
  struct alignas(16) Unit {
    unsigned char of[16];
  };
  static thread_local std::vector<Unit> room(bytes / sizeof(Unit) + 1);
  return room[0].of;
}

inline void launch(unsigned blocks, unsigned threads, void (*kernel)()) {
  std::vector<std::thread> running;
  for (unsigned i = 0; i < blocks; ++i) running.emplace_back(run_block, i, blocks, threads, kernel);
  for (auto& one : running) one.join();
}

}  // namespace cpu

inline void __syncthreads() { cpu::meet(cpu::block, cpu::fibers.size()); }
inline void __syncwarp() { cpu::meet(cpu::own_warp().meeting, 32); }

inline float __shfl_xor_sync(unsigned, float value, int step) {
  const unsigned mine[1] = {__float_as_uint(value)};
  return __uint_as_float(cpu::tell(mine)[threadIdx.x % 32 ^ step][0]);
}

// In place of ptx.cuh.
namespace emlxd {

inline int opaque(int i) { return i; }

inline void increment_release(unsigned long long* p) { __atomic_fetch_add(p, 1, __ATOMIC_SEQ_CST); }

inline unsigned long long load_acquire(const unsigned long long* p) {
  std::this_thread::yield();
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

inline unsigned fetch_increment(unsigned* p) { return __atomic_fetch_add(p, 1, __ATOMIC_SEQ_CST); }

inline void prefetch_line(const void*) {}

template <int AHEAD = 128>
void copy(void* to, const void* from) {
  cpu::own().groups.back().push_back({to, from});
}

inline void end_group() { cpu::own().groups.emplace_back(); }

template <int N>
void wait_for_groups() {
  auto& groups = cpu::own().groups;
  for (; groups.size() > N + 1; groups.pop_front())
    for (const auto& one : groups.front()) std::memcpy(one.to, one.from, 16);
}

// The warp's c += a b. Of a lane's words a0 and a2 are row lane / 4 of a, a1 and a3 the row 8 further on, b0 and b1
// column lane / 4 of b, and its c two columns of the same rows.
inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto words = cpu::tell(mine);
  const unsigned lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    for (int t = 0; t < 4; ++t) {
      const auto &left = words[lane / 4 * 4 + t], &right = words[(lane % 4 * 2 + e % 2) * 4 + t];
      for (int half = 0; half < 2; ++half) {
        const unsigned x = left[half * 2 + e / 2], y = right[4 + half];
        c[e] += __uint_as_float(x << 16) * __uint_as_float(y << 16);
        c[e] += __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
      }
    }
  }
}

template <unsigned MASK>
unsigned and_or(unsigned a, unsigned b) {
  return (a & MASK) | b;
}

}  // namespace emlxd
