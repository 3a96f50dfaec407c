// verify_attn for at most 16 rows a request (plain decoding with up to 16 heads) on any GPU since
// sm_80; with an e4m3 cache few_rows_fp8.cu does it. README.md explains the schedule.
//
// A block takes all rows of a request, 16 with those that are not there, and one split of its keys,
// 32 keys at a time, with 8 warps; two blocks an SM. For each 32 keys:
//   scores   each warp multiplies the rows with a quarter of the 576 features and half of the keys;
//            the quarters meet in shared memory
//   softmax  warps 0 and 1 add them up for 8 rows each, update the running maximum and sum, and
//            leave the probabilities in shared memory as the next product's operand
//   values   each warp multiplies all rows' probabilities with its own 64 of the 512 columns
// while the next 32 keys arrive in the other of two buffers.
//
// A key is 1,152 bytes (576 with e4m3) and is read once: the 4.3 TB/s of memory bound it.
#include "cuda/attention/sm80/common.h"

namespace kdtree::cuda::sm80 {

constexpr int kFewRows = 16;
constexpr int kFewBands = kFewRows / 8;  // warp h < kFewBands owns band h in softmax
constexpr int kLineBytes = kDim * 2;     // of a key in shared memory: 9 lines of 128 bytes
constexpr int kBufferBytes = kKeys * kLineBytes;
constexpr int kFewColumns = kLatent / kWarps;  // of the output, a warp

struct FewRowsShared {
  // Row r holds its 16-byte chunk c at c ^ (r % 8) within each 128 bytes: the 8 rows of one chunk
  // are 8 different bank groups.
  alignas(128) unsigned char buffers[2 * kBufferBytes];
  // Partial scores: band, feature group, 16-key half, lane (as the product leaves them: two keys
  // of each of two 8-key tiles). Each band's owner puts its probabilities over the first part.
  float4 scores[kFewBands][kFeatureGroups][2][32];
  // Kept here rather than in registers, of which the products leave few.
  Block block;
  float scale;                             // of scores, for exponentials in base 2
  uint64_t nodes[kFewRows];                // that a row sees
  uint64_t tile_nodes;                     // that any row sees
  int64_t entries[2][kKeys];               // of the page table
  alignas(8) uint8_t rescaled[kFewBands];  // some row's factor is not 1
  float top[kFewRows];                     // running maximum of the scores
  float sums[2][kFewRows];                 // running sums of probabilities: exact, as rounded to T
  float factor[kFewRows];                  // for what the output holds so far

  // Operand of the second product: for 16 keys `half`, lane 4g + t has row g of the band, keys 2t,
  // 2t+1 (x) and 2t+8, 2t+9 (y).
  __device__ uint2 &probabilities(int band, int half, int lane) {
    return reinterpret_cast<uint2 *>(scores[band])[half * 32 + lane];
  }
};

// Brings the keys of a step to shared memory, eight threads a key; their table entries come a step
// earlier. Keys that may not be read become zeros.
struct FewRowsLoader {
  const Params &a;
  FewRowsShared &shared;
  int step;
  unsigned thread;

  __device__ int key() const { return thread / 8; }
  __device__ int position() const { return shared.block.keys.begin + step * kKeys + key(); }
  // The place of this thread's first chunk; the others are 128 bytes apart.
  __device__ int place() const {
    return step % 2 * kBufferBytes + key() * kLineBytes + ((thread ^ key()) & 7) * 16;
  }

  __device__ void load_entry() const {
    if (thread % 8 == 0)
      copy_entry(a, shared.block, shared.tile_nodes, position(), &shared.entries[step % 2][key()]);
  }

  __device__ void load_keys() const {
    const char *from = find_key<false>(a, position(), &shared.entries[step % 2][key()]);
    const bool valid = from != nullptr;
    if (!valid) from = static_cast<const char *>(a.p.kv_cache);
    from += thread % 8 * 16;
    const uint32_t to = shared_address(shared.buffers) + place();
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) copy_async<16>(to + i * 128, from + i * 128, valid);
  }
};

// Everything at its start; by the first warp.
__device__ void set_up(const Params &a, const Block &block, FewRowsShared &shared) {
  const int lane = threadIdx.x;
  const uint64_t all = read_nodes(a, block, kFewRows, shared.nodes);
  if (lane < kFewRows) {
    shared.top[lane] = -INFINITY;
    shared.sums[0][lane] = shared.sums[1][lane] = 0;
  }
  if (lane < kFewBands) shared.rescaled[lane] = 0;
  if (lane > 0) return;
  shared.tile_nodes = all;
  shared.block = block;
  shared.scale = score_scale(a);
}

