namespace emlxd {

constexpr float HIDDEN = -1e30f;  // the score of what is not looked at

// Attention of one token a row over the cache, after writing that token's key and value into it.
//
// A unit is one key head of one row, or one of ``splits`` stretches of its positions; whoever ends last joins them.
template <int HEADS, int KV_HEADS, int DIM, int BITS, int GROUP>
struct Attention {
  static constexpr int SHARE = HEADS / KV_HEADS;  // query heads that look at one key head
  static constexpr int LANES = DIM / 8;           // lanes a key
  static constexpr int KEYS = 32 / LANES;         // keys a warp looks at together
  static constexpr int CELL = DIM + 2;            // a sum of values, the highest score, the sum of weights
  static constexpr int WIDTH = (HEADS + 2 * KV_HEADS) * DIM;
  static constexpr int AHEAD = SHARE > 1 ? 2 : 4;             // keys under way, a lane

  const bf16* qkv;
  const int* positions;  // -1 for a row that neither writes nor looks
  const bf16* norm;      // [HEADS + KV_HEADS, DIM], or null
  const float* turns;    // radians a position, [DIM / 2], or null
  float eps, scale, magnitude;
  int max_context, rows, splits;
  bf16* out;
  float* parts;
  unsigned* counters;

  // One key head of row m, and its positions [low, high).
  struct Unit {
    int m, head, split, low, high;
  };

  __device__ __forceinline__ Unit unit_of(int number) const {
    const int of = quotient(number, splits), split = number - of * splits, m = of / KV_HEADS;
    const int length = positions[m] + 1, each = (length + splits - 1) / splits;
    return {m, of % KV_HEADS, split, split * each, min(length, (split + 1) * each)};
  }

  __device__ __forceinline__ size_t begin_of(const Unit& unit) const {
    return ((size_t)unit.m * KV_HEADS + unit.head) * max_context * DIM;
  }

  // Asks the second-level cache for what the block looks at first.
  __device__ void announce(const bf16* keys, const bf16* values) const {
    if (blockIdx.x >= rows * KV_HEADS * splits) return;
    const Unit unit = unit_of(blockIdx.x);
    const size_t from = begin_of(unit) + (size_t)unit.low * DIM;
    for (int i = threadIdx.x * 64; i < (unit.high - unit.low) * DIM; i += THREADS * 64) {
      prefetch_line(keys + from + i);
      prefetch_line(values + from + i);
    }
  }

