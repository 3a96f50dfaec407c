// Rules of draft_topk that both houses share: which columns are real, where a row lies, which are
// live, what a log-prob is. The order itself is in tree/order.h.
#pragma once

#include <math.h>

#include "tree/limits.h"

namespace kdtree::tree {

// How many of `vocab` columns, from id vocab_start on, are not padding (vocab_size < 0: all).
KDTREE_HD int64_t real_columns(int64_t vocab, int64_t vocab_start, int64_t vocab_size) {
  if (vocab_size < 0) return vocab;
  const int64_t real = vocab_size - vocab_start;
  return real < 0 ? 0 : real < vocab ? real : vocab;
}

KDTREE_HD int64_t lead_rows(int ndim, const int64_t *dims) {
  int64_t rows = 1;
  for (int d = 0; d < ndim; ++d) rows *= dims[d];
  return rows;
}

// Where row `row` of [lead...] starts, in elements.
template <class Row>
KDTREE_HD int64_t lead_offset(int ndim, const int64_t *dims, const int64_t *strides, Row row) {
  int64_t offset = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int d = ndim - 1; d > 0; --d) {
    offset += row % static_cast<Row>(dims[d]) * strides[d];
    row /= static_cast<Row>(dims[d]);
  }
  return ndim > 0 ? offset + row * strides[0] : 0;
}

// Whether a request is no padding, by its root token.
KDTREE_HD bool is_live_request(const kdtree_draft_topk_params &p, int64_t request) {
  return load_id(p.root_tokens, p.root_tokens_dtype, request) >= 0;
}

// Never NaN: an infinite logit has log-prob 0, and in a row of -inf everything has -inf.
KDTREE_HD float log_prob(float logit, float lse) {
  if (lse == INFINITY && logit == lse) return 0;
  return lse == -INFINITY ? lse : logit - lse;
}

}  // namespace kdtree::tree
