#include "capi/check.h"

namespace kdtree::capi {

static bool check_tree_accept(const kdtree_tree_accept_params &p, Device) {
  check_dtype("draft_tokens", p.draft_tokens_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("next_token", p.next_token_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("next_sibling", p.next_sibling_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("target_predict", p.target_predict_dtype, {KDTREE_I32, KDTREE_I64});
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  if (p.batch == 0) return false;
  check_pointer("num_nodes", p.num_nodes, 4);
  check_pointer("accept_index", p.accept_index, 4);
  check_pointer("accept_token_num", p.accept_token_num, 4);
  check_pointer("accept_tokens", p.accept_tokens, 8);
  const auto input = [&](const char *name, const void *ptr, int32_t dtype, int64_t stride_b) {
    check_pointer(name, ptr, dtype_size(dtype));
    return extent(name, ptr, dtype_size(dtype), {{p.batch, stride_b}, {p.qlen, 1}});
  };
  const Dim b{p.batch, 1}, bq{p.batch * p.qlen, 1};
  check_no_overlap(
      {extent("accept_index", p.accept_index, 4, {bq}),
       extent("accept_token_num", p.accept_token_num, 4, {b}),
       extent("accept_tokens", p.accept_tokens, 8, {bq})},
      {input("draft_tokens", p.draft_tokens, p.draft_tokens_dtype, p.draft_tokens_stride_b),
       input("next_token", p.next_token, p.next_token_dtype, p.next_token_stride_b),
       input("next_sibling", p.next_sibling, p.next_sibling_dtype, p.next_sibling_stride_b),
       input("target_predict", p.target_predict, p.target_predict_dtype, p.target_predict_stride_b),
       extent("num_nodes", p.num_nodes, 4, {b})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_tree_accept(const kdtree_tree_accept_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_tree_accept, cpu::tree_accept, cuda::tree_accept);
}
