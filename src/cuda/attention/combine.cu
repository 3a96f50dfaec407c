// combine: out = sum of w_s out_s, w_s = 2^(lse_s - lse), lse = log2 of the sum of 2^lse_s, over
// the splits s of a row, always in the same order.
//
// A block takes 128 columns of one row: a lane four of them, warp g of G = min(splits, 8) the
// splits g, g + G, ...; the warps' sums meet in shared memory. Reads splits x 2 KB a row (the
// partial results mostly still lie in L2) and writes 1 KB: for 4,160 rows of 5 splits 47 MB,
// 11 us at 4.3 TB/s.
#include <algorithm>
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
  Pieces pieces{static_cast<int>(b * a.splits), a.splits};
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  if (a.parts > 0) pieces = a.pieces[b];
  if (pieces.count == 1) return;  // its results are there
  // Of split s: its row of partial results.
  const int rest = a.parts > 0 ? 2 : 1;
  const auto at = [&](int s) {
    const int64_t place = s == 0 ? pieces.first : pieces.first + 1 + (s - 1) * rest;
    return place * a.rows + (row - b * a.rows);
  };

  // Every warp finds the same total.
  float top = -INFINITY;
  for (int s = lane; s < pieces.count; s += 32) top = fmaxf(top, a.partial_lse[at(s)]);
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == -INFINITY) top = 0;  // a padding request: every weight is 0
  float total = 0;
  for (int s = lane; s < pieces.count; s += 32) total += exp2(a.partial_lse[at(s)] - top);
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);

  float4 sum{0, 0, 0, 0};
#pragma unroll 4
  for (int s = group; s < pieces.count; s += groups) {
    const float weight = exp2(a.partial_lse[at(s)] - top);
    if (weight == 0) continue;  // nothing was written there
    const float4 v = *reinterpret_cast<const float4 *>(a.partial_out + at(s) * kLatent + column);
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
  const auto kernel =
      a.p.q_dtype == KDTREE_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  const int64_t pieces = a.parts > 0 ? a.parts / a.p.batch + 1 : a.splits;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(a.p.batch * a.rows, kLatent / kCombineColumns);
  config.blockDim = dim3(32, std::min<int64_t>(pieces, kCombineWarps));
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = current_path() == Path::sm90;
  check(cudaLaunchKernelEx(&config, kernel, a), "verify_attn combine");
}

}  // namespace kdtree::cuda::attention
