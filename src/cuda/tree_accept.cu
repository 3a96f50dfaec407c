// tree_accept on CUDA: a block of 96 threads a request (src/tree/accept.h is the body), so that
// every slot has its thread and no load waits for another.
//
// Moves at most Q x 44 bytes a request, 2.9 KB at Q 65: 1,000 requests are 2.9 MB, under a
// microsecond at 4.3 TB/s. The floor is one launch, one memory round trip, and the walk: one shared
// load latency for each child looked at, 64 in the worst tree. Measured on an H200 with a cold L2:
// 4.7 us for one request and 5.1 for 64, of which an empty kernel is 3.5 and a round trip 1.0.
#include "cuda/launch.h"
#include "tree/accept.h"

namespace kdtree::cuda {

constexpr int kAcceptThreads = 96;

__global__ void __launch_bounds__(kAcceptThreads)
    tree_accept_kernel(const __grid_constant__ kdtree_tree_accept_params p) {
  __shared__ tree::AcceptScratch scratch;
  tree::BlockGroup<kAcceptThreads> group;
  tree::tree_accept(group, p, blockIdx.x, scratch);
}

void tree_accept(const kdtree_tree_accept_params &p, Stream stream) {
  launch("tree_accept", tree_accept_kernel, dim3(p.batch), dim3(kAcceptThreads), 0, stream, p);
}

}  // namespace kdtree::cuda
