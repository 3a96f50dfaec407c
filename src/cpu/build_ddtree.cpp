#include "cpu/parallel.h"
#include "ops.h"
#include "tree/build.h"

namespace kdtree::cpu {

void build_ddtree(const kdtree_build_ddtree_params &p) {
  parallel_for(p.batch, 16, [&](int64_t begin, int64_t end) {
    tree::SerialGroup group;
    tree::BuildScratch scratch;
    double table[tree::kMaxTable];
    for (int64_t b = begin; b < end; ++b) tree::build_ddtree(group, p, b, table, scratch);
  });
}

}  // namespace kdtree::cpu
