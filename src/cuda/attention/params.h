// What every attention kernel is given, and the rules they share: which keys a request has, which
// of them a row sees, where they lie, and how they are split.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "tree/limits.h"

namespace kdtree::cuda::attention {

constexpr int kDim = KDTREE_LATENT_DIM + KDTREE_ROPE_DIM;
constexpr int kLatent = KDTREE_LATENT_DIM;
constexpr int kSplitUnit = 64;  // keys; bounds of splits and pieces are multiples of it
// Keeps positions, look-ahead included, within an int.
constexpr int kMaxPrefix = INT32_MAX - 4096;

// A piece of a plan (plan.cu): some key blocks, of kSplitUnit, of a request.
struct alignas(16) Piece {
  int b;  // negative: there is none
  int begin, end;
  int place;  // of its partial results; negative: it is the whole request
  int nodes, prefix;
};

// A request whose `count` partial results, from `first` on, are to be merged.
struct Merge {
  int b, first, count;
};

struct Params {
  kdtree_verify_attn_params p;
  int rows;         // Q * H: the rows of a request, slot-major (row = slot * H + head)
  int tiles;        // of rows, per request
  int few_rows;     // of the last tile, where it is of the kind for few; else 0
  float load;       // of all tiles, in whole ones
  int splits;       // of keys, per request; 1: the kernel writes out and lse itself
  int page_shift;   // log2(page_size)
  int entry_bytes;  // of a table entry: 4, or 8 for int64 CSR rows
  int parts;        // at most, of a plan that takes the place of splits; else 0
  int max_pieces, max_merges;
  Piece *pieces;  // [max_pieces], of a plan
  Merge *merges;  // [max_merges]
  // Partial results of a place, b * splits + split without a plan, and a row: output (normalized,
  // kv_scale applied) and log2-sum-exp2, -inf where it holds no key that the row sees; the output
  // is not written then.
  float *partial_out;  // [places, rows, 512]
  float *partial_lse;  // [places, rows]

  // Of attention: one for each tile and split or piece.
  int64_t blocks() const { return (parts > 0 ? max_pieces : p.batch * splits) * tiles; }
};

__device__ __forceinline__ float read_kv_scale(const Params &a) {
  return a.p.kv_scale_ptr != nullptr ? *a.p.kv_scale_ptr : a.p.kv_scale;
}

// Of scores, for exponentials in base 2.
__device__ __forceinline__ float score_scale(const Params &a) {
  return a.p.sm_scale * read_kv_scale(a) * 1.44269504088896341f;
}

struct Request {
  int64_t b;
  int nodes;          // used slots; 0: padding, nothing of it is read
  int prefix;         // keys before the tree
  int length;         // prefix + nodes, or 0
  const char *table;  // its first entry: of the block table, or of its CSR rows
  int64_t entries;    // that may be read
};

// Of known lengths.
__device__ __forceinline__ Request find_request(const Params &a, int64_t b, int nodes, int prefix) {
  const kdtree_verify_attn_params &p = a.p;
  Request r{b, nodes, 0, 0, nullptr, 0};
  if (nodes == 0) return r;
  r.prefix = prefix;
  r.length = prefix + nodes;
  if (p.block_table != nullptr) {
    r.table = reinterpret_cast<const char *>(p.block_table + b * p.block_table_stride_b);
    r.entries = p.block_table_width;
  } else {
    const int64_t first = p.kv_indptr[b];
    r.table = static_cast<const char *>(p.kv_indices) + first * a.entry_bytes;
    if (first >= 0) r.entries = p.kv_indices_len - first;
  }
  return r;
}

__device__ __forceinline__ Request read_request(const Params &a, int64_t b) {
  const kdtree_verify_attn_params &p = a.p;
  const int prefix = p.prefix_lens[b];  // both loads at once
  const int64_t nodes = p.num_nodes != nullptr ? p.num_nodes[b] : p.qlen;
  return find_request(a, b, tree::clamp_nodes(nodes, p.qlen), min(max(prefix, 0), kMaxPrefix));
}

// The keys of one split. Pinned: the split length is kv_split, doubled until the request fits in
// `splits` of them, so it depends on nothing but the request. Otherwise equal shares.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange split_keys(const Params &a, int length, int split) {
  int64_t begin, end;
  if (a.p.kv_split > 0) {
    int64_t unit = min(a.p.kv_split, int64_t(1) << 31);
    while (unit * a.splits < length) unit *= 2;
    begin = unit * split;
    end = begin + unit;
  } else {
    const int64_t units = (int64_t(length) + kSplitUnit - 1) / kSplitUnit;
    begin = units * split / a.splits * kSplitUnit;
    end = units * (split + 1) / a.splits * kSplitUnit;
  }
  return {static_cast<int>(min(begin, int64_t(length))),
          static_cast<int>(min(end, int64_t(length)))};
}

