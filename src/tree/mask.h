// expand_mask: one row of a mask from one visibility word, for every layout.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

// The nodes that a row sees, as visibility bits: only used slots, and none for an unused row.
KDTREE_HD uint64_t row_nodes(const kdtree_expand_mask_params &p, int64_t b, int slot) {
  const int used = clamp_nodes(p.num_nodes[b], p.qlen);
  return slot < used ? static_cast<uint64_t>(p.visibility[b * p.visibility_stride_b + slot]) &
                           node_bits(used)
                     : 0;
}

// Whether such a row sees the slot `column`; the root, column 0, always.
KDTREE_HD bool sees(uint64_t nodes, int column) {
  return column == 0 || (nodes >> (column - 1) & 1) != 0;
}

// Columns 32 word .. 32 word + 31 of the row. Column 0 is bit 0, node j is bit j.
KDTREE_HD uint32_t packed_columns(uint64_t nodes, int word) {
  return static_cast<uint32_t>(word == 0 ? nodes << 1 | 1 : nodes >> (32 * word - 1));
}

// The prefix of a request as the byte layouts show it: QLEN has the tree's columns only.
KDTREE_HD int64_t mask_prefix(const kdtree_expand_mask_params &p, int64_t b) {
  return p.layout == KDTREE_MASK_FULL && p.prefix_lens[b] > 0 ? p.prefix_lens[b] : 0;
}

KDTREE_HD int packed_words(int64_t qlen) {
  return static_cast<int>((qlen + 31) / 32);
}

// PACKED32 of one request.
template <class Group>
KDTREE_HD void pack_mask(Group &group, const kdtree_expand_mask_params &p, int64_t b) {
  const int words = packed_words(p.qlen), count = static_cast<int>(p.qlen) * words;
  auto *out = static_cast<uint32_t *>(p.out) + b * count;
  for (int i = group.lane(); i < count; i += group.size())
    out[i] = packed_columns(row_nodes(p, b, i / words), i % words);
}

}  // namespace kdtree::tree
