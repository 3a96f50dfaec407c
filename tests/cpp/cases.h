// Random cases for every body of src/tree, run by one lane and by a group: the outputs must be
// equal to the bit. Outputs start out different, so an element that is not written shows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tree/accept.h"
#include "tree/build.h"
#include "tree/links.h"
#include "tree/mask.h"
#include "tree/merge.h"

namespace kdtree::test {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool chance(int percent) { return (*this)(1, 100) <= percent; }
  double real() { return std::uniform_real_distribution<double>(0, 1)(engine_); }

 private:
  std::mt19937_64 engine_;
};

// The outputs of one run. Every array is handed out by take().
class Outputs {
 public:
  explicit Outputs(uint8_t canary) : canary_(canary) {}
  template <class T>
  T *take(int64_t count) {
    arrays_.push_back(std::make_unique<std::vector<uint64_t>>(count * sizeof(T) / 8 + 1));
    std::memset(arrays_.back()->data(), canary_, count * sizeof(T));
    bytes_.push_back(count * sizeof(T));
    return reinterpret_cast<T *>(arrays_.back()->data());
  }
  void check_equal(const Outputs &other, const char *op) const {
    for (size_t i = 0; i < arrays_.size(); ++i) {
      if (std::memcmp(arrays_[i]->data(), other.arrays_[i]->data(), bytes_[i]) == 0) continue;
      std::fprintf(stderr, "%s: output %zu differs from that of one lane\n", op, i);
      std::exit(1);
    }
  }

 private:
  uint8_t canary_;
  std::vector<std::unique_ptr<std::vector<uint64_t>>> arrays_;
  std::vector<size_t> bytes_;
};

// One case: the same body by one lane and by the group that `run` starts, over `batch` requests
// with one scratch.
template <class Scratch, class Params, class Run, class Bind, class Body>
void compare(const char *op, const Params &params, int64_t batch, Run &&run, Bind &&bind,
             Body &&body) {
  Outputs alone(0x11), together(0x22);
  Params p = params;
  bind(p, alone);
  {
    auto scratch = std::make_unique<Scratch>();
    tree::SerialGroup group;
    for (int64_t b = 0; b < batch; ++b) body(group, p, b, *scratch);
  }
  bind(p, together);
  {
    auto scratch = std::make_unique<Scratch>();
    std::memset(static_cast<void *>(scratch.get()), 0x7f, sizeof *scratch);  // what nobody wrote
    run([&](auto &group) {
      for (int64_t b = 0; b < batch; ++b) body(group, p, b, *scratch);
    });
  }
  alone.check_equal(together, op);
}

struct BuildCaseScratch {
  double table[tree::kMaxTable];
  tree::BuildScratch build;
};

template <class Run>
void build_case(Random &random, Run &&run) {
  const int64_t batch = 2, depth = random.chance(90) ? random(0, 16) : random(17, 64);
  const int64_t k = random.chance(50) ? 64 : random(1, 64);
  const int budget = static_cast<int>(random.chance(50) ? 64 : random(0, 64)), qlen = budget + 1;
  // On a grid scores tie; on a fine one they differ in their last bits. Some are above 0.
  const float top = random.chance(80) ? 0.0f : random.chance(50) ? 0.5f : 1e-6f;
  const float grid = random.chance(40) ? 0.0f : random.chance(70) ? 0.25f : 0x1p-23f;
  std::vector<float> logprobs(batch * depth * k + 1), cost(qlen);
  std::vector<int32_t> ids(batch * depth * k + 1), prefix(batch);
  std::vector<int64_t> roots(batch);
  for (int64_t row = 0; row < batch * depth; ++row) {
    float *at = logprobs.data() + row * k;
    for (int64_t i = 0; i < k; ++i)
      at[i] = grid > 0 ? -grid * static_cast<float>(random(0, 6)) - (grid < 0.1f ? 1.0f : 0.0f)
                       : -4 * static_cast<float>(random.real());
    for (int64_t i = 0; i < k; ++i) at[i] += top;
    std::sort(at, at + k, std::greater<float>());
    if (top > 0 && random.chance(10)) at[0] = INFINITY;
    if (random.chance(10))
      std::fill(at + random(0, k - 1), at + k,
                random.chance(50) ? -INFINITY : std::numeric_limits<float>::quiet_NaN());
  }
  for (int32_t &id : ids) id = static_cast<int32_t>(random(0, 200000));
  for (int64_t b = 0; b < batch; ++b) {
    roots[b] = random.chance(10) ? -1 : random(0, 1000);
    prefix[b] = static_cast<int32_t>(random(0, 1 << 20));
  }
  float total = 0;
  for (float &c : cost) c = total += 0.2f * static_cast<float>(random.real());

  kdtree_build_ddtree_params p{};
  p.batch = batch, p.depth = depth, p.k = k, p.budget = budget;
  p.logprobs = logprobs.data(), p.logprobs_stride_b = depth * k, p.logprobs_stride_l = k;
  p.ids = ids.data(), p.ids_stride_b = depth * k, p.ids_stride_l = k, p.ids_dtype = KDTREE_I32;
  p.root_tokens = roots.data(), p.root_tokens_dtype = KDTREE_I64;
  p.prefix_lens = prefix.data();
  p.chain_seed = random.chance(40);
  if (random.chance(40)) p.node_cost = cost.data(), p.base_cost = 4 * random.real();
  compare<BuildCaseScratch>(
      "build_ddtree", p, batch, run,
      [&](kdtree_build_ddtree_params &q, Outputs &out) {
        const int64_t n = batch * qlen;
        q.draft_tokens = out.take<int64_t>(n), q.parents = out.take<int32_t>(n);
        q.depths = out.take<int32_t>(n), q.positions = out.take<int64_t>(n);
        q.next_token = out.take<int64_t>(n), q.next_sibling = out.take<int64_t>(n);
        q.visibility = out.take<int64_t>(n), q.scores = out.take<float>(n);
        q.num_nodes = out.take<int32_t>(batch);
      },
      [](auto &group, const kdtree_build_ddtree_params &q, int64_t b, BuildCaseScratch &scratch) {
        tree::build_ddtree(group, q, b, scratch.table, scratch.build);
      });
}

