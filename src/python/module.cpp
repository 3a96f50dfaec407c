// The nanobind module: one function per op. Each checks its arrays (rank, shape, dtype, device,
// layout), makes the outputs that the caller did not bring, and calls the C library, which checks
// the rest. Arguments are positional and complete: the defaults are in python/kdtree.
#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <vector>

#include "python/array.h"

namespace kdtree::python {

namespace {

constexpr int32_t kIdDtypes[] = {KDTREE_I32, KDTREE_I64};

// Starts a params struct on the device of `like`.
template <class Params>
Params params_for(const Array &like) {
  Params p{};
  p.struct_size = sizeof(Params);
  p.device_type = like.device_type;
  p.device_id = like.device_id;
  return p;
}

// Calls the library without the GIL.
template <class Params>
void call(int (*op)(const Params *, void *), const Params &p, void *stream) {
  int status;
  {
    nb::gil_scoped_release release;
    status = op(&p, stream);
  }
  throw_status(status);  // the message is thread local, and this is still the thread
}

Array input(const char *name, nb::handle value, const Array &like, void *stream) {
  Array array({name}, value, stream);
  array.same_device(like);
  return array;
}

// An int32 or int64 array [B,Q] that a request indexes by b * stride + slot.
Array id_matrix(const char *name, nb::handle value, const Array &like, void *stream, int64_t batch,
                int64_t qlen) {
  Array array = input(name, value, like, stream);
  array.dtypes({kIdDtypes[0], kIdDtypes[1]}).dims({batch, qlen}, "[B, Q]").dense_innermost();
  return array;
}

Array vector_of(const char *name, nb::handle value, const Array &like, void *stream, int64_t count,
                const char *shape_name, std::initializer_list<int32_t> dtypes) {
  Array array = input(name, value, like, stream);
  array.dtypes(dtypes).dims({count}, shape_name).dense_innermost();
  return array;
}

// An output and an array that the library does not see.
void check_apart(const Array &output, const Array &other) {
  const auto span = [](const Array &array) {
    auto low = reinterpret_cast<intptr_t>(array.data), high = low + array.item_size;
    for (int i = 0; i < array.ndim; ++i)
      (array.strides[i] < 0 ? low : high) +=
          (array.shape[i] - 1) * array.strides[i] * array.item_size;
    return std::make_pair(low, high);
  };
  if (output.numel() == 0 || other.numel() == 0) return;
  const auto [low, high] = span(output);
  const auto [other_low, other_high] = span(other);
  if (low < other_high && other_low < high)
    throw ValueError(output.name + ": expected memory of its own, got an overlap with " +
                     other.name.str());
}

// Leading dimensions [first, last) of an array into a params struct.
void lead_dims(const Array &array, int first, int last, int64_t *dims, int64_t *strides) {
  if (last - first > KDTREE_MAX_LEAD_DIMS)
    throw ValueError(array.name + ": expected at most " + std::to_string(KDTREE_MAX_LEAD_DIMS) +
                     " leading dimensions, got " + std::to_string(last - first));
  for (int i = first; i < last; ++i) {
    if (dims != nullptr) dims[i - first] = array.shape[i];
    strides[i - first] = array.strides[i];
  }
}

Shape shape_of(const Array &array, int first, int last) {
  return Shape(array.shape + first, array.shape + last);
}

// What an op returns: the fields of its record, in order.
using Fields = nb::typed<nb::tuple, nb::any, nb::ellipsis>;
template <class... Arrays>
Fields fields_of(const Arrays &...arrays) {
  return nb::borrow<Fields>(nb::make_tuple(arrays.object...));
}

// The results of an op, one after the other in the order of their record: fields of the caller's
// `out`, which is that record or a tuple, or, where `out` is None, new arrays.
class Outputs {
 public:
  Outputs(nb::handle out, const Array &like, void *stream)
      : out_(out), like_(like), stream_(stream) {}

  Array next(const char *name, const Shape &shape, const char *shape_name, int32_t dtype) {
    if (out_.is_none()) return allocate(name, like_, shape, dtype, stream_);
    const nb::object given = field(name);
    if (given.is_none()) throw TypeError(std::string(name) + ": expected an array, got None");
    return output(name, given, like_, shape, shape_name, dtype, stream_);
  }

 private:
  nb::handle out_;
  const Array &like_;
  void *stream_;
  Py_ssize_t used_ = 0;

