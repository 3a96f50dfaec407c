#include "capi/check.h"

namespace kdtree::capi {

static bool check_merge_topk(const kdtree_merge_topk_params &p, Device) {
  check_dtype("ids", p.ids_dtype, {KDTREE_I32, KDTREE_I64});
  check_range("shards", p.shards, 1, INT32_MAX);
  check_range("k", p.k, 1, KDTREE_MAX_K);
  Dim value[KDTREE_MAX_LEAD_DIMS], id[KDTREE_MAX_LEAD_DIMS], lse[KDTREE_MAX_LEAD_DIMS];
  const int64_t rows = check_lead_dims(p.lead_ndim, p.lead_dims, "values_lead_strides",
                                       p.values_lead_strides, value);
  check_lead_dims(p.lead_ndim, p.lead_dims, "ids_lead_strides", p.ids_lead_strides, id);
  check_lead_dims(p.lead_ndim, p.lead_dims, "lse_lead_strides", p.lse_lead_strides, lse);
  if (rows == 0) return false;
  const int64_t id_size = dtype_size(p.ids_dtype);
  check_pointer("values", p.values, 4);
  check_pointer("ids", p.ids, id_size);
  check_pointer("lse", p.lse, 4);
  check_pointer("logprobs", p.logprobs, 4);
  check_pointer("out_ids", p.out_ids, 8);
  check_pointer("out_lse", p.out_lse, 4);
  const auto input = [&](const char *name, const void *ptr, int64_t size, int64_t shard_stride,
                         const Dim *lead, int64_t k) {
    return extent(
        name, ptr, size,
        {{p.shards, shard_stride}, lead[0], lead[1], lead[2], lead[3], lead[4], lead[5], {k, 1}});
  };
  check_no_overlap({extent("logprobs", p.logprobs, 4, {{rows * p.k, 1}}),
                    extent("out_ids", p.out_ids, 8, {{rows * p.k, 1}}),
                    extent("out_lse", p.out_lse, 4, {{rows, 1}})},
                   {input("values", p.values, 4, p.values_shard_stride, value, p.k),
                    input("ids", p.ids, id_size, p.ids_shard_stride, id, p.k),
                    input("lse", p.lse, 4, p.lse_shard_stride, lse, 1)});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_merge_topk(const kdtree_merge_topk_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_merge_topk, cpu::merge_topk, cuda::merge_topk);
}
