#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "ops.h"
#include "tree/mask.h"

namespace kdtree::cpu {

void expand_mask(const kdtree_expand_mask_params &p) {
  if (p.layout == KDTREE_MASK_PACKED32) {
    parallel_for(p.batch, 256, [&](int64_t begin, int64_t end) {
      tree::SerialGroup group;
      for (int64_t b = begin; b < end; ++b) tree::pack_mask(group, p, b);
    });
    return;
  }

  std::vector<int64_t> start(p.batch);  // of each request, in bytes
  for (int64_t b = 0, next = 0; b < p.batch; ++b) {
    start[b] = next;
    next += p.qlen * (tree::mask_prefix(p, b) + p.qlen);
  }
  parallel_for(p.batch * p.qlen, 512, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / p.qlen, slot = row % p.qlen, prefix = tree::mask_prefix(p, b);
      const uint64_t nodes = tree::row_nodes(p, b, static_cast<int>(slot));
      auto *out = static_cast<uint8_t *>(p.out) + start[b] + slot * (prefix + p.qlen);
      std::memset(out, 1, prefix);
      for (int column = 0; column < p.qlen; ++column)
        out[prefix + column] = tree::sees(nodes, column);
    }
  });
}

}  // namespace kdtree::cpu
