// commit_kv: which rows of the cache move where, for one request. Nothing that the arrays hold
// leads outside the cache.
#pragma once

#include "tree/limits.h"

namespace kdtree::tree {

struct Move {
  int64_t from, to;  // offsets in a layer, in the unit of the strides; -1 outside the cache
};

// log2 of the page size; -1 where it is no power of two.
inline int page_shift(const kdtree_commit_kv_params &p) {
  return (p.page_size & (p.page_size - 1)) == 0 ? __builtin_ctzll(p.page_size) : -1;
}

// a = quotient * b + rest, a >= 0, b > 0, b = 2^shift if shift >= 0. A 64-bit division is a
// function call on the GPU.
KDTREE_HD void divide(int64_t a, int64_t b, int shift, int64_t &quotient, int64_t &rest) {
  if (shift >= 0) {
    quotient = a >> shift;
    rest = a & (b - 1);
  } else if ((a | b) >> 32 == 0) {
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

// Where the row of tree slot `slot` lies; -1 if there is no such slot, or it lies outside the
// cache. `shift` is page_shift(p); `prefix` is the request's prefix_lens, and does not count with
// cache_loc.
KDTREE_HD int64_t slot_row(const kdtree_commit_kv_params &p, int shift, int64_t b, int32_t prefix,
                           int32_t slot) {
  if (slot < 0 || slot >= p.qlen) return -1;
  const int64_t place = p.cache_loc != nullptr ? p.cache_loc[b * p.cache_loc_stride_b + slot]
                                               : int64_t(prefix) + slot;
  if (place < 0) return -1;
  int64_t page, row;
  divide(place, p.page_size, shift, page, row);
  if (p.cache_loc == nullptr) {
    if (page >= p.block_table_width) return -1;
    page = p.block_table[b * p.block_table_stride_b + page];
  }
  if (page < 0 || page >= p.num_pages) return -1;
  return page * p.kv_stride_page + row * p.kv_stride_row;
}

// Whether a move has something to write, where they are written in order: a row that stays has not,
// unless others before it may have been written to its place.
KDTREE_HD bool is_live(const Move &move, bool after_others) {
  return move.from >= 0 && move.to >= 0 && (move.from != move.to || after_others);
}

}  // namespace kdtree::tree
