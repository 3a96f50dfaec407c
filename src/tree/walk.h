// The walk down a tree along the target's tokens: stage the links of a request in scratch, for
// tree_accept and tree_accept_logits; and, for the latter, find the next slot and write what was
// accepted.
//
// Staging makes the links safe: a link must lead up in slot number and stay below num_nodes, or it
// counts as none. So every loop over links ends, whatever the arrays hold.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

struct alignas(16) WalkNode {  // one 16-byte load a step
  int64_t token;
  int32_t child, sibling;  // above this slot, or -1
};

struct WalkScratch {
  WalkNode node[kMaxQlen];
  int64_t token[kMaxQlen];  // of the walk: token[i] is the target's at slot[i]
  int32_t slot[kMaxQlen];
};

// Fills scratch.node[slot]. Params is that of either op. Unused slots are loaded too: no load then
// waits for num_nodes.
template <class Params>
KDTREE_HD void stage_slot(const Params &p, int64_t b, int slot, int used, WalkScratch &scratch) {
  const int64_t child = load_id(p.next_token, p.next_token_dtype, b * p.next_token_stride_b + slot);
  const int64_t sibling =
      load_id(p.next_sibling, p.next_sibling_dtype, b * p.next_sibling_stride_b + slot);
  WalkNode node;
  node.token = load_id(p.draft_tokens, p.draft_tokens_dtype, b * p.draft_tokens_stride_b + slot);
  node.child = child > slot && child < used ? static_cast<int32_t>(child) : -1;
  node.sibling = sibling > slot && sibling < used ? static_cast<int32_t>(sibling) : -1;
  scratch.node[slot] = node;
}

// Every slot of the request; the caller syncs.
template <class Group, class Params>
KDTREE_HD void stage_walk(Group &group, const Params &p, int64_t b, int used,
                          WalkScratch &scratch) {
  for_slots(group, p.qlen, [&](int slot) { stage_slot(p, b, slot, used, scratch); });
}

// The child of `slot` that holds `token`, the lowest on duplicates; -1 when there is none. Every
// lane may ask by itself: nothing here is a collective.
KDTREE_HD int next_slot(const WalkScratch &scratch, int slot, int64_t token) {
  int child = scratch.node[slot].child;
  while (child >= 0) {
    const WalkNode node = scratch.node[child];
    if (node.token == token) return child;
    child = node.sibling;
  }
  return -1;
}

// Writes the outputs of a walk over `steps` slots (the root included; 0 for padding), from
// scratch.slot and scratch.token, which the caller has synced.
template <class Group, class Params>
KDTREE_HD void write_accept(Group &group, const Params &p, int64_t b, int steps,
                            const WalkScratch &scratch) {
  for_slots(group, p.qlen, [&](int i) {
    p.accept_index[b * p.qlen + i] = i < steps ? scratch.slot[i] : -1;
    p.accept_tokens[b * p.qlen + i] = i < steps ? scratch.token[i] : -1;
  });
  if (group.lane() == 0) p.accept_token_num[b] = steps > 0 ? steps - 1 : 0;
}

}  // namespace kdtree::tree
