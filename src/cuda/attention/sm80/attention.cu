// verify_attn on any GPU since sm_80: mma.sync and cp.async. README.md explains the schedule.
//
// A block takes one tile of 64 (or 16) rows of a request and one split of its keys, 32 keys at a
// time, with 8 warps. For each 32 keys:
//   scores   each warp multiplies its rows with its quarter of the 576 features, held in registers
//            since the start; the quarters meet in shared memory
//   softmax  warp h adds them up for rows 8h..8h+7, updates the running maximum and sum, and leaves
//            the probabilities in shared memory as the next product's operand
//   values   each warp multiplies all rows' probabilities with its own 64 of the 512 columns
// while the next 32 keys arrive in the other of two buffers.
//
// Per row and key 1,088 multiply-adds, per key 1,152 bytes: 64 rows do 121 FLOP a byte, so the
// matrix units bound it (627 TF on the H200 for mma.sync); 16 rows of decoding are bound by the
// 4.3 TB/s of memory.
#include <cmath>

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/attention/sm80/mma.h"
#include "cuda/launch.h"

namespace kdtree::cuda::sm80 {

using attention::kDim;
using attention::KeyRange;
using attention::kLatent;
using attention::pack;
using attention::Params;
using attention::Request;
using attention::unpack;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = 32;            // of a step
constexpr int kRowBytes = kDim * 2;  // of a key in shared memory: 9 lines of 128 bytes
constexpr int kBufferBytes = kKeys * kRowBytes;
constexpr int kFeatureGroups = 4;  // warps that share the features of a score
constexpr int kFeatureSteps = kDim / 16 / kFeatureGroups;  // of 16 features, for each of them
constexpr int kColumns = kLatent / kWarps;                 // of the output, a warp
// A maximum that grows by less than this (in log2) leaves the old one in use: probabilities stay
// below 2^8, and the output is seldom rescaled.
constexpr float kSlack = 8;

// MTiles: 16-row tiles of a block. With 4, warps 0-3 and 4-7 score 32 rows each; with 1, 16 of the
// 32 keys each.
template <int MTiles>
struct Shape {
  static constexpr int rows = 16 * MTiles;
  static constexpr int bands = 2 * MTiles;  // of 8 rows; warp h < bands owns band h in softmax
  static constexpr int row_groups = MTiles == 4 ? 2 : 1;
  static constexpr int group_bands = bands / row_groups;  // a warp scores
  static constexpr int group_tiles = MTiles / row_groups;
  // With 4 tiles a warp scores the band that it owns, and keeps that part in registers.
  static constexpr bool owns_scored = row_groups == 2;
  static constexpr int parts = owns_scored ? kFeatureGroups - 1 : kFeatureGroups;
};

// What a block works on: rows first_row.. of a request, and one split of its keys.
struct Block {
  Request request;
  KeyRange keys;
  int first_row, rows, split, steps;
};

template <int MTiles>
__device__ __forceinline__ Block read_block(const Params &a) {
  Block block;
  block.first_row = blockIdx.x % a.tiles * Shape<MTiles>::rows;
  block.rows = min(Shape<MTiles>::rows, a.rows - block.first_row);
  block.split = blockIdx.x / a.tiles % a.splits;
  block.request = attention::read_request(a, blockIdx.x / a.tiles / a.splits);
  block.keys = attention::split_keys(a, block.request.length, block.split);
  block.steps = (block.keys.end - block.keys.begin + kKeys - 1) / kKeys;
  return block;
}

template <int MTiles>
struct Shared {
  using S = Shape<MTiles>;
  // Row r holds its 16-byte chunk c at c ^ (r % 8) within each 128 bytes: the 8 rows of one chunk
  // are 8 different bank groups.
  alignas(128) unsigned char buffers[2 * kBufferBytes];
  // Partial scores: band, feature group, 16-key half, lane (as the product leaves them: two keys
  // of each of two 8-key tiles). Each band's owner puts its probabilities over the first part.
  float4 scores[S::bands][S::parts][2][32];
  // Kept here rather than in registers, of which the products leave few.
  Block block;
  float scale;                     // of scores, for exponentials in base 2
  uint64_t nodes[S::rows];         // that a row sees
  uint64_t tile_nodes;             // that any row of the tile sees
  int64_t entries[2][kKeys];       // of the page table
  alignas(8) uint8_t rescaled[8];  // by band: some row's factor is not 1
  float top[S::rows];              // running maximum of the scores
  float sums[2][S::rows];          // running sums of the probabilities: exact, and as rounded to T
  float factor[S::rows];           // for what the output holds so far

