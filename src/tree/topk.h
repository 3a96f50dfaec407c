// Rules of draft_topk that both houses share: which columns are real, where a row lies, what a
// log-prob is. The order itself is in tree/order.h.
#pragma once

#include "tree/limits.h"
#include "tree/order.h"

namespace kdtree::tree {

// How many of `vocab` columns, from id vocab_start on, are not padding (vocab_size < 0: all).
KDTREE_HD int64_t real_columns(int64_t vocab, int64_t vocab_start, int64_t vocab_size) {
  if (vocab_size < 0) return vocab;
  const int64_t real = vocab_size - vocab_start;
  return real < 0 ? 0 : real < vocab ? real : vocab;
}

// Element offset of row number `row` of an array with these leading dimensions.
KDTREE_HD int64_t lead_offset(int64_t row, int ndim, const int64_t *dims, const int64_t *strides) {
  int64_t offset = 0;
  for (int i = ndim - 1; i >= 0; --i) {
    offset += row % dims[i] * strides[i];
    row /= dims[i];
  }
  return offset;
}

// Never NaN: an infinite logit has log-prob 0, and in a row of -inf everything has -inf.
KDTREE_HD float log_prob(float logit, float lse) {
  const float infinity = bits_float(0x7f800000u);
  if (lse == infinity && logit == lse) return 0;
  return lse == -infinity ? lse : logit - lse;
}

}  // namespace kdtree::tree
