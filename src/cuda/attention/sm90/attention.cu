// verify_attn on sm_90: wgmma, TMA. README.md explains the schedule.
//
// A block takes one tile of 64 rows of a request and a piece of its keys, 64 keys at a time; what
// 64 rows leave over is a tile of few_rows.h, where that pays. Warpgroup 0 owns the left 256
// columns of the output, warpgroup 1 the right ones, in registers; scores of even key blocks are
// warpgroup 0's, of odd ones warpgroup 1's, and the probabilities reach the other one through
// shared memory. A third warpgroup brings keys into two buffers, each of its warps a piece of them.
//
// Per row and key 1,088 multiply-adds; 64 rows do 121 FLOP per byte of a key, so the matrix units
// (790 TF) bound it: 2,176 cycles a key block. Reads and writes of shared memory, 303 KB at 128
// bytes a cycle, take 2,368. It takes 2,520.
#include <algorithm>
#include <cmath>

#include "cuda/attention/sm90/few_rows.h"

namespace kdtree::cuda::sm90 {

// One warpgroup's part of the results. Lane 4g + t of warp w has rows 16w + g and 16w + g + 8
// (h = 0, 1), and of each 8 columns or keys n the elements 2t, 2t + 1: x[4n + 2h], x[4n + 2h + 1].
struct Results {
  float out[2][64] = {};                  // by piece of the values
  float top[2] = {-INFINITY, -INFINITY};  // maximum in use
  float exact[2] = {}, rounded[2] = {};   // this lane's part of the sums
};

// Puts the sums on a new maximum; factor: what the output is to be multiplied by.
__device__ __forceinline__ void move_top(Results &r, const float (&top)[2], float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    factor[h] = top[h] == -INFINITY ? 1 : attention::exp2(r.top[h] - top[h]);
    r.top[h] = top[h];
    r.exact[h] *= factor[h], r.rounded[h] *= factor[h];
  }
}

__device__ __forceinline__ void multiply_out(Results &r, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < 64; ++n) {
    r.out[n / 32][n % 32 * 2] *= factor[n % 2];
    r.out[n / 32][n % 32 * 2 + 1] *= factor[n % 2];
  }
}

__device__ __forceinline__ void settle_out(Results &r) {
  settle(r.out[0]);
  settle(r.out[1]);
}

// scores += q keys, for a piece of the features.
template <class T, int Piece>
__device__ __forceinline__ void score(Shared &shared, int buffer, int turn, bool gathered,
                                      float (&s)[32]) {
  constexpr int kStride = piece_panels(Piece) * kTile;
  score_piece<Piece>(shared, buffer, turn, gathered, [&](int i, uint32_t to_q, uint32_t to_k) {
    if (Piece == nth_piece(0) && i == 0)
      multiply_scores<T, 0, kStride>(s, to_q, to_k);
    else
      multiply_scores<T, 1, kStride>(s, to_q, to_k);
  });
}

// out += probabilities values, for 64 keys and half the columns; a group of products for each
// piece.
template <class T, int Half>
__device__ __forceinline__ void add_values(Results &r, const Shared &shared, int buffer,
                                           const uint32_t (&p)[16]) {
  constexpr int kStride = 2 * kTile;
  fence_products();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const uint32_t v =
        down_rows(shared_address(shared.keys[buffer]) + piece_start(2 * Half + piece));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply_values<T, kStride>(r.out[piece], p + 4 * i, v + i * 2 * kStride);
    commit_products();
  }
}

// Takes what a row does not see out of its scores. offset: of the first key from the root.
__device__ __forceinline__ void mask(const Shared &shared, int row, int offset, float (&s)[32]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint64_t nodes = shared.nodes[row + 8 * h];
    const int shift = threadIdx.x % 4 * 2;
    const uint32_t seen[2] = {(offset <= -32 ? ~0u : attention::sees32(nodes, offset)) >> shift,
                              attention::sees32(nodes, offset + 32) >> shift};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!(seen[n / 4] >> (n % 4 * 8 + i) & 1)) s[4 * n + 2 * h + i] = -INFINITY;
    }
  }
}

