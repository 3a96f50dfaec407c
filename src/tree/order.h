// The order of the top-k ops: larger value first (NaN as -inf, -0 equal to +0), then the smaller
// id; empty places (id -1) last. As keys, so that a selection only ever compares integers.
#pragma once

#include <stdint.h>
#include <string.h>

#include "tree/group.h"

namespace kdtree::tree {

KDTREE_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
KDTREE_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Larger key, larger value. No float has key 0, which is left for "nothing here".
KDTREE_HD uint32_t value_key(float value) {
  if (value != value) value = bits_float(0xff800000u);
  const uint32_t bits = value == 0 ? 0 : float_bits(value);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
KDTREE_HD float key_value(uint32_t key) {
  return bits_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// Value and column in one word, for rows of fewer than 2^32 columns: the larger key comes first.
KDTREE_HD uint64_t topk_key(float value, uint32_t column) {
  return uint64_t(value_key(value)) << 32 | (0xffffffffu - column);
}
KDTREE_HD uint32_t key_column(uint64_t key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}

}  // namespace kdtree::tree