  // Operand of the second product: for 16 keys `half`, lane 4g + t has row g of the band, keys 2t,
  // 2t+1 (x) and 2t+8, 2t+9 (y).
  __device__ uint2 &probabilities(int band, int half, int lane) {
    return reinterpret_cast<uint2 *>(scores[band])[half * 32 + lane];
  }
};
static_assert(sizeof(Shared<4>) <= 101376);

// Brings the keys of a step to shared memory, eight threads a key; their table entries come a step
// earlier. Keys that no row sees and entries that the table does not have are never read: such
// rows become zeros.
template <class T, bool Fp8, int MTiles>
struct KeyLoader {
  static constexpr int chunk_bytes = Fp8 ? 8 : 16;  // eight features

  const Params &a;
  Shared<MTiles> &shared;
  int step;
  unsigned thread;

  __device__ int key() const { return thread / 8; }
  __device__ int position() const { return shared.block.keys.begin + step * kKeys + key(); }
  // The place of this thread's first chunk; the others are 128 bytes apart.
  __device__ int place() const {
    return step % 2 * kBufferBytes + key() * kRowBytes + ((thread ^ key()) & 7) * 16;
  }

  __device__ void load_entry() const {
    if (thread % 8 != 0) return;
    const void *from = nullptr;
    if (position() < shared.block.keys.end &&
        attention::sees(shared.tile_nodes, position() - shared.block.request.prefix))
      from = attention::entry_of(a, shared.block.request, position());
    int64_t *to = &shared.entries[step % 2][key()];
    if (from == nullptr)
      *to = -1;
    else if (a.entry_bytes == 4)
      copy_async<4>(shared_address(to), from);
    else
      copy_async<8>(shared_address(to), from);
  }

  __device__ void load_keys() const {
    const int64_t *entry = &shared.entries[step % 2][key()];
    const int64_t page = a.entry_bytes == 4 ? *reinterpret_cast<const int32_t *>(entry) : *entry;
    const bool valid = page >= 0 && page < a.p.num_pages;
    const int64_t in_page = position() & (static_cast<int>(a.p.page_size) - 1);
    const int64_t row = page * a.p.kv_stride_page + in_page * a.p.kv_stride_row;
    const char *from = static_cast<const char *>(a.p.kv_cache) + thread % 8 * chunk_bytes;
    if (valid) from += row * (Fp8 ? 1 : 2);
    const uint32_t to = shared_address(shared.buffers) + place();
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i)
      copy_async<chunk_bytes>(to + i * 128, from + i * 8 * chunk_bytes, valid);
  }

  // fp8 chunks arrive in the first half of their place and are widened there, by the thread that
  // copied them.
  __device__ void widen_keys() const {
    unsigned char *chunk = shared.buffers + place();
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
      const uint2 eight = *reinterpret_cast<const uint2 *>(chunk + i * 128);
      *reinterpret_cast<uint4 *>(chunk + i * 128) = attention::widen<T>(eight);
    }
  }
};

__device__ __forceinline__ float read_kv_scale(const Params &a) {
  return a.p.kv_scale_ptr != nullptr ? *a.p.kv_scale_ptr : a.p.kv_scale;
}

// What each row sees, what any row does, and everything at its start; by the first warp.
template <int MTiles>
__device__ void set_up(const Params &a, const Block &block, Shared<MTiles> &shared) {
  const int lane = threadIdx.x;
  uint64_t all = 0;
  for (int i = lane; i < Shape<MTiles>::rows; i += 32) {
    uint64_t nodes = 0;
    if (i < block.rows)
      nodes = attention::seen_nodes(a.p, block.request,
                                    (block.first_row + i) / static_cast<int>(a.p.heads));
    shared.nodes[i] = nodes;
    shared.top[i] = -INFINITY;
    shared.sums[0][i] = shared.sums[1][i] = 0;
    all |= nodes;
  }
  for (int step = 16; step > 0; step /= 2) all |= __shfl_xor_sync(~0u, all, step);
  if (lane < 8) shared.rescaled[lane] = 0;
  if (lane > 0) return;
  shared.tile_nodes = all;
  shared.block = block;
  shared.scale = a.p.sm_scale * read_kv_scale(a) * 1.44269504088896341f;
}

// Of the block's partial results: the first row.
__device__ __forceinline__ int64_t first_partial(const Params &a, const Block &block) {
  return (block.request.b * a.splits + block.split) * a.rows + block.first_row;
}

