// Noise for sampling: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), and Gumbel noise of its words by float operations that are rounded one by one, so that
// CPU and GPU choose the same token to the bit: no fused multiply-add, no library logarithm.
//
// argmax over v of (x_v + g_v), g_v = -log(E_v), E_v = -log(1 - w_v), w_v uniform in (0, 1), is a
// sample of softmax(x). Winners have small E, and there w and E keep their full relative precision.
#pragma once

#include <stdint.h>

#include "tree/order.h"

namespace kdtree::tree {

struct Words4 {
  uint32_t word[4];
};

KDTREE_HD Words4 philox4x32_10(Words4 counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * c0, b = uint64_t(0xcd9e8d57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The words of token ids 4 * block .. 4 * block + 3 at one position: they depend on nothing else.
KDTREE_HD Words4 token_words(int64_t seed, int64_t position, uint32_t block) {
  const auto s = static_cast<uint64_t>(seed), p = static_cast<uint64_t>(position);
  return philox4x32_10({{block, 0, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32)}},
                       static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
}

// Products and sums that no compiler fuses, as in tree/exp.h.
KDTREE_HD float rounded_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
KDTREE_HD float rounded_add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// log(2^exponent * (1 + f)) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; log(1 + f) is f - f^2 / 2 + f^3
// * polynomial (minimax of relative error, 6e-9), so a small f keeps its relative precision.
KDTREE_HD float log_parts(int exponent, float f) {
  const float c[8] = {0.333333312f, -0.25000838f,  0.200012927f, -0.16622765f,
                      0.141996956f, -0.131641858f, 0.127791149f, -0.0764610485f};
  float poly = c[7];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 6; i >= 0; --i) poly = rounded_add(rounded_mul(poly, f), c[i]);
  const float square = rounded_mul(f, f), e = static_cast<float>(exponent);
  float sum =
      rounded_add(rounded_mul(rounded_mul(square, f), poly), rounded_mul(e, 1.42860677e-6f));
  sum = rounded_add(sum, rounded_mul(square, -0.5f));
  return rounded_add(rounded_add(sum, f),
                     rounded_mul(e, 0.693145752f));  // the two constants sum to ln 2
}

// log of a positive normal number.
KDTREE_HD float log_rn(float value) {
  const uint32_t bits = float_bits(value);
  const int exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // from sqrt(1/2) up
  const float mantissa = bits_float(bits - (static_cast<uint32_t>(exponent) << 23));
  return log_parts(exponent, rounded_add(mantissa, -1.0f));
}

// w = (word + 1/2) / 2^32.
KDTREE_HD float uniform(uint32_t word) {
  return rounded_mul(rounded_add(static_cast<float>(word), 0.5f), 0x1p-32f);
}

KDTREE_HD float gumbel(uint32_t word) {
  // Below 0.289 from w, beyond from 1 - w, which is uniform(~word): whichever is exact and small.
  const float log_rest = word < 0x4a000000u ? log_parts(0, -uniform(word)) : log_rn(uniform(~word));
  return -log_rn(-log_rest);
}

// Most words can be told from their size to lose: x + gumbel(word) reaches `best` only where
// w <= E <= exp(x - best). The logarithm of the largest w that deserves a closer look; the margin
// is beyond every rounding in this file and in the caller's exponential.
KDTREE_HD float log_reach(float x, float best) {
  return x - best + (1e-4f + 1e-6f * (best < 0 ? -best : best));
}

}  // namespace kdtree::tree