  // name is "out.FIELD".
  nb::object field(const char *name) {
    if (PyTuple_Check(out_.ptr())) {
      PyObject *item = PyTuple_GetItem(out_.ptr(), used_++);
      if (item == nullptr) throw nb::python_error();
      return nb::borrow(item);
    }
    static std::unordered_map<const char *, PyObject *> interned;  // under the GIL
    PyObject *&key = interned[name];
    if (key == nullptr) key = PyUnicode_InternFromString(name + sizeof("out.") - 1);
    PyObject *value = PyObject_GetAttr(out_.ptr(), key);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
  }
};

int64_t int_in(const char *name, nb::handle value, int64_t low, int64_t high) {
  const int64_t result = as_int(name, value);
  if (result < low || result > high)
    throw ValueError(std::string(name) + ": expected " + std::to_string(low) + ".." +
                     std::to_string(high) + ", got " + std::to_string(result));
  return result;
}

// A dimension of an array that has limits of its own.
void check_dim(const Array &array, const char *dim, int64_t size, int64_t low, int64_t high) {
  if (size < low || size > high)
    throw ValueError(array.name + ": expected " + dim + " of " + std::to_string(low) + ".." +
                     std::to_string(high) + ", got " + std::to_string(size));
}
void check_qlen(const Array &array, int64_t qlen) {
  check_dim(array, "Q", qlen, 1, KDTREE_MAX_QLEN);
}

int64_t vocab_size_of(nb::handle value) {
  return value.is_none() ? -1 : int_in("vocab_size", value, 0, INT64_MAX);
}

Fields draft_topk(nb::handle logits_, nb::handle k_, nb::handle vocab_start, nb::handle vocab_size,
                  nb::handle normalize, nb::handle root_tokens, nb::handle out,
                  nb::handle stream_) {
  Array logits({"logits"}, logits_, stream_);
  void *stream = stream_of(stream_, logits);
  logits.dtypes({KDTREE_BF16, KDTREE_F16, KDTREE_F32}).same_device(logits);
  if (logits.ndim < 1) logits.rank(1, "[..., V]");
  logits.dense_innermost();
  const int lead = logits.ndim - 1;
  auto p = params_for<kdtree_draft_topk_params>(logits);
  lead_dims(logits, 0, lead, p.lead_dims, p.logits_lead_strides);
  p.logits = logits.data;
  p.logits_dtype = logits.dtype;
  p.lead_ndim = lead;
  p.vocab = logits.shape[lead];
  check_dim(logits, "V", p.vocab, 1, INT32_MAX);
  check_dim(logits, "rows", logits.numel() / p.vocab, 0, INT32_MAX);
  p.k = static_cast<int32_t>(int_in("k", k_, 1, std::min<int64_t>(KDTREE_MAX_K, p.vocab)));
  p.vocab_start = as_int("vocab_start", vocab_start);
  p.vocab_size = vocab_size_of(vocab_size);
  p.normalize = as_bool("normalize", normalize);
  std::vector<Array> roots;  // keeps the view alive
  if (!root_tokens.is_none()) {
    if (lead == 0) logits.rank(2, "[B, ..., V] with root_tokens");
    roots.push_back(vector_of("root_tokens", root_tokens, logits, stream, logits.shape[0], "[B]",
                              {KDTREE_I32, KDTREE_I64}));
    p.root_tokens = roots[0].data;
    p.root_tokens_dtype = roots[0].dtype;
  }

  const Shape rows = shape_of(logits, 0, lead);
  Shape rows_k = rows;
  rows_k.push_back(p.k);
  Outputs outputs(out, logits, stream);
  Array logprobs = outputs.next("out.logprobs", rows_k, "[..., k]", KDTREE_F32);
  Array ids = outputs.next("out.ids", rows_k, "[..., k]", KDTREE_I64);
  Array lse = outputs.next("out.lse", rows, "[...]", KDTREE_F32);
  p.logprobs = logprobs.as<float>();
  p.ids = ids.as<int64_t>();
  p.lse = lse.as<float>();
  call(kdtree_draft_topk, p, stream);
  return fields_of(logprobs, ids, lse);
}

Fields merge_topk(nb::handle values_, nb::handle ids_, nb::handle lse_, nb::handle out,
                  nb::handle stream_) {
  Array values({"values"}, values_, stream_);
  void *stream = stream_of(stream_, values);
  values.dtypes({KDTREE_F32}).same_device(values);
  if (values.ndim < 2) values.rank(2, "[S, ..., K]");
  values.dense_innermost();
  const int last = values.ndim - 1;
  Array ids = input("ids", ids_, values, stream);
  ids.dtypes({KDTREE_I32, KDTREE_I64}).dims(shape_of(values, 0, values.ndim), "[S, ..., K]");
  ids.dense_innermost();
  Array lse = input("lse", lse_, values, stream);
  lse.dtypes({KDTREE_F32}).dims(shape_of(values, 0, last), "[S, ...]").dense_innermost();

  auto p = params_for<kdtree_merge_topk_params>(values);
  lead_dims(values, 1, last, p.lead_dims, p.values_lead_strides);
  lead_dims(ids, 1, last, nullptr, p.ids_lead_strides);
  lead_dims(lse, 1, last, nullptr, p.lse_lead_strides);
  p.values = values.as<float>();
  p.ids = ids.data;
  p.ids_dtype = ids.dtype;
  p.lse = lse.as<float>();
  p.lead_ndim = last - 1;
  p.shards = values.shape[0];
  p.values_shard_stride = values.strides[0];
  p.ids_shard_stride = ids.strides[0];
  p.lse_shard_stride = lse.strides[0];
  check_dim(values, "S", p.shards, 1, INT32_MAX);
  check_dim(values, "K", values.shape[last], 1, KDTREE_MAX_K);
  p.k = static_cast<int32_t>(values.shape[last]);

  const Shape rows = shape_of(values, 1, last), rows_k = shape_of(values, 1, last + 1);
  Outputs outputs(out, values, stream);
  Array logprobs = outputs.next("out.logprobs", rows_k, "[..., K]", KDTREE_F32);
  Array merged = outputs.next("out.ids", rows_k, "[..., K]", KDTREE_I64);
  Array total = outputs.next("out.lse", rows, "[...]", KDTREE_F32);
  p.logprobs = logprobs.as<float>();
  p.out_ids = merged.as<int64_t>();
  p.out_lse = total.as<float>();
  call(kdtree_merge_topk, p, stream);
  return fields_of(logprobs, merged, total);
}

Fields build_ddtree(nb::handle logprobs_, nb::handle ids_, nb::handle root_tokens_,
                    nb::handle prefix_lens_, nb::handle budget, nb::handle chain_seed,
                    nb::handle node_cost, nb::handle base_cost, nb::handle out,
                    nb::handle stream_) {
  Array logprobs({"logprobs"}, logprobs_, stream_);
  void *stream = stream_of(stream_, logprobs);
  logprobs.dtypes({KDTREE_F32}).rank(3, "[B, L, K]").same_device(logprobs).dense_innermost();
  const int64_t batch = logprobs.shape[0], depth = logprobs.shape[1], k = logprobs.shape[2];
  check_dim(logprobs, "K", k, 1, KDTREE_MAX_K);
  Array ids = input("ids", ids_, logprobs, stream);
  ids.dtypes({KDTREE_I32, KDTREE_I64}).dims({batch, depth, k}, "[B, L, K]").dense_innermost();
  Array roots = vector_of("root_tokens", root_tokens_, logprobs, stream, batch, "[B]",
                          {KDTREE_I32, KDTREE_I64});
  Array prefix =
      vector_of("prefix_lens", prefix_lens_, logprobs, stream, batch, "[B]", {KDTREE_I32});

  auto p = params_for<kdtree_build_ddtree_params>(logprobs);
  p.batch = batch;
  p.depth = depth;
  p.k = k;
  p.logprobs = logprobs.as<float>();
  p.ids = ids.data;
  p.root_tokens = roots.data;
  p.prefix_lens = prefix.as<int32_t>();
  p.logprobs_stride_b = logprobs.strides[0];
  p.logprobs_stride_l = logprobs.strides[1];
  p.ids_stride_b = ids.strides[0];
  p.ids_stride_l = ids.strides[1];
  p.ids_dtype = ids.dtype;
  p.root_tokens_dtype = roots.dtype;
  p.budget = static_cast<int32_t>(int_in("budget", budget, 0, KDTREE_MAX_QLEN - 1));
  p.chain_seed = as_bool("chain_seed", chain_seed);
  const int64_t qlen = p.budget + 1;
  if (node_cost.is_none() != base_cost.is_none())
    throw ValueError(node_cost.is_none()
                         ? "node_cost: expected an array together with base_cost, got None"
                         : "base_cost: expected a float together with node_cost, got None");
  std::vector<Array> costs;  // keeps the view alive
  if (!node_cost.is_none()) {
    costs.push_back(vector_of("node_cost", node_cost, logprobs, stream, qlen, "[Q]", {KDTREE_F32}));
    p.node_cost = costs[0].as<float>();
    p.base_cost = as_float("base_cost", base_cost);
  }

  Outputs outputs(out, logprobs, stream);
  const auto field = [&](const char *name, int32_t dtype) {
    return outputs.next(name, {batch, qlen}, "[B, Q]", dtype);
  };
  Array draft_tokens = field("out.draft_tokens", KDTREE_I64);
  Array parents = field("out.parents", KDTREE_I32);
  Array depths = field("out.depths", KDTREE_I32);
  Array positions = field("out.positions", KDTREE_I64);
  Array next_token = field("out.next_token", KDTREE_I64);
  Array next_sibling = field("out.next_sibling", KDTREE_I64);
  Array visibility = field("out.visibility", KDTREE_I64);
  Array scores = field("out.scores", KDTREE_F32);
  Array num_nodes = outputs.next("out.num_nodes", {batch}, "[B]", KDTREE_I32);
  p.draft_tokens = draft_tokens.as<int64_t>();
  p.parents = parents.as<int32_t>();
  p.depths = depths.as<int32_t>();
  p.positions = positions.as<int64_t>();
  p.next_token = next_token.as<int64_t>();
  p.next_sibling = next_sibling.as<int64_t>();
  p.visibility = visibility.as<int64_t>();
  p.scores = scores.as<float>();
  p.num_nodes = num_nodes.as<int32_t>();
  call(kdtree_build_ddtree, p, stream);
  return fields_of(draft_tokens, parents, depths, positions, next_token, next_sibling, visibility,
                   scores, num_nodes);
}

Fields tree_links(nb::handle parents_, nb::handle num_nodes_, nb::handle prefix_lens,
                  nb::handle draft_tokens, nb::handle out, nb::handle stream_) {
  Array parents({"parents"}, parents_, stream_);
  void *stream = stream_of(stream_, parents);
  parents.dtypes({KDTREE_I32}).rank(2, "[B, Q]").same_device(parents).dense_innermost();
  const int64_t batch = parents.shape[0], qlen = parents.shape[1];
  check_qlen(parents, qlen);
  Array num_nodes = vector_of("num_nodes", num_nodes_, parents, stream, batch, "[B]", {KDTREE_I32});
  auto p = params_for<kdtree_tree_links_params>(parents);
  p.batch = batch;
  p.qlen = qlen;
  p.parents = parents.as<int32_t>();
  p.parents_stride_b = parents.strides[0];
  p.num_nodes = num_nodes.as<int32_t>();
  std::vector<Array> optional;
  if (!prefix_lens.is_none()) {
    optional.push_back(
        vector_of("prefix_lens", prefix_lens, parents, stream, batch, "[B]", {KDTREE_I32}));
    p.prefix_lens = optional.back().as<int32_t>();
  }
  std::optional<Array> carried;  // over to the tree, not read
  if (!draft_tokens.is_none())
    carried.emplace(id_matrix("draft_tokens", draft_tokens, parents, stream, batch, qlen));

  Outputs outputs(out, parents, stream);
  const auto field = [&](const char *name, int32_t dtype) {
    return outputs.next(name, {batch, qlen}, "[B, Q]", dtype);
  };
  Array depths = field("out.depths", KDTREE_I32);
  Array positions = field("out.positions", KDTREE_I64);
  Array next_token = field("out.next_token", KDTREE_I64);
  Array next_sibling = field("out.next_sibling", KDTREE_I64);
  Array visibility = field("out.visibility", KDTREE_I64);
  if (carried)
    for (const Array *output : {&depths, &positions, &next_token, &next_sibling, &visibility})
      check_apart(*output, *carried);
  p.depths = depths.as<int32_t>();
  p.positions = positions.as<int64_t>();
  p.next_token = next_token.as<int64_t>();
  p.next_sibling = next_sibling.as<int64_t>();
  p.visibility = visibility.as<int64_t>();
  call(kdtree_tree_links, p, stream);
  return fields_of(depths, positions, next_token, next_sibling, visibility);
}

nb::object expand_mask(nb::handle visibility_, nb::handle num_nodes_, nb::handle layout_,
                       nb::handle prefix_lens, nb::handle out, nb::handle stream_) {
  Array visibility({"tree.visibility"}, visibility_, stream_);
  void *stream = stream_of(stream_, visibility);
  visibility.dtypes({KDTREE_I64}).rank(2, "[B, Q]").same_device(visibility).dense_innermost();
  const int64_t batch = visibility.shape[0], qlen = visibility.shape[1];
  check_qlen(visibility, qlen);
  Array num_nodes =
      vector_of("tree.num_nodes", num_nodes_, visibility, stream, batch, "[B]", {KDTREE_I32});
  auto p = params_for<kdtree_expand_mask_params>(visibility);
  p.batch = batch;
  p.qlen = qlen;
  p.visibility = visibility.as<int64_t>();
  p.visibility_stride_b = visibility.strides[0];
  p.num_nodes = num_nodes.as<int32_t>();
  const std::string layout =
      PyUnicode_Check(layout_.ptr()) ? text_of(layout_) : std::string("another type");
  p.layout = layout == "qlen"       ? KDTREE_MASK_QLEN
             : layout == "full"     ? KDTREE_MASK_FULL
             : layout == "packed32" ? KDTREE_MASK_PACKED32
                                    : 0;
  if (p.layout == 0)
    throw ValueError("layout: expected 'qlen', 'full' or 'packed32', got '" + layout + "'");
  std::vector<Array> optional;
  if (!prefix_lens.is_none()) {
    optional.push_back(
        vector_of("prefix_lens", prefix_lens, visibility, stream, batch, "[B]", {KDTREE_I32}));
    p.prefix_lens = optional.back().as<int32_t>();
  } else if (p.layout == KDTREE_MASK_FULL) {
    throw ValueError("prefix_lens: expected an int32 [B] array for layout 'full', got None");
  }

  Shape shape = {batch, qlen, p.layout == KDTREE_MASK_QLEN ? qlen : (qlen + 31) / 32};
  const char *shape_name = p.layout == KDTREE_MASK_QLEN ? "[B, Q, Q]" : "[B, Q, ceil(Q/32)]";
  if (p.layout == KDTREE_MASK_FULL) {
    shape_name = "[sum over requests of Q * (prefix + Q)]";
    if (visibility.on_cuda()) {
      if (out.is_none())
        throw ValueError(
            "out: expected a flat bool array for layout 'full' on CUDA, where only the caller "
            "knows "
            "its size, got None");
      Array given({"out"}, out, stream);
      given.rank(1, shape_name);
      shape = {given.shape[0]};
    } else {
      int64_t total = 0;
      for (int64_t b = 0; b < batch; ++b)
        total += qlen * (std::max<int64_t>(0, p.prefix_lens[b]) + qlen);
      shape = {total};
    }
  }
  Array mask =
      output("out", out, visibility, shape, shape_name,
             p.layout == KDTREE_MASK_PACKED32 ? static_cast<int32_t>(KDTREE_I32) : kBool, stream);
  p.out = mask.data;
  p.out_numel = mask.numel();
  call(kdtree_expand_mask, p, stream);
  return mask.object;
}

int64_t verify_attn_workspace(nb::handle batch, nb::handle qlen, nb::handle heads,
                              int32_t device_type, int32_t device_id, bool no_kv_split) {
  kdtree_verify_attn_workspace_params p{};
  int64_t bytes = 0;
  p.struct_size = sizeof(p);
  p.device_type = device_type;
  p.device_id = device_id;
  p.batch = int_in("B", batch, 0, INT32_MAX);
  p.qlen = int_in("Q", qlen, 1, KDTREE_MAX_QLEN);
  p.heads = int_in("H", heads, 1, 128);
  p.no_kv_split = no_kv_split;
  p.bytes = &bytes;
  throw_status(kdtree_verify_attn_workspace(&p, nullptr));
  return bytes;
}

// Views of arguments, made in place and kept until the call is done.
class Views {
 public:
  const Array &add(const char *name, nb::handle value, const Array &like, void *stream) {
    return places_[used_++].emplace(Name{name}, value, stream).same_device(like);
  }

