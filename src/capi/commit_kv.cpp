#include <algorithm>
#include <utility>
#include <vector>

#include "capi/check.h"

namespace kdtree::capi {

using Params = kdtree_commit_kv_params;

// Rows must be apart: pages of rows or, the other way round, rows of pages.
static void check_strides(const Params &p) {
  const int64_t most = (int64_t(1) << 60) / p.element_size;
  const int64_t far_page = most / p.num_pages, far_row = most / p.page_size;
  // A dimension of one element may come with any stride.
  const int64_t page = p.num_pages > 1 ? p.kv_stride_page : 0;
  const int64_t row = p.page_size > 1 ? p.kv_stride_row : 0;
  check_range("kv_stride_page", page, 0, far_page);
  check_range("kv_stride_row", row, 0, far_row);
  const int64_t page_span = (p.page_size - 1) * row + p.row_elements;
  const int64_t row_span = (p.num_pages - 1) * page + p.row_elements;
  const bool pages_of_rows =
      (p.page_size == 1 || row >= p.row_elements) && (p.num_pages == 1 || page >= page_span);
  const bool rows_of_pages =
      (p.num_pages == 1 || page >= p.row_elements) && (p.page_size == 1 || row >= row_span);
  if (!pages_of_rows && !rows_of_pages)
    throw ValueError("kv_caches: expected rows that do not overlap, got strides " +
                     std::to_string(page) + " and " + std::to_string(row) + " for pages of " +
                     std::to_string(p.page_size) + " rows of " + std::to_string(p.row_elements));
}

static Extent cache_extent(const Params &p, const void *cache) {
  return extent(
      "kv_caches", cache, p.element_size,
      {{p.num_pages, p.kv_stride_page}, {p.page_size, p.kv_stride_row}, {p.row_elements, 1}});
}

// Layers may be interleaved, page by page, row by row or side by side in a row: whether two caches
// `gap` bytes apart share a byte. Both lie in the same pattern, `row` bytes at each step of an
// inner stride within each step of an outer one (check_strides), so what counts is how far the
// second is from a step of the first, forwards or backwards.
static bool layers_collide(const Params &p, int64_t gap) {
  const int64_t row = p.row_elements * p.element_size;
  Dim outer{p.num_pages, p.kv_stride_page * p.element_size};
  Dim inner{p.page_size, p.kv_stride_row * p.element_size};
  if (outer.size == 1 || (inner.size > 1 && inner.stride > outer.stride)) std::swap(outer, inner);
  const int64_t span = inner.size > 1 ? (inner.size - 1) * inner.stride + row : row;
  const auto shares = [&](int64_t distance) {  // of a pattern and the next one, at least 0
    if (distance >= span) return false;
    const int64_t rest = inner.size > 1 ? distance % inner.stride : distance;
    return rest < row || (inner.size > 1 && inner.stride - rest < row);
  };
  if (outer.size == 1) return shares(gap);
  const int64_t rest = gap % outer.stride;
  return shares(rest) || shares(outer.stride - rest);
}

static void check_layers_apart(const Params &p) {
  std::vector<uintptr_t> bases(p.num_layers);
  for (int64_t i = 0; i < p.num_layers; ++i) bases[i] = reinterpret_cast<uintptr_t>(p.kv_caches[i]);
  std::sort(bases.begin(), bases.end());
  const auto whole = static_cast<uintptr_t>(cache_extent(p, p.kv_caches[0]).high);
  for (size_t i = 0; i < bases.size(); ++i)
    for (size_t j = i + 1; j < bases.size() && bases[j] - bases[i] < whole; ++j)
      if (layers_collide(p, static_cast<int64_t>(bases[j] - bases[i])))
        throw ValueError("kv_caches: expected layers that do not overlap, got two that are " +
                         std::to_string(bases[j] - bases[i]) + " bytes apart");
}

static bool check_commit_kv(const Params &p, Device) {
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  check_range("num_layers", p.num_layers, 0, 65535);
  check_range("num_pages", p.num_pages, 0, int64_t(1) << 40);
  check_range("page_size", p.page_size, 1, int64_t(1) << 40);
  check_range("row_elements", p.row_elements, 1, int64_t(1) << 23);
  if (p.element_size < 1 || p.element_size > 16 || (p.element_size & (p.element_size - 1)) != 0)
    throw ValueError("element_size: expected 1, 2, 4, 8 or 16, got " +
                     std::to_string(p.element_size));
  if ((p.block_table != nullptr) == (p.cache_loc != nullptr))
    throw ValueError(std::string("block_table: expected either it or cache_loc, got ") +
                     (p.block_table != nullptr ? "both" : "neither"));
  check_range("block_table_width", p.block_table_width, 0, int64_t(1) << 40);
  if (p.batch == 0 || p.num_layers == 0 || p.num_pages == 0) return false;

  if (p.kv_caches == nullptr) throw ValueError("kv_caches: expected an array, got NULL");
  for (int64_t i = 0; i < p.num_layers; ++i)
    check_pointer("kv_caches", p.kv_caches[i], p.element_size);
  if (p.block_table != nullptr) {
    check_pointer("block_table", p.block_table, 4);
    check_pointer("prefix_lens", p.prefix_lens, 4);
  } else {
    check_pointer("cache_loc", p.cache_loc, 8);
  }
  check_pointer("accept_index", p.accept_index, 4);
  check_pointer("accept_token_num", p.accept_token_num, 4);
  check_strides(p);
  check_layers_apart(p);

  const Dim b{p.batch, 1}, q{p.qlen, 1};
  const Extent block_table = extent("block_table", p.block_table, 4,
                                    {{p.batch, p.block_table_stride_b}, {p.block_table_width, 1}});
  const Extent prefix_lens = extent("prefix_lens", p.prefix_lens, 4, {b});
  const Extent cache_loc =
      extent("cache_loc", p.cache_loc, 8, {{p.batch, p.cache_loc_stride_b}, q});
  const Extent accept_index =
      extent("accept_index", p.accept_index, 4, {{p.batch, p.accept_index_stride_b}, q});
  const Extent accept_token_num = extent("accept_token_num", p.accept_token_num, 4, {b});
  for (int64_t i = 0; i < p.num_layers; ++i)
    check_no_overlap({cache_extent(p, p.kv_caches[i])},
                     {block_table, prefix_lens, cache_loc, accept_index, accept_token_num});
  return true;
}

}  // namespace kdtree::capi

extern "C" int kdtree_commit_kv(const kdtree_commit_kv_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_commit_kv, cpu::commit_kv, cuda::commit_kv);
}
