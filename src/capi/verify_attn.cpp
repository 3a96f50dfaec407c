#include <algorithm>
#include <cmath>

#include "capi/check.h"
#include "tree/limits.h"

namespace kdtree::capi {

using Params = kdtree_verify_attn_params;

constexpr int64_t kDim = KDTREE_LATENT_DIM + KDTREE_ROPE_DIM;
constexpr int64_t kMost = int64_t(1) << 40;  // of anything counted: offsets stay within 64 bits

// The kernels read rows 16 bytes at a time, so every row starts at a multiple of 16 bytes.
// A dimension of one element may come with any stride; it gets one that no kernel minds.
static void check_stride(const char *name, const char *dim, int64_t &stride, int64_t size,
                         int64_t least, int64_t element_size) {
  if (size <= 1) {
    stride = kDim;
    return;
  }
  if (stride < least || stride > (int64_t(1) << 60) / (size * element_size) ||
      stride * element_size % 16 != 0)
    throw ValueError(std::string(name) + ": expected a " + dim + " stride of at least " +
                     std::to_string(least) + " elements, in multiples of " +
                     std::to_string(16 / element_size) + ", got " + std::to_string(stride));
}

static void check_finite(const char *name, float value) {
  if (!std::isfinite(value))
    throw ValueError(std::string(name) + ": expected a finite number, got " +
                     std::to_string(value));
}

static std::string in_request(int64_t b) {
  return " in request " + std::to_string(b);
}

// ---- lengths and indices, which only host memory lets us see; on CUDA the kernels guard instead

// The page that holds this position of request b, as block_table or kv_indices has it.
static void check_page(const Params &p, int64_t b, int64_t position) {
  const bool table = p.block_table != nullptr;
  const int64_t place = position / p.page_size;
  const int64_t page =
      table ? p.block_table[b * p.block_table_stride_b + place]
            : tree::load_id(p.kv_indices, p.kv_indices_dtype, p.kv_indptr[b] + place);
  if (page < 0 || page >= p.num_pages)
    throw ValueError((table ? "block_table: expected pages in " : "kv_indices: expected rows in ") +
                     range_text(0, p.num_pages - 1) + ", got " + std::to_string(page) +
                     in_request(b) + (table ? ", column " : ", place ") + std::to_string(place));
}

static void check_request(const Params &p, int64_t b) {
  const int used =
      p.num_nodes != nullptr ? tree::clamp_nodes(p.num_nodes[b], p.qlen) : static_cast<int>(p.qlen);
  if (used == 0) return;
  const int64_t prefix = p.prefix_lens[b];
  if (prefix < 0)
    throw ValueError("prefix_lens: expected at least 0, got " + std::to_string(prefix) +
                     in_request(b));
  const int64_t rows = prefix + used;
  const auto needs = [&] {
    return " (prefix " + std::to_string(prefix) + " + " + std::to_string(used) + " tree slots)" +
           in_request(b);
  };
  if (p.block_table != nullptr) {
    const int64_t columns = (rows + p.page_size - 1) / p.page_size;
    if (columns > p.block_table_width)
      throw ValueError("block_table: expected at least " + std::to_string(columns) +
                       " columns, got " + std::to_string(p.block_table_width) + needs());
  } else {
    const int64_t begin = p.kv_indptr[b], end = p.kv_indptr[b + 1];
    if (begin < 0 || end < begin || end > p.kv_indices_len)
      throw ValueError("kv_indptr: expected ascending offsets in " +
                       range_text(0, p.kv_indices_len) + ", got " + std::to_string(begin) +
                       " and " + std::to_string(end) + in_request(b));
    if (end - begin < rows)
      throw ValueError("kv_indptr: expected at least " + std::to_string(rows) + " rows, got " +
                       std::to_string(end - begin) + needs());
  }

  uint64_t nodes = tree::node_bits(used);
  if (p.visibility != nullptr) {
    uint64_t seen = 0;
    for (int slot = 0; slot < used; ++slot)
      seen |= static_cast<uint64_t>(p.visibility[b * p.visibility_stride_b + slot]);
    nodes &= seen;
  }
  for (int64_t position = 0; position < prefix; position += p.page_size) check_page(p, b, position);
  check_page(p, b, prefix);
  for (int slot = 1; slot < used; ++slot)
    if ((nodes & tree::slot_bit(slot)) != 0) check_page(p, b, prefix + slot);
}

static bool check_verify_attn(Params &p, Device device) {
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  check_range("heads", p.heads, 1, 128);
  check_dtype("q", p.q_dtype, {KDTREE_BF16, KDTREE_F16});
  check_dtype("kv_cache", p.kv_dtype, {static_cast<kdtree_dtype>(p.q_dtype), KDTREE_F8E4M3});
  check_finite("sm_scale", p.sm_scale);
  if (p.kv_scale_ptr != nullptr)
    check_pointer("kv_scale", p.kv_scale_ptr, 4);
  else
    check_finite("kv_scale", p.kv_scale);
  if (p.kv_split < 0 || p.kv_split % 64 != 0)
    throw ValueError("kv_split: expected a multiple of 64, got " + std::to_string(p.kv_split));
  if (p.batch == 0) return false;

  const int64_t q_size = 2, kv_size = dtype_size(p.kv_dtype);
  check_pointer("q", p.q, 16);
  check_stride("q", "request", p.q_stride_b, p.batch, 0, q_size);
  check_stride("q", "slot", p.q_stride_q, p.qlen, 0, q_size);
  check_stride("q", "head", p.q_stride_h, p.heads, 0, q_size);
  if (p.q_rope != nullptr) {
    check_pointer("q_rope", p.q_rope, 16);
    check_stride("q_rope", "request", p.q_rope_stride_b, p.batch, 0, q_size);
    check_stride("q_rope", "slot", p.q_rope_stride_q, p.qlen, 0, q_size);
    check_stride("q_rope", "head", p.q_rope_stride_h, p.heads, 0, q_size);
  }

  if (p.page_size < 1 || p.page_size > 128 || (p.page_size & (p.page_size - 1)) != 0)
    throw ValueError("kv_cache: expected a page size that is a power of two in 1..128, got " +
                     std::to_string(p.page_size));
  check_range("kv_cache: pages", p.num_pages, 1, kMost);
  check_pointer("kv_cache", p.kv_cache, 16);
  check_stride("kv_cache", "page", p.kv_stride_page, p.num_pages, kDim, kv_size);
  check_stride("kv_cache", "row", p.kv_stride_row, p.page_size, kDim, kv_size);

  if ((p.block_table != nullptr) == (p.kv_indptr != nullptr))
    throw ValueError(std::string("block_table: expected it or kv_indptr with kv_indices, got ") +
                     (p.block_table != nullptr ? "both" : "neither"));
  if (p.block_table != nullptr) {
    check_pointer("block_table", p.block_table, 4);
    if (p.kv_indices != nullptr)
      throw ValueError("kv_indices: expected none beside block_table, got an array");
    check_range("block_table: columns", p.block_table_width, 0, kMost);
    check_range("block_table: stride", p.block_table_stride_b, -kMost, kMost);
  } else {
    if (p.page_size != 1)
      throw ValueError("kv_cache: expected a page size of 1 with kv_indices, got " +
                       std::to_string(p.page_size));
    check_pointer("kv_indptr", p.kv_indptr, 4);
    check_dtype("kv_indices", p.kv_indices_dtype, {KDTREE_I32, KDTREE_I64});
    check_range("kv_indices: length", p.kv_indices_len, 0, kMost);
    if (p.kv_indices_len > 0)
      check_pointer("kv_indices", p.kv_indices, dtype_size(p.kv_indices_dtype));
  }

  check_pointer("prefix_lens", p.prefix_lens, 4);
  if (p.visibility != nullptr) {
    check_pointer("visibility", p.visibility, 8);
    check_range("visibility: stride", p.visibility_stride_b, -kMost, kMost);
  }
  if (p.num_nodes != nullptr) check_pointer("num_nodes", p.num_nodes, 4);
  check_pointer("out", p.out, 16);
  if (p.lse != nullptr) check_pointer("lse", p.lse, 4);
  check_range("workspace: bytes", p.workspace_bytes, 0, INT64_MAX / 4);
  if (device == Device::cuda && p.workspace_bytes > 0) check_pointer("workspace", p.workspace, 256);

  const Dim b{p.batch, 1};
  const int64_t q_width = p.q_rope != nullptr ? KDTREE_LATENT_DIM : kDim;
  const int64_t rows = p.batch * p.qlen * p.heads;
  check_no_overlap(
      {extent("out", p.out, q_size, {{rows * KDTREE_LATENT_DIM, 1}}),
       extent("lse", p.lse, 4, {{rows, 1}}),
       extent("workspace", p.workspace, 1, {{p.workspace_bytes, 1}})},
      {extent("q", p.q, q_size,
              {{p.batch, p.q_stride_b},
               {p.qlen, p.q_stride_q},
               {p.heads, p.q_stride_h},
               {q_width, 1}}),
       extent("q_rope", p.q_rope, q_size,
              {{p.batch, p.q_rope_stride_b},
               {p.qlen, p.q_rope_stride_q},
               {p.heads, p.q_rope_stride_h},
               {KDTREE_ROPE_DIM, 1}}),
       extent("kv_cache", p.kv_cache, kv_size,
              {{p.num_pages, p.kv_stride_page}, {p.page_size, p.kv_stride_row}, {kDim, 1}}),
       extent("block_table", p.block_table, 4,
              {{p.batch, p.block_table_stride_b}, {p.block_table_width, 1}}),
       extent("kv_indptr", p.kv_indptr, 4, {{p.batch + 1, 1}}),
       extent("kv_indices", p.kv_indices, dtype_size(p.kv_indices_dtype), {{p.kv_indices_len, 1}}),
       extent("prefix_lens", p.prefix_lens, 4, {b}),
       extent("visibility", p.visibility, 8, {{p.batch, p.visibility_stride_b}, {p.qlen, 1}}),
       extent("num_nodes", p.num_nodes, 4, {b}), extent("kv_scale", p.kv_scale_ptr, 4, {{1, 1}})});

  if (device == Device::cpu)
    for (int64_t request = 0; request < p.batch; ++request) check_request(p, request);
  return true;
}

// The bytes depend on the device, which is current only here.
static void verify_attn_on_cuda(const Params &p, Stream stream) {
  const int64_t bytes = cuda::verify_attn_workspace(p.batch, p.qlen, p.heads, p.kv_split > 0);
  if (p.workspace_bytes < bytes)
    throw ValueError("workspace: expected at least " + std::to_string(bytes) +
                     " bytes (verify_attn_workspace), got " + std::to_string(p.workspace_bytes));
  cuda::verify_attn(p, stream);
}

static void verify_attn_workspace(const kdtree_verify_attn_workspace_params *params) {
  const auto p = read_params(params);
  const Device device = device_of(p.device_type, p.device_id);
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("qlen", p.qlen, 1, KDTREE_MAX_QLEN);
  check_range("heads", p.heads, 1, 128);
  check_pointer("bytes", p.bytes, 8);
  int64_t bytes = 0;
  if (device == Device::cuda && p.batch > 0) {
    DeviceGuard guard(device, p.device_id);
    bytes = cuda::verify_attn_workspace(p.batch, p.qlen, p.heads, false);
    if (!p.no_kv_split)
      bytes = std::max(bytes, cuda::verify_attn_workspace(p.batch, p.qlen, p.heads, true));
  }
  *p.bytes = bytes;
}

}  // namespace kdtree::capi

extern "C" int kdtree_verify_attn(const kdtree_verify_attn_params *params, void *stream) {
  using namespace kdtree;
  return capi::run_op(params, stream, capi::check_verify_attn, cpu::verify_attn,
                      capi::verify_attn_on_cuda);
}

extern "C" int kdtree_verify_attn_workspace(const kdtree_verify_attn_workspace_params *params,
                                            void *) {
  using namespace kdtree;
  return capi::guarded([&] { capi::verify_attn_workspace(params); });
}
