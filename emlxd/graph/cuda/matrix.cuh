// Matrix products of a few rows with weights that are read once.
//
// Weights on their way wait in shared memory. In registers they would share the few scoreboards of a warp, so that
// waiting for the oldest of them is waiting for all.

namespace emlxd {

// What a warp does of a matrix. A block has every gridDim-th unit; its warps share the chunks of all its units, each an
// equal stretch of them.
template <class Item>
struct Stretch {
  int units, chunks, each, count;
  int number, chunk;  // where it begins

  __device__ __forceinline__ Stretch(const Matrix& w, int warp) {
    units = quotient((int)w.units + gridDim.x - 1 - blockIdx.x, gridDim.x);
    chunks = (unsigned)w.columns / Item::CHUNK;
    each = max(1u, (unsigned)(units * chunks + WARPS - 1) / WARPS);
    count = max(0, min(each, units * chunks - warp * each));
    number = quotient(warp * each, chunks);
    chunk = warp * each - number * chunks;
  }
};

__device__ __forceinline__ int unit_of(int number) { return number * gridDim.x + blockIdx.x; }

// The weights that a warp needs, of one matrix after the other: they do not depend on what is computed, so DEPTH items
// are always under way, across barriers and everything else that is between two products.
template <class Item_, int DEPTH, class Matrices>
struct Stream {
  using Item = Item_;

  // What is copied next: a unit's number, and how many items of it and of the warp's stretch there are yet.
  struct Next {
    typename Item::Source source;
    int number, ahead, left = 0;
  };

  Matrices matrices;  // the i-th by its number, null after the last
  unsigned char* ring;
  int slot = 0;   // the next item's place in the ring, in bytes
  int index = 0;  // the next matrix
  Next next;

  __device__ __forceinline__ Stream(Matrices matrices_, unsigned char* rings)
      : matrices(matrices_), ring(rings + thread_index() / 32 * (DEPTH * Item::BYTES)) {
#pragma unroll 1
    for (int d = 0; d < DEPTH; ++d) load(ring + d * Item::BYTES);
  }

  __device__ __forceinline__ void load(unsigned char* to) {
    if (next.left == 0) next_matrix();
    if (next.left > 0) {
      if (next.ahead == 0) next_unit();
      next.source.copy_to(to, thread_index() % 32);
      --next.left;
      --next.ahead;
    }
    end_group();
  }

  __device__ __forceinline__ void next_matrix() {
    while (const Matrix* w = matrices(index)) {
      ++index;
      Stretch<Item> stretch(*w, thread_index() / 32);
      if (stretch.count == 0) continue;
      next.left = stretch.count;
      next.number = stretch.number;
      next.ahead = stretch.chunks - stretch.chunk;
      next.source.open(*w, unit_of(stretch.number), stretch.chunk, thread_index() % 32);
      return;
    }
  }

  __device__ __forceinline__ void next_unit() {
    const Matrix& w = *matrices(index - 1);
    next.ahead = (unsigned)w.columns / Item::CHUNK;
    next.source.open(w, unit_of(++next.number), 0, thread_index() % 32);
  }

  // Calls use(item) with the next one, and then has another come in its place.
  template <class Use>
  __device__ __forceinline__ void take(Use use) {
    wait_for_groups<DEPTH - 1>();
    __syncwarp();
    use(ring + slot);
    __syncwarp();
    load(ring + slot);
    slot = slot == (DEPTH - 1) * Item::BYTES ? 0 : slot + Item::BYTES;
  }
};

// W x for at most 8 * HALVES rows of x. Units that several warps have worked on are added up in shared memory, once.
template <int HALVES, class Item>
struct Product {
  static constexpr int SUMS = HALVES * 8 * PAIR * TILE;  // of a unit; a warp's first and last may be parts of one

  const Matrix& w;
  int rows;

  // x is [rows, stride] in ``order``; done(unit, m, i, totals) gets row i of both tiles of a unit, for row m of x.
  template <class Stream, class Done>
  __device__ __forceinline__ void run(Stream& stream, const bf16* x, int stride, float* sums, Done done) const {
    multiply_stretch(stream, x, stride, sums, done);
    __syncthreads();
    join(sums, done);
  }

 private:
  template <class Stream, class Done>
  __device__ __forceinline__ void multiply_stretch(Stream& stream, const bf16* x, int stride, float* sums,
                                                   Done done) const {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const Stretch<Item> stretch(w, warp);
    const Rows<HALVES> own(x, rows, stride, lane);
    int number = stretch.number, chunk = stretch.chunk;
    bool whole = chunk == 0;
    float sum[HALVES][4] = {};
#pragma unroll 1
    for (int left = stretch.count; left > 0; --left) {
      stream.take([&](const unsigned char* item) { Item::add(sum, item, w, chunk, own, lane); });
      if (++chunk < stretch.chunks) continue;
      if (whole) {
        finish(sum, unit_of(number), lane, done);
      } else {
        store(sum, sums + 2 * warp * SUMS, lane);
      }
      clear(sum);
      whole = true;
      chunk = 0;
      ++number;
    }
    if (chunk > 0 && stretch.count > 0) store(sum, sums + (2 * warp + whole) * SUMS, lane);
  }

  __device__ __forceinline__ static void clear(float (&sum)[HALVES][4]) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[h][e] = 0.0f;
  }

  template <class Done>
  __device__ __forceinline__ void finish(const float (&sum)[HALVES][4], int unit, int lane, Done done) const {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int m = h * 8 + lane % 4 * 2 + e;
        if (m < rows) done(unit, m, lane / 4, {sum[h][e], sum[h][2 + e]});
      }
  }

  __device__ __forceinline__ static void store(const float (&sum)[HALVES][4], float* to, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[((h * 8 + lane % 4 * 2 + e % 2) * PAIR + e / 2) * TILE + lane / 4] = sum[h][e];
  }

  template <class Done>
  __device__ __forceinline__ void join(const float* sums, Done done) const {
    const Stretch<Item> stretch(w, 0);
    const int each = stretch.each, chunks = stretch.chunks;
    for (int n = thread_index(); n < stretch.units * rows * TILE; n += THREADS) {
      const int i = n % TILE, of = quotient(n / TILE, rows), m = n / TILE - of * rows;
      const int first = quotient(of * chunks, each), last = quotient((of + 1) * chunks - 1, each);
      if (first == last) continue;
      float total[PAIR] = {0.0f, 0.0f};
#pragma unroll 4
      for (int by = first; by <= last; ++by) {
        const float* p = sums + (2 * by + (by * each <= of * chunks)) * SUMS + m * PAIR * TILE + i;
        total[0] += p[0];
        total[1] += p[TILE];
      }
      done(unit_of(of), m, i, total);
    }
  }
};

}  // namespace emlxd
