// The body of the kernel. Inputs: embedded, positions, lengths, extent, table, scratch, keys_i, values_i.
// Output: logits.
using namespace emlxd;
constexpr int WORDS = (LAYERS * sizeof(Layer) + sizeof(Phase)) / 8;
extern __shared__ __align__(16) unsigned char shared[];
__shared__ unsigned long long words[WORDS];
__shared__ bf16* keys[LAYERS];
__shared__ bf16* values[LAYERS];
__shared__ int at[8 * Sizes::HALVES];
__shared__ unsigned long long target;

if (threadIdx.x == 0) {
  LIST_CACHE
}
for (int i = threadIdx.x; i < WORDS; i += THREADS) words[i] = table[i];
if (threadIdx.x < extent[0]) at[threadIdx.x] = lengths[threadIdx.x] ? positions[threadIdx.x] : -1;
Step<Sizes> step(const_cast<unsigned char*>(scratch), shared, &target, {extent[0], extent[1]});
step.begin(embedded);
__syncthreads();

const Phases phases{reinterpret_cast<const Layer*>(words), LAYERS * PHASES};
Stream<Item<Sizes::BITS, Sizes::GROUP>, Sizes::DEPTH, Phases> stream(phases, step.ring());
static_assert(WARPS * Sizes::DEPTH * decltype(stream)::Item::BYTES == Sizes::RING_BYTES);
#pragma unroll 1
for (int i = 0; i <= phases.count; ++i) {
  const int l = i / PHASES, n = i % PHASES;
  if (i < phases.count && n < 2) {
    const auto attention = step.attending(phases.layers[l].mixing, at);
    if (n == 0) {
      attention.announce(keys[l], values[l]);
    } else {
      step.barrier.wait();
      // Attention needs all registers: what the compiler would spill, it would read back for every item.
      static_assert(sizeof(stream.next) * THREADS <= Sizes::SUMS);
      auto& parked = reinterpret_cast<decltype(stream.next)*>(step.sums())[threadIdx.x];
      parked = stream.next;
      attention.run(keys[l], values[l], reinterpret_cast<float*>(shared));
      stream.next = parked;
    }
  }
  step.run(phases.phase(i), stream, logits);
}
