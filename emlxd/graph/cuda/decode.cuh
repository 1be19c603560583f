// One decode step as one kernel: every block works on every phase, with a barrier between phases.

namespace emlxd {

// A matrix product and what becomes of it. The host writes these; a pointer is 0 for what there is not.
struct Phase {
  enum Kind : long long { STORE, ADD, GATE, LOGITS };

  Matrix w;
  const bf16* bias;
  const bf16* norm;  // of the rows that W is multiplied with
  long long columns, units, unit_rows, tile_rows;
  long long kind;
  long long from, to;  // places in the scratch memory
};

struct Mixing {
  const bf16* qk_norm;
  const float* turns;
};

constexpr int PHASES = 4;  // of a layer: queries, keys and values; output; gate and linear part; down

struct Layer {
  Phase phases[PHASES];
  Mixing mixing;
};

// Rows of x, normalised and in ``order``, to ``to`` [rows, stride]: by all threads of a block.
template <int BITS>
__device__ __forceinline__ void stage_normalised(const bf16* x, int rows, int columns, const bf16* weight, float eps,
                                                 bf16* to, int stride, float* partial) {
  int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  int each = rows > 8 ? 1 : rows > 4 ? 2 : rows > 2 ? 4 : WARPS / rows;  // warps a row
  int m = warp / each, first = (warp % each * 32 + lane) * 8, step = each * 32 * 8;
  if (m < rows) {
    float sum = 0.0f;
    for (int k = first; k < columns; k += step) {
      uint4 v = __ldcg(reinterpret_cast<const uint4*>(x + (size_t)m * columns + k));
      const bf16* e = reinterpret_cast<const bf16*>(&v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float f = __bfloat162float(e[i]);
        sum += f * f;
        to[(size_t)m * stride + order<BITS>(k + i)] = e[i];
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
  }
  __syncthreads();
  if (m < rows) {
    float sum = 0.0f;
    for (int i = 0; i < each; ++i) sum += partial[m * each + i];
    float scale = rsqrtf(sum / columns + eps);
    for (int k = first; k < columns; k += step) {
      uint4 v = __ldg(reinterpret_cast<const uint4*>(weight + k));
      const bf16* e = reinterpret_cast<const bf16*>(&v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bf16& cell = to[(size_t)m * stride + order<BITS>(k + i)];
        cell = __float2bfloat16_rn(__bfloat162float(cell) * scale * __bfloat162float(e[i]));
      }
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void stage(const bf16* x, int rows, int columns, bf16* to, int stride) {
  for (int k = thread_index() * 8; k < columns; k += THREADS * 8)
    for (int m = 0; m < rows; ++m)
      *reinterpret_cast<uint4*>(to + m * stride + k) = __ldcg(reinterpret_cast<const uint4*>(x + m * columns + k));
  __syncthreads();
}

// How many rows a step has, and how many blocks share a key head's positions.
struct Extent {
  int rows, splits;
};

template <class S>
struct Step {
  Barrier barrier;
  Extent extent;
  unsigned char* scratch;  // what the phases leave for each other
  unsigned char* shared;

  __device__ Step(unsigned char* scratch_, unsigned char* shared_, Extent extent_)
      : barrier(reinterpret_cast<unsigned long long*>(scratch_)), extent(extent_), scratch(scratch_), shared(shared_) {}

  template <class T = bf16>
  __device__ __forceinline__ T* buffer(long long place) const {
    return reinterpret_cast<T*>(scratch + place);
  }

  __device__ __forceinline__ bf16* staged() const { return reinterpret_cast<bf16*>(shared); }
  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(shared + S::STAGED); }
  __device__ __forceinline__ float* partial() const { return sums() + S::SUMS / 4; }

  __device__ __forceinline__ void begin(const bf16* embedded) {
    const uint4* from = reinterpret_cast<const uint4*>(embedded);
    uint4* to = buffer<uint4>(S::X);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < extent.rows * S::WIDTH / 8; i += gridDim.x * THREADS)
      to[i] = from[i];
  }

  __device__ __forceinline__ void run(const Phase& p, float* logits) {
    Product<S::HALVES, S::BITS, S::GROUP> product(p.w, p.columns, p.units, p.unit_rows, p.tile_rows, extent.rows);
    if (p.norm) prefetch(p.norm, p.columns * 2);
    barrier.wait();
    const bf16* x = buffer(p.from);
    int columns = p.columns, stride = columns;
    if (S::HALVES == 1) {
      // Neighbouring rows begin in different banks.
      int padded = columns + 32;
      if (p.norm) {
        stage_normalised<S::BITS>(x, extent.rows, columns, p.norm, S::EPS, staged(), padded, partial());
      } else if (extent.rows * padded * 2 <= S::STAGED) {
        stage(x, extent.rows, columns, staged(), padded);
      }
      if (p.norm || extent.rows * padded * 2 <= S::STAGED) {
        x = staged();
        stride = padded;
      }
    } else if (p.norm) {
      // Too much for each block to do for itself: one block a row, for all.
      bf16* normed = buffer(S::NORMED);
      if (blockIdx.x < extent.rows) {
        size_t row = (size_t)blockIdx.x * columns;
        stage_normalised<S::BITS>(x + row, 1, columns, p.norm, S::EPS, staged(), columns, partial());
        for (int k = thread_index() * 8; k < columns; k += THREADS * 8)
          *reinterpret_cast<uint4*>(normed + row + k) = *reinterpret_cast<const uint4*>(staged() + k);
      }
      barrier.wait();
      x = normed;
    }
    product.run(x, stride, sums(),
                [&](int unit, int m, int i, const float (&total)[PAIR]) { finish(p, unit, m, i, total, logits); });
  }

  __device__ __forceinline__ void finish(const Phase& p, int unit, int m, int i, const float (&total)[PAIR],
                                         float* logits) const {
    int first = unit * p.unit_rows + i, second = first + p.tile_rows;
    float a = bf16_round(total[0]), b = bf16_round(total[1]);
    if (p.bias) {
      a = bf16_round(a + __bfloat162float(p.bias[first]));
      b = bf16_round(b + __bfloat162float(p.bias[second]));
    }
    bf16* to = buffer(p.to);
    if (p.kind == Phase::STORE) {
      to += (size_t)m * S::QKV_WIDTH;
      to[first] = __float2bfloat16_rn(a);
      to[second] = __float2bfloat16_rn(b);
    } else if (p.kind == Phase::ADD) {
      to += (size_t)m * S::WIDTH;
      to[first] = __float2bfloat16_rn(__bfloat162float(to[first]) + scaled(a));
      to[second] = __float2bfloat16_rn(__bfloat162float(to[second]) + scaled(b));
    } else if (p.kind == Phase::GATE) {
      float open = bf16_round(a * bf16_round(1.0f / (1.0f + expf(-a))));
      to[(size_t)m * S::HIDDEN_WIDTH + order<S::BITS>(first)] = __float2bfloat16_rn(open * b);
    } else {
      logits += (size_t)m * S::VOCABULARY;
      logits[first] = a;
      logits[second] = b;
    }
  }

  __device__ __forceinline__ float scaled(float v) const {
    return S::RESIDUAL_SCALE == 1.0f ? v : bf16_round(v * S::RESIDUAL_SCALE);
  }

  __device__ __forceinline__ void attend(const Mixing& mixing, bf16* keys, bf16* values, const int* positions) const {
    Attention<S::HEADS, S::KV_HEADS, S::DIM, S::BITS> attention{
        buffer(S::QKV),      positions,
        mixing.qk_norm,      mixing.turns,
        S::QK_EPS,           S::SCALE,
        S::MAGNITUDE,        S::MAX_CONTEXT,
        extent.rows,         extent.splits,
        buffer(S::ATTENDED), buffer<float>(S::PARTS),
        buffer<unsigned>(S::COUNTERS)};
    attention.run(keys, values, reinterpret_cast<float*>(shared));
  }
};

}  // namespace emlxd