// Partial scores of this warp's 16 keys, to shared.scores. As matrices: 8 keys by 8 features, two
// by two.
template <class T>
__device__ __forceinline__ void score_keys(FewRowsShared &shared, int step, unsigned thread,
                                           const uint32_t (&q)[kFeatureSteps][1][4]) {
  const int lane = thread % 32, warp = thread / 32;
  const int feature_group = warp % kFeatureGroups, half = warp / kFeatureGroups;
  const int key = lane % 8 + lane / 16 * 8;
  const uint32_t address = shared_address(shared.buffers) + step % 2 * kBufferBytes +
                           key * kLineBytes + (((feature_group * 2 + lane / 8 % 2) ^ key) & 7) * 16;
  float score[2][4] = {};
#pragma unroll
  for (int j = 0; j < kFeatureSteps; ++j) {
    uint32_t k[4];
    load_matrices(k, address + half * (16 * kLineBytes) + j * 128);
    multiply<T>(score[0], q[j][0], k[0], k[1]);
    multiply<T>(score[1], q[j][0], k[2], k[3]);
  }
#pragma unroll
  for (int band = 0; band < kFewBands; ++band) {
    const float *low = score[0] + band * 2, *high = score[1] + band * 2;
    shared.scores[band][feature_group][half][lane] = {low[0], low[1], high[0], high[1]};
  }
}

// Scores of band `warp` to probabilities. Lane 4g + t has row g and, as x[half][i], key
// 16 half + 8 (i / 2) + 2t + i % 2 of the step.
template <class T>
__device__ __forceinline__ void softmax(FewRowsShared &shared, int step, unsigned thread) {
  const int lane = thread % 32, band = thread / 32;
  const int row = band * 8 + lane / 4;
  float x[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < kFeatureGroups; ++part) {
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
template <class T>
__device__ __forceinline__ void add_values(FewRowsShared &shared, int step, unsigned thread,
                                           float (&out)[1][kFewColumns / 8][4]) {
  const int lane = thread % 32, warp = thread / 32;
  if (*reinterpret_cast<const uint16_t *>(shared.rescaled) != 0) {
#pragma unroll
    for (int band = 0; band < kFewBands; ++band) {
      const float factor = shared.factor[band * 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < kFewColumns / 8; ++n) {
        out[0][n][band * 2] *= factor;
        out[0][n][band * 2 + 1] *= factor;
      }
    }
  }
  const int key = lane % 16;
  const uint32_t address = shared_address(shared.buffers) + step % 2 * kBufferBytes +
                           key * kLineBytes + warp * 128 + ((lane / 16 ^ key) & 7) * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint2 low = shared.probabilities(0, half, lane);
    const uint2 high = shared.probabilities(1, half, lane);
    const uint32_t p[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
    for (int n = 0; n < kFewColumns / 8; n += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, (address ^ (n * 16)) + half * (16 * kLineBytes));
      multiply<T>(out[0][n], p, v[0], v[1]);
      multiply<T>(out[0][n + 1], p, v[2], v[3]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(128) unsigned char attention_smem[];
  FewRowsShared &shared = *reinterpret_cast<FewRowsShared *>(attention_smem);

  Block block;
  if (!read_block(a, kFewRows, kKeys, block)) return;
  if (block.steps == 0) return write_nothing<T, kThreads>(a, block);
  unsigned thread = threadIdx.x;
  if (thread < 32) set_up(a, block, shared);
  __syncthreads();
  FewRowsLoader{a, shared, 0, thread}.load_entry();
  FewRowsLoader{a, shared, 1, thread}.load_entry();
  wait_copies();
  __syncwarp();
  FewRowsLoader{a, shared, 0, thread}.load_keys();
  uint32_t q[kFeatureSteps][1][4];
  load_q<T, 1>(a, block, 0, 0, thread / 32 % kFeatureGroups, q);

  float out[1][kFewColumns / 8][4] = {};
  for (int step = 0; step < shared.block.steps; ++step) {
    wait_copies();
    __syncthreads();  // this step's keys are there; the other buffer and the scores are free
    forget(thread);
    if (step + 1 < shared.block.steps) {
      FewRowsLoader{a, shared, step + 1, thread}.load_keys();
      FewRowsLoader{a, shared, step + 2, thread}.load_entry();
    }
    score_keys<T>(shared, step, thread, q);
    __syncthreads();
    forget(thread);
    if (thread / 32 * 8 < shared.block.rows) softmax<T>(shared, step, thread);
    __syncthreads();
    forget(thread);
    add_values<T>(shared, step, thread, out);
  }
  forget(thread);
  if (thread < shared.block.rows)
    write_lse(a, shared.block, thread, shared.top[thread], shared.sums[0][thread]);
  write_output<T, 1, kFewColumns>(a, shared.block, 0, thread / 32 * kFewColumns, shared.sums[1],
                                  out);
}

void few_rows_attention(const Params &a, Stream stream) {
  if (a.p.kv_dtype == KDTREE_F8E4M3) return few_rows_fp8_attention(a, stream);
  launch_blocks(
      a.p.q_dtype == KDTREE_BF16 ? few_rows_kernel<__nv_bfloat16> : few_rows_kernel<__half>,
      sizeof(FewRowsShared), a, stream);
}

}  // namespace kdtree::cuda::sm80
