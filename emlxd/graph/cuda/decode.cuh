// One decode step as one kernel: every block works on every phase, with a barrier between phases.

namespace emlxd {

// A matrix product and what becomes of it. The host writes these; a pointer is 0 for what there is not.
struct Phase {
  enum Kind : long long { STORE, ADD, GATE, LOGITS };

  Matrix w;
  const bf16* bias;
  const bf16* norm;  // of the rows that W is multiplied with
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

// All phases by their numbers; the head's is the last.
struct Phases {
  const Layer* layers;
  int count;

  __device__ __forceinline__ const Phase& phase(int i) const {
    return i < count ? layers[i / PHASES].phases[i % PHASES] : *reinterpret_cast<const Phase*>(layers + count / PHASES);
  }

  __device__ __forceinline__ const Matrix* operator()(int i) const { return i <= count ? &phase(i).w : nullptr; }
};

constexpr int SPAN = 32 * 8;  // elements of a row that a warp takes at once
constexpr int TOGETHER = 4;   // loads under way, a thread

// Half of an RMS norm: rows of x times its weights to ``to`` [rows, stride], in ``order``, and to ``inverse`` [rows]
// what else they are to be multiplied with, which a product does at its end. By all threads of a block: a warp takes
// a span of AT_ONCE rows at a time. ``squares`` is room for a number of each span; they are summed in one order
// however many rows there are.
template <int BITS, int GROUP, int AT_ONCE>
__device__ __forceinline__ void stage_weighted(const bf16* x, int rows, int columns, const bf16* weight, float eps,
                                               bf16* to, int stride, float* inverse, float* squares) {
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const int spans = (columns + SPAN - 1) / SPAN;
  for (int n = warp; n < spans * ((rows + AT_ONCE - 1) / AT_ONCE); n += WARPS) {
    const int batch = quotient(n, spans), span = n - batch * spans, first = batch * AT_ONCE;
    const bool within = span * SPAN + lane * 8 < columns;
    const int k = within ? span * SPAN + lane * 8 : 0;
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(weight + k));
    uint4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      v[i] = __ldcg(reinterpret_cast<const uint4*>(x + min(first + i, rows - 1) * columns + k));
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bf16 *values = reinterpret_cast<const bf16*>(&v[i]), *weights = reinterpret_cast<const bf16*>(&w);
      float sum = 0.0f, products[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float value = __bfloat162float(values[e]);
        sum += value * value;
        products[e] = value * __bfloat162float(weights[e]);
      }
      sum = warp_sum(within ? sum : 0.0f);
      if (first + i >= rows) continue;
      if (within)
        *reinterpret_cast<uint4*>(to + (first + i) * stride + order<BITS, GROUP>(k)) = ordered<BITS>(products);
      if (lane == 0) squares[(first + i) * spans + span] = sum;
    }
  }
  __syncthreads();
  if (thread < rows) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < spans; ++i) sum += squares[thread * spans + i];
    inverse[thread] = rsqrtf(sum / columns + eps);
  }
  __syncthreads();
}