  __device__ void run(bf16* keys, bf16* values, float* shared) const {
    for (int number = blockIdx.x; number < rows * KV_HEADS * splits; number += gridDim.x) {
      const Unit unit = unit_of(number);
      if (positions[unit.m] < 0) continue;
      one(unit, keys, values, shared);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void one(const Unit& unit, bf16* keys, bf16* values, float* shared) const {
    const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
    const int m = unit.m, head = unit.head, low = unit.low, high = unit.high, position = positions[m];
    const size_t base = begin_of(unit);
    float* queries = shared;                        // [SHARE, DIM]
    float* cells = shared + SHARE * DIM;            // [WARPS, SHARE, CELL]
    const bool writes = low <= position && position < high;
    // What is there already does not wait for the queries; what is written now comes after them.
    const int first = low + warp * KEYS + lane / LANES, d = lane % LANES * 8;
    Vectors k, v;
    k.load(keys + base + d, first, min(high, position));
    v.load(values + base + d, first, min(high, position));
    for (int i = warp; i < SHARE + 2; i += WARPS) {
      if (i < SHARE) {
        turned(m, head * SHARE + i, position, [&](int d, float v) { queries[i * DIM + d] = v * scale; });
      } else if (writes && i == SHARE) {
        bf16* to = keys + base + (size_t)position * DIM;
        turned(m, HEADS + head, position, [&](int d, float v) { to[d] = __float2bfloat16_rn(v); });
      } else if (writes) {
        const bf16* from = qkv + (size_t)m * WIDTH + (HEADS + KV_HEADS + head) * DIM;
        for (int d = lane; d < DIM; d += 32) values[base + (size_t)position * DIM + d] = from[d];
      }
    }
    __syncthreads();
    if (writes) {
      k.load_one(keys + base + d, first, position);
      v.load_one(values + base + d, first, position);
    }
    look(k, v, keys + base + d, values + base + d, first, high, queries, cells + warp * SHARE * CELL);
    __syncthreads();
    join(m, head, unit.split, cells);
  }

  // A head of queries or keys, normalised and rotated to its position.
  template <class To>
  __device__ __forceinline__ void turned(int m, int head, int position, To to) const {
    const int lane = thread_index() % 32;
    const bf16* from = qkv + (size_t)m * WIDTH + head * DIM;
    float v[DIM / 32];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) {
      v[i] = __bfloat162float(from[i * 32 + lane]);
      sum += v[i] * v[i];
    }
    if (norm) {
      float inverse = rsqrtf(warp_sum(sum) / DIM + eps);
#pragma unroll
      for (int i = 0; i < DIM / 32; ++i)
        v[i] = bf16_round(bf16_round(v[i] * inverse) * __bfloat162float(norm[head * DIM + i * 32 + lane]));
    }
    if (turns) {
#pragma unroll
      for (int i = 0; i < DIM / 64; ++i) {
        float sine, cosine;
        sincosf(position * turns[i * 32 + lane], &sine, &cosine);
        sine *= magnitude;
        cosine *= magnitude;
        float a = v[i], b = v[i + DIM / 64];
        v[i] = bf16_round(a * cosine - b * sine);
        v[i + DIM / 64] = bf16_round(a * sine + b * cosine);
      }
    }
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) to(i * 32 + lane, v[i]);
  }

  static constexpr int STRIDE = WARPS * KEYS;  // from a lane's key to its next

  // A lane's part of AHEAD keys or values.
  struct Vectors {
    uint4 of[AHEAD];

    // Those from ``first`` on that are below ``end``; zeros for others.
    __device__ __forceinline__ void load(const bf16* from, int first, int end) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * STRIDE;
        of[a] = at < end ? *reinterpret_cast<const uint4*>(from + (size_t)at * DIM) : make_uint4(0, 0, 0, 0);
      }
    }

    __device__ __forceinline__ void load_one(const bf16* from, int first, int wanted) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a)
        if (first + a * STRIDE == wanted) of[a] = *reinterpret_cast<const uint4*>(from + (size_t)wanted * DIM);
    }
  };

  // A warp's positions: this lane's are ``first`` and every STRIDE-th from there on, of which k and v are loaded.
  __device__ __forceinline__ void look(Vectors& k, Vectors& v, const bf16* keys, const bf16* values, int first,
                                       int high, const float* queries, float* cell) const {
    const int lane = thread_index() % 32, d = lane % LANES * 8;
    float q[SHARE][8], sum[SHARE][8], highest[SHARE], weight[SHARE];
#pragma unroll
    for (int h = 0; h < SHARE; ++h) {
      highest[h] = HIDDEN;
      weight[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q[h][i] = queries[h * DIM + d + i];
        sum[h][i] = 0.0f;
      }
    }
    for (int lowest = first - lane / LANES; lowest < high; lowest += STRIDE * AHEAD, first += STRIDE * AHEAD) {
      float scores[AHEAD][SHARE];
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const bool valid = first + a * STRIDE < high;
        const bf16* key = reinterpret_cast<const bf16*>(&k.of[a]);
#pragma unroll
        for (int h = 0; h < SHARE; ++h) {
          float score = 0.0f;
#pragma unroll
          for (int i = 0; i < 8; ++i) score += q[h][i] * __bfloat162float(key[i]);
#pragma unroll
          for (int step = LANES / 2; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
          scores[a][h] = valid ? score : HIDDEN;
        }
      }
      k.load(keys, first + STRIDE * AHEAD, high);
#pragma unroll
      for (int h = 0; h < SHARE; ++h) {
        float top = highest[h];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) top = fmaxf(top, scores[a][h]);
        float keep = exp2f(highest[h] - top);
        highest[h] = top;
        weight[h] *= keep;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[h][i] *= keep;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
          const bf16* value = reinterpret_cast<const bf16*>(&v.of[a]);
          float share = scores[a][h] == HIDDEN ? 0.0f : exp2f(scores[a][h] - top);
          weight[h] += share;
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[h][i] += share * __bfloat162float(value[i]);
        }
      }
      v.load(values, first + STRIDE * AHEAD, high);
    }
