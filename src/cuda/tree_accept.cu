// tree_accept on CUDA: one warp a request (src/tree/accept.h is the body), four warps a block.
//
// Moves at most Q x 44 bytes a request, 2.9 KB at Q 65: 1,000 requests are 2.9 MB, under a
// microsecond at 4.3 TB/s. The floor is one launch, one memory round trip, and the walk: a
// 16-byte shared load for each child looked at, 64 in the worst tree.
#include "cuda/launch.h"
#include "tree/accept.h"

namespace kdtree::cuda {

constexpr int kAcceptWarps = 4;

__global__ void __launch_bounds__(kAcceptWarps * 32)
    tree_accept_kernel(const __grid_constant__ kdtree_tree_accept_params p) {
  __shared__ tree::AcceptScratch scratch[kAcceptWarps];
  const int warp = threadIdx.x / 32;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kAcceptWarps + warp;
  if (b >= p.batch) return;
  tree::WarpGroup group;
  tree::tree_accept(group, p, b, scratch[warp]);
}

void tree_accept(const kdtree_tree_accept_params &p, Stream stream) {
  launch("tree_accept", tree_accept_kernel, dim3(ceil_div(p.batch, kAcceptWarps)),
         dim3(kAcceptWarps * 32), 0, stream, p);
}

}  // namespace kdtree::cuda
