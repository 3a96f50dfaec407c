// The kernels under verify_attn.
#pragma once

#include "cuda/attention/params.h"
#include "ops.h"

namespace kdtree::cuda::attention {

// Writes pieces and merges, from the lengths of the requests; at_once: blocks that the GPU runs.
void plan(const Params &params, int at_once, Stream stream);

// Merges the partial results of every row into out and lse.
void combine(const Params &params, Stream stream);

}  // namespace kdtree::cuda::attention

namespace kdtree::cuda::sm80 {

// Rows of a block, and how many blocks of that size an SM runs at once.
constexpr int tile_rows(int64_t rows) {
  return rows <= 16 ? 16 : 64;
}
constexpr int blocks_per_sm(int64_t rows) {
  return rows <= 16 ? 2 : 1;
}
void attention(const attention::Params &params, Stream stream);

}  // namespace kdtree::cuda::sm80

namespace kdtree::cuda::sm90 {

// 64-row tiles, a block an SM; the last one may be of a kind for few rows, up to kFewRows.
constexpr int kFewRows = 16;
void attention(const attention::Params &params, Stream stream);

}  // namespace kdtree::cuda::sm90
