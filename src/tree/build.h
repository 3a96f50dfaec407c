// build_ddtree: the best-first tree of one request.
//
// The frontier (what the reference keeps in a heap) has one entry for every slot taken so far: the
// next of its children, whose siblings before it are taken. Taking an entry moves it on to the next
// sibling, in place, and opens the children of the new slot. So slots are spread over the lanes,
// and all that travels between lanes is one child.
//
// Equal scores are decided by rank tuples, and for that each entry knows its place among them in
// lexicographic order, a prefix before its extensions. Taking the entry at a place puts the new
// slot's first child there and the next sibling right after it: all that could come between them
// are extensions of the child, which do not exist yet. So what was at that place or after moves up
// by one, and no tuple is ever stored or compared.
//
// A step is one chain of dependent instructions, from a choice to the next, so everything in it is
// there to be short: while the group chooses, each lane already scores what follows its own best,
// and what is not part of the chain is done in its waits.
// The tree is grown to the budget first; the stop rule of node_cost then cuts it, since what is
// taken never depends on it, and links follow from what each node was.
#pragma once

#include <math.h>
#include <string.h>

#include "tree/exp.h"
#include "tree/limits.h"

namespace kdtree::tree {

constexpr int kMaxLanes = 32;

struct BuildScratch {
  double score[kMaxQlen + kMaxLanes];    // behind the slots, a place for each lane to waste a store
  double weight[kMaxQlen];               // e^score, for the stop rule
  uint32_t node[kMaxQlen + kMaxLanes];   // parent | place in the table << 8; [0] is not used
  uint8_t slot_of[kMaxQlen][kMaxK + 1];  // of a child, by parent and rank; 0: not taken
  int taken;                             // slots without the root
};

// The log-probs of one request that can matter, as doubles: a row of k and a -inf for each depth,
// and -inf for as far as a step may look behind them. So a step needs no bounds.
struct BuildTable {
  int levels, k, pitch, size;
  uint32_t inverse;  // of pitch