template <int N>
__device__ __forceinline__ void multiply_all(float (&x)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= factor;
}

// Raises the maximum in use, where one of the warp's scores is above it by more than kSlack; then
// the output is to be multiplied by `factor`.
__device__ __forceinline__ bool raise_top(const float (&s)[32], float scale, Results &r,
                                          float (&factor)[2]) {
  float x[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int n = 1; n < 8; ++n) x[h] = fmaxf(x[h], fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
    x[h] *= scale;
  }
  if (!__any_sync(~0u, x[0] > r.top[0] + kSlack || x[1] > r.top[1] + kSlack)) return false;
  float top[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x[h] = fmaxf(x[h], __shfl_xor_sync(~0u, x[h], 1));
    x[h] = fmaxf(x[h], __shfl_xor_sync(~0u, x[h], 2));
    top[h] = x[h] > r.top[h] + kSlack ? x[h] : r.top[h];
  }
  move_top(r, top, factor);
  return true;
}

// Scores to probabilities, in place and as operands of the next product.
template <class T>
__device__ __forceinline__ void exponentials(const Results &r, float (&s)[32], float scale,
                                             uint32_t (&p)[16]) {
  const float base[2] = {r.top[0] == -INFINITY ? 0 : r.top[0],
                         r.top[1] == -INFINITY ? 0 : r.top[1]};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    s[2 * i] = attention::exp2(s[2 * i] * scale - base[i % 2]);
    s[2 * i + 1] = attention::exp2(s[2 * i + 1] * scale - base[i % 2]);
    p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }
}

// Adds probabilities to the sums: behind the products that use them, for nobody waits for sums.
template <class T>
__device__ __forceinline__ void add_sums(Results &r, float (&s)[32], const uint32_t (&p)[16]) {
  settle(s);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    r.exact[i % 2] += s[2 * i] + s[2 * i + 1];
    const float2 rounded = unpack<T>(p[i]);
    r.rounded[i % 2] += rounded.x + rounded.y;
  }
}

// Where this lane finds, or leaves, row `lane % 16` of its warp's 8x8 matrices of probabilities: of
// the i-th 16 keys.
__device__ __forceinline__ uint32_t probabilities_of(const Shared &shared, int i) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  return shared_address(shared.probabilities) + row * 128 + (((i * 2 + lane / 16) ^ row) & 7) * 16;
}

// Leaves probabilities and maximum for the same warp of the other warpgroup, which has the same
// rows and, in its turn, the same place.
__device__ __forceinline__ void share(Shared &shared, int warpgroup, int row, const Results &r,
                                      const uint32_t (&p)[16]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_matrices(probabilities_of(shared, i), p + 4 * i);
  if (lane % 4 == 0) shared.top[row] = r.top[0], shared.top[row + 8] = r.top[1];
  arrive(shared.shared_out[warpgroup][threadIdx.x % 128 / 32]);
}

// Takes them, and puts the results on that maximum.
__device__ __forceinline__ void take(Shared &shared, int warpgroup, int turn, int row, Results &r,
                                     uint32_t (&p)[16]) {
  wait(shared.shared_out[warpgroup][threadIdx.x % 128 / 32], turn % 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) load_matrices(p + 4 * i, probabilities_of(shared, i));
  const float top[2] = {shared.top[row], shared.top[row + 8]};
  __syncwarp();
  if (__any_sync(~0u, r.top[0] != top[0] || r.top[1] != top[1])) {
    float factor[2];
    move_top(r, top, factor);
    wait_products<0>();
    settle_out(r);
    multiply_out(r, factor);
  }
}

// Scores to probabilities. Returns whether the results are to be multiplied by `factor`.
template <class T>
__device__ __forceinline__ bool soften(const Loop &loop, const Shared &shared, Scale scale, int row,
                                       int step, float (&s)[32], Results &r, float (&factor)[2],
                                       uint32_t (&p)[16]) {
  if (scale.before != 1) multiply_all(s, scale.before);
  if (step >= loop.plain) mask(shared, row, loop.offset + step * kKeys, s);
  const bool changed = raise_top(s, scale.inside, r, factor);
  exponentials<T>(r, s, scale.inside, p);
  return changed;
}

