// e^x in double, the same bits on host and device: only additions and multiplications, each
// rounded on its own. Within 1 ulp for normal results. (Device code asks for that rounding by name;
// host code needs -ffp-contract=off.)
#pragma once

#include <stdint.h>
#include <string.h>

#include "tree/group.h"

namespace kdtree::tree {

#if defined(__CUDA_ARCH__)
KDTREE_HD double rounded_add(double a, double b) {
  return __dadd_rn(a, b);
}
KDTREE_HD double rounded_mul(double a, double b) {
  return __dmul_rn(a, b);
}
#else
KDTREE_HD double rounded_add(double a, double b) {
  return a + b;
}
KDTREE_HD double rounded_mul(double a, double b) {
  return a * b;
}
#endif

// 2^n for a normal result.
KDTREE_HD double power_of_two(int n) {
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

KDTREE_HD double exact_exp(double x) {
  if (!(x > -746.0)) return x < 0 ? 0.0 : x;  // NaN stays
  if (x > 710.0) return 2.0 * power_of_two(1023);

  // x = n ln 2 + r, |r| <= ln 2 / 2. The high part of ln 2 has 21 trailing zeros: n times it is
  // exact. Adding 1.5 * 2^52 rounds to an integer.
  const double round = 6755399441055744.0;
  const double n = (rounded_mul(x, 0x1.71547652b82fep+0) + round) - round;
  const double high = x - rounded_mul(n, 0x1.62e42fee00000p-1);
  const double low = rounded_mul(n, 0x1.a39ef35793c76p-33);
  const double r = high - low;

  // (e^r - 1 - r) / r^2 by its series; the first term left out is below 2^-57.
  double q = 1.0 / 6227020800.0;
  const double inverse_factorial[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                      1.0 / 362880.0,    1.0 / 40320.0,    1.0 / 5040.0,
                                      1.0 / 720.0,       1.0 / 120.0,      1.0 / 24.0,
                                      1.0 / 6.0,         1.0 / 2.0};
  for (const double c : inverse_factorial) q = rounded_add(rounded_mul(q, r), c);
  const double tail = rounded_add(rounded_mul(rounded_mul(r, r), q), -low);
  const double value = rounded_add(1.0, rounded_add(high, tail));

  // In two steps, since 2^n alone may be out of range.
  const int half = static_cast<int>(n) / 2;
  return rounded_mul(rounded_mul(value, power_of_two(half)),
                     power_of_two(static_cast<int>(n) - half));
}

}  // namespace kdtree::tree
