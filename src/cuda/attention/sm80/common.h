// What the kernels of the portable path share: a block's work, where its keys lie, q as
// operands, and what is written at the end.
#pragma once

#include <cmath>

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/attention/sm80/mma.h"
#include "cuda/launch.h"

namespace kdtree::cuda::sm80 {

using attention::first_partial;
using attention::kDim;
using attention::kLatent;
using attention::pack;
using attention::Params;
using attention::read_kv_scale;
using attention::score_scale;
using attention::unpack;
using attention::write_nothing;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = 32;          // of a step
constexpr int kFeatureGroups = 4;  // warps that share the features of a score
constexpr int kFeatureSteps = kDim / 16 / kFeatureGroups;  // of 16 features, for each of them
// A maximum that grows by less than this (in log2) leaves the old one in use: probabilities stay
// below 2^8, and the output is seldom rescaled.
constexpr float kSlack = 8;

// Attention for at most 16 rows a request; the second for e4m3 caches.
void few_rows_attention(const Params &params, Stream stream);
void few_rows_fp8_attention(const Params &params, Stream stream);

struct Block : attention::Work {
  int steps;
};

// Returns whether there is anything to do.
__device__ __forceinline__ bool read_block(const Params &a, int tile_rows, int step_keys,
                                           Block &block) {
  let_next_start();
  if (a.parts > 0) wait_for_previous();  // the plan is there
  if (!attention::find_work(a, tile_rows, block)) return false;
  block.steps = (block.keys.end - block.keys.begin + step_keys - 1) / step_keys;
  return true;
}

template <class Kernel>
void launch_blocks(Kernel kernel, size_t smem, const Params &a, Stream stream) {
  allow_smem(kernel, smem);
  launch_early("verify_attn", kernel, dim3(a.blocks()), dim3(kThreads), smem, stream, a.parts > 0,
               a);
}

// What each row of the tile sees, to `nodes`; what any does is returned. By one warp.
__device__ __forceinline__ uint64_t read_nodes(const Params &a, const Block &block, int tile_rows,
                                               uint64_t *nodes) {
  uint64_t all = 0;
  for (int i = threadIdx.x % 32; i < tile_rows; i += 32) {
    nodes[i] = 0;
    if (i < block.rows)
      nodes[i] = attention::seen_nodes(a.p, block.request,
                                       (block.first_row + i) / static_cast<int>(a.p.heads));
    all |= nodes[i];
  }
  for (int step = 16; step > 0; step /= 2) all |= __shfl_xor_sync(~0u, all, step);
  return all;
}

// Has a table entry brought to `to`.
__device__ __forceinline__ void copy_entry(const Params &a, const void *from, int64_t *to) {
  if (a.entry_bytes == 4)
    copy_async<4>(shared_address(to), from);
  else
    copy_async<8>(shared_address(to), from);
}

// Has a position's table entry brought to `to`, or -1: no row of the tile sees the key, or the
// table does not have it.
__device__ __forceinline__ void copy_entry(const Params &a, const Block &block, uint64_t tile_nodes,
                                           int position, int64_t *to) {
  const void *from = nullptr;
  if (position < block.keys.end && attention::sees(tile_nodes, position - block.request.prefix))
    from = attention::entry_of(a, block.request, position);
  if (from == nullptr)
    *to = -1;
  else
    copy_entry(a, from, to);
}

// The same at the cost of a single load for the positions below `clear`, which all rows see and the
// table has.
struct alignas(16) Lookup {
  const char *table;
  int begin;  // of the split
  int clear;

  __device__ __forceinline__ static Lookup of(const Params &a, const Block &block) {
    const int64_t listed = min(block.request.entries, int64_t(INT32_MAX)) << a.page_shift;
    const int64_t seen = min(block.keys.end, block.request.prefix + 1);
    return {block.request.table, block.keys.begin, static_cast<int>(min(listed, seen))};
  }

