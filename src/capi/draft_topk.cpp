#include <algorithm>

#include "capi/check.h"

namespace kdtree::capi {

static bool check_draft_topk(const kdtree_draft_topk_params &p, Device) {
  check_dtype("logits", p.logits_dtype, {KDTREE_BF16, KDTREE_F16, KDTREE_F32});
  check_range("vocab", p.vocab, 1, INT32_MAX);
  check_range("vocab_start", p.vocab_start, 0, INT64_MAX - p.vocab);
  check_range("k", p.k, 1, std::min<int64_t>(KDTREE_MAX_K, p.vocab));
  const int64_t size = dtype_size(p.logits_dtype);
  Dim lead[KDTREE_MAX_LEAD_DIMS];
  const int64_t rows =
      check_lead_dims(p.lead_ndim, p.lead_dims, "logits_lead_strides", p.logits_lead_strides, lead);
  const bool padded = p.root_tokens != nullptr;
  if (padded) {
    check_dtype("root_tokens", p.root_tokens_dtype, {KDTREE_I32, KDTREE_I64});
    check_range("lead_ndim", p.lead_ndim, 1, KDTREE_MAX_LEAD_DIMS);
    check_pointer("root_tokens", p.root_tokens, dtype_size(p.root_tokens_dtype));
  }
  if (rows == 0) return false;
  check_pointer("logits", p.logits, size);
  check_pointer("logprobs", p.logprobs, 4);
  check_pointer("ids", p.ids, 8);
  check_pointer("lse", p.lse, 4);
  check_no_overlap(
      {extent("logprobs", p.logprobs, 4, {{rows * p.k, 1}}),
       extent("ids", p.ids, 8, {{rows * p.k, 1}}), extent("lse", p.lse, 4, {{rows, 1}})},
      {extent("logits", p.logits, size,
              {lead[0], lead[1], lead[2], lead[3], lead[4], lead[5], {p.vocab, 1}}),
       extent("root_tokens", p.root_tokens, dtype_size(p.root_tokens_dtype),
              {{padded ? p.lead_dims[0] : 0, 1}})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_draft_topk(const kdtree_draft_topk_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_draft_topk, cpu::draft_topk, cuda::draft_topk);
}