 private:
  std::optional<Array> places_[8];  // the most that verify_attn has
  int used_ = 0;
};

nb::object verify_attn(nb::handle q_, nb::handle kv_cache_, nb::handle block_table,
                       nb::handle prefix_lens_, nb::handle visibility, nb::handle num_nodes,
                       nb::handle sm_scale, nb::handle q_rope, nb::handle kv_scale,
                       nb::handle kv_split, nb::handle kv_indptr, nb::handle kv_indices,
                       nb::handle out_, nb::handle lse_, nb::handle return_lse,
                       nb::handle workspace, nb::handle stream_) {
  Views views;
  Array q({"q"}, q_, stream_);
  void *stream = stream_of(stream_, q);
  q.dtypes({KDTREE_BF16, KDTREE_F16}).same_device(q);
  const bool split = !q_rope.is_none();
  const int64_t width = split ? KDTREE_LATENT_DIM : KDTREE_LATENT_DIM + KDTREE_ROPE_DIM;
  q.rank(4, split ? "[B, Q, H, 512]" : "[B, Q, H, 576]");
  const int64_t batch = q.shape[0], qlen = q.shape[1], heads = q.shape[2];
  check_qlen(q, qlen);
  check_dim(q, "H", heads, 1, 128);
  q.dims({batch, qlen, heads, width}, split ? "[B, Q, H, 512]" : "[B, Q, H, 576]");
  q.dense_innermost();
  auto p = params_for<kdtree_verify_attn_params>(q);
  p.batch = batch;
  p.qlen = qlen;
  p.heads = heads;
  p.q = q.data;
  p.q_stride_b = q.strides[0];
  p.q_stride_q = q.strides[1];
  p.q_stride_h = q.strides[2];
  p.q_dtype = q.dtype;
  if (split) {
    const Array &rope = views.add("q_rope", q_rope, q, stream);
    rope.dtypes({q.dtype})
        .dims({batch, qlen, heads, KDTREE_ROPE_DIM}, "[B, Q, H, 64]")
        .dense_innermost();
    p.q_rope = rope.data;
    p.q_rope_stride_b = rope.strides[0];
    p.q_rope_stride_q = rope.strides[1];
    p.q_rope_stride_h = rope.strides[2];
  }

  Array kv = input("kv_cache", kv_cache_, q, stream);
  kv.dtypes({q.dtype, KDTREE_F8E4M3});
  const int last = kv.ndim - 1;
  if (kv.ndim != 3 && !(kv.ndim == 4 && kv.shape[2] == 1))
    kv.rank(3, "[pages, page_size, 576] or [pages, page_size, 1, 576]");
  if (kv.shape[last] != KDTREE_LATENT_DIM + KDTREE_ROPE_DIM)
    kv.dims({kv.shape[0], kv.shape[1], KDTREE_LATENT_DIM + KDTREE_ROPE_DIM},
            "[pages, page_size, 576]");
  kv.dense_innermost();
  p.kv_cache = kv.data;
  p.kv_dtype = kv.dtype;
  p.num_pages = kv.shape[0];
  p.page_size = kv.shape[1];
  p.kv_stride_page = kv.strides[0];
  p.kv_stride_row = kv.strides[1];

  if (block_table.is_none() == (kv_indptr.is_none() && kv_indices.is_none()) ||
      kv_indptr.is_none() != kv_indices.is_none())
    throw ValueError(
        "block_table: expected an array, or None together with both kv_indptr and kv_indices");
  if (!block_table.is_none()) {
    const Array &table = views.add("block_table", block_table, q, stream);
    table.dtypes({KDTREE_I32}).rank(2, "[B, M]");
    table.dims({batch, table.shape[1]}, "[B, M]").dense_innermost();
    p.block_table = table.as<int32_t>();
    p.block_table_stride_b = table.strides[0];
    p.block_table_width = table.shape[1];
  } else {
    const Array &offsets = views.add("kv_indptr", kv_indptr, q, stream);
    offsets.dtypes({KDTREE_I32}).dims({batch + 1}, "[B + 1]").dense_innermost();
    p.kv_indptr = offsets.as<int32_t>();
    const Array &indices = views.add("kv_indices", kv_indices, q, stream);
    indices.dtypes({KDTREE_I32, KDTREE_I64}).rank(1, "[rows]").dense_innermost();
    p.kv_indices = indices.data;
    p.kv_indices_len = indices.shape[0];
    p.kv_indices_dtype = indices.dtype;
  }
  const Array &prefix = views.add("prefix_lens", prefix_lens_, q, stream);
  prefix.dtypes({KDTREE_I32}).dims({batch}, "[B]").dense_innermost();
  p.prefix_lens = prefix.as<int32_t>();
  if (!visibility.is_none()) {
    const Array &words = views.add("visibility", visibility, q, stream);
    words.dtypes({KDTREE_I64}).dims({batch, qlen}, "[B, Q]").dense_innermost();
    p.visibility = words.as<int64_t>();
    p.visibility_stride_b = words.strides[0];
  }
  if (!num_nodes.is_none()) {
    const Array &nodes = views.add("num_nodes", num_nodes, q, stream);
    nodes.dtypes({KDTREE_I32}).dims({batch}, "[B]").dense_innermost();
    p.num_nodes = nodes.as<int32_t>();
  }
  p.sm_scale = static_cast<float>(as_float("sm_scale", sm_scale));
  p.kv_scale = 1.0f;
  if (kv_scale.is_none()) {
  } else if (!PyFloat_Check(kv_scale.ptr()) && nb::hasattr(kv_scale, "__dlpack__")) {
    const Array &scale = views.add("kv_scale", kv_scale, q, stream);
    scale.dtypes({KDTREE_F32});
    if (scale.numel() != 1) scale.dims({1}, "of one element");
    p.kv_scale_ptr = scale.as<float>();
  } else {
    p.kv_scale = static_cast<float>(as_float("kv_scale", kv_scale));
  }
  if (!kv_split.is_none()) {
    p.kv_split = as_int("kv_split", kv_split);
    if (p.kv_split <= 0)
      throw ValueError("kv_split: expected a positive multiple of 64 or None, got " +
                       std::to_string(p.kv_split));
  }
  const bool wants_lse = as_bool("return_lse", return_lse);

  Array out = output("out", out_, q, {batch, qlen, heads, KDTREE_LATENT_DIM}, "[B, Q, H, 512]",
                     q.dtype, stream);
  p.out = out.data;
  std::optional<Array> lse;
  if (!lse_.is_none() || wants_lse) {
    lse.emplace(output("lse", lse_, q, {batch, qlen, heads}, "[B, Q, H]", KDTREE_F32, stream));
    p.lse = lse->as<float>();
  }

  if (!workspace.is_none()) {
    const Array &bytes = views.add("workspace", workspace, q, stream);
    bytes.dtypes({kUInt8}).rank(1, "[bytes]").writable().contiguous();
    p.workspace = bytes.data;
    p.workspace_bytes = bytes.shape[0];
    call(kdtree_verify_attn, p, stream);
  } else {
    int64_t needed = 0;
    if (q.on_cuda() && batch > 0)
      needed = verify_attn_workspace(nb::int_(batch), nb::int_(qlen), nb::int_(heads),
                                     q.device_type, q.device_id, p.kv_split == 0);
    Workspace scratch(q, needed, stream);
    p.workspace = scratch.data;
    p.workspace_bytes = needed;
    call(kdtree_verify_attn, p, stream);
  }
  if (wants_lse) return nb::make_tuple(out.object, lse->object);
  return out.object;
}

// The part of a tree that a walk reads, into either accept op's params.
struct WalkViews {
  Array draft_tokens, next_token, next_sibling, num_nodes;
};
template <class Params>
void set_walk(Params &p, const WalkViews &tree) {
  p.draft_tokens = tree.draft_tokens.data;
  p.next_token = tree.next_token.data;
  p.next_sibling = tree.next_sibling.data;
  p.draft_tokens_stride_b = tree.draft_tokens.strides[0];
  p.next_token_stride_b = tree.next_token.strides[0];
  p.next_sibling_stride_b = tree.next_sibling.strides[0];
  p.draft_tokens_dtype = tree.draft_tokens.dtype;
  p.next_token_dtype = tree.next_token.dtype;
  p.next_sibling_dtype = tree.next_sibling.dtype;
  p.num_nodes = tree.num_nodes.as<int32_t>();
}
WalkViews walk_views(nb::handle draft_tokens, nb::handle next_token, nb::handle next_sibling,
                     nb::handle num_nodes, const Array &like, void *stream, int64_t batch,
                     int64_t qlen) {
  return {id_matrix("tree.draft_tokens", draft_tokens, like, stream, batch, qlen),
          id_matrix("tree.next_token", next_token, like, stream, batch, qlen),
          id_matrix("tree.next_sibling", next_sibling, like, stream, batch, qlen),
          vector_of("tree.num_nodes", num_nodes, like, stream, batch, "[B]", {KDTREE_I32})};
}

template <class Params>
Fields run_accept(int (*op)(const Params *, void *), Params &p, const Array &like, nb::handle out,
                  void *stream) {
  Outputs outputs(out, like, stream);
  Array index = outputs.next("out.accept_index", {p.batch, p.qlen}, "[B, Q]", KDTREE_I32);
  Array count = outputs.next("out.accept_token_num", {p.batch}, "[B]", KDTREE_I32);
  Array tokens = outputs.next("out.accept_tokens", {p.batch, p.qlen}, "[B, Q]", KDTREE_I64);
  p.accept_index = index.as<int32_t>();
  p.accept_token_num = count.as<int32_t>();
  p.accept_tokens = tokens.as<int64_t>();
  call(op, p, stream);
  return fields_of(index, count, tokens);
}

Fields tree_accept(nb::handle draft_tokens, nb::handle next_token, nb::handle next_sibling,
                   nb::handle num_nodes, nb::handle target_predict, nb::handle out,
                   nb::handle stream_) {
  Array target({"target_predict"}, target_predict, stream_);
  void *stream = stream_of(stream_, target);
  target.dtypes({KDTREE_I32, KDTREE_I64}).rank(2, "[B, Q]").same_device(target).dense_innermost();
  const int64_t batch = target.shape[0], qlen = target.shape[1];
  check_qlen(target, qlen);
  const WalkViews tree =
      walk_views(draft_tokens, next_token, next_sibling, num_nodes, target, stream, batch, qlen);
  auto p = params_for<kdtree_tree_accept_params>(target);
  p.batch = batch;
  p.qlen = qlen;
  set_walk(p, tree);
  p.target_predict = target.data;
  p.target_predict_stride_b = target.strides[0];
  p.target_predict_dtype = target.dtype;
  return run_accept(kdtree_tree_accept, p, target, out, stream);
}

Fields tree_accept_logits(nb::handle draft_tokens, nb::handle next_token, nb::handle next_sibling,
                          nb::handle num_nodes, nb::handle positions, nb::handle logits_,
                          nb::handle temperature, nb::handle seeds, nb::handle vocab_size,
                          nb::handle out, nb::handle stream_) {
  Array logits({"logits"}, logits_, stream_);
  void *stream = stream_of(stream_, logits);
  logits.dtypes({KDTREE_BF16, KDTREE_F16, KDTREE_F32}).rank(3, "[B, Q, V]").same_device(logits);
  logits.dense_innermost();
  const int64_t batch = logits.shape[0], qlen = logits.shape[1];
  check_qlen(logits, qlen);
  check_dim(logits, "V", logits.shape[2], 1, INT32_MAX);
  const WalkViews tree =
      walk_views(draft_tokens, next_token, next_sibling, num_nodes, logits, stream, batch, qlen);
  auto p = params_for<kdtree_tree_accept_logits_params>(logits);
  p.batch = batch;
  p.qlen = qlen;
  set_walk(p, tree);
  std::vector<Array> keep;
  keep.reserve(4);
  if (!positions.is_none()) {
    keep.push_back(input("tree.positions", positions, logits, stream));
    keep.back().dtypes({KDTREE_I64}).dims({batch, qlen}, "[B, Q]").dense_innermost();
    p.positions = keep.back().as<int64_t>();
    p.positions_stride_b = keep.back().strides[0];
  }
  p.logits = logits.data;
  p.logits_dtype = logits.dtype;
  p.logits_stride_b = logits.strides[0];
  p.logits_stride_q = logits.strides[1];
  p.vocab = logits.shape[2];
  p.vocab_size = vocab_size_of(vocab_size);
  bool needs_seeds = !temperature.is_none();
  if (temperature.is_none()) {
  } else if (!PyFloat_Check(temperature.ptr()) && nb::hasattr(temperature, "__dlpack__")) {
    keep.push_back(
        vector_of("temperature", temperature, logits, stream, batch, "[B]", {KDTREE_F32}));
    p.temperature_ptr = keep.back().as<float>();
  } else {
    const double value = as_float("temperature", temperature);
    if (!(value >= 0))
      throw ValueError("temperature: expected at least 0, got " + text_of(temperature));
    p.temperature = static_cast<float>(value);
    needs_seeds = value > 0;
  }
  if (seeds.is_none()) {
    if (needs_seeds)
      throw ValueError("seeds: expected an int64 [B] array together with a temperature, got None");
  } else {
    keep.push_back(vector_of("seeds", seeds, logits, stream, batch, "[B]", {KDTREE_I64}));
    p.seeds = keep.back().as<int64_t>();
  }
  return run_accept(kdtree_tree_accept_logits, p, logits, out, stream);
}

void commit_kv(nb::handle kv_caches, nb::handle block_table, nb::handle prefix_lens,
               nb::handle accept_index, nb::handle accept_token_num, nb::handle cache_loc,
               nb::handle stream_) {
  // The layers: a list or tuple of caches, or one stacked array.
  std::vector<Array> layers;
  void *stream = nullptr;
  const auto add = [&](Name name, nb::handle layer) {
    if (!layers.empty()) {
      layers.emplace_back(name, layer, stream);
      return;
    }
    layers.emplace_back(name, layer, stream_);
    stream = stream_of(stream_, layers.front());
  };
  const bool listed = PyList_Check(kv_caches.ptr()) || PyTuple_Check(kv_caches.ptr());
  if (listed) {
    const nb::object items = nb::borrow(kv_caches);
    layers.reserve(nb::len(items));
    for (nb::handle item : items) add({"kv_caches", static_cast<int64_t>(layers.size())}, item);
    if (layers.empty())
      throw ValueError("kv_caches: expected at least one layer, got an empty list");
  } else {
    add({"kv_caches"}, kv_caches);
  }
  const Array &first = layers.front();
  first.same_device(first);
  if (first.item_size < 1 || first.item_size > 16 || (first.item_size & (first.item_size - 1)) != 0)
    throw TypeError(first.name + ": expected a dtype of 1, 2, 4, 8 or 16 bytes, got " +
                    std::to_string(first.item_size));
  const int page_dim = listed ? 0 : 1;
  const char *layout = listed ? "[pages, page_size, D] or [pages, page_size, 1, D]"
                              : "[layers, pages, page_size, D] or [layers, pages, page_size, 1, D]";
  if (first.ndim != page_dim + 3 && !(first.ndim == page_dim + 4 && first.shape[page_dim + 2] == 1))
    first.rank(page_dim + 3, layout);
  for (const Array &layer : layers) {
    layer.dims(shape_of(first, 0, first.ndim), layout)
        .same_device(first)
        .writable()
        .dense_innermost();
    bool same = layer.item_size == first.item_size && layer.dtype == first.dtype &&
                layer.dtype_text == first.dtype_text;
    if (!same) throw TypeError(layer.name + ": expected the dtype of " + first.name.str());
    for (int i = 0; i < first.ndim; ++i)
      if (layer.strides[i] != first.strides[i])
        throw ValueError(layer.name + ": expected the strides of " + first.name.str() + " " +
                         shape_text(first.strides, first.ndim) + ", got " +
                         shape_text(layer.strides, layer.ndim));
  }

  Array index({"accept.accept_index"}, accept_index, stream);
  index.dtypes({KDTREE_I32}).rank(2, "[B, Q]").same_device(first).dense_innermost();
  const int64_t batch = index.shape[0], qlen = index.shape[1];
  check_qlen(index, qlen);
  Array count = vector_of("accept.accept_token_num", accept_token_num, first, stream, batch, "[B]",
                          {KDTREE_I32});
  auto p = params_for<kdtree_commit_kv_params>(first);
  p.batch = batch;
  p.qlen = qlen;
  std::vector<void *> pointers;
  if (listed) {
    for (const Array &layer : layers) pointers.push_back(layer.data);
  } else {
    for (int64_t i = 0; i < first.shape[0]; ++i)
      pointers.push_back(static_cast<char *>(first.data) + i * first.strides[0] * first.item_size);
  }
  p.kv_caches = pointers.data();
  p.num_layers = static_cast<int64_t>(pointers.size());
  p.num_pages = first.shape[page_dim];
  p.page_size = first.shape[page_dim + 1];
  p.row_elements = first.shape[first.ndim - 1];
  p.kv_stride_page = first.strides[page_dim];
  p.kv_stride_row = first.strides[page_dim + 1];
  p.element_size = first.item_size;
  check_dim(first, "page size", p.page_size, 1, INT32_MAX);
  check_dim(first, "D", p.row_elements, 1, int64_t(1) << 23);

  std::vector<Array> keep;
  keep.reserve(4);
  if (block_table.is_none() == cache_loc.is_none())
    throw ValueError("block_table: expected an array, or None together with cache_loc");
  if (!prefix_lens.is_none()) {
    keep.push_back(
        vector_of("prefix_lens", prefix_lens, first, stream, batch, "[B]", {KDTREE_I32}));
    p.prefix_lens = keep.back().as<int32_t>();
  } else if (cache_loc.is_none()) {
    throw TypeError("prefix_lens: expected an int32 [B] array, got None");
  }
  if (!block_table.is_none()) {
    keep.push_back(input("block_table", block_table, first, stream));
    const Array &table = keep.back();
    table.dtypes({KDTREE_I32}).rank(2, "[B, M]");
    table.dims({batch, table.shape[1]}, "[B, M]").dense_innermost();
    p.block_table = table.as<int32_t>();
    p.block_table_stride_b = table.strides[0];
    p.block_table_width = table.shape[1];
  } else {
    keep.push_back(input("cache_loc", cache_loc, first, stream));
    const Array &rows = keep.back();
    rows.dtypes({KDTREE_I64}).dims({batch, qlen}, "[B, Q]").dense_innermost();
    p.cache_loc = rows.as<int64_t>();
    p.cache_loc_stride_b = rows.strides[0];
  }
  p.accept_index = index.as<int32_t>();
  p.accept_index_stride_b = index.strides[0];
  p.accept_token_num = count.as<int32_t>();
  call(kdtree_commit_kv, p, stream);
}

// Every array and scalar may arrive as None: an error that names it is ours to raise.
auto arg(const char *name) {
  return nb::arg(name).none();
}

// Everything about one GPU, or about their absence.
nb::dict device_info(int device_id) {
  kdtree_device_info_params info{};
  info.struct_size = sizeof(info);
  info.device_id = device_id;
  throw_status(kdtree_device_info(&info));
  nb::dict result;
  result["device_count"] = info.device_count;
  result["driver_version"] = info.driver_version;
  result["name"] = nb::str(info.name);
  result["compute_capability"] = nb::make_tuple(info.cc_major, info.cc_minor);
  result["num_sms"] = info.num_sms;
  result["total_memory"] = info.total_memory;
  result["path"] = nb::str(info.path);
  result["reason"] = nb::str(info.reason);
  return result;
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error &error) {
      raise_in_python(error);
    }
  });
  m.doc() = "The compiled part of kdtree; kdtree's own functions are the public API.";
  m.def("draft_topk", &draft_topk, arg("logits"), arg("k"), arg("vocab_start"), arg("vocab_size"),
        arg("normalize"), arg("root_tokens"), arg("out"), arg("stream"));
  m.def("merge_topk", &merge_topk, arg("values"), arg("ids"), arg("lse"), arg("out"),
        arg("stream"));
  m.def("build_ddtree", &build_ddtree, arg("logprobs"), arg("ids"), arg("root_tokens"),
        arg("prefix_lens"), arg("budget"), arg("chain_seed"), arg("node_cost"), arg("base_cost"),
        arg("out"), arg("stream"));
  m.def("tree_links", &tree_links, arg("parents"), arg("num_nodes"), arg("prefix_lens"),
        arg("draft_tokens"), arg("out"), arg("stream"));
  m.def("expand_mask", &expand_mask, arg("visibility"), arg("num_nodes"), arg("layout"),
        arg("prefix_lens"), arg("out"), arg("stream"));
  m.def("verify_attn", &verify_attn, arg("q"), arg("kv_cache"), arg("block_table"),
        arg("prefix_lens"), arg("visibility"), arg("num_nodes"), arg("sm_scale"), arg("q_rope"),
        arg("kv_scale"), arg("kv_split"), arg("kv_indptr"), arg("kv_indices"), arg("out"),
        arg("lse"), arg("return_lse"), arg("workspace"), arg("stream"));
  m.def("verify_attn_workspace", &verify_attn_workspace, arg("batch"), arg("qlen"), arg("heads"),
        nb::arg("device_type"), nb::arg("device_id"), nb::arg("no_kv_split") = false);
  m.def("tree_accept", &tree_accept, arg("draft_tokens"), arg("next_token"), arg("next_sibling"),
        arg("num_nodes"), arg("target_predict"), arg("out"), arg("stream"));
  m.def("tree_accept_logits", &tree_accept_logits, arg("draft_tokens"), arg("next_token"),
        arg("next_sibling"), arg("num_nodes"), arg("positions"), arg("logits"), arg("temperature"),
        arg("seeds"), arg("vocab_size"), arg("out"), arg("stream"));
  m.def("commit_kv", &commit_kv, arg("kv_caches"), arg("block_table"), arg("prefix_lens"),
        arg("accept_index"), arg("accept_token_num"), arg("cache_loc"), arg("stream"));
  m.def("device_info", &device_info, nb::arg("device_id"),
        nb::sig("def device_info(device_id: int) -> dict[str, object]"));
  m.def("build_info", [] { return nb::str(kdtree_build_info()); });
  m.attr("MAX_QLEN") = KDTREE_MAX_QLEN;
  m.attr("MAX_K") = KDTREE_MAX_K;
  m.attr("ABI_VERSION") = kdtree_abi_version();
}

}  // namespace kdtree::python
