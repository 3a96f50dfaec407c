#include "capi/check.h"
#include "tree/mask.h"

namespace kdtree::capi {

// What out_numel must be; FULL on CUDA is the caller's word. Where out_numel is too small, FULL
// stops at a sum that shows it.
static int64_t mask_numel(const kdtree_expand_mask_params &p) {
  if (p.layout == KDTREE_MASK_QLEN) return p.batch * p.qlen * p.qlen;
  if (p.layout == KDTREE_MASK_PACKED32) return p.batch * p.qlen * tree::packed_words(p.qlen);
  int64_t numel = 0;
  for (int64_t b = 0; b < p.batch && numel <= p.out_numel; ++b)
    numel += p.qlen * (tree::mask_prefix(p, b) + p.qlen);
  return numel;
}

static bool check_expand_mask(const kdtree_expand_mask_params &p, Device device) {
  check_range("layout", p.layout, KDTREE_MASK_QLEN, KDTREE_MASK_PACKED32);
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  check_range("out_numel", p.out_numel, 0, INT64_MAX / 8);
  const bool full = p.layout == KDTREE_MASK_FULL;
  if (p.batch > 0) {
    check_pointer("visibility", p.visibility, 8);
    check_pointer("num_nodes", p.num_nodes, 4);
    if (full) check_pointer("prefix_lens", p.prefix_lens, 4);
  }
  if (!full || device == Device::cpu) {
    const int64_t expected = mask_numel(p);
    if (p.out_numel != expected)
      throw ValueError("out: expected " +
                       std::string(full && expected > p.out_numel ? "at least " : "") +
                       std::to_string(expected) + " elements, got " + std::to_string(p.out_numel));
  }
  if (p.out_numel == 0) return false;
  const int64_t size = p.layout == KDTREE_MASK_PACKED32 ? 4 : 1;
  check_pointer("out", p.out, size);
  const Dim b{p.batch, 1};
  check_no_overlap(
      {extent("out", p.out, size, {{p.out_numel, 1}})},
      {extent("visibility", p.visibility, 8, {{p.batch, p.visibility_stride_b}, {p.qlen, 1}}),
       extent("num_nodes", p.num_nodes, 4, {b}), extent("prefix_lens", p.prefix_lens, 4, {b})});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_expand_mask(const kdtree_expand_mask_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_expand_mask, cpu::expand_mask, cuda::expand_mask);
}
