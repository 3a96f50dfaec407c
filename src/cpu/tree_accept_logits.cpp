// tree_accept_logits on the CPU: requests side by side, or the columns of one row when there are
// fewer requests than threads. Choosing is exact, so the split changes nothing.
#include <algorithm>
#include <mutex>

#include "cpu/logits.h"
#include "cpu/parallel.h"
#include "ops.h"
#include "tree/sample.h"
#include "tree/topk.h"
#include "tree/walk.h"

namespace kdtree::cpu {

namespace {

constexpr int64_t kChunk = 16384;

template <class T>
tree::Choice choose(const T *row, int64_t begin, int64_t end, const tree::Draw &draw) {
  tree::Choice choice;
  LogitBlock block;
  for (int64_t at = begin; at < end; at += LogitBlock::kColumns) {
    const int64_t count = std::min<int64_t>(end - at, LogitBlock::kColumns);
    block.load(row + at, count);
    choice.see_logit(block.top);
    if (!choice.finite)
      for (float value : block.value) choice.see_logit(value);
    if (draw.greedy()) {
      if (!(block.top > choice.score)) continue;
      const float *first = std::find(block.value, block.value + count, block.top);
      choice.take(block.top, static_cast<uint32_t>(at + (first - block.value)));
      continue;
    }
    if (!draw.can_reach(block.top, choice.score)) continue;
    float reach[LogitBlock::kColumns];
    for (int i = 0; i < LogitBlock::kColumns; ++i)
      reach[i] = exp_near(tree::log_reach(draw.scaled(block.value[i]), choice.score));
    tree::Words4 words{};
    for (int i = 0; i < count; ++i) {
      if (i % 4 == 0) words = draw.words(static_cast<uint32_t>(at + i) / 4);
      const uint32_t word = words.word[i % 4];
      if (!(tree::uniform(word) > reach[i]) && block.value[i] > -kInfinity)
        choice.take(draw.score(block.value[i], word), static_cast<uint32_t>(at + i));
    }
  }
  return choice;
}
}  // namespace
}