  __device__ __forceinline__ void copy(const Params &a, const Block &block, uint64_t tile_nodes,
                                       int position, int64_t *to) const {
    if (position >= clear) return copy_entry(a, block, tile_nodes, position, to);
    copy_entry(a, table + int64_t(position >> a.page_shift) * a.entry_bytes, to);
  }
};

// Where the key of that entry lies; nullptr: nowhere that may be read.
template <bool Fp8>
__device__ __forceinline__ const char *find_key(const Params &a, int position,
                                                const int64_t *entry) {
  const int64_t page = a.entry_bytes == 4 ? *reinterpret_cast<const int32_t *>(entry) : *entry;
  if (page < 0 || page >= a.p.num_pages) return nullptr;
  const int64_t in_page = position & (static_cast<int>(a.p.page_size) - 1);
  const int64_t row = page * a.p.kv_stride_page + in_page * a.p.kv_stride_row;
  return static_cast<const char *>(a.p.kv_cache) + row * (Fp8 ? 1 : 2);
}

// A row of q, from one of its features on, and the same of its rope part.
template <class T>
struct QRow {
  const T *latent, *rope;
};

template <class T>
__device__ __forceinline__ QRow<T> find_q(const kdtree_verify_attn_params &p, int64_t b, int slot,
                                          int head, int feature) {
  const T *latent = static_cast<const T *>(p.q) + b * p.q_stride_b + slot * p.q_stride_q +
                    head * p.q_stride_h + feature;
  const T *rope = latent + kLatent;
  if (p.q_rope != nullptr)
    rope = static_cast<const T *>(p.q_rope) + b * p.q_rope_stride_b + slot * p.q_rope_stride_q +
           head * p.q_rope_stride_h + feature;
  return {latent, rope};
}

// Rows first + 8 (i ^ turn) + g of the tile, for each 8-row band i, as operands: features
// 16 (f + 4 j) .. + 15 of feature group f for each j. The last j is the rope part.
template <class T, int Tiles>
__device__ __forceinline__ void load_q(const Params &a, const Block &block, int first, int turn,
                                       int feature_group, uint32_t (&q)[kFeatureSteps][Tiles][4]) {
  const int lane = threadIdx.x % 32;
  const int heads = static_cast<int>(a.p.heads);
  const int feature = feature_group * 16 + lane % 4 * 2;
#pragma unroll
  for (int band = 0; band < 2 * Tiles; ++band) {
    const int i = first + (band ^ turn) * 8 + lane / 4;
    const QRow<T> row = find_q<T>(a.p, block.request.b, (block.first_row + i) / heads,
                                  (block.first_row + i) % heads, feature);
#pragma unroll
    for (int j = 0; j < kFeatureSteps; ++j) {
      const T *from = j < kFeatureSteps - 1 ? row.latent + j * 64 : row.rope;
#pragma unroll
      for (int k = 0; k < 2; ++k)
        q[j][band / 2][band % 2 + k * 2] =
            i < block.rows ? *reinterpret_cast<const uint32_t *>(from + k * 8) : 0;
    }
  }
}

// A row's lse, from its maximum and the sum of its probabilities.
__device__ __forceinline__ void write_lse(const Params &a, const Block &block, int row, float top,
                                          float sum) {
  if (block.place >= 0)
    a.partial_lse[first_partial(a, block) + row] = top + log2f(sum);
  else if (a.p.lse != nullptr)
    a.p.lse[block.request.b * a.rows + block.first_row + row] = attention::natural_log(top, sum);
}

// Rows first.. of the tile and columns from `column` on, divided by the rows' sums.
template <class T, int Tiles, int Columns>
__device__ __forceinline__ void write_output(const Params &a, const Block &block, int first,
                                             int column, const float *sums,
                                             const float (&out)[Tiles][Columns / 8][4]) {
  const int lane = threadIdx.x % 32;
  const int64_t first_row = block.request.b * a.rows + block.first_row + first;
  const float kv_scale = read_kv_scale(a);
  column += lane % 4 * 2;
#pragma unroll
  for (int band = 0; band < 2 * Tiles; ++band) {
    const int i = band * 8 + lane / 4;
    if (first + i >= block.rows) continue;
    const float norm = sums[i] > 0 ? kv_scale / sums[i] : 0;
    float *partial = a.partial_out + (first_partial(a, block) + first + i) * kLatent + column;
    T *result = static_cast<T *>(a.p.out) + (first_row + i) * kLatent + column;
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
      const float low = out[band / 2][n][band % 2 * 2] * norm;
      const float high = out[band / 2][n][band % 2 * 2 + 1] * norm;
      if (block.place >= 0)
        *reinterpret_cast<float2 *>(partial + n * 8) = {low, high};
      else
        *reinterpret_cast<uint32_t *>(result + n * 8) = pack<T>(low, high);
    }
  }
}

}  // namespace kdtree::cuda::sm80