// The results of an empty split, or of a padding request.
template <class T>
__device__ void write_nothing(const Params &a, const Block &block) {
  const int64_t row = block.request.b * a.rows + block.first_row;
  for (int i = threadIdx.x; i < block.rows; i += kThreads) {
    if (a.splits > 1)
      a.partial_lse[first_partial(a, block) + i] = -INFINITY;
    else if (a.p.lse != nullptr)
      a.p.lse[row + i] = -INFINITY;
  }
  if (a.splits > 1) return;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(a.p.out) + row * kLatent);
  for (int i = threadIdx.x; i < block.rows * (kLatent / 8); i += kThreads) out[i] = {};
}

// This warp's part of q, as operands: its rows, and features 16 (f + 4 j) .. + 15 of feature group
// f for each j. The last j is the rope part.
template <class T, int MTiles>
__device__ __forceinline__ void load_q(
    const Params &a, const Block &block,
    uint32_t (&q)[kFeatureSteps][Shape<MTiles>::group_tiles][4]) {
  using S = Shape<MTiles>;
  const kdtree_verify_attn_params &p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = static_cast<int>(p.heads);
  const int feature = warp % kFeatureGroups * 16 + lane % 4 * 2;
#pragma unroll
  for (int band = 0; band < S::group_bands; ++band) {
    const int i = (S::owns_scored ? warp / kFeatureGroups * 32 : 0) + band * 8 + lane / 4;
    const int64_t b = block.request.b;
    const int slot = (block.first_row + i) / heads, head = (block.first_row + i) % heads;
    const T *latent = static_cast<const T *>(p.q) + b * p.q_stride_b + slot * p.q_stride_q +
                      head * p.q_stride_h + feature;
    const T *rope = latent + kLatent;
    if (p.q_rope != nullptr)
      rope = static_cast<const T *>(p.q_rope) + b * p.q_rope_stride_b + slot * p.q_rope_stride_q +
             head * p.q_rope_stride_h + feature;
#pragma unroll
    for (int j = 0; j < kFeatureSteps; ++j) {
      const T *from = j < kFeatureSteps - 1 ? latent + j * 64 : rope;
#pragma unroll
      for (int k = 0; k < 2; ++k)
        q[j][band / 2][band % 2 + k * 2] =
            i < block.rows ? *reinterpret_cast<const uint32_t *>(from + k * 8) : 0;
    }
  }
}

// Partial scores of this warp's rows, 16 keys at a time, to shared.scores and `own`. As matrices:
// 8 keys by 8 features, two by two.
template <class T, int MTiles>
__device__ __forceinline__ void score_keys(
    Shared<MTiles> &shared, int step, unsigned thread,
    const uint32_t (&q)[kFeatureSteps][Shape<MTiles>::group_tiles][4], float (&own)[2][4]) {
  using S = Shape<MTiles>;
  const int lane = thread % 32, warp = thread / 32;
  const int feature_group = warp % kFeatureGroups;
  const int first_band = S::owns_scored ? warp / kFeatureGroups * S::group_bands : 0;
  const int key = lane % 8 + lane / 16 * 8;
  const uint32_t address = shared_address(shared.buffers) + step % 2 * kBufferBytes +
                           key * kRowBytes + (((feature_group * 2 + lane / 8 % 2) ^ key) & 7) * 16;
#pragma unroll
  for (int i = 0; i < S::row_groups; ++i) {
    const int half = S::owns_scored ? i : warp / kFeatureGroups;
    float score[S::group_tiles][2][4] = {};
#pragma unroll
    for (int j = 0; j < kFeatureSteps; ++j) {
      uint32_t k[4];
      load_matrices(k, address + half * (16 * kRowBytes) + j * 128);
#pragma unroll
      for (int m = 0; m < S::group_tiles; ++m) {
        multiply<T>(score[m][0], q[j][m], k[0], k[1]);
        multiply<T>(score[m][1], q[j][m], k[2], k[3]);
      }
    }
#pragma unroll
    for (int band = 0; band < S::group_bands; ++band) {
      const float *low = score[band / 2][0] + band % 2 * 2;
      const float *high = score[band / 2][1] + band % 2 * 2;
      if (S::owns_scored && band == feature_group) {
        own[i][0] = low[0], own[i][1] = low[1], own[i][2] = high[0], own[i][3] = high[1];
      } else {
        const int part = feature_group - (S::owns_scored && feature_group > band ? 1 : 0);
        shared.scores[first_band + band][part][half][lane] = {low[0], low[1], high[0], high[1]};
      }
    }
  }
}

