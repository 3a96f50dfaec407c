// verify_attn for at most 16 rows a request over an e4m3 cache, on any GPU since sm_80. README.md
// explains the schedule; few_rows.cu is its sibling for 16-bit caches.
//
// A block takes all rows of a request, 8 or 16 with those that are not there, and one split of its
// keys, 64 keys at a time, with 8 warps; two blocks an SM. For each 64 keys:
//   scores   each warp multiplies half of the keys with the rows, a quarter of the 576 features;
//            the quarters meet in shared memory
//   softmax  each warp adds them up for its row or two, updates maximum and sums, and leaves the
//            probabilities in shared memory as the next product's operand
//   values   each warp multiplies its own 64 of the 512 columns with all rows' probabilities
// while the next 64 keys arrive in the other of two buffers. Keys and columns are the products' 16
// rows, and rows their 8 columns, so that 8 rows waste nothing.
//
// Keys stay e4m3 in shared memory and become f16, which holds them exactly, in the registers of the
// products: four bytes are two operands, one instruction each, since features and columns may come
// in any order. q becomes f16 too; a power of two for each row of a bf16 one keeps it within range.
//
// A key is 576 bytes and is read once: the 4.3 TB/s of memory bound it.
#include <cfloat>

#include "cuda/attention/sm80/common.h"

namespace kdtree::cuda::sm80 {

constexpr int kFp8Rows = 16;
constexpr int kFp8Keys = 64;  // of a step
constexpr int kFp8Columns = kLatent / kWarps;
// Of a row of scores and of probabilities, so that no access meets a bank conflict.
constexpr int kScoreStride = kFp8Keys + 4, kProbabilityStride = kFp8Keys + 8;
constexpr float kMaxHalf = 32768;  // that q is scaled to

struct Fp8Shared {
  // Key r holds its 16-byte chunk c of every four at c ^ (r / 2 % 4): four chunks of two keys, and
  // one chunk of 8 keys, are 8 different bank groups.
  alignas(128) unsigned char buffers[2][kFp8Keys][kDim];
  alignas(16) float scores[kFeatureGroups][kFp8Rows][kScoreStride];  // partial ones
  alignas(16) __half probabilities[kFp8Rows][kProbabilityStride];
  // Kept here rather than in registers.
  Block block;
  Lookup lookup;
  uint64_t nodes[kFp8Rows];           // that a row sees
  uint64_t tile_nodes;                // that any row sees
  int64_t entries[2][kFp8Keys];       // of the page table
  uint32_t largest[kFp8Rows];         // of q, as a float's bits
  alignas(8) float factor[kFp8Rows];  // for what the output holds so far
  float sums[kFp8Rows];               // at the end, of the rounded probabilities
};
static_assert(sizeof(Fp8Shared) <= 101376);

// Brings the keys of a step to shared memory, four threads a key; their table entries come a step
// earlier. Keys that may not be read become zeros.
struct Fp8Loader {
  const Params &a;
  Fp8Shared &shared;
  int step;
  unsigned thread;

  __device__ int key() const { return thread / 4; }
  __device__ int position() const { return shared.lookup.begin + step * kFp8Keys + key(); }

  __device__ void load_entry() const {
    if (thread % 4 == 0)
      shared.lookup.copy(a, shared.block, shared.tile_nodes, position(),
                         &shared.entries[step % 2][key()]);
  }

