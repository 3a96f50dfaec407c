// commit_kv: which rows of the cache move where, for one request. Nothing that the arrays hold
// leads outside the cache.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

struct Move {
  int64_t from, to;  // element offsets in a layer; `to` is -1 where nothing moves
};

// How many entries of accept_index count.
KDTREE_HD int count_moves(const kdtree_commit_kv_params &p, int64_t b) {
  const int32_t accepted = p.accept_token_num[b];
  if (accepted < 0) return 0;
  return static_cast<int>(accepted < p.qlen ? accepted + 1 : p.qlen);
}

// Element offset of the row that belongs to tree slot `slot`; -1 when it lies outside the cache.
KDTREE_HD int64_t slot_row(const kdtree_commit_kv_params &p, int64_t b, int slot) {
  int64_t page, row;
  if (p.cache_loc != nullptr) {
    const int64_t loc = p.cache_loc[b * p.cache_loc_stride_b + slot];
    if (loc < 0) return -1;
    page = loc / p.page_size;
    row = loc % p.page_size;
  } else {
    const int64_t position = int64_t(p.prefix_lens[b]) + slot;
    if (position < 0 || position / p.page_size >= p.block_table_width) return -1;
    page = p.block_table[b * p.block_table_stride_b + position / p.page_size];
    row = position % p.page_size;
  }
  if (page < 0 || page >= p.num_pages) return -1;
  return page * p.kv_stride_page + row * p.kv_stride_row;
}

// Where the row of accept_index[b,i] lies and goes.
KDTREE_HD Move accepted_move(const kdtree_commit_kv_params &p, int64_t b, int i) {
  const int32_t *accept_index = p.accept_index + b * p.accept_index_stride_b;
  const int32_t slot = accept_index[i];
  if (accept_index[0] < 0 || slot < 0 || slot >= p.qlen) return {-1, -1};
  const int64_t from = slot_row(p, b, slot);
  return {from, from < 0 ? -1 : slot_row(p, b, i)};
}

// Whether move i of `count` has something to write: it goes somewhere else, and no later one goes
// to the same row, which would win.
KDTREE_HD bool is_live(const Move *moves, int count, int i) {
  if (moves[i].to < 0 || moves[i].to == moves[i].from) return false;
  for (int later = i + 1; later < count; ++later)
    if (moves[later].to == moves[i].to) return false;
  return true;
}

}  // namespace kdtree::tree
