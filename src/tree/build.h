// build_ddtree: the best-first tree of one request.
//
// The frontier (what the reference keeps in a heap) has one entry for every slot taken so far: the
// next of its children, whose siblings before it are taken. Taking an entry moves it on to the next
// sibling, in place, and opens the children of the new slot.
//
// Equal scores are decided by rank tuples, and for that each entry knows its order among them,
// lexicographic, a prefix before its extensions. Taking an entry gives its order to the new slot's
// first child, and the next one to the sibling: all that could come between them are extensions of
// the child, which do not exist yet. So what was behind moves up by one, and no tuple is ever
// stored or compared.
//
// A lane of its own (BuildList) looks for the best entry in a list. Many lanes (BuildLanes) hold an
// entry each and know its place in the sorted frontier, so the best is known beforehand, and ties
// cost nothing: its lane hands out what follows it, all lanes compare their entry with both, and
// two ballots tell the places of the new ones. 32 lanes are enough for 64 nodes: after t nodes
// there are t + 1 entries of which 64 - t may still be taken, so what falls off the end is not
// missed.
//
// A step is a chain of dependent instructions from one choice to the next, in one warp that is
// alone: few of them and no branch is what makes it short.
// The tree is grown to the budget first; the stop rule of node_cost then cuts it, since what is
// taken never depends on it, and links follow from what each node was.
#pragma once

#include <math.h>
#include <string.h>

#include <type_traits>

#include "tree/exp.h"
#include "tree/limits.h"

namespace kdtree::tree {

constexpr int kParentBit = 16, kOrderBit = 24;

// A node, slots 1 up, as its step leaves it.
struct alignas(16) BuildNode {
  uint64_t child, sibling;  // keys of what follows it
  double score;
  uint32_t at_parent;    // where its log-prob is in the table, in bytes; its parent's slot << 16
  uint32_t below_order;  // where its first child's is, in bytes; its order << 24

  KDTREE_HD int at() const { return static_cast<int>(at_parent % (1u << kParentBit)) / 8; }
  KDTREE_HD int parent() const { return static_cast<int>(at_parent >> kParentBit); }
};
KDTREE_HD BuildNode plain_node(double score, int at, int parent) {
  return {0, 0, score, static_cast<uint32_t>(at * 8 | parent << kParentBit), 0};
}

struct BuildScratch {
  BuildNode node[kMaxQlen + 1];                         // [0] is not used; steps come in pairs
  double weight[kMaxQlen];                              // e^score, for the stop rule
  alignas(4) uint8_t slot_of[kMaxQlen + 3][kMaxK + 1];  // of a child, by parent and rank; 0: none
  int taken;                                            // slots without the root
};

// The log-probs of one request that can matter, as doubles: for each depth a row of k and a -inf,
// and a row of -inf below the last. So a step needs no bounds. What follows a dead node is never
// taken, whatever it is made of; for that there are three rows more, to be read. Staged in pieces
// of kStagedRows.
constexpr int kStagedRows = 16;
struct BuildTable {
  int levels, k, pitch, size;
  uint32_t inverse;  // of pitch

