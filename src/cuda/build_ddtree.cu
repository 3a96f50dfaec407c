// build_ddtree on CUDA: one warp a request (src/tree/build.h is the body), one warp a block.
//
// The log-probs that can matter, min(L, budget) rows of K, are staged in shared memory by
// asynchronous copies: all of them in flight at once, one memory round trip. Then `budget` steps
// that depend on each other, each a choice of the largest of 64 scores: two scores a lane, one
// warp reduction over the high words (a second one only on a tie), a vote and a shuffle by one
// lane. A step is some 110 instructions without a branch and, by their latencies, about 200
// cycles; 64 of them are 6.5 us at 1.98 GHz. Bytes are nothing beside that: 12 KB in and 3.5 KB
// out a request at L 15, K 64, so 1,000 requests move 16 MB, 4 us at 4.3 TB/s, while more than
// twenty warps a multiprocessor hide each other's latency.
#include <cuda_pipeline_primitives.h>

#include "cuda/launch.h"
#include "tree/build.h"

namespace kdtree::cuda {

__global__ void __launch_bounds__(32)
    build_ddtree_kernel(const __grid_constant__ kdtree_build_ddtree_params p) {
  extern __shared__ tree::BuildScratch scratch[];  // one base address for both
  auto *table = reinterpret_cast<float *>(scratch + 1);
  const int64_t b = blockIdx.x;
  tree::WarpGroup group;
  tree::stage_logprobs(group, p, b, table, [](float *to, const float *from) {
    __pipeline_memcpy_async(to, from, sizeof(float));
  });
  __pipeline_commit();
  __pipeline_wait_prior(0);
  group.sync();
  tree::build_ddtree(group, p, b, table, *scratch);
}

void build_ddtree(const kdtree_build_ddtree_params &p, Stream stream) {
  launch("build_ddtree", build_ddtree_kernel, dim3(p.batch), dim3(32),
         sizeof(tree::BuildScratch) + tree::table_floats(p) * sizeof(float), stream, p);
}

}  // namespace kdtree::cuda
