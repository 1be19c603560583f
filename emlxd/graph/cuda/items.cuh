// The two formats of weights: how a warp copies a piece of a matrix to shared memory, and multiplies it.
//
// Tensor cores compute the products with the weights as A (16 x 16) and the rows as B (16 x 8). A sum does not care
// about the order of its terms, so a thread takes neighbouring terms of a row of weights instead of the spread ones
// that the instruction names. What a row gives does not depend on the rows beside it.

namespace emlxd {

constexpr int TILE = 8;  // rows of weights; an instruction takes a pair of tiles
constexpr int PAIR = 2;

// [rows, columns]: bfloat16, or 4 bits with a scale and a bias for each group of columns. Unit u of it, of ``units``,
// is the pair of tiles that begin at the rows u * unit_rows and u * unit_rows + apart. Scales and biases lie in the
// order of items: [units, columns / 128, rows of a unit, groups, 2].
struct Matrix {
  const unsigned char* data;
  const unsigned char* scales;
  long long columns, units, unit_rows, apart;
};

// The rows that weights are multiplied with: what this thread reads of them, 8 of each 32 columns.
template <int HALVES>
struct Rows {
  const bf16* x;
  int at[HALVES];

  // Rows that do not exist read the last: what comes of them is left alone.
  __device__ __forceinline__ Rows(const bf16* x_, int rows, int stride, int lane) : x(x_) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) at[h] = min(h * 8 + lane / 4, rows - 1) * stride + lane % 4 * 8;
  }

  __device__ __forceinline__ uint4 read(int h, int column) const {
    return *reinterpret_cast<const uint4*>(x + at[h] + column);
  }
};

// An item is CHUNK columns of a unit. A warp copies it to a slot of shared memory, BYTES long, and adds its product
// with the rows to a sum [16, 8] for each 8 rows. This is the one of bfloat16 weights.
template <int BITS, int GROUP>
struct Item {
  static constexpr int CHUNK = 64, ROW = CHUNK * 2, BYTES = PAIR * TILE * ROW;

  // What a lane copies next: 16 bytes of every fourth row.
  struct Source {
    const unsigned char* data;
    unsigned row, tile;  // bytes from one to the next

    __device__ __forceinline__ void open(const Matrix& w, int unit, int chunk, int lane) {
      row = w.columns * 2;
      tile = w.apart * row;
      data = w.data + (size_t)(unit * (unsigned)w.unit_rows + lane / 8) * row + (chunk * ROW + lane % 8 * 16);
    }

    __device__ __forceinline__ void copy_to(unsigned char* slot, int lane) {
      unsigned char* to = slot + at(lane / 8, lane % 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy(to + (i / 2 * TILE + i % 2 * 4) * ROW, data + i / 2 * (size_t)tile + i % 2 * 4 * (size_t)row);
      data += ROW;
    }
  };

  // Odd rows swap halves, so that 8 threads read from all banks.
  __device__ __forceinline__ static int at(int row, int piece) { return row * ROW + (piece ^ row % 2 * 4) * 16; }

  template <int HALVES>
  __device__ __forceinline__ static void add(float (&sum)[HALVES][4], const unsigned char* slot, const Matrix& w,
                                             int chunk, const Rows<HALVES>& x, int lane) {
#pragma unroll
    for (int j = 0; j < CHUNK / 32; ++j) {
      const uint4* from = reinterpret_cast<const uint4*>(slot + at(lane / 4, j * 4 + lane % 4));
      const uint4 a = from[0], b = from[TILE * ROW / 16];
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        uint4 v = x.read(h, chunk * CHUNK + j * 32);
        multiply(sum[h], {a.x, b.x, a.y, b.y}, v.x, v.y);
        multiply(sum[h], {a.z, b.z, a.w, b.w}, v.z, v.w);
      }
    }
  }
};

// The one of 4-bit weights. Four threads share each group of a row, so that every product is of one group alone: scales
// and biases are applied to the sums, and the weights are multiplied as the small integers that they are.
template <int GROUP>
struct Item<4, GROUP> {
  static constexpr int CHUNK = 128, ROW = CHUNK / 2;
  static constexpr int GROUPS = CHUNK / GROUP, WORDS = GROUP / 32;  // words that a thread has of a group
  static constexpr int DATA = PAIR * TILE * ROW, SCALES = PAIR * TILE * GROUPS * 4, BYTES = DATA + SCALES;
  static constexpr unsigned ONES = 0x3f803f80u;  // two bfloat16

