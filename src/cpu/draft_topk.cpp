// draft_topk on the CPU: rows cut in chunks of a fixed width, so that one row keeps several threads
// busy and sums do not depend on how many there are; then the chunks' best are put together.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cpu/logits.h"
#include "cpu/parallel.h"
#include "ops.h"
#include "tree/topk.h"

namespace kdtree::cpu {

namespace {

constexpr int64_t kChunk = 16384;
constexpr size_t kPending = 1024;  // candidates collected before they are cut down to k

// sum of e^(value - top) over what was seen, for log-sum-exp.
struct ExpSum {
  float top = -kInfinity;
  double sum = 0;

  void raise(float other) {
    if (!(other > top)) return;
    sum = sum > 0 ? sum * std::exp(double(top) - other) : 0;
    top = other;
  }
  void add(const LogitBlock &block) {
    raise(block.top);
    if (std::isinf(top)) return;
    float part[LogitBlock::kColumns];
    for (int i = 0; i < LogitBlock::kColumns; ++i) part[i] = exp_near(block.value[i] - top);
    float lane[16] = {};
    for (int i = 0; i < LogitBlock::kColumns; i += 16)
      for (int j = 0; j < 16; ++j) lane[j] += part[i + j];
    for (float some : lane) sum += some;
  }
  void add(const ExpSum &other) {
    raise(other.top);
    if (!std::isinf(other.top)) sum += other.sum * std::exp(double(other.top) - top);
  }
  float log() const { return std::isinf(top) ? top : static_cast<float>(top + std::log(sum)); }
};

// The k largest keys of those pushed in ascending order of columns.
class Best {
 public:
  explicit Best(int k) : k_(k) { keys_.reserve(kPending); }

  // Whether a later column with this value can still be among the best.
  bool wants(float value) const { return !full_ || value > least_; }
  void push(float value, int64_t column) {
    keys_.push_back(tree::topk_key(value, static_cast<uint32_t>(column)));
    if (keys_.size() == kPending) cut();
  }
  void cut() {
    if (keys_.size() < static_cast<size_t>(k_)) return;
    std::nth_element(keys_.begin(), keys_.begin() + (k_ - 1), keys_.end(),
                     std::greater<uint64_t>());
    keys_.resize(k_);
    full_ = true;
    least_ = tree::key_value(static_cast<uint32_t>(keys_.back() >> 32));
  }
  const std::vector<uint64_t> &keys() const { return keys_; }

 private:
  int k_;
  bool full_ = false;
  float least_ = 0;
  std::vector<uint64_t> keys_;
};

struct Part {
  std::vector<uint64_t> keys;
  ExpSum exp_sum;
};

template <class T>
Part scan(const T *row, int64_t begin, int64_t end, int k) {
  Best best(k);
  Part part;
  LogitBlock block;
  for (int64_t at = begin; at < end; at += LogitBlock::kColumns) {
    const int64_t count = std::min<int64_t>(end - at, LogitBlock::kColumns);
    block.load(row + at, count);
    part.exp_sum.add(block);
    if (!best.wants(block.top)) continue;
    for (int64_t i = 0; i < count; ++i)
      if (best.wants(block.value[i])) best.push(block.value[i], at + i);
  }
  best.cut();
  part.keys = best.keys();
  return part;
}

void finish(const kdtree_draft_topk_params &p, int64_t row, const Part *parts, int64_t count) {
  std::vector<uint64_t> keys;
  ExpSum exp_sum;
  for (int64_t i = 0; i < count; ++i) {
    keys.insert(keys.end(), parts[i].keys.begin(), parts[i].keys.end());
    exp_sum.add(parts[i].exp_sum);
  }
  const int64_t found = std::min<int64_t>(p.k, keys.size());
  std::partial_sort(keys.begin(), keys.begin() + found, keys.end(), std::greater<uint64_t>());
  const float lse = exp_sum.log();
  p.lse[row] = lse;
  for (int64_t i = 0; i < p.k; ++i) {
    const float logit = i < found ? tree::key_value(static_cast<uint32_t>(keys[i] >> 32)) : 0;
    p.logprobs[row * p.k + i] = i >= found    ? -kInfinity
                                : p.normalize ? tree::log_prob(logit, lse)
                                              : logit;
    p.ids[row * p.k + i] = i < found ? p.vocab_start + tree::key_column(keys[i]) : -1;
  }
}

}  // namespace

void draft_topk(const kdtree_draft_topk_params &p) {
  const int64_t rows = tree::lead_rows(p.lead_ndim, p.lead_dims);
  const int64_t columns = tree::real_columns(p.vocab, p.vocab_start, p.vocab_size);
  const int64_t chunks = std::max<int64_t>(1, (columns + kChunk - 1) / kChunk);

  std::vector<Part> parts(rows * chunks);
  parallel_for(
      rows * chunks, std::max<int64_t>(1, kChunk / (columns + 1)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (p.root_tokens != nullptr &&
              !tree::is_live_request(p, i / (rows / p.lead_dims[0] * chunks)))
            continue;
          const int64_t first = i % chunks * kChunk;
          with_logits(
              p.logits, p.logits_dtype,
              tree::lead_offset(p.lead_ndim, p.lead_dims, p.logits_lead_strides, i / chunks),
              [&](auto *row) {
                parts[i] = scan(row, first, std::min(columns, first + kChunk), p.k);
              });
        }
      });
  parallel_for(rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) finish(p, row, &parts[row * chunks], chunks);
  });
}

}  // namespace kdtree::cpu