// What a block works on: rows first_row.. of a request, and a piece of its keys.
struct Work {
  Request request;
  KeyRange keys;
  int first_row, rows;
  int place;  // of its partial results; negative: the results are whole
};

// Returns whether there is anything to do.
__device__ __forceinline__ bool find_work(const Params &a, int tile_rows, Work &work) {
  work.first_row = blockIdx.x % a.tiles * tile_rows;
  work.rows = min(tile_rows, a.rows - work.first_row);
  const int number = blockIdx.x / a.tiles;
  if (a.parts > 0) {
    const Piece piece = a.pieces[number];
    if (piece.b < 0) return false;
    work.request = find_request(a, piece.b, piece.nodes, piece.prefix);
    work.keys = {piece.begin * kSplitUnit, min(piece.end * kSplitUnit, work.request.length)};
    work.place = piece.place;
  } else {
    work.request = read_request(a, number / a.splits);
    work.keys = split_keys(a, work.request.length, number % a.splits);
    work.place = a.splits > 1 ? number : -1;
  }
  return true;
}

// Of the block's partial results: the first row.
__device__ __forceinline__ int64_t first_partial(const Params &a, const Work &work) {
  return int64_t(work.place) * a.rows + work.first_row;
}

// The results of a piece without keys, or of a padding request, by a block of Threads.
template <class T, int Threads>
__device__ void write_nothing(const Params &a, const Work &work) {
  const int64_t row = work.request.b * a.rows + work.first_row;
  for (int i = threadIdx.x; i < work.rows; i += Threads) {
    if (work.place >= 0)
      a.partial_lse[first_partial(a, work) + i] = -INFINITY;
    else if (a.p.lse != nullptr)
      a.p.lse[row + i] = -INFINITY;
  }
  if (work.place >= 0) return;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(a.p.out) + row * kLatent);
  for (int i = threadIdx.x; i < work.rows * (kLatent / 8); i += Threads) out[i] = {};
}

// The nodes that a slot sees: the visibility word, made safe.
__device__ __forceinline__ uint64_t seen_nodes(const kdtree_verify_attn_params &p, const Request &r,
                                               int slot) {
  if (slot >= r.nodes) return 0;
  if (p.visibility == nullptr) return tree::node_bits(slot + 1);
  const int64_t word = p.visibility[r.b * p.visibility_stride_b + slot];
  return static_cast<uint64_t>(word) & tree::node_bits(r.nodes);
}

// Whether a row that sees `nodes` sees the key at `offset` = position - prefix, below num_nodes.
__device__ __forceinline__ bool sees(uint64_t nodes, int offset) {
  return offset <= 0 || (nodes & tree::slot_bit(offset)) != 0;
}

// The same for 32 keys from `offset` > -32 on, as bits; keys past the tree are not seen.
__device__ __forceinline__ uint32_t sees32(uint64_t nodes, int offset) {
  const int skip = offset - 1;  // node bits before the first key
  if (skip >= 64) return 0;
  if (skip >= 0) return static_cast<uint32_t>(nodes >> skip);
  return static_cast<uint32_t>(nodes << -skip | ((uint64_t(1) << -skip) - 1));
}

// Where the table names the page of a position (for CSR: the row); nullptr: it does not. The entry
// itself is checked against num_pages where it is used.
__device__ __forceinline__ const void *entry_of(const Params &a, const Request &r, int position) {
  const int64_t i = position >> a.page_shift;
  return i < r.entries ? r.table + i * a.entry_bytes : nullptr;
}

}  // namespace kdtree::cuda::attention
