#include "cpu/parallel.h"
#include "ops.h"
#include "tree/accept.h"

namespace kdtree::cpu {

void tree_accept(const kdtree_tree_accept_params &p) {
  parallel_for(p.batch, 256, [&](int64_t begin, int64_t end) {
    tree::SerialGroup group;
    tree::AcceptScratch scratch;
    for (int64_t b = begin; b < end; ++b) tree::tree_accept(group, p, b, scratch);
  });
}

}  // namespace kdtree::cpu