  struct alignas(4 * WORDS) Words {
    unsigned of[WORDS];
  };

  // Of a row: the lower half of each is a scale, the upper half a bias.
  struct alignas(4 * GROUPS) Scales {
    unsigned of[GROUPS];
  };

  // What a lane copies next: 16 bytes of a row in each tile, and some lanes 16 bytes of scales.
  struct Source {
    const unsigned char *data, *scales;
    unsigned tile;  // bytes from one to the next

    __device__ __forceinline__ void open(const Matrix& w, int unit, int chunk, int lane) {
      const unsigned columns = w.columns, first = unit * (unsigned)w.unit_rows;
      tile = (unsigned)w.apart * (columns / 2);
      data = w.data + (size_t)(first + lane / 4) * (columns / 2) + (chunk * ROW + lane % 4 * 16);
      scales = w.scales + (size_t)(unit * (columns / CHUNK) + chunk) * SCALES + lane * 16;
    }

    __device__ __forceinline__ void copy_to(unsigned char* slot, int lane) {
      unsigned char* to = slot + at(lane / 4, lane % 4 * 16);
      copy<256>(to, data);
      copy<256>(to + TILE * ROW, data + tile);
      if (lane < SCALES / 16) copy(slot + DATA + lane * 16, scales);
      data += ROW;
      scales += SCALES;
    }
  };

  // Swapped within a row so that the threads that read together read from all banks.
  __device__ __forceinline__ static int at(int row, int byte) {
    return row * ROW + (byte ^ (GROUP == 32 ? row / 2 % 4 * 16 : GROUP == 64 ? row / 2 % 2 * 32 : 0));
  }

  template <int HALVES>
  __device__ __forceinline__ static void add(float (&sum)[HALVES][4], const unsigned char* slot, const Matrix& w,
                                             int chunk, const Rows<HALVES>& x, int lane) {
    const Scales* from = reinterpret_cast<const Scales*>(slot + DATA) + lane / 4;
    const Scales scales[PAIR] = {from[0], from[TILE]};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int place = at(lane / 4, g * (GROUP / 2) + lane % 4 * WORDS * 4);
      const Words* tiles = reinterpret_cast<const Words*>(slot + place);
      const Words words[PAIR] = {tiles[0], tiles[TILE * ROW / sizeof(Words)]};
      unsigned weights[2 * WORDS][4];
#pragma unroll
      for (int n = 0; n < 2 * WORDS; ++n) {
        unsigned a = words[0].of[n / 2] >> n % 2 * 8, b = words[1].of[n / 2] >> n % 2 * 8;
        weights[n][0] = unpack(a), weights[n][1] = unpack(b);
        weights[n][2] = unpack(a >> 4), weights[n][3] = unpack(b >> 4);
      }
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        float product[4] = {}, total[4] = {};  // of the rows with 128 + n, and with 1
#pragma unroll
        for (int n = 0; n < WORDS; ++n) {
          uint4 v = x.read(h, chunk * CHUNK + g * GROUP + n * 32);
          multiply(product, weights[2 * n], v.x, v.y);
          multiply(total, {ONES, ONES, ONES, ONES}, v.x, v.y);
          multiply(product, weights[2 * n + 1], v.z, v.w);
          multiply(total, {ONES, ONES, ONES, ONES}, v.z, v.w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const unsigned both = scales[e / 2].of[g];
          float scale = __uint_as_float(both << 16);
          float bias = __uint_as_float(both & 0xffff0000u) - 128.0f * scale;
          sum[h][e] = fmaf(scale, product[e], fmaf(bias, total[e], sum[h][e]));
        }
      }
    }
  }

  // Two weights n of 4 bits as the bfloat16 numbers 128 + n: they are the lowest four bits of those.
  __device__ __forceinline__ static unsigned unpack(unsigned word) {
    return and_or<0x000f000f>(word, 0x43004300u);
  }
};

}  // namespace emlxd
