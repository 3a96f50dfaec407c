// build_ddtree: the best-first tree of one request.
//
// The frontier (what the reference keeps in a heap) is an array in lexicographic order of rank
// tuples, a prefix before its extensions. Taking the entry at a position puts its first child in
// its place and its next sibling right after, and that keeps the order: all that could come
// between them are extensions of the child, which do not exist yet. So the tie rule is "the
// leftmost of the largest", and no tuple is ever stored or compared. Before n nodes are taken the
// frontier spans n + 1 positions, so 64 are enough; a dead entry is a hole.
//
// The positions are spread over the lanes in blocks. A step is one choice of the largest score,
// and while the group chooses, each lane already scores the successors of its own best; it is one
// chain of dependent instructions, so everything in it is there to be short. The tree is grown to
// the budget first; the stop rule of node_cost then cuts it, since what is taken never depends on
// it, and links follow from what each node was: a rank 0 is its parent's first child, any other
// is the next sibling of the rank before.
#pragma once

#include <math.h>
#include <string.h>

#include "tree/exp.h"
#include "tree/limits.h"

namespace kdtree::tree {

struct BuildScratch {
  double score[kMaxQlen];
  double weight[kMaxQlen];  // e^score, for the stop rule
  uint32_t node[kMaxQlen];  // as packed by node_word; [0] is not used
  int32_t child[kMaxQlen];
  int32_t sibling[kMaxQlen];
};

// The log-probs of one request that can matter, with -inf around them, so that a step needs no
// bounds: each depth is a row of k + 1 floats, and two rows of -inf follow.
KDTREE_HD int table_levels(const kdtree_build_ddtree_params &p) {
  return static_cast<int>(p.depth < p.budget ? p.depth : p.budget);
}
KDTREE_HD int table_floats(const kdtree_build_ddtree_params &p) {
  return (table_levels(p) + 2) * static_cast<int>(p.k + 1);
}
constexpr int kMaxTableFloats = (kMaxNodes + 2) * (kMaxK + 1);

// copy(to, from) moves one float, and may finish later: the caller waits, then syncs.
template <class Group, class Copy>
KDTREE_HD void stage_logprobs(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                              float *table, Copy &&copy) {
  const int levels = table_levels(p), k = static_cast<int>(p.k), pitch = k + 1;
  for (int level = 0; level < levels; ++level) {
    const float *row = p.logprobs + b * p.logprobs_stride_b + level * p.logprobs_stride_l;
    for (int rank = group.lane(); rank < k; rank += group.size())
      copy(table + level * pitch + rank, row + rank);
  }
  for (int level = group.lane(); level < levels; level += group.size())
    table[level * pitch + k] = -HUGE_VALF;
  for (int i = levels * pitch + group.lane(); i < table_floats(p); i += group.size())
    table[i] = -HUGE_VALF;
}

// A frontier entry or node in one word: depth 1..65, rank 0..64, the parent's slot and, when rank
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

// A score as an integer: larger score, larger key. -inf, and NaN with it, is kDead: what is behind
// it is never taken. A score is never -0.
constexpr uint64_t kDead = 0x000fffffffffffff;
KDTREE_HD uint64_t score_key(double score) {
  int64_t bits;
  memcpy(&bits, &score, sizeof bits);
  const bool nan = static_cast<uint64_t>(bits) << 1 > uint64_t(0x7ff) << 53;
  return nan ? kDead : static_cast<uint64_t>(bits ^ (bits >> 63 | INT64_MIN));
}
KDTREE_HD double key_score(uint64_t key) {
  const int64_t bits = static_cast<int64_t>(key) ^ (~static_cast<int64_t>(key) >> 63 | INT64_MIN);
  double score;
  memcpy(&score, &bits, sizeof score);
  return score;
}

// Takes nodes into scratch.score and scratch.node, slots 1 up, and returns how many.
template <class Group>
KDTREE_HD int grow_tree(Group &group, const kdtree_build_ddtree_params &p, const float *table,
                        BuildScratch &scratch) {
  constexpr int kHeld = (kMaxNodes + Group::kSize - 1) / Group::kSize;  // positions of a lane
  const int lane = group.lane(), pitch = static_cast<int>(p.k + 1);
  uint64_t key[kHeld];
  uint32_t node[kHeld];
  for (int j = 0; j < kHeld; ++j) {
    key[j] = kDead;
    node[j] = node_word(0, 0, 1, 0);
  }
  if (lane == 0) key[0] = score_key(0.0 + static_cast<double>(table[0]));

  int taken = 0;
  for (; taken < p.budget; ++taken) {
    const int held = Group::kSize == 1 ? taken + 1 : kHeld;  // a lone lane skips what is empty
    // The chain's next node is always at position 0, until it is dead for good.
    const bool chain = p.chain_seed && lane == 0 && key[0] > kDead;
    uint64_t best = key[0];
    uint32_t best_node = node[0];
    int best_j = 0;
    for (int j = 1; j < held; ++j) {
      if (key[j] > best && !chain) {
        best = key[j];
        best_node = node[j];
        best_j = j;
      }
    }
    const float *at = table + (node_depth(best_node) - 1) * pitch + node_rank(best_node);
    const float own = at[0], next = at[1], below = table[node_depth(best_node) * pitch];

    const uint64_t bid = chain ? ~uint64_t(0) : best;
    const uint32_t high = static_cast<uint32_t>(bid >> 32), low = static_cast<uint32_t>(bid);
    const uint32_t top = group.max(high);
    if (top <= kDead >> 32) break;
    const double score = key_score(best);
    const uint64_t child = score_key(score + static_cast<double>(below));
    const uint64_t sibling =
        score_key((score - static_cast<double>(own)) + static_cast<double>(next));
    uint32_t holders = group.ballot(high == top);
    if ((holders & (holders - 1)) != 0) {  // the same for every lane: the low words decide
      const uint32_t low_top = group.max(high == top ? low : 0);
      holders = group.ballot(high == top && low == low_top);
    }
    // The lowest holder is chosen; what lies above its choice moves up by one position.
    const bool above = (holders & ((1u << lane) - 1)) != 0;
    const bool chosen = !above && (holders >> lane & 1) != 0;

    const int slot = taken + 1;
    if (chosen) {
      scratch.score[slot] = score;
      scratch.node[slot] = best_node;
    }
    const uint32_t child_node = node_word(slot, 0, node_depth(best_node) + 1, 0);
    const uint32_t sibling_node =
        node_word(node_parent(best_node), slot, node_depth(best_node), node_rank(best_node) + 1);
    const bool push_out = chosen && best_j == kHeld - 1;  // the sibling goes to the next lane
    const uint64_t pushed = group.shfl(push_out ? sibling : key[kHeld - 1], lane - 1);
    const uint32_t pushed_node = group.shfl(push_out ? sibling_node : node[kHeld - 1], lane - 1);
    const int from = chosen ? best_j : above ? -1 : kHeld;
    const uint64_t inserted = chosen ? sibling : pushed;
    const uint32_t inserted_node = chosen ? sibling_node : pushed_node;
    const int last = held < kHeld ? held : kHeld - 1, first = Group::kSize == 1 ? from : 0;
    for (int j = last; j >= first; --j) {  // a warp has no branch here, and keeps all in registers
      const int before = j > 0 ? j - 1 : 0;
      key[j] = j > from ? key[before] : key[j];
      node[j] = j > from ? node[before] : node[j];
      key[j] = j == from + 1 ? inserted : key[j];
      node[j] = j == from + 1 ? inserted_node : node[j];
      key[j] = j == from ? child : key[j];
      node[j] = j == from ? child_node : node[j];
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

// `table` is staged and synced (scratch may still be read for the request before until then).
template <class Group>
KDTREE_HD void build_ddtree(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                            const float *table, BuildScratch &scratch) {
  const int64_t root = load_id(p.root_tokens, p.root_tokens_dtype, b);
  const int64_t prefix = p.prefix_lens[b];
  int taken = -1;  // padding: not even the root
  if (root >= 0) {
    taken = grow_tree(group, p, table, scratch);
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

  for (int slot = group.lane(); slot <= p.budget; slot += group.size()) {
    const bool used = slot <= taken, is_root = used && slot == 0;
    const uint32_t node = used && !is_root ? scratch.node[slot] : 0;
    const int depth = node_depth(node);
    uint64_t visible = 0;
    for (int up = used ? slot : 0; up > 0; up = node_parent(scratch.node[up]))
      visible |= slot_bit(up);
    int64_t token = is_root ? root : 0;
    if (depth > 0)
      token = load_id(p.ids, p.ids_dtype,
                      b * p.ids_stride_b + (depth - 1) * p.ids_stride_l + node_rank(node));
    const int64_t out = b * (p.budget + 1) + slot;
    p.draft_tokens[out] = token;
    p.parents[out] = depth > 0 ? node_parent(node) : -1;
    p.depths[out] = depth;
    p.positions[out] = prefix + depth;
    p.next_token[out] = used ? scratch.child[slot] : -1;
    p.next_sibling[out] = used ? scratch.sibling[slot] : -1;
    p.visibility[out] = static_cast<int64_t>(visible);
    p.scores[out] = is_root ? 0.0f : used ? static_cast<float>(scratch.score[slot]) : -HUGE_VALF;
  }
  if (group.lane() == 0) p.num_nodes[b] = taken + 1;
}

}  // namespace kdtree::tree
