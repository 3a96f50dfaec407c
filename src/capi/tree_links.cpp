#include "capi/check.h"

namespace kdtree::capi {

static bool check_tree_links(const kdtree_tree_links_params &p, Device) {
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  if (p.batch == 0) return false;
  check_pointer("parents", p.parents, 4);
  check_pointer("num_nodes", p.num_nodes, 4);
  if (p.prefix_lens != nullptr) check_pointer("prefix_lens", p.prefix_lens, 4);
  check_pointer("depths", p.depths, 4);
  check_pointer("positions", p.positions, 8);
  check_pointer("next_token", p.next_token, 8);
  check_pointer("next_sibling", p.next_sibling, 8);
  check_pointer("visibility", p.visibility, 8);
  const Dim b{p.batch, 1}, bq{p.batch * p.qlen, 1};
  check_no_overlap(
      {extent("depths", p.depths, 4, {bq}), extent("positions", p.positions, 8, {bq}),
       extent("next_token", p.next_token, 8, {bq}), extent("next_sibling", p.next_sibling, 8, {bq}),
       extent("visibility", p.visibility, 8, {bq})},
      {extent("parents", p.parents, 4, {{p.batch, p.parents_stride_b}, {p.qlen, 1}}),
       extent("num_nodes", p.num_nodes, 4, {b}), extent("prefix_lens", p.prefix_lens, 4, {b})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_tree_links(const kdtree_tree_links_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_tree_links, cpu::tree_links, cuda::tree_links);
}