  KDTREE_HD explicit BuildTable(const kdtree_build_ddtree_params &p)
      : levels(static_cast<int>(p.depth < p.budget ? p.depth : p.budget)),
        k(static_cast<int>(p.k)),
        pitch(k + 1),
        size(rows(levels) * pitch),
        inverse((1u << 19) / pitch + 1) {}
  KDTREE_HD static constexpr int rows(int levels) {
    const int staged = (levels + kStagedRows) / kStagedRows * kStagedRows;
    return staged > levels + 4 ? staged : levels + 4;
  }
  // at / pitch: exact, since at x pitch is below 2^19.
  KDTREE_HD int row(int at) const { return static_cast<int>(at * inverse >> 19); }
};
constexpr int kMaxTable = BuildTable::rows(kMaxNodes) * (kMaxK + 1);
static_assert(kMaxTable * sizeof(double) <= 1 << kParentBit);
// Orders start up to kMaxQlen + 31, and every step may add one.
static_assert(kMaxQlen + 31 + kMaxNodes + 1 < 1 << (32 - kOrderBit));

// Returns whether this lane saw a log-prob above 0. NaN is dead like -inf.
template <class Group>
KDTREE_HD bool stage_build(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                           double *table) {
  // A row by 32 lanes, all rows of a piece at once; of each lane several loads before it waits for
  // one. What is behind a row or below the last one becomes -inf too.
  constexpr int kWide = Group::kSize < 32 ? 1 : 32, kAcross = kMaxK / kWide;
  constexpr int kTeams = Group::kSize / kWide, kAhead = kStagedRows / kTeams;
  const BuildTable shape(p);
  const int lane = group.lane() % kWide, team = group.lane() / kWide;
  float highest = -HUGE_VALF;
  for (int first = team; first <= shape.levels; first += kStagedRows) {
    const float *from = p.logprobs + b * p.logprobs_stride_b + first * p.logprobs_stride_l + lane;
    double *to = table + first * shape.pitch;
    float value[kAhead][kAcross];
    for (int i = 0; i < kAhead; ++i, from += kTeams * p.logprobs_stride_l) {
      for (int j = 0; j < kAcross; ++j) {
        value[i][j] = -HUGE_VALF;
        if (first + i * kTeams < shape.levels && lane + j * kWide < shape.k)
          value[i][j] = from[j * kWide];
      }
    }
    group.fence();
    for (int i = 0; i < kAhead; ++i, to += kTeams * shape.pitch) {
      for (int j = 0; j < kAcross; ++j) {
        const float logprob = value[i][j] > -HUGE_VALF ? value[i][j] : -HUGE_VALF;
        highest = logprob > highest ? logprob : highest;
        if (lane + j * kWide < shape.k) to[lane + j * kWide] = logprob;
      }
      if (lane == 0) to[shape.k] = -HUGE_VAL;
    }
  }
  return highest > 0;
}

// Makes +inf something finite that no float reaches: an infinite score would make NaN of its
// siblings.
template <class Group>
KDTREE_HD void cap_infinite(Group &group, const kdtree_build_ddtree_params &p, double *table) {
  const BuildTable shape(p);
  for (int at = group.lane(); at < shape.levels * shape.pitch; at += group.size())
    if (table[at] == HUGE_VAL) table[at] = 1e300;
  group.sync();
}

// A score as an integer, its key: the larger the score, the smaller. Scores of log-probs are not
// above 0 and never -0, so their bits are their keys; only kAnySign has more to do. The key of a
// NaN may come before all others.
template <bool kAnySign>
KDTREE_HD uint64_t flip_positive(uint64_t bits) {
  return kAnySign ? bits ^ (~(static_cast<int64_t>(bits) >> 63) & INT64_MAX) : bits;
}
template <bool kAnySign>
KDTREE_HD uint64_t score_key(double score) {
  uint64_t bits;
  memcpy(&bits, &score, sizeof bits);
  return flip_positive<kAnySign>(bits);
}
template <bool kAnySign>
KDTREE_HD double key_score(uint64_t key) {
  const uint64_t bits = flip_positive<kAnySign>(key);
  double score;
  memcpy(&score, &bits, sizeof score);
  return score;
}

// Whether it is above -inf, the last of all scores: by its high word.
KDTREE_HD bool is_alive(double score) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__double2hiint(score)) < 0xfff00000;
#else
  return score > -HUGE_VAL;
#endif
}

struct BuildEntry {
  double score;
  int at, below;  // in the table: its log-prob, and that of its own first child
  int parent;     // slot
  int order;      // by rank tuple among all entries
};

// The frontier of a lane of its own, which asks nothing of its group: entry i is that of slot i.
class BuildList {
 public:
  KDTREE_HD BuildList(SerialGroup &group, const BuildEntry &entry) { add(group, entry); }
  KDTREE_HD void add(SerialGroup &, const BuildEntry &entry) {
    score_[held_] = entry.score, order_[held_] = entry.order;
    at_[held_] = entry.at, below_[held_] = entry.below;
    ++held_;
  }