#pragma unroll
    for (int h = 0; h < SHARE; ++h) {
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) {
        float other = __shfl_xor_sync(~0u, highest[h], step);
        float top = fmaxf(highest[h], other);
        float keep = exp2f(highest[h] - top);
        highest[h] = top;
        weight[h] *= keep;
        weight[h] += __shfl_xor_sync(~0u, weight[h], step);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[h][i] *= keep;
          sum[h][i] += __shfl_xor_sync(~0u, sum[h][i], step);
        }
      }
      if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) cell[h * CELL + d + i] = sum[h][i];
        if (lane == 0) {
          cell[h * CELL + DIM] = highest[h];
          cell[h * CELL + DIM + 1] = weight[h];
        }
      }
    }
  }

  __device__ __forceinline__ void join(int m, int head, int split, const float* cells) const {
    const int thread = thread_index();
    float* own = parts + (((size_t)m * KV_HEADS + head) * splits) * SHARE * CELL;
    for (int i = thread; i < SHARE * DIM; i += THREADS) {
      int h = i / DIM, d = i % DIM;
      Sum sum;
      sum.add(cells + h * CELL, WARPS, d);
      if (splits == 1) {
        put(m, head, h, d, sum.values / sum.weight);
      } else {
        float* cell = own + ((size_t)split * SHARE + h) * CELL;
        cell[d] = sum.values;
        if (d == 0) {
          cell[DIM] = sum.highest;
          cell[DIM + 1] = sum.weight;
        }
      }
    }
    if (splits == 1) return;
    __shared__ bool last;
    __syncthreads();
    if (thread == 0) {
      unsigned* counter = counters + m * KV_HEADS + head;
      last = fetch_increment(counter) == splits - 1;
      if (last) *counter = 0;
    }
    __syncthreads();
    if (!last) return;
    for (int i = thread; i < SHARE * DIM; i += THREADS) {
      Sum sum;
      sum.add(own + i / DIM * CELL, splits, i % DIM);
      put(m, head, i / DIM, i % DIM, sum.values / sum.weight);
    }
  }

  // One dimension of the values that several looked at, weighted as if one had looked at all.
  struct Sum {
    float values = 0.0f, highest = HIDDEN, weight = 0.0f;

    // The cells may lie in shared memory, and those in device memory are new: no load of a special kind.
    __device__ __forceinline__ void add(const float* cells, int count, int d) {
      constexpr int TOGETHER = 16;  // loads under way
      for (int first = 0; first < count; first += TOGETHER) {
        float v[TOGETHER], top[TOGETHER], w[TOGETHER], higher = highest;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float* cell = cells + min(first + i, count - 1) * SHARE * CELL;
          v[i] = cell[d];
          top[i] = cell[DIM];
          w[i] = cell[DIM + 1];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) higher = fmaxf(higher, top[i]);
        const float keep = exp2f(highest - higher);
        values *= keep;
        weight *= keep;
        highest = higher;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float share = first + i < count ? exp2f(top[i] - higher) : 0.0f;
          values += v[i] * share;
          weight += w[i] * share;
        }
      }
    }
  };

  __device__ __forceinline__ void put(int m, int head, int h, int d, float v) const {
    out[(size_t)m * HEADS * DIM + order<BITS, GROUP>((head * SHARE + h) * DIM + d)] = __float2bfloat16_rn(v);
  }
};

}  // namespace emlxd
