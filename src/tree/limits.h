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

#if defined(__CUDACC__)
// Element i of an i32 or i64 array as it lies in memory: two loads without a branch, that go out
// together with others and are waited for where value() is. Of 32 bits both are the same word, and
// shifted, not chosen: a choice would become a second load that waits for the first.
struct IdWords {
  int sign_shift;
  int32_t low, high;
  __device__ __forceinline__ IdWords(const void *ids, int32_t dtype, int64_t i) {
    const bool wide = dtype == KDTREE_I64;
    const int32_t *word = static_cast<const int32_t *>(ids) + (wide ? 2 * i : i);
    low = word[0];
    high = word[wide];
    sign_shift = wide ? 0 : 31;
  }
  __device__ __forceinline__ int64_t value() const {
    return static_cast<int64_t>(static_cast<uint64_t>(high >> sign_shift) << 32 |
                                static_cast<uint32_t>(low));
  }
};
#endif

// Element i of an i32 or i64 array.
KDTREE_HD int64_t load_id(const void *ids, int32_t dtype, int64_t i) {
#if defined(__CUDA_ARCH__)
  return IdWords(ids, dtype, i).value();
#else
  return dtype == KDTREE_I64 ? static_cast<const int64_t *>(ids)[i]
                             : static_cast<const int32_t *>(ids)[i];
#endif
}

// f(slot) for `count` slots, kMaxQlen at most, each by one lane.
template <class Group, class F>
KDTREE_HD void for_slots(const Group &group, int64_t count, F &&f) {
  if constexpr (Group::kSize >= kMaxQlen) {
    if (group.lane() < count) f(group.lane());
  } else {
    for (int slot = group.lane(); slot < count; slot += group.size()) f(slot);
  }
}

}  // namespace kdtree::tree