  // Takes the best nodes into scratch, slots taken + 1 to budget, and returns how many there are.
  KDTREE_HD int take(SerialGroup &group, const double *table, int pitch, int budget, int taken,
                     BuildScratch &scratch) {
    for (; taken < budget; ++taken) {
      int best = 0;
      for (int i = 1; i < held_; ++i) {
        if (score_[i] < score_[best]) continue;  // a branch that a CPU foresees
        if (score_[i] > score_[best] || order_[i] < order_[best]) best = i;
      }
      const double score = score_[best];
      if (score == -HUGE_VAL) break;
      const int slot = taken + 1, at = at_[best]++, below = below_[best], order = order_[best];
      scratch.node[slot] = plain_node(score, at, best);
      for (int i = 0; i < held_; ++i) order_[i] += order_[i] >= order;
      score_[best] = (score - table[at]) + table[at + 1];
      if (slot < budget) add(group, {score + table[below], below, below + pitch, slot, order});
    }
    return taken;
  }

 private:
  double score_[kMaxQlen];
  int order_[kMaxQlen], at_[kMaxQlen], below_[kMaxQlen];  // as BuildEntry's
  int held_ = 0;
};

// A move without a branch, which compilers would rather put there.
template <class T>
KDTREE_HD void move_if(bool when, T &to, T from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8)
    asm("{.reg .pred p; setp.ne.s32 p, %1, 0; @p mov.b64 %0, %2;}"
        : "+l"(to)
        : "r"(static_cast<int>(when)), "l"(from));
  else
    asm("{.reg .pred p; setp.ne.s32 p, %1, 0; @p mov.b32 %0, %2;}"
        : "+r"(to)
        : "r"(static_cast<int>(when)), "r"(from));
#else
  if (when) to = from;
#endif
}

template <class T>
KDTREE_HD void add_if(bool when, T &to, T what) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .pred p; setp.ne.s32 p, %1, 0; @p add.u32 %0, %0, %2;}"
      : "+r"(to)
      : "r"(static_cast<int>(when)), "r"(what));
#else
  if (when) to += what;
#endif
}

// The frontier of 32 lanes: the best 32 entries, one a lane.
template <class Group, bool kAnySign>
class BuildLanes {
 public:
  static constexpr int kSize = Group::kSize;
  static_assert(kSize == 32 && kMaxNodes <= 2 * kSize);

  // With one entry, and dead ones behind it.
  KDTREE_HD BuildLanes(Group &group, const BuildEntry &entry)
      : key_(key(group.lane() == 0 ? entry.score : -HUGE_VAL)),
        at_(entry.at * 8),
        below_(entry.below * 8),
        parent_(entry.parent),
        below_order_(below_ | (kMaxQlen + static_cast<uint32_t>(group.lane())) << kOrderBit),
        place_(group.lane()) {}

  KDTREE_HD void add(Group &group, const BuildEntry &entry) {
    const uint64_t its_key = key(entry.score);
    const uint32_t its_below = entry.below * 8;
    const uint32_t its_below_order = its_below | static_cast<uint32_t>(entry.order) << kOrderBit;
    const bool behind = key_ + (below_order_ > its_below_order) > its_key;
    const int its_place = count_lanes(group.ballot(!behind));
    place_ += behind;
    if (place_ == kSize) {
      key_ = its_key, below_order_ = its_below_order, place_ = its_place;
      at_ = entry.at * 8, below_ = its_below, parent_ = entry.parent;
    }
  }

  // As BuildList's.
  KDTREE_HD int take(Group &group, const double *table, int pitch, int budget, int taken,
                     BuildScratch &scratch) {
    if (taken == budget) return taken;
    best_ = place_ == 0;
    look(table);
    BuildNode *node = scratch.node + taken;
    bool more;
    // Two steps for one branch: what one too many takes is dropped. So is what a step takes after
    // it has found the best one dead: there are NaNs then.
    do {
      more = step(group, table, pitch, ++taken, *++node);
      more &= step(group, table, pitch, ++taken, *++node);
    } while (more && taken < budget);
    if (taken > budget) taken = budget;
    while (taken > 0 && !(scratch.node[taken].score > -HUGE_VAL)) --taken;
    return taken;
  }

 private:
  KDTREE_HD static uint64_t key(double score) { return score_key<kAnySign>(score); }

  // What would follow this lane's entry, for the next step.
  KDTREE_HD void look(const double *table) {
    const auto logprob = [&](uint32_t at) {
      return *reinterpret_cast<const double *>(reinterpret_cast<const char *>(table) + at);
    };
    const double score = key_score<kAnySign>(key_);
    child_ = key(score + logprob(below_));
    sibling_ = key((score - logprob(at_)) + logprob(at_ + 8));
  }

