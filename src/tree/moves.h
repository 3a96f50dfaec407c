// commit_kv: which rows of the cache move where, for one request. Nothing that the arrays hold
// leads outside the cache.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

struct Move {
  int64_t from, to;  // element offsets in a layer; `to` is -1 where nothing moves
};

// a = quotient * b + rest, a >= 0, b > 0. A 64-bit division is a function call on the GPU.
KDTREE_HD void divide(int64_t a, int64_t b, int64_t &quotient, int64_t &rest) {
  if ((a | b) >> 32 == 0) {
    quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    rest = static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
  } else {
    quotient = a / b;
    rest = a % b;
  }
}

// How many entries of accept_index count; `accepted` is the request's accept_token_num.
KDTREE_HD int count_moves(const kdtree_commit_kv_params &p, int32_t accepted) {
  if (accepted < 0) return 0;
  return static_cast<int>(accepted < p.qlen ? accepted + 1 : p.qlen);
}

// Element offset of the row that belongs to tree slot `slot`; -1 when it lies outside the cache.
KDTREE_HD int64_t slot_row(const kdtree_commit_kv_params &p, int64_t b, int slot) {
  const int64_t place = p.cache_loc != nullptr ? p.cache_loc[b * p.cache_loc_stride_b + slot]
                                               : int64_t(p.prefix_lens[b]) + slot;
  if (place < 0) return -1;
  int64_t page, row;
  divide(place, p.page_size, page, row);
  if (p.cache_loc == nullptr) {
    if (page >= p.block_table_width) return -1;
    page = p.block_table[b * p.block_table_stride_b + page];
  }
  if (page < 0 || page >= p.num_pages) return -1;
  return page * p.kv_stride_page + row * p.kv_stride_row;
}

// Where the row of accept_index[i] lies and goes; row_of(slot) is slot_row, or what it gave.
template <class RowOf>
KDTREE_HD Move accepted_move(const kdtree_commit_kv_params &p, int32_t root, int32_t slot, int i,
                             RowOf &&row_of) {
  if (root < 0 || slot < 0 || slot >= p.qlen) return {-1, -1};
  const int64_t from = row_of(slot);
  return {from, from < 0 ? -1 : row_of(i)};
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
