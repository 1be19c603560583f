// The body of the kernel. Inputs: embedded, positions, lengths, extent, table, scratch, keys_i, values_i. Output: logits.
using namespace emlxd;
constexpr int WORDS = (LAYERS * sizeof(Layer) + sizeof(Phase)) / 8;
extern __shared__ __align__(16) unsigned char shared[];
__shared__ unsigned long long words[WORDS];
__shared__ bf16* keys[LAYERS];
__shared__ bf16* values[LAYERS];
__shared__ int at[8 * Sizes::HALVES];

if (threadIdx.x == 0) {
  LIST_CACHE
}
for (int i = threadIdx.x; i < WORDS; i += THREADS) words[i] = table[i];
if (threadIdx.x < extent[0]) at[threadIdx.x] = lengths[threadIdx.x] ? positions[threadIdx.x] : -1;
Step<Sizes> step(const_cast<unsigned char*>(scratch), shared, {extent[0], extent[1]});
step.begin(embedded);
__syncthreads();

const Layer* layers = reinterpret_cast<const Layer*>(words);
const Phase* head = reinterpret_cast<const Phase*>(layers + LAYERS);
#pragma unroll 1
for (int i = 0; i <= LAYERS * PHASES; ++i) {
  int l = i / PHASES, n = i % PHASES;
  if (n == 1) {
    const Phase& next = layers[l].phases[n];
    step.barrier.wait();
    prefetch(next.w.data, next.units * PAIR * TILE * next.columns * Sizes::BITS / 8);
    step.attend(layers[l].mixing, keys[l], values[l], at);
  }
  step.run(i < LAYERS * PHASES ? layers[l].phases[n] : *head, logits);
}
