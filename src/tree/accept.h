// tree_accept: one request's walk along target_predict. Every lane walks by itself over the same
// scratch, which costs a warp no more than one lane and needs no broadcast, and keeps in registers
// the steps that it will write.
#pragma once

#include "tree/walk.h"

namespace kdtree::tree {

struct AcceptScratch {
  WalkScratch walk;
  int64_t target[kMaxQlen];
};

template <class Group>
KDTREE_HD void tree_accept(Group &group, const kdtree_tree_accept_params &p, int64_t b,
                           AcceptScratch &scratch) {
  const int32_t num_nodes = p.num_nodes[b];
  for_slots(group, p.qlen, [&](int slot) {  // every load goes out before one is waited for
    const int64_t target =
        load_id(p.target_predict, p.target_predict_dtype, b * p.target_predict_stride_b + slot);
    stage_slot(p, b, slot, clamp_nodes(num_nodes, p.qlen), scratch.walk);
    scratch.target[slot] = target;
  });
  group.sync();

  struct Step {
    int32_t slot;
    int64_t token;
  };
  constexpr int kSize = Group::kSize, kHeld = (kMaxQlen + kSize - 1) / kSize;
  Step held[kHeld];
  for (Step &step : held) step = {-1, -1};
  const auto hold = [&](int step, int slot, int64_t token) {
    const int i = kHeld > 1 ? step / kSize : 0;
    if (group.lane() + i * kSize == step) held[i] = {slot, token};
  };
  // One loop over all nodes that are looked at, not a loop of their siblings in one of steps, and
  // with a node comes what it has for the next step: one load and one comparison each.
  int steps = 0;
  if (num_nodes > 0) {
    int64_t target = scratch.target[0];
    hold(steps++, 0, target);
    for (int slot = scratch.walk.node[0].child; slot >= 0;) {
      const WalkNode node = scratch.walk.node[slot];
      const int64_t its_target = scratch.target[slot];
      const bool match = node.token == target;
      if (match) hold(steps, slot, its_target);
      steps += match;
      target = match ? its_target : target;
      slot = match ? node.child : node.sibling;
    }
  }
  for (int i = 0; i < kHeld; ++i) {
    const int64_t step = i * kSize + group.lane();
    if (step >= p.qlen) break;
    p.accept_index[b * p.qlen + step] = held[i].slot;
    p.accept_tokens[b * p.qlen + step] = held[i].token;
  }
  if (group.lane() == 0) p.accept_token_num[b] = steps > 0 ? steps - 1 : 0;
  group.sync();  // scratch may be used again
}

}  // namespace kdtree::tree
