#include "cpu/parallel.h"
#include "ops.h"
#include "tree/merge.h"

namespace kdtree::cpu {

void merge_topk(const kdtree_merge_topk_params &p) {
  parallel_for(tree::lead_rows(p.lead_ndim, p.lead_dims), 32, [&](int64_t begin, int64_t end) {
    tree::SerialGroup group;
    tree::MergeScratch scratch;
    for (int64_t row = begin; row < end; ++row) tree::merge_topk(group, p, row, scratch);
  });
}

}  // namespace kdtree::cpu
