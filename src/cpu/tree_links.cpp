#include "tree/links.h"

#include "cpu/parallel.h"
#include "ops.h"

namespace kdtree::cpu {

void tree_links(const kdtree_tree_links_params &p) {
  parallel_for(p.batch, 64, [&](int64_t begin, int64_t end) {
    tree::SerialGroup group;
    tree::LinksScratch scratch;
    for (int64_t b = begin; b < end; ++b) tree::tree_links(group, p, b, scratch);
  });
}

}  // namespace kdtree::cpu