// Warpgroup 0: scores of even key blocks, the left columns.
template <class T>
__device__ __forceinline__ void consume_left(const Loop &loop, Shared &shared, Scale scale, int row,
                                             Results &r) {
  float s[32];
  uint32_t p[16], other[16];
  for (int step = 0; step < loop.steps; step += 2) {
    const int turn = step / 2;
    const bool gathered = step >= loop.boxed;
    if (step > 0) wait(shared.scored, (turn - 1) % 2);
    score<T, kRope>(shared, 0, turn, gathered, s);
    score<T, 0>(shared, 0, turn, gathered, s);
    score<T, 2>(shared, 0, turn, gathered, s);
    score<T, 1>(shared, 0, turn, gathered, s);
    score<T, 3>(shared, 0, turn, gathered, s);
    if (step > 0) {
      take(shared, 1, turn - 1, row, r, other);
      add_values<T, 0>(r, shared, 1, other);
      wait_products<2>();
    } else {
      wait_products<0>();
    }
    settle(s);
    release(shared, 0, kRope);
    float factor[2];
    const bool changed = soften<T>(loop, shared, scale, row, step, s, r, factor, p);
    share(shared, 0, row, r, p);
    if (step > 0) {
      wait_products<1>();
      release(shared, 1, 0);
    }
    wait_products<0>();
    settle(other);
    settle_out(r);
    if (step > 0) release(shared, 1, 1);
    if (changed) multiply_out(r, factor);
    add_values<T, 0>(r, shared, 0, p);
    add_sums<T>(r, s, p);
    wait_products<1>();
    release(shared, 0, 0);
    wait_products<0>();
    settle(p);
    settle_out(r);
    release(shared, 0, 1);
  }
  if (loop.steps % 2 == 0) {
    take(shared, 1, loop.steps / 2 - 1, row, r, other);
    add_values<T, 0>(r, shared, 1, other);
  }
  wait_products<0>();
  settle_out(r);
}

// Warpgroup 1: scores of odd key blocks, the right columns.
template <class T>
__device__ __forceinline__ void consume_right(const Loop &loop, Shared &shared, Scale scale,
                                              int row, Results &r) {
  float s[32];
  uint32_t p[16], other[16];
  for (int step = 1; step < loop.steps; step += 2) {
    const int turn = step / 2;
    const bool gathered = step >= loop.boxed;
    take(shared, 0, turn, row, r, other);
    add_values<T, 1>(r, shared, 0, other);
    score<T, kRope>(shared, 1, turn, gathered, s);
    wait_products<2>();
    release(shared, 0, 2);
    wait_products<1>();
    settle(other);
    release(shared, 0, 3);
    score<T, 0>(shared, 1, turn, gathered, s);
    score<T, 2>(shared, 1, turn, gathered, s);
    score<T, 1>(shared, 1, turn, gathered, s);
    score<T, 3>(shared, 1, turn, gathered, s);
    if (threadIdx.x % 32 == 0) arrive(shared.scored);
    wait_products<0>();
    settle(s);
    settle_out(r);
    release(shared, 1, kRope);
    float factor[2];
    const bool changed = soften<T>(loop, shared, scale, row, step, s, r, factor, p);
    share(shared, 1, row, r, p);
    if (changed) multiply_out(r, factor);
    add_values<T, 1>(r, shared, 1, p);
    add_sums<T>(r, s, p);
    wait_products<1>();
    release(shared, 1, 2);
    wait_products<0>();
    settle(p);
    settle_out(r);
    release(shared, 1, 3);
  }
  if (loop.steps % 2 == 1) {
    take(shared, 0, loop.steps / 2, row, r, other);
    add_values<T, 1>(r, shared, 0, other);
  }
  wait_products<0>();
  settle_out(r);
}