// Parents of a tree, with some that are out of range, above their slot, or in a cycle.
template <class Run>
void links_case(Random &random, Run &&run) {
  const int64_t batch = 3, qlen = random(1, 65);
  std::vector<int32_t> parents(batch * qlen), nodes(batch), prefix(batch, 7);
  for (int64_t i = 0; i < batch * qlen; ++i)
    parents[i] = static_cast<int32_t>(
        random.chance(15) ? random(-70, 70) : random(0, std::max<int64_t>(i % qlen - 1, 0)));
  for (int32_t &n : nodes) n = static_cast<int32_t>(random(-1, qlen + 1));
  kdtree_tree_links_params p{};
  p.batch = batch, p.qlen = qlen, p.parents = parents.data(), p.parents_stride_b = qlen;
  p.num_nodes = nodes.data(), p.prefix_lens = random.chance(50) ? prefix.data() : nullptr;
  compare<tree::LinksScratch>(
      "tree_links", p, batch, run,
      [&](kdtree_tree_links_params &q, Outputs &out) {
        const int64_t n = batch * qlen;
        q.depths = out.take<int32_t>(n), q.positions = out.take<int64_t>(n);
        q.next_token = out.take<int64_t>(n), q.next_sibling = out.take<int64_t>(n);
        q.visibility = out.take<int64_t>(n);
      },
      [](auto &group, const kdtree_tree_links_params &q, int64_t b, tree::LinksScratch &scratch) {
        tree::tree_links(group, q, b, scratch);
      });
}

// Links that mostly lead up, with some wild ones; few tokens, so that the walk goes deep.
template <class Run>
void accept_case(Random &random, Run &&run) {
  const int64_t batch = 3, qlen = random(1, 65);
  std::vector<int64_t> tokens(batch * qlen), target(batch * qlen), child(batch * qlen);
  std::vector<int32_t> sibling(batch * qlen), nodes(batch);
  for (int64_t i = 0; i < batch * qlen; ++i) {
    tokens[i] = random(0, 2);
    target[i] = random(0, 2);
    child[i] = random.chance(10) ? random(-80, 80) : i % qlen + random(1, 3);
    sibling[i] =
        static_cast<int32_t>(random.chance(10) ? random(-80, 80) : i % qlen + random(1, 9));
  }
  for (int32_t &n : nodes)
    n = static_cast<int32_t>(random.chance(70) ? qlen : random(-1, qlen + 1));
  kdtree_tree_accept_params p{};
  p.batch = batch, p.qlen = qlen;
  p.draft_tokens = tokens.data(), p.next_token = child.data(), p.next_sibling = sibling.data();
  p.target_predict = target.data();
  p.draft_tokens_dtype = p.next_token_dtype = p.target_predict_dtype = KDTREE_I64;
  p.next_sibling_dtype = KDTREE_I32;
  p.draft_tokens_stride_b = p.next_token_stride_b = p.next_sibling_stride_b = qlen;
  p.target_predict_stride_b = qlen;
  p.num_nodes = nodes.data();
  compare<tree::AcceptScratch>(
      "tree_accept", p, batch, run,
      [&](kdtree_tree_accept_params &q, Outputs &out) {
        q.accept_index = out.take<int32_t>(batch * qlen);
        q.accept_token_num = out.take<int32_t>(batch);
        q.accept_tokens = out.take<int64_t>(batch * qlen);
      },
      [](auto &group, const kdtree_tree_accept_params &q, int64_t b, tree::AcceptScratch &scratch) {
        tree::tree_accept(group, q, b, scratch);
      });
}