  // Takes the best entry, and returns whether it was alive.
  KDTREE_HD bool step(Group &group, const double *table, int pitch, int slot, BuildNode &record) {
    const BuildNode node = group.hand_out(best_,
                                          BuildNode{child_, sibling_, key_score<kAnySign>(key_),
                                                    at_ + (parent_ << kParentBit), below_order_},
                                          record);

    // From here on the best lane's entry is the sibling; but where all are compared with the
    // sibling, it stands for the child: so as many lanes are ahead of either as its place says. Of
    // equal keys the later in order is behind, as if its key were one more; the sibling is later
    // than the child.
    const bool later = below_order_ >= node.below_order;
    move_if(best_, key_, node.sibling);
    const uint64_t to_child = key_ + later;
    uint64_t to_sibling = to_child;
    move_if(best_, to_sibling, node.child);
    const bool behind_child = to_child > node.child, behind_sibling = to_sibling > node.sibling;
    const uint32_t before_child = group.ballot(!behind_child);
    const uint32_t before_sibling = group.ballot(!behind_sibling);

    // The child takes the lane of what falls off the end.
    const bool opens = ((place_ == kSize - 1) & behind_child & behind_sibling) |
                       (best_ & (before_sibling == 0xffffffff));
    const uint32_t pitch_bytes = pitch * 8, opened = node.below_order % (1u << kOrderBit),
                   opened_below = opened + pitch_bytes;
    add_if(best_, at_, 8u);
    move_if(opens, at_, opened);
    move_if(opens, below_, opened_below);
    move_if(opens, key_, node.child);
    look(table);

    const bool second = (place_ == 1) & !behind_child & !behind_sibling;
    const int sibling_place = count_lanes(before_sibling), child_place = count_lanes(before_child);
    add_if(behind_child, place_, 1);
    add_if(behind_sibling, place_, 1);
    place_ -= 1;
    move_if(best_, place_, sibling_place);
    move_if(opens, place_, child_place);
    add_if(later, below_order_, 1u << kOrderBit);
    move_if(opens, below_order_, node.below_order + pitch_bytes);
    move_if(opens, parent_, static_cast<uint32_t>(slot));
    best_ = second | (best_ & (before_sibling == 0)) | (opens & (before_child == 0));
    return is_alive(node.score);
  }

  uint64_t key_;
  uint32_t at_, below_;  // in bytes
  uint32_t parent_;
  uint32_t below_order_;  // as BuildNode's
  int place_;
  bool best_;  // place_ == 0, known before it
  uint64_t child_, sibling_;
};

// Takes nodes into scratch, slots 1 up, and returns how many. The first `seeded` are the chain.
template <bool kAnySign, class Group>
KDTREE_HD int grow_tree(Group &group, const kdtree_build_ddtree_params &p, const double *table,
                        int &seeded, BuildScratch &scratch) {
  const int pitch = BuildTable(p).pitch;
  // The root's entry or, after a chain, one for each of its slots, the deeper the earlier in order.
  double score = 0;
  bool take;
  const auto entry = [&] {
    const int at = seeded * pitch;
    score += table[at];
    take = p.chain_seed && score > -HUGE_VAL;
    return BuildEntry{take ? (score - table[at]) + table[at + 1] : score, at + take, at + pitch,
                      seeded, kMaxQlen - seeded};
  };
  seeded = 0;
  std::conditional_t<Group::kSize == 1, BuildList, BuildLanes<Group, kAnySign>> frontier(group,
                                                                                         entry());
  while (take) {
    if (group.lane() == 0) scratch.node[seeded + 1] = plain_node(score, seeded * pitch, seeded);
    ++seeded;
    frontier.add(group, entry());
  }
  const int taken = frontier.take(group, table, pitch, p.budget, seeded, scratch);
  group.sync();
  return taken;
}