// This warpgroup's half of the output, divided by the sums, and the lse.
template <class T>
__device__ __forceinline__ void write_results(const Params &a, Shared &shared, int warpgroup,
                                              int row, Results &r) {
  const Block &block = shared.block;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      r.exact[h] += __shfl_xor_sync(~0u, r.exact[h], step);
      r.rounded[h] += __shfl_xor_sync(~0u, r.rounded[h], step);
    }
    if (lane % 4 == 0) {
      shared.sums[warpgroup][0][row + 8 * h] = r.exact[h];
      shared.sums[warpgroup][1][row + 8 * h] = r.rounded[h];
    }
  }
  arrive(shared.summed);
  wait(shared.summed, 0);
  const int64_t first = block.request.b * a.rows + block.first_row;  // of B * rows
  const int64_t partial_row = first_partial(a, block);
  const int column = warpgroup * 256 + lane % 4 * 2;
  const bool odd = lane % 2;
  const float kv_scale = read_kv_scale(a);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = row + 8 * h;
    const bool valid = i < block.rows;
    if (valid && warpgroup == 0 && lane % 4 == 0) {
      const float sum = shared.sums[0][0][i] + shared.sums[1][0][i];
      if (block.place >= 0)
        a.partial_lse[partial_row + i] = r.top[h] + log2f(sum);
      else if (a.p.lse != nullptr)
        a.p.lse[first + i] = attention::natural_log(r.top[h], sum);
    }
    const float sum = shared.sums[0][1][i] + shared.sums[1][1][i];
    const float norm = sum > 0 ? kv_scale / sum : 0;
    float *partial = a.partial_out + (partial_row + i) * kLatent + column;
    // Two lanes exchange halves of two groups of 8 columns, so that each has 4 of one.
    T *result = static_cast<T *>(a.p.out) + (first + i) * kLatent + column + (odd ? 6 : 0);
#pragma unroll
    for (int n = 0; n < 32; n += 2) {
      const float *x = &r.out[n / 16][n % 16 * 4 + 2 * h];
      const float2 low{x[0] * norm, x[1] * norm}, high{x[4] * norm, x[5] * norm};
      if (block.place >= 0) {
        if (!valid) continue;
        *reinterpret_cast<float2 *>(partial + n * 8) = low;
        *reinterpret_cast<float2 *>(partial + n * 8 + 8) = high;
      } else {
        const uint32_t pairs[2] = {pack<T>(low.x, low.y), pack<T>(high.x, high.y)};
        const uint32_t taken = __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1);
        if (!valid) continue;
        *reinterpret_cast<uint2 *>(result + n * 8) =
            odd ? uint2{taken, pairs[1]} : uint2{pairs[0], taken};
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void consume(const Params &a, const Loop &loop, Scale scale,
                                        int warpgroup, Shared &shared) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  Results r;
  if (warpgroup == 0)
    consume_left<T>(loop, shared, scale, row, r);
  else
    consume_right<T>(loop, shared, scale, row, r);
  write_results<T>(a, shared, warpgroup, row, r);
}

// What warpgroups that multiply do, each kind of tile in a copy of its own: where kinds share this,
// the compiler loses sight of what is the same throughout a warp, and products come slower.
template <class Consume>
__device__ __forceinline__ void run_consumer(const Params &a, const Block &block, Shared &shared,
                                             const Consume &consume) {
  const int warpgroup = uniform(threadIdx.x / 128);
  grow_registers<232>();
  prepare(a, block, shared);
  Scale scale{1, attention::score_scale(a)};  // for base 2
  if (!(scale.inside > 0)) scale = {scale.inside, 1};
  const Loop loop{block.steps, block.plain, block.boxed, block.keys.begin - block.request.prefix};
  consume(loop, scale, warpgroup, shared);
}

