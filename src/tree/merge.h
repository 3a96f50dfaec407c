// merge_topk: one row of S sorted shards to one sorted top-k.
//
// The result so far and the next shard are merged into k places: a lane finds where its outputs
// start in the two lists by bisection (the merge path) and goes on from there, so a warp needs
// about log2(k) + k / 32 steps a shard, a lone lane k. Whatever the lists hold, an output at place
// o reads places up to o only: nothing is out of bounds if a list is not sorted.
#pragma once

#include <math.h>

#include "tree/order.h"
#include "tree/topk.h"

namespace kdtree::tree {

struct alignas(16) Candidate {  // one 16-byte access
  int64_t id;                   // -1: an empty place
  uint32_t key;                 // value_key; 0 in an empty place
};

struct MergeScratch {
  Candidate list[3][kMaxK];
};

// The order of the top-k; an id of -1 is the largest as an unsigned number.
KDTREE_HD bool comes_before(const Candidate &a, const Candidate &b) {
  return a.key != b.key ? a.key > b.key : static_cast<uint64_t>(a.id) < static_cast<uint64_t>(b.id);
}

// The lane's block of one output list: the first k of the two lists together.
template <class Group>
KDTREE_HD void merge_lists(Group &group, const Candidate *a, const Candidate *b, int k,
                           Candidate *out) {
  constexpr int kHeld = (kMaxK + Group::kSize - 1) / Group::kSize;
  const int begin = group.lane() * kHeld;
  const int end = begin + kHeld < k ? begin + kHeld : k;
  if (begin >= end) return;
  int low = 0, high = begin;  // how many of `begin` outputs come from a
  while (low < high) {
    const int middle = (low + high) / 2;
    if (comes_before(b[begin - 1 - middle], a[middle]))
      high = middle;
    else
      low = middle + 1;
  }
  int i = low, j = begin - low;
  for (int o = begin; o < end; ++o) {
    const Candidate from_a = a[i], from_b = b[j];
    const bool take_b = comes_before(from_b, from_a);
    out[o] = take_b ? from_b : from_a;
    (take_b ? j : i) += 1;
  }
}

template <class Group>
KDTREE_HD void merge_topk(Group &group, const kdtree_merge_topk_params &p, int64_t row,
                          MergeScratch &scratch) {
  constexpr int kHeld = (kMaxK + Group::kSize - 1) / Group::kSize;
  const float *values =
      p.values + lead_offset(p.lead_ndim, p.lead_dims, p.values_lead_strides, row);
  const int64_t ids = lead_offset(p.lead_ndim, p.lead_dims, p.ids_lead_strides, row);
  const float *lse = p.lse + lead_offset(p.lead_ndim, p.lead_dims, p.lse_lead_strides, row);

  Candidate *result = scratch.list[0], *shard = scratch.list[1], *merged = scratch.list[2];
  // A shard ahead, so that its load overlaps the merge of the one before.
  float next_value[kHeld];
  int64_t next_id[kHeld];
  for (int64_t s = 0; s <= p.shards; ++s) {
    if (s > 0) {
      Candidate *list = s == 1 ? result : shard;
      for (int j = 0; j < kHeld; ++j) {
        const int place = group.lane() + j * group.size();
        if (place < p.k)
          list[place] =
              next_id[j] < 0 ? Candidate{-1, 0} : Candidate{next_id[j], value_key(next_value[j])};
      }
    }
    if (s < p.shards) {
      for (int j = 0; j < kHeld; ++j) {
        const int place = group.lane() + j * group.size();
        if (place >= p.k) continue;
        next_value[j] = values[s * p.values_shard_stride + place];
        next_id[j] = load_id(p.ids, p.ids_dtype, ids + s * p.ids_shard_stride + place);
      }
    }
    group.sync();  // before any store too: the lists may still be read for the row before
    if (s > 1) {
      merge_lists(group, result, shard, p.k, merged);
      group.sync();
      Candidate *old = result;
      result = merged;
      merged = old;
    }
  }

  // Every lane sums for itself, in shard order: the same bits with any group.
  uint32_t top_key = value_key(-HUGE_VALF);
  for (int64_t s = 0; s < p.shards; ++s) {
    const uint32_t key = value_key(lse[s * p.lse_shard_stride]);
    top_key = key > top_key ? key : top_key;
  }
  const float top = key_value(top_key);
  float total = top;
  if (top - top == 0) {  // finite
    float sum = 0;
    for (int64_t s = 0; s < p.shards; ++s)
      sum += expf(key_value(value_key(lse[s * p.lse_shard_stride])) - top);
    total = top + logf(sum);
  }

  for (int place = group.lane(); place < p.k; place += group.size()) {
    const Candidate candidate = result[place];
    const float value = candidate.id < 0 ? -HUGE_VALF : key_value(candidate.key);
    p.logprobs[row * p.k + place] = log_prob(value, total);
    p.out_ids[row * p.k + place] = candidate.id;
  }
  if (group.lane() == 0) p.out_lse[row] = total;
}

}  // namespace kdtree::tree