// How many of `taken` nodes the stop rule of node_cost leaves; the `seeded` first are not subject
// to it.
template <class Group>
KDTREE_HD int cut_tree(Group &group, const kdtree_build_ddtree_params &p, int seeded, int taken,
                       BuildScratch &scratch) {
  for (int slot = group.lane() + 1; slot <= taken; slot += group.size())
    scratch.weight[slot] = exact_exp(scratch.node[slot].score);
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
    if (mine <= taken && mine > seeded) {
      const double cost_before = p.base_cost + static_cast<double>(p.node_cost[mine - 1]);
      const double cost_after = p.base_cost + static_cast<double>(p.node_cost[mine]);
      stop = !(after / cost_after > before / cost_before);
    }
    const uint32_t stops = group.ballot(stop);
    if (stops != 0) return first + lowest_lane(stops) - 1;
  }
  return taken;
}

// Grows the tree from the table, and leaves its size in scratch. any_sign: a log-prob is above 0.
template <class Group>
KDTREE_HD void build_nodes(Group &group, const kdtree_build_ddtree_params &p, double *table,
                           bool any_sign, BuildScratch &scratch) {
  int seeded, taken;
  if (any_sign) {
    cap_infinite(group, p, table);
    taken = grow_tree<true>(group, p, table, seeded, scratch);
  } else {
    taken = grow_tree<false>(group, p, table, seeded, scratch);
  }
  if (p.node_cost != nullptr) taken = cut_tree(group, p, seeded, taken, scratch);
  if (group.lane() == 0) scratch.taken = taken;
}

// No slot has a child yet. For `lanes` lanes that need not grow the tree.
KDTREE_HD void clear_links(int lane, int lanes, BuildScratch &scratch) {
  auto *words = reinterpret_cast<uint32_t *>(scratch.slot_of);
  for (int i = lane; i < static_cast<int>(sizeof scratch.slot_of / 4); i += lanes) words[i] = 0;
}

// Writes every field of the tree.
template <class Group>
KDTREE_HD void write_tree(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                          int64_t root, int64_t prefix, BuildScratch &scratch) {
  const BuildTable shape(p);
  const int taken = root < 0 ? -1 : scratch.taken;  // padding: not even the root
  const auto row = [&](const BuildNode &node) { return shape.row(node.at()); };
  const auto rank = [&](const BuildNode &node) { return node.at() - row(node) * shape.pitch; };
  for_slots(group, taken + 1, [&](int slot) {
    const BuildNode &mine = scratch.node[slot];
    if (slot > 0) scratch.slot_of[mine.parent()][rank(mine)] = static_cast<uint8_t>(slot);
  });
  group.sync();
  for_slots(group, p.budget + 1, [&](int slot) {
    const int64_t out = b * (p.budget + 1) + slot;
    const bool used = slot <= taken;
    int64_t token = used ? root : 0;
    int parent = -1, depth = 0, child = 0, sibling = 0;
    float score = used ? 0.0f : -HUGE_VALF;
    uint64_t visible = 0;
    if (used && slot > 0) {
      const BuildNode &mine = scratch.node[slot];
      token =
          load_id(p.ids, p.ids_dtype, b * p.ids_stride_b + row(mine) * p.ids_stride_l + rank(mine));
      parent = mine.parent();
      depth = row(mine) + 1;
      sibling = scratch.slot_of[parent][rank(mine) + 1];
      score = static_cast<float>(mine.score);
      visible = slot_bit(slot);
      for (int up = parent, left = depth; left > 1; --left) {
        visible |= slot_bit(up);
        up = scratch.node[up].parent();
      }
    }
    if (used) child = scratch.slot_of[slot][0];
    p.draft_tokens[out] = token;
    p.parents[out] = parent;
    p.depths[out] = depth;
    p.positions[out] = prefix + depth;
    p.next_token[out] = child > 0 ? child : -1;
    p.next_sibling[out] = sibling > 0 ? sibling : -1;
    p.visibility[out] = static_cast<int64_t>(visible);
    p.scores[out] = score;
  });
  if (group.lane() == 0) p.num_nodes[b] = taken + 1;
}

template <class Group>
KDTREE_HD void build_ddtree(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                            double *table, BuildScratch &scratch) {
  const int64_t root = load_id(p.root_tokens, p.root_tokens_dtype, b);
  const bool any_sign = group.any(stage_build(group, p, b, table));
  clear_links(group.lane(), group.size(), scratch);
  group.sync();
  if (root >= 0) build_nodes(group, p, table, any_sign, scratch);
  group.sync();
  write_tree(group, p, b, root, p.prefix_lens[b], scratch);
  group.sync();  // scratch may be used again
}

}  // namespace kdtree::tree