  // The thread's share: a chunk in every 64 features.
  struct Copies {
    const char *from;
    uint32_t to;
    bool wanted, valid;
    __device__ __forceinline__ void start(int i) const {
      copy_async_if<16>(wanted, to + i * 64, from + i * 64, valid);
    }
  };
  __device__ Copies copies(bool wanted) const {
    const char *from = find_key<true>(a, position(), &shared.entries[step % 2][key()]);
    const bool valid = from != nullptr;
    if (!valid) from = static_cast<const char *>(a.p.kv_cache);
    const uint32_t place = (thread ^ key() / 2) & 3;
    return {from + thread % 4 * 16, shared_address(shared.buffers[step % 2][key()]) + place * 16,
            wanted, valid};
  }
};

// A row's power of two, that brings its largest value to kMaxHalf at most.
__device__ __forceinline__ float q_scale(uint32_t largest) {
  const float x = __uint_as_float(largest);
  return x < kMaxHalf ? 1 : __uint_as_float((127 + 14 + 127 - min(largest >> 23, 254u)) << 23);
}

// The rows as operands, 8 by 8: q[j] has features 16 (f + 4 j) + 4t .. + 3 of feature group f, in
// the order that e4m3 keys come in.
template <class T, int Tiles>
__device__ __forceinline__ void load_fp8_q(const Params &a, Fp8Shared &shared, int feature_group,
                                           uint32_t (&q)[kFeatureSteps][Tiles][2]) {
  const Block &block = shared.block;
  const int lane = threadIdx.x % 32;
  const int heads = static_cast<int>(a.p.heads);
  const int feature = feature_group * 16 + lane % 4 * 4;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    const int i = tile * 8 + lane / 4;
    const QRow<T> row = find_q<T>(a.p, block.request.b, i / heads, i % heads, feature);
#pragma unroll
    for (int j = 0; j < kFeatureSteps; ++j) {
      uint2 four{};
      if (i < block.rows)
        four = *reinterpret_cast<const uint2 *>(j < kFeatureSteps - 1 ? row.latent + j * 64
                                                                      : row.rope);
      q[j][tile][0] = four.x, q[j][tile][1] = four.y;
    }
  }
  if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      float most = 0;
#pragma unroll
      for (int j = 0; j < 2 * kFeatureSteps; ++j) {
        const float2 two = unpack<T>(q[j / 2][tile][j % 2]);
        most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
      }
      atomicMax(&shared.largest[tile * 8 + lane / 4], __float_as_uint(most));
    }
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      const float scale = q_scale(shared.largest[tile * 8 + lane / 4]);
#pragma unroll
      for (int j = 0; j < 2 * kFeatureSteps; ++j) {
        uint32_t &pair = q[j / 2][tile][j % 2];
        const float2 two = unpack<T>(pair);
        pair = pack<__half>(two.x * scale, two.y * scale);
      }
    }
  }
}

// Partial scores of this warp's 32 keys, to shared.scores. As matrices: 8 keys by 16 features.
template <int Tiles>
__device__ __forceinline__ void score_keys(Fp8Shared &shared, int step, unsigned thread,
                                           const uint32_t (&q)[kFeatureSteps][Tiles][2],
                                           const Fp8Loader::Copies &copies) {
  const int lane = thread % 32, warp = thread / 32;
  const int feature_group = warp % kFeatureGroups, first = warp / kFeatureGroups * 32;
  const uint32_t address =
      shared_address(shared.buffers[step % 2][first + lane]) + (feature_group ^ lane / 2 % 4) * 16;
  float score[2][Tiles][4] = {};
#pragma unroll
  for (int j = 0; j < kFeatureSteps; ++j) {
    uint32_t k[4];
    load_matrices(k, address + j * 64);
    copies.start(j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t keys[4];
      attention::widen_four(k[half * 2], keys[0], keys[2]);      // keys 0..7
      attention::widen_four(k[half * 2 + 1], keys[1], keys[3]);  // 8..15
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile)
        multiply<__half>(score[half][tile], keys, q[j][tile][0], q[j][tile][1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        shared.scores[feature_group][tile * 8 + lane % 4 * 2 + i % 2]
                     [first + half * 16 + i / 2 * 8 + lane / 4] = score[half][tile][i];
    }
  }
}

// What a lane keeps of its row; sums are its share.
struct Fp8Row {
  float scale;  // of scores, for exponentials in base 2
  float top = -FLT_MAX, exact = 0, rounded = 0;
};

// Scores to probabilities: 32 / Tiles lanes a row, 2 Tiles keys a lane.
template <int Tiles>
__device__ __forceinline__ void softmax(Fp8Shared &shared, int step, unsigned thread,
                                        Fp8Row &state) {
  constexpr int kLanes = 32 / Tiles, kEach = 2 * Tiles;
  const int row = thread / kLanes, key = thread % kLanes * kEach;
  float x[kEach] = {};
#pragma unroll
  for (int part = 0; part < kFeatureGroups; ++part) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const float2 v = *reinterpret_cast<const float2 *>(&shared.scores[part][row][key + i]);
      x[i] += v.x, x[i + 1] += v.y;
    }
  }
  const int offset = shared.block.keys.begin + step * kFp8Keys - shared.block.request.prefix + key;
  const uint32_t seen = offset + kEach <= 1 ? ~0u : attention::sees32(shared.nodes[row], offset);
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    x[i] = seen >> i & 1 ? x[i] * state.scale : -INFINITY;
    most = fmaxf(most, x[i]);
  }
  float factor = 1;
  if (__any_sync(~0u, most > state.top + kSlack)) {
#pragma unroll
    for (int i = 1; i < kLanes; i *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    if (!(most > state.top + kSlack)) most = state.top;
    factor = attention::exp2(state.top - most);
    state.top = most;
    state.exact *= factor, state.rounded *= factor;
  }
  if (key == 0) shared.factor[row] = factor;
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    x[i] = attention::exp2(x[i] - state.top), x[i + 1] = attention::exp2(x[i + 1] - state.top);
    const uint32_t pair = pack<__half>(x[i], x[i + 1]);
    const float2 rounded = unpack<__half>(pair);
    state.exact += x[i] + x[i + 1];
    state.rounded += rounded.x + rounded.y;
    *reinterpret_cast<uint32_t *>(&shared.probabilities[row][key + i]) = pair;
  }
}

