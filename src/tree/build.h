// build_ddtree: the best-first tree of one request.
//
// The frontier (what the reference keeps in a heap) is an array in lexicographic order of rank
// tuples, a prefix before its extensions. Taking the entry at a position puts its first child in
// its place and its next sibling right after, and that keeps the order: all that could come
// between them are extensions of the child, which do not exist yet. So the tie rule is "the
// leftmost of the largest", and no tuple is ever stored or compared. Before n nodes are taken the
// frontier spans n + 1 positions, so 64 are enough; a dead entry is a hole of score -inf.
//
// The positions are spread over the lanes in blocks. A step is one choice of the largest score,
// and while the group chooses, each lane already scores the successors of its own best. The tree
// is grown to the budget first; the stop rule of node_cost then cuts it, since what is taken never
// depends on it, and links follow from what each node was: a rank 0 is its parent's first child,
// any other is the next sibling of the rank before.
#pragma once

#include <math.h>
#include <string.h>

#include "tree/exp.h"
#include "tree/limits.h"

namespace kdtree::tree {

// One request; the log-probs apart, since the GPU stages them first.
struct BuildRequest {
  int64_t b;
  int64_t root;
  const float *logprobs;
  int64_t logprobs_stride;  // of a depth
};

struct BuildScratch {
  double score[kMaxQlen];
  uint32_t node[kMaxQlen];  // as packed by node_word; [0] is not used
  double weight[kMaxQlen];  // e^score, for the stop rule
  int32_t child[kMaxQlen];
  int32_t sibling[kMaxQlen];
};

// A frontier entry or node in one word: depth 1..64, rank 0..63, the parent's slot and, when rank
// is not 0, the slot of the sibling before.
KDTREE_HD uint32_t node_word(int parent, int before, int depth, int rank) {
  return static_cast<uint32_t>(parent | before << 8 | depth << 16 | rank << 24);
}
KDTREE_HD int node_parent(uint32_t node) {
  return node & 0xff;
}
KDTREE_HD int node_before(uint32_t node) {
  return node >> 8 & 0xff;
}
KDTREE_HD int node_depth(uint32_t node) {
  return node >> 16 & 0xff;
}
KDTREE_HD int node_rank(uint32_t node) {
  return node >> 24;
}

constexpr double kDead = -HUGE_VAL;

// A score, or kDead where it (or the candidate behind it) is -inf or NaN.
KDTREE_HD double alive(double score) {
  return score > kDead ? score : kDead;
}

// Larger score, larger key. A score is never NaN or -0.
KDTREE_HD uint64_t score_key(double score) {
  uint64_t bits;
  memcpy(&bits, &score, sizeof bits);
  return bits ^ (bits >> 63 ? ~uint64_t(0) : uint64_t(1) << 63);
}

// Takes nodes into scratch.score and scratch.node, slots 1 up, and returns how many.
template <class Group>
KDTREE_HD int grow_tree(Group &group, const kdtree_build_ddtree_params &p, const BuildRequest &r,
                        BuildScratch &scratch) {
  constexpr int kHeld = (kMaxNodes + Group::kSize - 1) / Group::kSize;
  const int first = group.lane() * kHeld;  // this lane's positions: [first, first + kHeld)
  const int64_t levels = p.depth < p.budget ? p.depth : p.budget;  // none deeper can be taken
  double score[kHeld];
  uint32_t node[kHeld];
  for (int j = 0; j < kHeld; ++j) {
    score[j] = kDead;
    node[j] = 0;
  }
  if (group.lane() == 0 && levels > 0) {
    score[0] = alive(0.0 + static_cast<double>(r.logprobs[0]));
    node[0] = node_word(0, 0, 1, 0);
  }

  int taken = 0;
  for (; taken < p.budget; ++taken) {
    const int held = Group::kSize == 1 ? taken + 1 : kHeld;  // a lone lane skips what is empty
    const double below_score = group.shfl(score[kHeld - 1], group.lane() - 1);
    const uint32_t below_node = group.shfl(node[kHeld - 1], group.lane() - 1);

    // The chain's next node is always at position 0, until it is dead for good.
    const bool chain = p.chain_seed && group.lane() == 0 && score[0] > kDead;
    double best = score[0];
    uint32_t best_node = node[0];
    int best_at = first;
    for (int j = 1; j < held; ++j) {
      if (score[j] > best && !chain) {
        best = score[j];
        best_node = node[j];
        best_at = first + j;
      }
    }
    double child = kDead, sibling = kDead;
    if (best > kDead) {
      const int depth = node_depth(best_node), rank = node_rank(best_node);
      const float *row = r.logprobs + (depth - 1) * r.logprobs_stride;
      if (depth < levels) child = alive(best + static_cast<double>(row[r.logprobs_stride]));
      if (rank + 1 < p.k)
        sibling =
            alive((best - static_cast<double>(row[rank])) + static_cast<double>(row[rank + 1]));
    }

    const int from = lane_of_max(group, chain ? ~uint64_t(0) : score_key(best));
    best = group.shfl(best, from);
    best_node = group.shfl(best_node, from);
    best_at = group.shfl(best_at, from);
    child = group.shfl(child, from);
    sibling = group.shfl(sibling, from);
    if (!(best > kDead)) break;

    const int slot = taken + 1;
    if (group.lane() == 0) {
      scratch.score[slot] = best;
      scratch.node[slot] = best_node;
    }
    const int depth = node_depth(best_node), rank = node_rank(best_node);
    const uint32_t child_node = node_word(slot, 0, depth + 1, 0);
    const uint32_t sibling_node = node_word(node_parent(best_node), slot, depth, rank + 1);
    for (int j = held < kHeld ? held : kHeld - 1; j >= 0; --j) {
      const int at = first + j;
      if (at < best_at) continue;
      score[j] = at == best_at       ? child
                 : at == best_at + 1 ? sibling
                 : j > 0             ? score[j - 1]
                                     : below_score;
      node[j] = at == best_at       ? child_node
                : at == best_at + 1 ? sibling_node
                : j > 0             ? node[j - 1]
                                    : below_node;
    }
  }
  group.sync();
  return taken;
}

// How many of `taken` nodes the stop rule of node_cost leaves.
template <class Group>
KDTREE_HD int cut_tree(Group &group, const kdtree_build_ddtree_params &p, int taken,
                       BuildScratch &scratch) {
  for (int slot = group.lane() + 1; slot <= taken; slot += group.size())
    scratch.weight[slot] = exact_exp(scratch.score[slot]);
  group.sync();
  double sum = 1;  // in slot order, by every lane for itself
  for (int first = 1; first <= taken; first += group.size()) {
    const int mine = first + group.lane();
    double before = 1, after = 1;
    for (int slot = first; slot < first + group.size() && slot <= taken; ++slot) {
      if (slot == mine) before = sum;
      sum += scratch.weight[slot];
      if (slot == mine) after = sum;
    }
    bool stop = false;
    if (mine <= taken && !(p.chain_seed && node_depth(scratch.node[mine]) == mine)) {
      const double cost_before = p.base_cost + static_cast<double>(p.node_cost[mine - 1]);
      const double cost_after = p.base_cost + static_cast<double>(p.node_cost[mine]);
      stop = !(after / cost_after > before / cost_before);
    }
    const uint32_t stops = group.ballot(stop);
    if (stops != 0) return first + lowest_lane(stops) - 1;
  }
  return taken;
}

template <class Group>
KDTREE_HD void build_ddtree(Group &group, const kdtree_build_ddtree_params &p,
                            const BuildRequest &r, BuildScratch &scratch) {
  int taken = -1;  // padding: not even the root
  if (r.root >= 0) {
    taken = grow_tree(group, p, r, scratch);
    if (p.node_cost != nullptr) taken = cut_tree(group, p, taken, scratch);
  }

  for (int slot = group.lane(); slot <= taken; slot += group.size())
    scratch.child[slot] = scratch.sibling[slot] = -1;
  group.sync();
  for (int slot = group.lane() + 1; slot <= taken; slot += group.size()) {
    const uint32_t node = scratch.node[slot];
    if (node_rank(node) == 0)
      scratch.child[node_parent(node)] = slot;
    else
      scratch.sibling[node_before(node)] = slot;
  }
  group.sync();

  const int64_t prefix = p.prefix_lens[r.b];
  for (int slot = group.lane(); slot <= p.budget; slot += group.size()) {
    const bool used = slot <= taken, root = used && slot == 0;
    const uint32_t node = used && !root ? scratch.node[slot] : 0;
    const int depth = node_depth(node);
    uint64_t visible = 0;
    for (int up = used ? slot : 0; up > 0; up = node_parent(scratch.node[up]))
      visible |= slot_bit(up);
    int64_t token = root ? r.root : 0;
    if (depth > 0)
      token = load_id(p.ids, p.ids_dtype,
                      r.b * p.ids_stride_b + (depth - 1) * p.ids_stride_l + node_rank(node));
    const int64_t out = r.b * (p.budget + 1) + slot;
    p.draft_tokens[out] = token;
    p.parents[out] = depth > 0 ? node_parent(node) : -1;
    p.depths[out] = depth;
    p.positions[out] = prefix + depth;
    p.next_token[out] = used ? scratch.child[slot] : -1;
    p.next_sibling[out] = used ? scratch.sibling[slot] : -1;
    p.visibility[out] = static_cast<int64_t>(visible);
    p.scores[out] = root ? 0.0f : static_cast<float>(used ? scratch.score[slot] : kDead);
  }
  if (group.lane() == 0) p.num_nodes[r.b] = taken + 1;
  group.sync();  // scratch may be used again
}

}  // namespace kdtree::tree
