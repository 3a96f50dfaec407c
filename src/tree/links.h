// tree_links: links, depths, positions and visibility of one request, from its parents.
//
// Each slot climbs to the root on its own, so nothing depends on the order of slots, and a climb
// only ever descends in slot number, so it ends after at most 64 steps whatever the array holds.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

struct LinksScratch {
  int32_t parent[kMaxQlen];  // -1: broken, unused, or the root
};

template <class Group>
KDTREE_HD void tree_links(Group &group, const kdtree_tree_links_params &p, int64_t b,
                          LinksScratch &scratch) {
  const int qlen = static_cast<int>(p.qlen);
  const int used = clamp_nodes(p.num_nodes[b], qlen);
  const int32_t *parents = p.parents + b * p.parents_stride_b;
  const int64_t prefix = p.prefix_lens != nullptr ? p.prefix_lens[b] : 0;

  for (int slot = group.lane(); slot < qlen; slot += group.size()) {
    uint64_t visible = 0;
    int depth = 0;
    int at = slot < used ? slot : 0;
    while (at > 0) {
      const int up = parents[at];
      if (up < 0 || up >= at) break;
      visible |= slot_bit(at);
      ++depth;
      at = up;
    }
    const bool whole = at == 0;  // reached the root
    const int64_t out = b * qlen + slot;
    p.visibility[out] = static_cast<int64_t>(whole ? visible : 0);
    p.depths[out] = whole ? depth : 0;
    p.positions[out] = prefix + (whole ? depth : 0);
    scratch.parent[slot] = whole && depth > 0 ? parents[slot] : -1;
  }
  group.sync();

  for (int slot = group.lane(); slot < qlen; slot += group.size()) {
    const int parent = scratch.parent[slot];
    int child = -1, sibling = -1;
    for (int other = used - 1; other > slot; --other) {
      if (scratch.parent[other] < 0) continue;
      if (scratch.parent[other] == slot) child = other;
      if (scratch.parent[other] == parent) sibling = other;
    }
    p.next_token[b * qlen + slot] = child;
    p.next_sibling[b * qlen + slot] = sibling;
  }
  group.sync();  // scratch may be used again
}

}  // namespace kdtree::tree
