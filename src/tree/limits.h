// Limits and bit layout of the tree, once for host and device.
#pragma once

#include <stdint.h>

#include "kdtree.h"
#include "tree/group.h"

namespace kdtree::tree {

constexpr int kMaxQlen = KDTREE_MAX_QLEN;
constexpr int kMaxNodes = KDTREE_MAX_QLEN - 1;
constexpr int kMaxK = KDTREE_MAX_K;

// The visibility bit of slot `slot` >= 1. The root has none: every slot sees it.
KDTREE_HD uint64_t slot_bit(int slot) {
  return uint64_t(1) << (slot - 1);
}

// The bits that may be set in a request of `num_nodes` used slots.
KDTREE_HD uint64_t node_bits(int num_nodes) {
  return num_nodes <= 1 ? 0 : num_nodes > kMaxNodes ? ~uint64_t(0) : slot_bit(num_nodes) - 1;
}

// num_nodes as a caller gave it, made safe to index with.
KDTREE_HD int clamp_nodes(int32_t num_nodes, int64_t qlen) {
  return num_nodes < 0 ? 0 : num_nodes > qlen ? static_cast<int>(qlen) : num_nodes;
}

// Element i of an i32 or i64 array.
KDTREE_HD int64_t load_id(const void *ids, int32_t dtype, int64_t i) {
  return dtype == KDTREE_I64 ? static_cast<const int64_t *>(ids)[i]
                             : static_cast<const int32_t *>(ids)[i];
}

}  // namespace kdtree::tree
