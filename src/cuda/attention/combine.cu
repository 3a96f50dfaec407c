// combine: out = sum of w_s out_s, w_s = 2^(lse_s - lse), lse = log2 of the sum of 2^lse_s, over
// the partial results s of a row, always in the same order.
//
// A block takes one row, or with few rows a quarter of one: a thread four columns, group g of G <=
// 8 the partial results g, g + G, ...; the groups' sums meet in shared memory. Reads S x 2 KB a
// row, mostly from L2, and writes 1 KB: 520 rows of 14 take 15 MB, 3.5 us at 4.3 TB/s.
#include <algorithm>
#include <cmath>

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/launch.h"

namespace kdtree::cuda::attention {

constexpr int kGroups = 8;
constexpr int kThreads = kLatent / 4;  // a group has at most
constexpr int kAtOnce = 4;             // partial results that a thread has in flight

// What results add up to: sum of 2^(lse_s - top) out_s, and of the weights.
struct Total {
  float top, weight;
  float4 sum;

  __device__ __forceinline__ void add(float factor, const Total &x) {
    weight += factor * x.weight;
    sum.x += factor * x.sum.x, sum.y += factor * x.sum.y;
    sum.z += factor * x.sum.z, sum.w += factor * x.sum.w;
  }
};

// The sum of N totals. What weighs nothing may hold anything: it was never written.
template <int N>
__device__ __forceinline__ Total add_up(const Total (&x)[N]) {
  Total total{-INFINITY, 0, {}};
#pragma unroll
  for (int i = 0; i < N; ++i) total.top = fmaxf(total.top, x[i].top);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (x[i].top > -INFINITY) total.add(exp2(x[i].top - total.top), x[i]);
  return total;
}

template <class T>
__global__ void __launch_bounds__(kGroups *kThreads)
    combine_kernel(const __grid_constant__ Params a) {
  extern __shared__ Total totals[];  // by group and thread, of more groups than one
  const int number = blockIdx.x / a.rows, row_of_request = blockIdx.x % a.rows;
  const int group = threadIdx.y, groups = blockDim.y;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  wait_for_previous();
  const Merge merge = a.parts > 0 ? a.merges[number] : Merge{number, number * a.splits, a.splits};
  if (merge.count == 0) return;
  const int64_t first = int64_t(merge.first) * a.rows + row_of_request;
  Total total{-INFINITY, 0, {}};
  for (int s = group; s < merge.count; s += kAtOnce * groups) {
    Total x[kAtOnce + 1];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      x[i].top = -INFINITY;
      if (s + i * groups >= merge.count) continue;
      const int64_t at = first + int64_t(s + i * groups) * a.rows;
      x[i].top = a.partial_lse[at];
      x[i].weight = 1;
      x[i].sum = *reinterpret_cast<const float4 *>(a.partial_out + at * kLatent + column);
    }
    x[kAtOnce] = total;
    total = add_up(x);
  }
  if (groups > 1) {
    totals[group * blockDim.x + threadIdx.x] = total;
    __syncthreads();
    if (group != 0) return;
    for (int g = 1; g < groups; ++g) {
      const Total both[2] = {total, totals[g * blockDim.x + threadIdx.x]};
      total = add_up(both);
    }
  }
  const float scale = total.weight > 0 ? 1 / total.weight : 0;
  uint2 packed;
  packed.x = pack<T>(total.sum.x * scale, total.sum.y * scale);
  packed.y = pack<T>(total.sum.z * scale, total.sum.w * scale);
  const int64_t row = int64_t(merge.b) * a.rows + row_of_request;
  *reinterpret_cast<uint2 *>(static_cast<T *>(a.p.out) + row * kLatent + column) = packed;
  if (a.p.lse != nullptr && column == 0)
    a.p.lse[row] = total.weight > 0 ? natural_log(total.top, total.weight) : -INFINITY;
}

void combine(const Params &a, Stream stream) {
  const int64_t requests = a.parts > 0 ? a.max_merges : a.p.batch;
  const int64_t rows = requests * a.rows;
  const int pieces = a.parts > 0 ? a.parts / static_cast<int>(a.p.batch) + 1 : a.splits;
  const int groups = std::clamp(pieces / kAtOnce, 1, kGroups);  // not from the batch, where pinned
  const bool few = rows < 2 * num_sms();
  const int threads = few ? 32 : kThreads;
  launch_early("verify_attn combine",
               a.p.q_dtype == KDTREE_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>,
               dim3(rows, kThreads / threads), dim3(threads, groups),
               groups > 1 ? groups * threads * sizeof(Total) : 0, stream, true, a);
}

}  // namespace kdtree::cuda::attention