// FewRows: where not 0, tiles of so many rows and fewer are few_rows.h's.
template <class T, bool Fp8, int FewRows>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Params a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char attention_smem[];
  Shared &shared = *reinterpret_cast<Shared *>(attention_smem);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kPieces; ++i) {
      init_barrier(shared.full[i / kPieces][i % kPieces], kProducers / 32);
      init_barrier(shared.empty[i / kPieces][i % kPieces], 4);  // a warpgroup's warps
    }
    for (int i = 0; i < 8; ++i) init_barrier(shared.shared_out[i / 4][i % 4], 32);
    init_barrier(shared.ready, kConsumers);
    init_barrier(shared.scored, 4);
    init_barrier(shared.summed, kConsumers);
    publish_barriers();
  }
  __syncthreads();
  if (a.parts > 0) wait_for_previous();  // the plan is there
  Block block;
  if (!read_block(a, keys, block)) return;
  if (block.steps == 0) return attention::write_nothing<T, kThreads>(a, block);
  // Lets the compiler know that warps do not diverge.
  block.steps = uniform(block.steps);
  block.plain = uniform(block.plain);
  block.boxed = uniform(block.boxed);
  if (uniform(threadIdx.x / 128) == kConsumers / 128) {
    shrink_registers<40>();
    produce<T, Fp8>(a, keys, block, shared);
  } else {
    if (block.rows > FewRows || FewRows == 0)
      run_consumer(a, block, shared, [&](auto &&...x) { consume<T>(a, x...); });
    else if constexpr (FewRows > 0)
      run_consumer(a, block, shared, [&](auto &&...x) { consume_few<T, FewRows>(a, x...); });
  }
#endif
}

// ---- host

using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder of tensor maps; the library does not link the driver.
static EncodeTiled find_encoder() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

// The cache as the copy engine sees it, where it can: 16-bit, pages of 8 rows and more.
static Keys describe_keys(const kdtree_verify_attn_params &p) {
  static const EncodeTiled encode = find_encoder();
  Keys keys{};
  if (encode == nullptr || p.page_size < 8 || p.num_pages <= 0 || p.kv_dtype != p.q_dtype)
    return keys;
  const int box_rows = static_cast<int>(std::min<int64_t>(p.page_size, kKeys));
  const auto row = static_cast<cuuint64_t>(p.kv_stride_row) * 2;
  const auto page = static_cast<cuuint64_t>(p.kv_stride_page) * 2;
  const cuuint64_t sizes[5] = {64, 8, kPanels, static_cast<cuuint64_t>(p.page_size / 8),
                               static_cast<cuuint64_t>(p.num_pages)};
  const cuuint64_t strides[4] = {row, 128, row * 8, page};
  const cuuint32_t unit[5] = {1, 1, 1, 1, 1};
  for (const int piece : {0, kRope}) {
    const cuuint32_t box[5] = {64, 8, static_cast<cuuint32_t>(piece_panels(piece)),
                               static_cast<cuuint32_t>(box_rows / 8), 1};
    const CUresult result =
        encode(piece == kRope ? &keys.rope : &keys.values,
               p.kv_dtype == KDTREE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
               5, const_cast<void *>(p.kv_cache), sizes, strides, box, unit,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return keys;
  }
  keys.box_rows = box_rows;
  return keys;
}

template <class T>
static auto kernel_for(const Params &a) {
  return a.p.kv_dtype == KDTREE_F8E4M3 ? attention_kernel<T, true, 0>
         : a.few_rows == 0             ? attention_kernel<T, false, 0>
         : a.few_rows <= 8             ? attention_kernel<T, false, 8>
                                       : attention_kernel<T, false, 16>;
}

void attention(const Params &a, Stream stream) {
  const auto kernel =
      a.p.q_dtype == KDTREE_BF16 ? kernel_for<__nv_bfloat16>(a) : kernel_for<__half>(a);
  allow_smem(kernel, sizeof(Shared));
  launch_early("verify_attn", kernel, dim3(a.blocks()), dim3(kThreads), sizeof(Shared), stream,
               a.parts > 0, a, describe_keys(a.p));
}

}  // namespace kdtree::cuda::sm90
