// tree_accept: one request's walk along target_predict. Every lane walks by itself over the same
// scratch, which costs a warp no more than one lane and needs no broadcast. The next request may
// follow at once: until its own first sync it writes nothing that is still read for this one.
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

  int steps = 0;
  for (int slot = num_nodes > 0 ? 0 : -1; slot >= 0; ++steps) {
    const int64_t target = scratch.target[slot];
    if (group.lane() == 0) {
      scratch.walk.slot[steps] = slot;
      scratch.walk.token[steps] = target;
    }
    slot = next_slot(scratch.walk, slot, target);
  }
  group.sync();
  write_accept(group, p, b, steps, scratch.walk);
}

}  // namespace kdtree::tree