// Scores of band `warp` to probabilities. Lane 4g + t has row g and, as x[half][i], key
// 16 half + 8 (i / 2) + 2t + i % 2 of the step.
template <class T, int MTiles>
__device__ __forceinline__ void softmax(Shared<MTiles> &shared, int step, unsigned thread,
                                        const float (&own)[2][4]) {
  using S = Shape<MTiles>;
  const int lane = thread % 32, band = thread / 32;
  const int row = band * 8 + lane / 4;
  float x[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[half][i] = S::owns_scored ? own[half][i] : 0;
#pragma unroll
    for (int part = 0; part < S::parts; ++part) {
      const float4 v = shared.scores[band][part][half][lane];
      x[half][0] += v.x, x[half][1] += v.y, x[half][2] += v.z, x[half][3] += v.w;
    }
  }
  const int offset = shared.block.keys.begin + step * kKeys - shared.block.request.prefix;
  const uint32_t seen = offset + kKeys <= 1 ? ~0u : attention::sees32(shared.nodes[row], offset);
  const float old_top = shared.top[row];
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float &v = x[i / 4][i % 4];
    v = seen >> (i / 2 * 8 + lane % 4 * 2 + i % 2) & 1 ? v * shared.scale : -INFINITY;
    top = fmaxf(top, v);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  if (!(top > old_top + kSlack)) top = old_top;
  const float base = top == -INFINITY ? 0 : top;  // -inf: nothing seen so far
  const float factor = attention::exp2(old_top - base);
  float exact = 0, rounded = 0;
  uint2 probabilities[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exact += x[half][i] = attention::exp2(x[half][i] - base);
    probabilities[half] = {pack<T>(x[half][0], x[half][1]), pack<T>(x[half][2], x[half][3])};
    const float2 low = unpack<T>(probabilities[half].x), high = unpack<T>(probabilities[half].y);
    rounded += low.x + low.y + high.x + high.y;
  }
  // Both sums over the four lanes of a row: even lanes end up with the exact one.
  const bool odd = lane % 2;
  float sum = (odd ? rounded : exact) + __shfl_xor_sync(~0u, odd ? exact : rounded, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const bool rescaled = __any_sync(~0u, factor != 1);
  __syncwarp();  // the partial scores and the old maximum are read
  if (lane % 4 < 2) shared.sums[lane % 4][row] = shared.sums[lane % 4][row] * factor + sum;
  if (lane % 4 == 0) shared.top[row] = top, shared.factor[row] = factor;
  if (lane == 0) shared.rescaled[band] = rescaled;
#pragma unroll
  for (int half = 0; half < 2; ++half) shared.probabilities(band, half, lane) = probabilities[half];
}

// out += probabilities x values for this warp's columns, 16 keys at a time. As matrices: 8 keys by
// 8 columns, two by two; the next 16 columns are 32 bytes on, before the swizzle.
template <class T, int MTiles>
__device__ __forceinline__ void add_values(Shared<MTiles> &shared, int step, unsigned thread,
                                           bool full, float (&out)[MTiles][kColumns / 8][4]) {
  const int lane = thread % 32, warp = thread / 32;
  if (*reinterpret_cast<const uint64_t *>(shared.rescaled) != 0) {
#pragma unroll
    for (int band = 0; band < Shape<MTiles>::bands; ++band) {
      const float factor = shared.factor[band * 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out[band / 2][n][band % 2 * 2] *= factor;
        out[band / 2][n][band % 2 * 2 + 1] *= factor;
      }
    }
  }
  const int key = lane % 16;
  const uint32_t address = shared_address(shared.buffers) + step % 2 * kBufferBytes +
                           key * kRowBytes + warp * 128 + ((lane / 16 ^ key) & 7) * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t p[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      const uint2 low = shared.probabilities(m * 2, half, lane);
      const uint2 high = shared.probabilities(m * 2 + 1, half, lane);
      p[m][0] = low.x, p[m][1] = high.x, p[m][2] = low.y, p[m][3] = high.y;
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, (address ^ (n * 16)) + half * (16 * kRowBytes));
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        if (m >= 2 && !full) continue;
        multiply<T>(out[m][n], p[m], v[0], v[1]);
        multiply<T>(out[m][n + 1], p[m], v[2], v[3]);
      }
    }
  }
}

