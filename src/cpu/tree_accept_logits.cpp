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

constexpr int kColumns = LogitBlock::kColumns;

void sample(const LogitBlock &block, uint32_t first, int count, const tree::Draw &draw,
            tree::Choice &choice) {
  const float bound = std::max(choice.score, draw.least_score(block.top));
  if (!draw.can_reach(block.top, bound)) return;
  float reach[kColumns];
  for (int i = 0; i < kColumns; ++i)
    reach[i] = exp_near(tree::log_reach(draw.scaled(block.value[i]), bound));
  tree::Words4 words{};
  for (int i = 0; i < count; ++i) {
    if (i % 4 == 0) words = draw.words((first + i) / 4);
    const uint32_t word = words.word[i % 4];
    if (block.value[i] > -kInfinity && tree::uniform(word) <= reach[i])
      choice.take(draw.score(block.value[i], word), first + i);
  }
}

// Blocks [begin, end) of a row of `columns`.
template <class T>
tree::Choice choose(const T *row, int64_t columns, int64_t begin, int64_t end,
                    const tree::Draw &draw) {
  tree::Choice choice;
  LogitBlock block;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i * kColumns;
    const int count = static_cast<int>(std::min<int64_t>(columns - first, kColumns));
    block.load(row + first, count);
    if (!choice.finite)
      for (float logit : block.value) choice.see(logit);
    if (!draw.greedy()) {
      sample(block, static_cast<uint32_t>(first), count, draw, choice);
    } else if (block.top > choice.score) {
      const float *at = std::find(block.value, block.value + count, block.top);
      choice.take(block.top, static_cast<uint32_t>(first + (at - block.value)));
    }
  }
  return choice;
}

int64_t draw_token(const kdtree_tree_accept_logits_params &p, int64_t b, int slot,
                   const tree::Draw &draw, bool split) {
  const int64_t columns = tree::real_columns(p.vocab, 0, p.vocab_size);
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  uint64_t best = 0;
  bool finite = false;
  std::mutex mutex;
  parallel_for(blocks, split ? 256 : blocks, [&](int64_t begin, int64_t end) {
    with_logits(p.logits, p.logits_dtype, b * p.logits_stride_b + slot * p.logits_stride_q,
                [&](auto *row) {
                  const tree::Choice choice = choose(row, columns, begin, end, draw);
                  std::lock_guard<std::mutex> lock(mutex);
                  best = std::max(best, choice.key());
                  finite |= choice.finite;
                });
  });
  return tree::chosen_token(best, finite);
}

void walk(const kdtree_tree_accept_logits_params &p, int64_t b, bool split) {
  tree::SerialGroup group;
  tree::WalkScratch scratch;
  const int used = tree::clamp_nodes(p.num_nodes[b], p.qlen);
  tree::stage_walk(group, p, b, used, scratch);
  int steps = 0;
  if (used > 0) {
    tree::Draw draw = tree::make_draw(p, b);
    for (int slot = 0; slot >= 0; ++steps) {
      draw.position = tree::slot_position(p, b, slot, steps);
      const int64_t token = draw_token(p, b, slot, draw, split);
      scratch.slot[steps] = slot;
      scratch.token[steps] = token;
      slot = token < 0 ? -1 : tree::next_slot(scratch, slot, token);
    }
  }
  tree::write_accept(group, p, b, steps, scratch);
}

}  // namespace

void tree_accept_logits(const kdtree_tree_accept_logits_params &p) {
  const bool split = p.batch < num_threads();
  parallel_for(p.batch, split ? p.batch : 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) walk(p, b, split);
  });
}

}  // namespace kdtree::cpu