// out += values x probabilities for this warp's columns, 16 keys at a time. As matrices: 8 keys by
// 16 columns, two by two. Of a product's rows, 0..7 are the even and 8..15 the odd of 16 columns.
template <int Tiles>
__device__ __forceinline__ void add_values(Fp8Shared &shared, int step, unsigned thread,
                                           float (&out)[kFp8Columns / 16][Tiles][4]) {
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    const float2 factor =
        *reinterpret_cast<const float2 *>(&shared.factor[tile * 8 + lane % 4 * 2]);
    if (!__any_sync(~0u, factor.x != 1 || factor.y != 1)) continue;
#pragma unroll
    for (int c = 0; c < kFp8Columns / 16; ++c) {
      out[c][tile][0] *= factor.x, out[c][tile][1] *= factor.y;
      out[c][tile][2] *= factor.x, out[c][tile][3] *= factor.y;
    }
  }
  const uint32_t probabilities = shared_address(shared.probabilities[lane % 8]) + lane / 8 * 16;
  const uint32_t address = shared_address(shared.buffers[step % 2][lane % 16]) +
                           warp * kFp8Columns + (lane / 16 ^ lane / 2 % 4) * 16;
#pragma unroll
  for (int first = 0; first < kFp8Keys; first += 32) {
    uint32_t p[Tiles][4];  // for 8 keys each
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile)
      load_matrices(p[tile], probabilities + (tile * 8 * kProbabilityStride + first) * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < kFp8Columns / 16; c += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, (address ^ c * 16) + (first + half * 16) * kDim);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t values[4];
#pragma unroll
          for (int k = 0; k < 2; ++k) {  // keys 0..7, 8..15; by column, two keys
            const uint32_t by_column = __byte_perm(v[2 * i + k], 0, 0x3120);
            attention::widen_four(by_column, values[k * 2], values[k * 2 + 1]);
          }
#pragma unroll
          for (int tile = 0; tile < Tiles; ++tile)
            multiply<__half>(out[c + i][tile], values, p[tile][half * 2], p[tile][half * 2 + 1]);
        }
      }
    }
  }
}