template <class Run>
void merge_case(Random &random, Run &&run) {
  const int64_t shards = random(1, 9), rows = 2, k = random.chance(50) ? 64 : random(1, 64);
  std::vector<float> values(shards * rows * k), lse(shards * rows);
  std::vector<int64_t> ids(shards * rows * k);
  for (int64_t list = 0; list < shards * rows; ++list) {
    float *value = values.data() + list * k;
    int64_t *id = ids.data() + list * k;
    for (int64_t i = 0; i < k; ++i) value[i] = 0.5f * static_cast<float>(random(-8, 8));
    std::sort(value, value + k, std::greater<float>());
    for (int64_t i = 0; i < k; ++i) id[i] = list / rows * 1000 + i;
    const int64_t end = random.chance(30) ? random(0, k) : k;  // the rest: NaN, or empty places
    for (int64_t i = end; i < k; ++i) {
      value[i] = random.chance(50) ? -INFINITY : std::numeric_limits<float>::quiet_NaN();
      if (list % 2 == 0) id[i] = -1;
    }
    lse[list] = random.chance(10) ? -INFINITY : static_cast<float>(10 * random.real());
  }
  if (random.chance(10)) lse[0] = INFINITY;
  kdtree_merge_topk_params p{};
  p.values = values.data(), p.ids = ids.data(), p.lse = lse.data(), p.ids_dtype = KDTREE_I64;
  p.shards = shards, p.k = static_cast<int32_t>(k), p.lead_ndim = 1, p.lead_dims[0] = rows;
  p.values_shard_stride = p.ids_shard_stride = rows * k, p.lse_shard_stride = rows;
  p.values_lead_strides[0] = p.ids_lead_strides[0] = k, p.lse_lead_strides[0] = 1;
  compare<tree::MergeScratch>(
      "merge_topk", p, rows, run,
      [&](kdtree_merge_topk_params &q, Outputs &out) {
        q.logprobs = out.take<float>(rows * k), q.out_ids = out.take<int64_t>(rows * k);
        q.out_lse = out.take<float>(rows);
      },
      [](auto &group, const kdtree_merge_topk_params &q, int64_t row, tree::MergeScratch &scratch) {
        tree::merge_topk(group, q, row, scratch);
      });
}

template <class Run>
void mask_case(Random &random, Run &&run) {
  const int64_t batch = 3, qlen = random(1, 65);
  std::vector<int64_t> visibility(batch * qlen);
  std::vector<int32_t> nodes(batch);
  for (int64_t &word : visibility) word = random(INT64_MIN, INT64_MAX);
  for (int32_t &n : nodes) n = static_cast<int32_t>(random(-1, qlen + 1));
  kdtree_expand_mask_params p{};
  p.batch = batch, p.qlen = qlen, p.visibility = visibility.data(), p.visibility_stride_b = qlen;
  p.num_nodes = nodes.data(), p.layout = KDTREE_MASK_PACKED32;
  struct None {};
  compare<None>(
      "expand_mask", p, batch, run,
      [&](kdtree_expand_mask_params &q, Outputs &out) {
        q.out = out.take<uint32_t>(batch * qlen * tree::packed_words(qlen));
      },
      [](auto &group, const kdtree_expand_mask_params &q, int64_t b, None &) {
        tree::pack_mask(group, q, b);
      });
}

template <class Run>
void all_cases(int count, Run &&run) {
  Random random(1);
  for (int i = 0; i < count; ++i) {
    build_case(random, run);
    links_case(random, run);
    accept_case(random, run);
    merge_case(random, run);
    mask_case(random, run);
  }
}

}  // namespace kdtree::test
