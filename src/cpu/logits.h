// Rows of logits on the CPU, for draft_topk and tree_accept_logits: blocks of floats, and an
// exponential that compilers turn into vector code.
#pragma once

#include <cstdint>
#include <limits>

#include "kdtree.h"
#include "tree/order.h"

namespace kdtree::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(float value) {
  return value;
}
inline float to_float(BFloat16 value) {
  return tree::bits_float(uint32_t(value.bits) << 16);
}
inline float to_float(Float16 value) {
  // Exponent and fraction moved into place are the value times 2^-112, subnormals included.
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const uint32_t bits = tree::float_bits(tree::bits_float(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0;
  return tree::bits_float(bits | special | (value.bits & 0x8000u) << 16);
}

// body(first element of the row, as its own type).
template <class Body>
void with_logits(const void *logits, int32_t dtype, int64_t offset, Body &&body) {
  if (dtype == KDTREE_F32) return body(static_cast<const float *>(logits) + offset);
  if (dtype == KDTREE_F16) return body(static_cast<const Float16 *>(logits) + offset);
  body(static_cast<const BFloat16 *>(logits) + offset);
}

// A block of a row as floats, NaN as -inf, filled up with -inf.
struct LogitBlock {
  static constexpr int kColumns = 64;
  float value[kColumns];
  float top;

  template <class T>
  void load(const T *logits, int64_t count) {
    if (count >= kColumns) {
      for (int i = 0; i < kColumns; ++i) value[i] = ordered(to_float(logits[i]));
    } else {
      for (int i = 0; i < kColumns; ++i)
        value[i] = i < count ? ordered(to_float(logits[i])) : -kInfinity;
    }
    find_top();
  }

  void find_top() {
    float lane[16];
    for (int i = 0; i < 16; ++i) lane[i] = value[i];
    for (int i = 16; i < kColumns; i += 16)
      for (int j = 0; j < 16; ++j) lane[j] = lane[j] < value[i + j] ? value[i + j] : lane[j];
    top = lane[0];
    for (int j = 1; j < 16; ++j) top = top < lane[j] ? lane[j] : top;
  }

  static float ordered(float x) { return x > -kInfinity ? x : -kInfinity; }
};

// e^x, off by less than 1e-7 (1 + |x|) of itself for |x| <= 87, and as at 87 or -87 beyond and for
// NaN. The clamp is one of integers, which compilers turn into vector code without -ffast-math.
inline float exp_near(float x) {
  const uint32_t bits = tree::float_bits(x * 1.44269504f);
  const int32_t size = static_cast<int32_t>(bits & 0x7fffffffu), most = 0x42fc0000;  // 126.0
  const float t =
      tree::bits_float(static_cast<uint32_t>(size < most ? size : most) | (bits & 0x80000000u));
  const float shifted = t + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(t)
  const float f = t - (shifted - 12582912.0f);
  float poly = 1.53533619e-4f;  // 2^f on [-1/2, 1/2]
  poly = poly * f + 1.33988744e-3f;
  poly = poly * f + 9.61843736e-3f;
  poly = poly * f + 5.55033247e-2f;
  poly = poly * f + 2.40226479e-1f;
  poly = poly * f + 6.93147203e-1f;
  poly = poly * f + 1.0f;
  return tree::bits_float(tree::float_bits(poly) + (tree::float_bits(shifted) << 23));
}

}  // namespace kdtree::cpu
