// tree_links on CUDA: a block of 96 threads a request (src/tree/links.h is the body), a slot each.
//
// Moves about Q x 36 bytes a request, 2.3 KB at Q 65: even 1,000 requests are 2.3 MB, half a
// microsecond at 4.3 TB/s, so the floor is one launch and two dependent memory round trips.
#include "cuda/launch.h"
#include "tree/links.h"

namespace kdtree::cuda {

constexpr int kLinksThreads = 96;

__global__ void __launch_bounds__(kLinksThreads)
    tree_links_kernel(const __grid_constant__ kdtree_tree_links_params p) {
  __shared__ tree::LinksScratch scratch;
  tree::BlockGroup<kLinksThreads> group;
  tree::tree_links(group, p, blockIdx.x, scratch);
}

void tree_links(const kdtree_tree_links_params &p, Stream stream) {
  launch("tree_links", tree_links_kernel, dim3(p.batch), dim3(kLinksThreads), 0, stream, p);
}

}  // namespace kdtree::cuda