// The block's lse, and its output divided by the sums; partial results when there are splits.
template <class T, int MTiles>
__device__ __forceinline__ void write_results(const Params &a, Shared<MTiles> &shared,
                                              unsigned thread,
                                              const float (&out)[MTiles][kColumns / 8][4]) {
  const int lane = thread % 32, warp = thread / 32;
  const Block &block = shared.block;
  const int64_t first = block.request.b * a.rows + block.first_row;  // of B * rows
  if (thread < block.rows) {
    const float top = shared.top[thread], sum = shared.sums[0][thread];
    if (a.splits > 1)
      a.partial_lse[first_partial(a, block) + thread] = top + log2f(sum);
    else if (a.p.lse != nullptr)
      a.p.lse[first + thread] = attention::natural_log(top, sum);
  }
  const int column = warp * kColumns + lane % 4 * 2;
  const float kv_scale = read_kv_scale(a);
#pragma unroll
  for (int band = 0; band < Shape<MTiles>::bands; ++band) {
    const int i = band * 8 + lane / 4;
    if (i >= block.rows) continue;
    const float norm = shared.sums[1][i] > 0 ? kv_scale / shared.sums[1][i] : 0;
    float *partial = a.partial_out + (first_partial(a, block) + i) * kLatent + column;
    T *result = static_cast<T *>(a.p.out) + (first + i) * kLatent + column;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float low = out[band / 2][n][band % 2 * 2] * norm;
      const float high = out[band / 2][n][band % 2 * 2 + 1] * norm;
      if (a.splits > 1)
        *reinterpret_cast<float2 *>(partial + n * 8) = {low, high};
      else
        *reinterpret_cast<uint32_t *>(result + n * 8) = pack<T>(low, high);
    }
  }
}

template <class T, bool Fp8, int MTiles>
__global__ void __launch_bounds__(kThreads, MTiles == 4 ? 1 : 2)
    attention_kernel(const __grid_constant__ Params a) {
  using S = Shape<MTiles>;
  using Loader = KeyLoader<T, Fp8, MTiles>;
  extern __shared__ __align__(128) unsigned char attention_smem[];
  Shared<MTiles> &shared = *reinterpret_cast<Shared<MTiles> *>(attention_smem);

  const Block block = read_block<MTiles>(a);
  if (block.steps == 0) return write_nothing<T>(a, block);
  unsigned thread = threadIdx.x;
  if (thread < 32) set_up(a, block, shared);
  __syncthreads();
  Loader{a, shared, 0, thread}.load_entry();
  Loader{a, shared, 1, thread}.load_entry();
  wait_copies();
  __syncwarp();
  Loader{a, shared, 0, thread}.load_keys();
  uint32_t q[kFeatureSteps][S::group_tiles][4];
  load_q<T, MTiles>(a, block, q);
  // The second half of a tile of 64 rows may be empty; its products are skipped.
  const bool full = MTiles == 1 || block.rows > S::rows / 2;

  float out[MTiles][kColumns / 8][4] = {};
  for (int step = 0; step < shared.block.steps; ++step) {
    wait_copies();
    if (Fp8) Loader{a, shared, step, thread}.widen_keys();
    __syncthreads();  // this step's keys are there; the other buffer and the scores are free
    forget(thread);
    if (step + 1 < shared.block.steps) {
      Loader{a, shared, step + 1, thread}.load_keys();
      Loader{a, shared, step + 2, thread}.load_entry();
    }
    float own[2][4] = {};
    if (full || thread < kThreads / 2) score_keys<T>(shared, step, thread, q, own);
    __syncthreads();
    forget(thread);
    if (thread / 32 * 8 < shared.block.rows) softmax<T>(shared, step, thread, own);
    __syncthreads();
    forget(thread);
    add_values<T>(shared, step, thread, full, out);
  }
  forget(thread);
  write_results<T>(a, shared, thread, out);
}

template <class T, bool Fp8, int MTiles>
void launch_tiles(const Params &a, Stream stream) {
  allow_smem(attention_kernel<T, Fp8, MTiles>, sizeof(Shared<MTiles>));
  launch("verify_attn", attention_kernel<T, Fp8, MTiles>, dim3(a.p.batch * a.splits * a.tiles),
         dim3(kThreads), sizeof(Shared<MTiles>), stream, a);
}

template <class T, bool Fp8>
void choose_tiles(const Params &a, Stream stream) {
  tile_rows(a.rows) == 16 ? launch_tiles<T, Fp8, 1>(a, stream) : launch_tiles<T, Fp8, 4>(a, stream);
}

template <class T>
void choose_keys(const Params &a, Stream stream) {
  a.p.kv_dtype == KDTREE_F8E4M3 ? choose_tiles<T, true>(a, stream)
                                : choose_tiles<T, false>(a, stream);
}

void attention(const Params &a, Stream stream) {
  a.p.q_dtype == KDTREE_BF16 ? choose_keys<__nv_bfloat16>(a, stream)
                             : choose_keys<__half>(a, stream);
}

}  // namespace kdtree::cuda::sm80
