// Matrix products of a few rows with weights that are read once.
//
// Tensor cores compute them with the rows as A (16 x 16) and the weights as B (16 x 8). A sum does not care about the
// order of its terms, so a thread takes 8 neighbouring terms for two products instead of the spread ones that the
// instruction names: weights are then read 16 bytes at a time as they lie.

namespace emlxd {

constexpr int CHUNK = 128;  // terms of a sum that a warp takes at once
constexpr int TILE = 8;     // rows of weights that one instruction takes
constexpr int PAIR = 2;     // tiles that are computed together

// [rows, columns]: bfloat16, or 4 bits with a scale and a bias for each group of columns.
struct Matrix {
  const uint4* data;
  const bf16* scales;
  const bf16* biases;
};

__device__ __forceinline__ uint4 read_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ unsigned short read_half(const bf16* p) {
  return __ldg(reinterpret_cast<const unsigned short*>(p));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned as_word(bf162 v) { return *reinterpret_cast<unsigned*>(&v); }
__device__ __forceinline__ bf162 as_pair(unsigned v) { return *reinterpret_cast<bf162*>(&v); }

// What a thread reads of one row of weights for one chunk; ``t`` is its place among the four that share the row.
template <int BITS, int GROUP>
struct Piece {
  uint4 data[4];

  __device__ __forceinline__ void load(const Matrix& w, size_t row, int columns, int chunk, int t) {
    const uint4* p = w.data + (row * columns + chunk * CHUNK) / 8 + t;
#pragma unroll
    for (int j = 0; j < 4; ++j) data[j] = read_once(p + j * 4);
  }

  __device__ __forceinline__ uint4 values(int j) const { return data[j]; }
};

template <int GROUP>
struct Piece<4, GROUP> {
  uint4 data;
  unsigned short scale, bias;

  __device__ __forceinline__ void load(const Matrix& w, size_t row, int columns, int chunk, int t) {
    data = read_once(w.data + (row * columns + chunk * CHUNK) / 32 + t);
    size_t group = row * (columns / GROUP) + (chunk * CHUNK + t * 32) / GROUP;
    scale = read_half(w.scales + group);
    bias = read_half(w.biases + group);
  }

  __device__ __forceinline__ uint4 values(int j) const {
    unsigned word = j == 0 ? data.x : j == 1 ? data.y : j == 2 ? data.z : data.w;
    return make_uint4(unpack(word), unpack(word >> 4), unpack(word >> 8), unpack(word >> 12));
  }

  __device__ __forceinline__ unsigned unpack(unsigned word) const {
    // The bits of 128 + n are those of 128 with n in the lowest four.
    bf162 n = __hsub2(as_pair((word & 0x000f000fu) | 0x43004300u), as_pair(0x43004300u));
    // Made a pair only here: what waits for a number that is being read keeps the warp from reading ahead.
    return as_word(__hfma2(n, as_pair(scale * 0x10001u), as_pair(bias * 0x10001u)));
  }
};

// W x for at most 8 * HALVES rows of x. A unit is a pair of tiles of W; ``split`` warps share its columns.
template <int HALVES, int BITS, int GROUP>
struct Product {
  static constexpr int DEPTH = BITS == 16 ? 2 : 4;  // chunks under way
  static constexpr int BLOCKS = (HALVES + 1) / 2;
  static constexpr int SUMS = HALVES * 8 * PAIR * TILE;  // what a warp has for a unit

  struct Item {
    Piece<BITS, GROUP> pieces[PAIR];
  };

  struct Cursor {
    int round = 0, step = 0;

    __device__ __forceinline__ void advance(int each) {
      if (++step == each) {
        step = 0;
        ++round;
      }
    }
  };

  Matrix w;
  int columns, units, unit_rows, tile_rows, rows;
  int thread, warp, split, member, group, groups, each;
  Cursor loading;
  Item ring[DEPTH];

  // The first row of W of tile r of a unit is unit * unit_rows + r * tile_rows.
  //
  // Weights do not depend on the phase before: reading them begins ahead of the barrier.
  __device__ __forceinline__ Product(const Matrix& w_, int columns_, int units_, int unit_rows_, int tile_rows_, int rows_)
      : w(w_), columns(columns_), units(units_), unit_rows(unit_rows_), tile_rows(tile_rows_), rows(rows_) {
    thread = thread_index();
    warp = thread / 32;
    int chunks = columns / CHUNK;
    split = chunks % 16 == 0 ? 16 : chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 16;
    member = warp % split;
    group = warp / split;
    groups = WARPS / split;
    each = (chunks + split - 1) / split;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      ring[d] = Item{};  // else what the phase before has left there would have to be kept
      load(ring[d]);
    }
  }

  __device__ __forceinline__ int unit_of(int round, int of_group) const {
    return (round * groups + of_group) * gridDim.x + blockIdx.x;
  }

  __device__ __forceinline__ void load(Item& item) {
    int unit = unit_of(loading.round, group), chunk = member + loading.step * split, t = thread % 4;
    if (unit < units && chunk * CHUNK < columns) {
      size_t row = (size_t)unit * unit_rows + thread % 32 / 4;
#pragma unroll
      for (int r = 0; r < PAIR; ++r) item.pieces[r].load(w, row + r * tile_rows, columns, chunk, t);
    }
    loading.advance(each);
  }

  // x is [rows, stride] in ``order``; done(unit, m, i, totals) gets row i of both tiles of a unit, for row m of x.
  template <class Done>
  __device__ __forceinline__ void run(const bf16* x, int stride, float* sums, Done done) {
    const int rounds = (units + groups * gridDim.x - 1) / (groups * gridDim.x);
    Cursor at;
    float c[BLOCKS][PAIR][4];
    clear(c);
    while (at.round < rounds) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (at.round >= rounds) break;
        int chunk = member + at.step * split;
        if (unit_of(at.round, group) < units && chunk * CHUNK < columns) add(c, ring[d], x + chunk * CHUNK, stride);
        load(ring[d]);
        if (at.step == each - 1) {
          float* place = sums + (at.round & 1) * WARPS * SUMS;
          store(c, place + warp * SUMS);
          clear(c);
          __syncthreads();
          finish(place, at.round, done);
        }
        at.advance(each);
      }
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void clear(float (&c)[BLOCKS][PAIR][4]) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int r = 0; r < PAIR; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[b][r][i] = 0.0f;
  }

