// combine: out = sum of w_s out_s, w_s = 2^(lse_s - lse), lse = log2 of the sum of 2^lse_s, over
// the splits s of a row, always in the same order.
//
// A block takes 128 columns of one row: a lane four of them, warp g of G = min(splits, 8) the
// splits g, g + G, ...; the warps' sums meet in shared memory. Reads splits x 2 KB a row (the
// partial results mostly still lie in L2) and writes 1 KB: for 4,160 rows of 5 splits 47 MB,
// 11 us at 4.3 TB/s.
#include <cmath>

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/launch.h"

namespace kdtree::cuda::attention {

constexpr int kCombineWarps = 8;
constexpr int kCombineColumns = 128;

template <class T>
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_kernel(const __grid_constant__ Params a) {
  __shared__ float4 sums[kCombineWarps][32];
  const int64_t row = blockIdx.x;  // of B * rows
  const int64_t b = row / a.rows;
  const int lane = threadIdx.x, group = threadIdx.y, groups = blockDim.y;
  const int column = blockIdx.y * kCombineColumns + lane * 4;
  const float *lse = a.partial_lse + row * a.splits;

  // Every warp finds the same total.
  float top = -INFINITY;
  for (int s = lane; s < a.splits; s += 32) top = fmaxf(top, lse[s]);
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == -INFINITY) top = 0;  // a padding request: every weight is 0
  float total = 0;
  for (int s = lane; s < a.splits; s += 32) total += exp2(lse[s] - top);
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);

  const float *partial =
      a.partial_out + (b * a.splits * a.rows + (row - b * a.rows)) * kLatent + column;
  float4 sum{0, 0, 0, 0};
#pragma unroll 4
  for (int s = group; s < a.splits; s += groups) {
    const float weight = exp2(lse[s] - top);
    if (weight == 0) continue;  // nothing was written there
    const float4 v = *reinterpret_cast<const float4 *>(partial + int64_t(s) * a.rows * kLatent);
    sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0) return;
  for (int g = 1; g < groups; ++g) {
    const float4 v = sums[g][lane];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  const float scale = total > 0 ? 1 / total : 0;
  uint2 packed;
  packed.x = pack<T>(sum.x * scale, sum.y * scale);
  packed.y = pack<T>(sum.z * scale, sum.w * scale);
  *reinterpret_cast<uint2 *>(static_cast<T *>(a.p.out) + row * kLatent + column) = packed;
  if (a.p.lse != nullptr && lane == 0 && blockIdx.y == 0)
    a.p.lse[row] = total > 0 ? natural_log(top, total) : -INFINITY;
}

void combine(const Params &a, Stream stream) {
  launch("verify_attn combine",
         a.p.q_dtype == KDTREE_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>,
         dim3(a.p.batch * a.rows, kLatent / kCombineColumns),
         dim3(32, a.splits < kCombineWarps ? a.splits : kCombineWarps), 0, stream, a);
}

}  // namespace kdtree::cuda::attention