// Rows of x as they are, to ``to`` [rows, stride].
__device__ __forceinline__ void stage(const bf16* x, int rows, int columns, bf16* to, int stride) {
  const int each = columns / 8, all = rows * each;
  for (int first = thread_index(); first < all; first += TOGETHER * THREADS) {
    uint4 v[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      v[i] = __ldcg(reinterpret_cast<const uint4*>(x) + min(first + i * THREADS, all - 1));
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      if (const int n = first + i * THREADS; n < all)
        *reinterpret_cast<uint4*>(to + n * 8 + quotient(n, each) * (stride - columns)) = v[i];
  }
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

  __device__ Step(unsigned char* scratch_, unsigned char* shared_, unsigned long long* target, Extent extent_)
      : barrier(reinterpret_cast<unsigned long long*>(scratch_), target), extent(extent_), scratch(scratch_),
        shared(shared_) {}

  template <class T = bf16>
  __device__ __forceinline__ T* buffer(long long place) const {
    return reinterpret_cast<T*>(scratch + place);
  }

  __device__ __forceinline__ bf16* staged() const { return reinterpret_cast<bf16*>(shared); }
  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(shared + S::STAGED); }
  __device__ __forceinline__ float* inverse() const { return sums() + S::SUMS / 4; }
  __device__ __forceinline__ float* squares() const { return inverse() + 8 * S::HALVES; }
  __device__ __forceinline__ unsigned char* ring() const { return shared + S::RING; }

  __device__ __forceinline__ void begin(const bf16* embedded) {
    const uint4* from = reinterpret_cast<const uint4*>(embedded);
    uint4* to = buffer<uint4>(S::X);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < extent.rows * S::WIDTH / 8; i += gridDim.x * THREADS)
      to[i] = from[i];
  }

  // A product. Its rows come to shared memory if there is room for them, as there is for those that blocks normalise
  // for themselves.
  template <class Stream>
  __device__ __forceinline__ void run(const Phase& p, Stream& stream, float* logits) {
    const Product<S::HALVES, typename Stream::Item> product{p.w, extent.rows};
    if (p.norm && threadIdx.x < p.w.columns / 64) prefetch_line(p.norm + threadIdx.x * 64);
    barrier.wait();
    const bf16* x = buffer(p.from);
    const int stride = p.w.columns, padded = stride + 32;  // neighbouring rows begin in different banks
    const bool fits = extent.rows * padded * 2 <= S::STAGED;
    if (p.norm && S::HALVES == 1) {
      stage_weighted<S::BITS, S::GROUP, 4>(x, extent.rows, stride, p.norm, S::EPS, staged(), padded, inverse(),
                                           squares());
    } else {
      if (p.norm) x = weighted(x, stride, p.norm);
      if (fits) stage(x, extent.rows, stride, staged(), padded);
    }
    auto done = [&](int unit, int m, int i, const float (&total)[PAIR]) { finish(p, unit, m, i, total, logits); };
    if (fits) {
      product.run(stream, staged(), padded, sums(), done);
    } else {
      product.run(stream, x, stride, sums(), done);
    }
  }

  // ``stage_weighted`` for more rows than each block does for itself: each block some rows, for all.
  __device__ __forceinline__ const bf16* weighted(const bf16* x, int columns, const bf16* norm) {
    bf16* to = buffer(S::WEIGHTED);
    float* all = buffer<float>(S::INVERSE);
    for (int m = blockIdx.x; m < extent.rows; m += gridDim.x) {
      const size_t row = (size_t)m * columns;
      stage_weighted<S::BITS, S::GROUP, 1>(x + row, 1, columns, norm, S::EPS, staged(), columns, inverse(), squares());
      for (int k = thread_index() * 8; k < columns; k += THREADS * 8)
        *reinterpret_cast<uint4*>(to + row + k) = *reinterpret_cast<const uint4*>(staged() + k);
      if (threadIdx.x == 0) all[m] = inverse()[0];
      __syncthreads();
    }
    barrier.wait();
    if (threadIdx.x < extent.rows) inverse()[threadIdx.x] = __ldcg(all + threadIdx.x);
    __syncthreads();
    return to;
  }

  __device__ __forceinline__ void finish(const Phase& p, int unit, int m, int i, const float (&total)[PAIR],
                                         float* logits) const {
    const int first = unit * (int)p.w.unit_rows + i, second = first + (int)p.w.apart;
    const float inverse = p.norm ? this->inverse()[m] : 1.0f;
    float a = bf16_round(total[0] * inverse), b = bf16_round(total[1] * inverse);
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
      to[(size_t)m * S::HIDDEN_WIDTH + order<S::BITS, S::GROUP>(first)] = __float2bfloat16_rn(open * b);
    } else {
      logits += (size_t)m * S::VOCABULARY;
      logits[first] = a;
      logits[second] = b;
    }
  }

  __device__ __forceinline__ float scaled(float v) const {
    return S::RESIDUAL_SCALE == 1.0f ? v : bf16_round(v * S::RESIDUAL_SCALE);
  }

  using Attending = Attention<S::HEADS, S::KV_HEADS, S::DIM, S::BITS, S::GROUP>;

  __device__ __forceinline__ Attending attending(const Mixing& mixing, const int* positions) const {
    return {buffer(S::QKV),      positions,
            mixing.qk_norm,      mixing.turns,
            S::QK_EPS,           S::SCALE,
            S::MAGNITUDE,        S::MAX_CONTEXT,
            extent.rows,         extent.splits,
            buffer(S::ATTENDED), buffer<float>(S::PARTS),
            buffer<unsigned>(S::COUNTERS)};
  }
};

}  // namespace emlxd
