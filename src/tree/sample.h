// The target's token at one visited slot: argmax of the logits, or of logits / temperature plus
// noise. Each house cuts the row as it likes and puts the parts' keys together by maximum.
#pragma once

#include <math.h>

#include "tree/random.h"

namespace kdtree::tree {

struct Draw {
  static constexpr float kMost = 0x1.fffffep127f;  // of floats

  float inverse;  // 1 / temperature; 0: take the largest logit
  int64_t seed, position;

  KDTREE_HD bool greedy() const { return inverse == 0; }

  // Finite logits stay finite, and infinite ones as they are.
  KDTREE_HD float scaled(float logit) const {
    const float x = rounded_mul(logit, inverse);
    if (logit > kMost || logit < -kMost) return logit;
    return x > kMost ? kMost : x < -kMost ? -kMost : x;
  }
  KDTREE_HD float score(float logit, uint32_t word) const {
    return rounded_add(scaled(logit), gumbel(word));
  }
  KDTREE_HD Words4 words(uint32_t block) const { return token_words(seed, position, block); }

  // What this logit scores at least: no noise is below -3.14. Finite, for log_reach's sake.
  KDTREE_HD float least_score(float logit) const {
    const float x = scaled(logit);
    return (x < kMost ? x : kMost) - 3.2f;
  }

  // Whether any word lets this logit reach `best`: none is below 2^-33.
  KDTREE_HD bool can_reach(float logit, float best) const {
    return !(log_reach(scaled(logit), best) < -22.9f);
  }
};

// Params as kdtree.h has them; temperatures below 1e-6 are 0, so that 1 / temperature is tame.
KDTREE_HD Draw make_draw(const kdtree_tree_accept_logits_params &p, int64_t b) {
  const float temperature = p.temperature_ptr != nullptr ? p.temperature_ptr[b] : p.temperature;
  if (!(temperature >= 1e-6f)) return {0, 0, 0};
  const float inverse = 1.0f / temperature;
  return {inverse > 0x1p-126f ? inverse : 0x1p-126f, p.seeds[b], 0};
}

// What counts the noise of a slot: its position, so a token has the same noise in every tree.
KDTREE_HD int64_t slot_position(const kdtree_tree_accept_logits_params &p, int64_t b, int slot,
                                int depth) {
  return p.positions != nullptr ? p.positions[b * p.positions_stride_b + slot] : depth;
}

// The best of the columns seen so far, in ascending order.
struct Choice {
  float score = -INFINITY;
  uint32_t column = 0;
  bool finite = false;  // some logit was

  KDTREE_HD void take(float other, uint32_t its_column) {
    if (!(other > score)) return;
    score = other;
    column = its_column;
  }
  KDTREE_HD void see(float logit) { finite |= logit > -INFINITY && logit < INFINITY; }
  // The larger key wins, 0 is nothing: -inf and NaN are never taken.
  KDTREE_HD uint64_t key() const { return score > -INFINITY ? topk_key(score, column) : 0; }
};

KDTREE_HD int64_t chosen_token(uint64_t key, bool finite) {
  return key != 0 && finite ? static_cast<int64_t>(key_column(key)) : -1;
}

}  // namespace kdtree::tree
