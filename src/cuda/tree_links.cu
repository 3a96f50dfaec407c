// tree_links on CUDA: one warp a request (src/tree/links.h is the body), four warps a block.
//
// Moves about Q x 36 bytes a request, 2.3 KB at Q 65: even 1,000 requests are 2.3 MB, half a
// microsecond at 4.3 TB/s, so the floor is one launch and two dependent memory round trips.
#include "cuda/launch.h"
#include "tree/links.h"

namespace kdtree::cuda {

constexpr int kLinksWarps = 4;

__global__ void __launch_bounds__(kLinksWarps * 32)
    tree_links_kernel(const __grid_constant__ kdtree_tree_links_params p) {
  __shared__ tree::LinksScratch scratch[kLinksWarps];
  const int warp = threadIdx.x / 32;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kLinksWarps + warp;
  if (b >= p.batch) return;
  tree::WarpGroup group;
  tree::tree_links(group, p, b, scratch[warp]);
}

void tree_links(const kdtree_tree_links_params &p, Stream stream) {
  launch("tree_links", tree_links_kernel, dim3(ceil_div(p.batch, kLinksWarps)),
         dim3(kLinksWarps * 32), 0, stream, p);
}

}  // namespace kdtree::cuda