  KDTREE_HD explicit BuildTable(const kdtree_build_ddtree_params &p)
      : levels(static_cast<int>(p.depth < p.budget ? p.depth : p.budget)),
        k(static_cast<int>(p.k)),
        pitch(k + 1),
        size((levels + 1) * pitch + 1),
        inverse((1u << 19) / pitch + 1) {}
  // at / pitch: exact, since at x pitch is below 2^19.
  KDTREE_HD int row(int at) const { return static_cast<int>(at * inverse >> 19); }
};
constexpr int kMaxTable = (kMaxNodes + 1) * (kMaxK + 1) + 1;

// NaN is dead like -inf, and +inf is something finite that no float reaches: an infinite score
// would make NaN of its siblings.
KDTREE_HD double table_value(float logprob) {
  const double value = logprob > -HUGE_VALF ? logprob : -HUGE_VALF;
  return value < 1e300 ? value : 1e300;
}

template <class Group>
KDTREE_HD void stage_build(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                           double *table) {
  // Lanes side by side in a row, as many rows at once as there are lanes for; of each lane several
  // loads before it waits for one.
  constexpr int kWide = Group::kSize < 32 ? Group::kSize : 32, kRows = Group::kSize / kWide;
  constexpr int kAhead = kWide == 32 ? 3 : 1, kAcross = kWide == 32 ? kMaxK / kWide : 1;
  const BuildTable shape(p);
  const int lane = group.lane() % kWide, team = group.lane() / kWide;
  const float *logprobs = p.logprobs + b * p.logprobs_stride_b;
  for (int first = team; first <= shape.levels; first += kAhead * kRows) {
    for (int start = lane; start < shape.pitch; start += kAcross * kWide) {
      float value[kAhead][kAcross];
      for (int i = 0; i < kAhead; ++i) {
        const int row = first + i * kRows;
        for (int j = 0; j < kAcross; ++j) {
          const int rank = start + j * kWide;
          value[i][j] = -HUGE_VALF;
          if (row < shape.levels && rank < shape.k)
            value[i][j] = logprobs[row * p.logprobs_stride_l + rank];
        }
      }
      for (int i = 0; i < kAhead; ++i) {
        const int row = first + i * kRows;
        for (int j = 0; j < kAcross; ++j) {
          const int rank = start + j * kWide;
          if (row <= shape.levels && rank < shape.pitch)
            table[row * shape.pitch + rank] = table_value(value[i][j]);
        }
      }
    }
  }
  if (group.lane() == 0) table[shape.size - 1] = -HUGE_VAL;
}

// A node as grow_tree leaves it.
struct BuildNode {
  int parent, row, rank;
  KDTREE_HD BuildNode(const BuildTable &shape, uint32_t node)
      : parent(node & 0xff), row(shape.row(node >> 8)), rank((node >> 8) - row * shape.pitch) {}
};

// A score as an integer: larger score, larger key. That of -inf is kDead: what is behind it is
// never taken. A score is never -0.
constexpr uint64_t kDead = 0x000fffffffffffff;
KDTREE_HD uint64_t score_key(double score) {
  int64_t bits;
  memcpy(&bits, &score, sizeof bits);
  return static_cast<uint64_t>(bits ^ (bits >> 63 | INT64_MIN));
}
KDTREE_HD double key_score(uint64_t key) {
  const int64_t bits = static_cast<int64_t>(key) ^ (~static_cast<int64_t>(key) >> 63 | INT64_MIN);
  double score;
  memcpy(&score, &bits, sizeof score);
  return score;
}

// The entries of a lane: those of slots lane, lane + size, ...
template <class Group>
struct BuildEntries {
  static constexpr int kMost = kMaxNodes / Group::kSize;
  uint64_t key[kMost];
  int at[kMost];     // the next child, in the table
  int below[kMost];  // where that child's children are
  int order[kMost];  // among all entries, by rank tuple: below kOrders
};
constexpr uint32_t kOrders = 256;

// array[j]; for a few entries without an index, which registers do not have.
template <int kHeld>
KDTREE_HD int entry_of(const int *array, int j) {
  if constexpr (kHeld > 2) return array[j];
  return kHeld == 2 && j == 1 ? array[1] : array[0];
}

// What a lane offers: the first of its entries, and what would follow that.
struct BuildOffer {
  uint64_t key, child, sibling;
  double score;
  int j, at, below, order;
};

// Takes nodes until there are `most`, with the first kHeld entries of each lane in use; returns
// whether there are.
template <int kHeld, class Group>
KDTREE_HD bool take_nodes(Group &group, BuildEntries<Group> &entries, const double *table,
                          int pitch, int most, int &taken, BuildScratch &scratch) {
  constexpr bool kAlone = Group::kSize == 1;
  constexpr uint32_t kLane = Group::kSize - 1;  // the bits of a lane's number
  const int lane = group.lane();
  auto &key = entries.key;
  auto &at = entries.at, &below = entries.below, &order = entries.order;

  BuildOffer best;
  uint32_t bid, top, opened_place, holders;
  uint64_t opened;
  // Everything from one update of the entries to the next, in one piece: a lane's offer, the
  // highest bid and, before it is sure that only one lane bids so high, the child of the winner.
  // In a bid the number of the lane takes the place of the lowest bits.
  const auto choose = [&] {
    // A lane of its own skips what is empty.
    const int held = !kAlone ? kHeld : taken < kHeld ? taken + 1 : kHeld;
    int j = 0, first = order[0];
    best.key = key[0];
    uint32_t high = static_cast<uint32_t>(key[0] >> 32);
    for (int i = 1; i < held; ++i) {
      if (kAlone && key[i] < best.key) continue;  // a branch that a CPU foresees
      const uint32_t other = static_cast<uint32_t>(key[i] >> 32);
      high = other > high ? other : high;
      const bool equal = key[i] == best.key;
      if ((key[i] > best.key) | (equal & (order[i] < first)))
        best.key = key[i], first = order[i], j = i;
    }
    best.j = j, best.order = first;
    best.at = entry_of<kHeld>(at, j), best.below = entry_of<kHeld>(below, j);
    bid = (high & ~kLane) | static_cast<uint32_t>(lane);
    top = group.max(bid);
    best.score = key_score(best.key);
    best.child = score_key(best.score + table[best.below]);
    best.sibling = score_key((best.score - table[best.at]) + table[best.at + 1]);
    const int winner = static_cast<int>(top & kLane);
    opened = group.shfl(best.child, winner);
    opened_place = group.shfl(static_cast<uint32_t>(best.below) * kOrders + best.order, winner);
    holders = group.ballot((bid ^ top) <= kLane);
  };

  for (choose(); taken < most; choose()) {
    if (top <= kDead >> 32) return false;
    int winner = static_cast<int>(top & kLane);
    if ((holders & (holders - 1)) != 0) {  // the same for every lane: the bits below, then order
      bool ahead = (bid ^ top) <= kLane;
      const uint32_t low = ahead ? static_cast<uint32_t>(best.key >> 5) : 0;
      const uint32_t low_top = group.max(low);
      ahead = ahead && low == low_top;
      const uint32_t last = (static_cast<uint32_t>(best.key) % 32 + 1) * kOrders - 1 - best.order;
      winner = static_cast<int>(group.max(ahead ? last << 5 | lane : 0) & kLane);
      opened = group.shfl(best.child, winner);
      opened_place = group.shfl(static_cast<uint32_t>(best.below) * kOrders + best.order, winner);
    }
    const int slot = ++taken, new_at = opened_place / kOrders, new_order = opened_place % kOrders;
    const bool won = lane == winner;
    for (int j = 0; j < (kAlone ? slot : kHeld); ++j) order[j] += order[j] >= new_order;
    const auto update = [&](int j, bool moves, bool opens) {
      key[j] = opens ? opened : moves ? best.sibling : key[j];
      at[j] = opens ? new_at : at[j] + moves;
      below[j] = opens ? new_at + pitch : below[j];
      order[j] = opens ? new_order : order[j];
    };
    if constexpr (kAlone) {
      update(best.j, true, false);
      if (slot < kMaxNodes) update(slot, false, true);
    } else {
      for (int j = 0; j < kHeld; ++j)
        update(j, won & (j == best.j), slot == lane + j * Group::kSize);
    }
    const int record = won ? slot : kMaxQlen + lane;  // a store for all is less than a branch
    scratch.score[record] = best.score;
    scratch.node[record] = static_cast<uint32_t>(best.at << 8 | (best.j * Group::kSize + lane));
  }
  return true;
}

// Takes nodes into scratch, slots 1 up, and returns how many. The first `seeded` are the chain.
template <class Group>
KDTREE_HD int grow_tree(Group &group, const kdtree_build_ddtree_params &p, const double *table,
                        int &seeded, BuildScratch &scratch) {
  constexpr int kMost = BuildEntries<Group>::kMost;
  const int lane = group.lane(), pitch = BuildTable(p).pitch;
  BuildEntries<Group> entries;
  for (int j = 0; j < kMost; ++j)
    entries.key[j] = kDead, entries.at[j] = entries.below[j] = entries.order[j] = 0;

  // The root's entry or, after a chain, one for each of its slots, the deeper the earlier in order.
  double score = 0;
  for (seeded = 0;; ++seeded) {
    const int at = seeded * pitch;
    score += table[at];
    const bool take = p.chain_seed && score > -HUGE_VAL;
    const uint64_t key = score_key(take ? (score - table[at]) + table[at + 1] : score);
    for (int j = 0; j < kMost; ++j)
      if (seeded == lane + j * Group::kSize)
        entries.key[j] = key, entries.at[j] = at + take, entries.below[j] = at + pitch,
        entries.order[j] = kMaxQlen - seeded;
    if (!take) break;
    if (lane == 0) {
      scratch.score[seeded + 1] = score;
      scratch.node[seeded + 1] = static_cast<uint32_t>(at << 8 | seeded);
    }
  }

  int taken = seeded;
  bool more = true;
  if constexpr (kMost == 2) {  // one entry is quicker than two, while slots are few
    const int most = p.budget < Group::kSize ? p.budget : Group::kSize - 1;
    if (taken < most) more = take_nodes<1>(group, entries, table, pitch, most, taken, scratch);
  }
  if (more) take_nodes<kMost>(group, entries, table, pitch, p.budget, taken, scratch);
  group.sync();
  return taken;
}

// How many of `taken` nodes the stop rule of node_cost leaves; the `seeded` first are not subject
// to it.
template <class Group>
KDTREE_HD int cut_tree(Group &group, const kdtree_build_ddtree_params &p, int seeded, int taken,
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

// Grows the tree from the table, and leaves its size in scratch.
template <class Group>
KDTREE_HD void build_nodes(Group &group, const kdtree_build_ddtree_params &p, const double *table,
                           BuildScratch &scratch) {
  int seeded;
  int taken = grow_tree(group, p, table, seeded, scratch);
  if (p.node_cost != nullptr) taken = cut_tree(group, p, seeded, taken, scratch);
  if (group.lane() == 0) scratch.taken = taken;
}

// Writes every field of the tree.
template <class Group>
KDTREE_HD void write_tree(Group &group, const kdtree_build_ddtree_params &p, int64_t b,
                          int64_t root, int64_t prefix, BuildScratch &scratch) {
  const BuildTable shape(p);
  const int taken = root < 0 ? -1 : scratch.taken;  // padding: not even the root
  const auto node = [&](int slot) { return BuildNode(shape, scratch.node[slot]); };
  for_slots(group, taken + 1, [&](int slot) {
    scratch.slot_of[slot][0] = 0;
    if (slot > 0) scratch.slot_of[node(slot).parent][node(slot).rank + 1] = 0;
  });
  group.sync();
  for_slots(group, taken + 1, [&](int slot) {
    if (slot > 0) scratch.slot_of[node(slot).parent][node(slot).rank] = static_cast<uint8_t>(slot);
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
      const BuildNode mine = node(slot);
      token =
          load_id(p.ids, p.ids_dtype, b * p.ids_stride_b + mine.row * p.ids_stride_l + mine.rank);
      parent = mine.parent;
      depth = mine.row + 1;
      sibling = scratch.slot_of[parent][mine.rank + 1];
      score = static_cast<float>(scratch.score[slot]);
      for (int up = slot; up > 0; up = scratch.node[up] & 0xff) visible |= slot_bit(up);
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
  stage_build(group, p, b, table);
  group.sync();
  if (root >= 0) build_nodes(group, p, table, scratch);
  group.sync();
  write_tree(group, p, b, root, p.prefix_lens[b], scratch);
  group.sync();  // scratch may be used again
}

}  // namespace kdtree::tree