// Two columns of two rows of a tile are a lane's.
template <class T, int Tiles>
__device__ __forceinline__ void write_fp8_output(const Params &a, const Fp8Shared &shared,
                                                 unsigned thread,
                                                 const float (&out)[kFp8Columns / 16][Tiles][4]) {
  const int lane = thread % 32;
  const Block &block = shared.block;
  const float kv_scale = read_kv_scale(a);
#pragma unroll
  for (int i = 0; i < 2 * Tiles; ++i) {
    const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (row >= block.rows) continue;
    const float norm = shared.sums[row] > 0 ? kv_scale / shared.sums[row] : 0;
    const int column = thread / 32 * kFp8Columns + lane / 4 * 2;
    float *partial = a.partial_out + (first_partial(a, block) + row) * kLatent + column;
    T *result = static_cast<T *>(a.p.out) + (block.request.b * a.rows + row) * kLatent + column;
#pragma unroll
    for (int c = 0; c < kFp8Columns / 16; ++c) {
      const float low = out[c][i / 2][i % 2] * norm, high = out[c][i / 2][i % 2 + 2] * norm;
      if (block.place >= 0)
        *reinterpret_cast<float2 *>(partial + c * 16) = {low, high};
      else
        *reinterpret_cast<uint32_t *>(result + c * 16) = pack<T>(low, high);
    }
  }
}

template <class T, int Tiles>
__global__ void __launch_bounds__(kThreads, 2)
    few_rows_fp8_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(128) unsigned char attention_smem[];
  Fp8Shared &shared = *reinterpret_cast<Fp8Shared *>(attention_smem);

  Block block;
  if (!read_block(a, kFp8Rows, kFp8Keys, block)) return;
  if (block.steps == 0) return write_nothing<T, kThreads>(a, block);
  unsigned thread = threadIdx.x;
  if (thread < 32) {
    const uint64_t all = read_nodes(a, block, kFp8Rows, shared.nodes);
    if (thread == 0) {
      shared.tile_nodes = all;
      shared.block = block;
      shared.lookup = Lookup::of(a, block);
    }
  } else if (thread < 32 + kFp8Rows) {
    shared.largest[thread - 32] = 0;
  }
  __syncthreads();
  Fp8Loader{a, shared, 0, thread}.load_entry();
  Fp8Loader{a, shared, 1, thread}.load_entry();
  wait_copies();
  __syncwarp();
  {
    const Fp8Loader::Copies copies = Fp8Loader{a, shared, 0, thread}.copies(true);
#pragma unroll
    for (int i = 0; i < kFeatureSteps; ++i) copies.start(i);
  }
  uint32_t q[kFeatureSteps][Tiles][2];
  load_fp8_q<T>(a, shared, thread / 32 % kFeatureGroups, q);
  const int row = thread / (32 / Tiles);
  Fp8Row state;
  state.scale = score_scale(a) / q_scale(shared.largest[row]);

  float out[kFp8Columns / 16][Tiles][4] = {};
  for (int step = 0; step < shared.block.steps; ++step) {
    wait_copies();
    __syncthreads();  // this step's keys are there; the other buffer and the scores are free
    forget(thread);
    Fp8Loader{a, shared, step + 2, thread}.load_entry();
    const Fp8Loader next{a, shared, step + 1, thread};
    score_keys(shared, step, thread, q, next.copies(step + 1 < shared.block.steps));
    __syncthreads();
    forget(thread);
    softmax<Tiles>(shared, step, thread, state);
    __syncthreads();
    forget(thread);
    add_values(shared, step, thread, out);
  }
  forget(thread);
#pragma unroll
  for (int i = 1; i < 32 / Tiles; i *= 2) {
    state.exact += __shfl_xor_sync(~0u, state.exact, i);
    state.rounded += __shfl_xor_sync(~0u, state.rounded, i);
  }
  if (thread % (32 / Tiles) == 0) {
    shared.sums[row] = state.rounded;
    if (row < shared.block.rows) write_lse(a, shared.block, row, state.top, state.exact);
  }
  __syncthreads();
  write_fp8_output<T>(a, shared, thread, out);
}

template <class T>
void choose_few_rows_fp8(const Params &a, Stream stream) {
  launch_blocks(a.rows > 8 ? few_rows_fp8_kernel<T, 2> : few_rows_fp8_kernel<T, 1>,
                sizeof(Fp8Shared), a, stream);
}

void few_rows_fp8_attention(const Params &a, Stream stream) {
  a.p.q_dtype == KDTREE_BF16 ? choose_few_rows_fp8<__nv_bfloat16>(a, stream)
                             : choose_few_rows_fp8<__half>(a, stream);
}

}  // namespace kdtree::cuda::sm80