  __device__ __forceinline__ void add(float (&c)[BLOCKS][PAIR][4], const Item& item, const bf16* x, int stride) {
    const int g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint4 v[2 * BLOCKS];
#pragma unroll
      for (int h = 0; h < 2 * BLOCKS; ++h) {
        int m = h * 8 + g;
        v[h] = make_uint4(0, 0, 0, 0);
        if (h < HALVES && m < rows) v[h] = *reinterpret_cast<const uint4*>(x + (size_t)m * stride + j * 32 + t * 8);
      }
#pragma unroll
      for (int r = 0; r < PAIR; ++r) {
        uint4 weights = item.pieces[r].values(j);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
          uint4 low = v[2 * b], high = v[2 * b + 1];
          multiply(c[b][r], {low.x, high.x, low.y, high.y}, weights.x, weights.y);
          multiply(c[b][r], {low.z, high.z, low.w, high.w}, weights.z, weights.w);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const float (&c)[BLOCKS][PAIR][4], float* place) {
    const int g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int r = 0; r < PAIR; ++r) {
        float* to = place + ((h * 8 + g) * PAIR + r) * TILE + t * 2;
        to[0] = c[h / 2][r][h % 2 * 2];
        to[1] = c[h / 2][r][h % 2 * 2 + 1];
      }
  }

  template <class Done>
  __device__ __forceinline__ void finish(const float* place, int round, Done done) {
    for (int n = thread; n < groups * rows * TILE; n += THREADS) {
      int i = n % TILE, m = n / TILE % rows, of_group = n / TILE / rows, unit = unit_of(round, of_group);
      if (unit >= units) continue;
      const float* p = place + of_group * split * SUMS + m * PAIR * TILE + i;
      float total[PAIR] = {0.0f, 0.0f};
#pragma unroll 4
      for (int k = 0; k < split; ++k) {
        total[0] += p[k * SUMS];
        total[1] += p[k * SUMS + TILE];
      }
      done(unit, m, i, total);
    }
  }
};

}  // namespace emlxd
