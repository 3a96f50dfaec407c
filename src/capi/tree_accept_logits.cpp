#include <algorithm>

#include "capi/check.h"

namespace kdtree::capi {

static bool check_tree_accept_logits(const kdtree_tree_accept_logits_params &p, Device) {
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  check_range("vocab", p.vocab, 1, INT32_MAX);
  check_dtype("logits", p.logits_dtype, {KDTREE_BF16, KDTREE_F16, KDTREE_F32});
  check_dtype("draft_tokens", p.draft_tokens_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("next_token", p.next_token_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("next_sibling", p.next_sibling_dtype, {KDTREE_I32, KDTREE_I64});
  if (p.temperature_ptr == nullptr && !(p.temperature >= 0))
    throw ValueError("temperature: expected at least 0, got " + std::to_string(p.temperature));
  if (p.batch == 0) return false;

  const int64_t size = dtype_size(p.logits_dtype);
  const int64_t draft_size = dtype_size(p.draft_tokens_dtype);
  const int64_t token_size = dtype_size(p.next_token_dtype);
  const int64_t sibling_size = dtype_size(p.next_sibling_dtype);
  check_pointer("draft_tokens", p.draft_tokens, draft_size);
  check_pointer("next_token", p.next_token, token_size);
  check_pointer("next_sibling", p.next_sibling, sibling_size);
  check_pointer("num_nodes", p.num_nodes, 4);
  if (p.positions != nullptr) check_pointer("positions", p.positions, 8);
  check_pointer("logits", p.logits, size);
  if (p.temperature_ptr != nullptr) check_pointer("temperature", p.temperature_ptr, 4);
  if (p.temperature_ptr != nullptr || p.temperature > 0 || p.seeds != nullptr)
    check_pointer("seeds", p.seeds, 8);
  check_pointer("accept_index", p.accept_index, 4);
  check_pointer("accept_token_num", p.accept_token_num, 4);
  check_pointer("accept_tokens", p.accept_tokens, 8);

  const int64_t far = (int64_t(1) << 60) / (p.batch * size);
  check_range("logits_stride_b", p.logits_stride_b, -far, far);
  check_range("logits_stride_q", p.logits_stride_q, -far, far);
  const Dim b{p.batch, 1}, q{p.qlen, 1}, bq{p.batch * p.qlen, 1};
  check_no_overlap(
      {extent("accept_index", p.accept_index, 4, {bq}),
       extent("accept_token_num", p.accept_token_num, 4, {b}),
       extent("accept_tokens", p.accept_tokens, 8, {bq})},
      {extent("draft_tokens", p.draft_tokens, draft_size, {{p.batch, p.draft_tokens_stride_b}, q}),
       extent("next_token", p.next_token, token_size, {{p.batch, p.next_token_stride_b}, q}),
       extent("next_sibling", p.next_sibling, sibling_size,
              {{p.batch, p.next_sibling_stride_b}, q}),
       extent("num_nodes", p.num_nodes, 4, {b}),
       extent("positions", p.positions, 8, {{p.batch, p.positions_stride_b}, q}),
       extent("logits", p.logits, size,
              {{p.batch, p.logits_stride_b}, {p.qlen, p.logits_stride_q}, {p.vocab, 1}}),
       extent("temperature", p.temperature_ptr, 4, {b}), extent("seeds", p.seeds, 8, {b})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_tree_accept_logits(const kdtree_tree_accept_logits_params *params,
                                         void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_tree_accept_logits, cpu::tree_accept_logits,
                      cuda::tree_accept_logits);
}
