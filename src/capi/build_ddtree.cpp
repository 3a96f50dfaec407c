#include <cmath>

#include "capi/check.h"

namespace kdtree::capi {

static bool check_build_ddtree(const kdtree_build_ddtree_params &p, Device) {
  check_dtype("ids", p.ids_dtype, {KDTREE_I32, KDTREE_I64});
  check_dtype("root_tokens", p.root_tokens_dtype, {KDTREE_I32, KDTREE_I64});
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("depth", p.depth, 0, INT32_MAX);
  check_range("k", p.k, 1, KDTREE_MAX_K);
  check_range("budget", p.budget, 0, KDTREE_MAX_QLEN - 1);
  const int64_t qlen = p.budget + 1;
  if (p.node_cost != nullptr) {
    check_pointer("node_cost", p.node_cost, 4);
    if (!std::isfinite(p.base_cost))
      throw ValueError("base_cost: expected a finite number, got " + std::to_string(p.base_cost));
  }
  if (p.batch == 0) return false;
  const int64_t id_size = dtype_size(p.ids_dtype), root_size = dtype_size(p.root_tokens_dtype);
  if (p.depth > 0) {
    check_pointer("logprobs", p.logprobs, 4);
    check_pointer("ids", p.ids, id_size);
  }
  check_pointer("root_tokens", p.root_tokens, root_size);
  check_pointer("prefix_lens", p.prefix_lens, 4);
  check_pointer("draft_tokens", p.draft_tokens, 8);
  check_pointer("parents", p.parents, 4);
  check_pointer("depths", p.depths, 4);
  check_pointer("positions", p.positions, 8);
  check_pointer("next_token", p.next_token, 8);
  check_pointer("next_sibling", p.next_sibling, 8);
  check_pointer("visibility", p.visibility, 8);
  check_pointer("scores", p.scores, 4);
  check_pointer("num_nodes", p.num_nodes, 4);
  const Dim b{p.batch, 1}, bq{p.batch * qlen, 1}, k{p.k, 1};
  check_no_overlap(
      {extent("draft_tokens", p.draft_tokens, 8, {bq}), extent("parents", p.parents, 4, {bq}),
       extent("depths", p.depths, 4, {bq}), extent("positions", p.positions, 8, {bq}),
       extent("next_token", p.next_token, 8, {bq}), extent("next_sibling", p.next_sibling, 8, {bq}),
       extent("visibility", p.visibility, 8, {bq}), extent("scores", p.scores, 4, {bq}),
       extent("num_nodes", p.num_nodes, 4, {b})},
      {extent("logprobs", p.logprobs, 4,
              {{p.batch, p.logprobs_stride_b}, {p.depth, p.logprobs_stride_l}, k}),
       extent("ids", p.ids, id_size, {{p.batch, p.ids_stride_b}, {p.depth, p.ids_stride_l}, k}),
       extent("root_tokens", p.root_tokens, root_size, {b}),
       extent("prefix_lens", p.prefix_lens, 4, {b}),
       extent("node_cost", p.node_cost, 4, {{qlen, 1}})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_build_ddtree(const kdtree_build_ddtree_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_build_ddtree, cpu::build_ddtree,
                      cuda::build_ddtree);
}
