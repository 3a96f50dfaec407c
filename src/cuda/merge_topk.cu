// merge_topk on CUDA: one warp a row (src/tree/merge.h is the body), four warps a block.
//
// Moves S x K x 12 bytes a row, 6 KB at 8 shards of 64: 1,000 rows are 6 MB, 1.5 us at 4.3 TB/s.
// For a few rows the floor is one launch, one memory round trip, and S - 1 merges of about nine
// dependent shared loads each; the next shard's load overlaps the merge of the one before.
#include "cuda/launch.h"
#include "tree/merge.h"

namespace kdtree::cuda {

constexpr int kMergeWarps = 4;

__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_topk_kernel(const __grid_constant__ kdtree_merge_topk_params p) {
  __shared__ tree::MergeScratch scratch[kMergeWarps];
  const int warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kMergeWarps + warp;
  if (row >= tree::lead_rows(p.lead_ndim, p.lead_dims)) return;
  tree::WarpGroup group;
  tree::merge_topk(group, p, row, scratch[warp]);
}

void merge_topk(const kdtree_merge_topk_params &p, Stream stream) {
  launch("merge_topk", merge_topk_kernel,
         dim3(ceil_div(tree::lead_rows(p.lead_ndim, p.lead_dims), kMergeWarps)),
         dim3(kMergeWarps * 32), 0, stream, p);
}

}  // namespace kdtree::cuda
