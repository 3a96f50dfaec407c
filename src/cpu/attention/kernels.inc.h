// The body of kernels.h, included once by each file that names a vector width:
//
//   KDTREE_KERNELS        the Kernels that the file defines
//   KDTREE_LANES          fp32 lanes of a vector
//   KDTREE_SCORE_VECTORS x KDTREE_SCORE_KEYS    accumulators of the score product
//   KDTREE_VALUE_ROWS x KDTREE_VALUE_VECTORS    accumulators of the value product
//
// Per row and key: 576 + 512 multiply-adds and one 2^x; per key and block, one conversion to fp32.
// Both products run outer-product style from L1: a score step loads some vectors of query rows and
// broadcasts one element of some keys, a value step loads vectors of one key's latent and
// broadcasts some rows' weights. Scores are summed in chunks of kChunk, values per tile, so that
// rounding grows with the root of a short sum.
//
// Files that include this are compiled for CPUs that may not be there: everything is internal to
// the file, and nothing inline from outside (STL, shared helpers) may be used, since the linker
// could keep this file's copy of it for everybody.
#include <stdint.h>

#include "cpu/attention/kernels.h"

namespace kdtree::cpu::attention {
namespace {

constexpr int kLanes = KDTREE_LANES;
constexpr int kScoreVectors = KDTREE_SCORE_VECTORS, kScoreKeys = KDTREE_SCORE_KEYS;
constexpr int kValueRows = KDTREE_VALUE_ROWS, kValueVectors = KDTREE_VALUE_VECTORS;
constexpr int kChunk = 96;
static_assert(kRows % (kScoreVectors * kLanes) == 0 && kKeys % kScoreKeys == 0, "");
static_assert(kRows % kValueRows == 0 && kLatent % (kValueVectors * kLanes) == 0, "");
static_assert(kDim % kChunk == 0 && KDTREE_ROPE_DIM % kLanes == 0 && kRows <= 64, "");

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));  // what comparisons give
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

constexpr float kInfinity = __builtin_inff();

template <class Vector>
inline Vector load(const void *ptr) {
  Vector v;
  __builtin_memcpy(&v, ptr, sizeof(v));
  return v;
}
template <class Vector>
inline void store(void *ptr, Vector v) {
  __builtin_memcpy(ptr, &v, sizeof(v));
}
inline Floats splat(float x) {
  return x - Floats{};
}
inline Floats as_floats(Words x) {
  return reinterpret_cast<Floats>(x);
}
inline Words as_words(Floats x) {
  return reinterpret_cast<Words>(x);
}
// x < y where both are below 2^31: the signed comparison, which every ISA has.
inline Ints below(Words x, int32_t y) {
  return reinterpret_cast<Ints>(x) < y;
}

// ---- number formats

// A float of kBits bits with kMantissa mantissa bits and this bias. Magnitudes from kSpecial up
// (in its own bits) are infinite or NaN.
template <int kBits, int kMantissa, int kBias, int kSpecial>
inline Floats widen(Words x) {
  constexpr int kShift = 23 - kMantissa;
  const Words sign = x >> (kBits - 1) << 31;
  const Words magnitude = (x & ((1u << (kBits - 1)) - 1)) << kShift;
  // A subnormal is exact as what it adds to the least normal number; no fp32 subnormal arises,
  // so this is right under any rounding-to-zero mode of the caller's.
  constexpr uint32_t kLeast = (128u - kBias) << 23;
  const Floats small = as_floats(magnitude | kLeast) - as_floats(Words{} + kLeast);
  const Words normal = magnitude + ((127u - kBias) << 23);
  const Words finite = below(magnitude, 1 << 23) ? as_words(small) : normal;
  return as_floats((below(magnitude, kSpecial << kShift) ? finite : normal | 0x7f800000) | sign);
}

// kLanes elements of a dtype, as fp32.
template <int kDtype>
inline Floats load_floats(const void *row, int element) {
  if constexpr (kDtype == KDTREE_F8E4M3) {
    const Bytes x = load<Bytes>(static_cast<const uint8_t *>(row) + element);
    return widen<8, 3, 7, 0x7f>(__builtin_convertvector(x, Words));
  } else {
    const Halves x = load<Halves>(static_cast<const uint16_t *>(row) + element);
    const Words bits = __builtin_convertvector(x, Words);
    if constexpr (kDtype == KDTREE_BF16) return as_floats(bits << 16);
    return widen<16, 10, 15, 0x7c00>(bits);
  }
}

template <int kDtype>
void load_row(const void *row, int elements, float *to) {
  for (int i = 0; i < elements; i += kLanes) store(to + i, load_floats<kDtype>(row, i));
}
void load_row(int32_t dtype, const void *row, int elements, float *to) {
  if (dtype == KDTREE_BF16) return load_row<KDTREE_BF16>(row, elements, to);
  if (dtype == KDTREE_F16) return load_row<KDTREE_F16>(row, elements, to);
  load_row<KDTREE_F8E4M3>(row, elements, to);
}

// fp32 to 16 bits, nearest, ties to even.
template <int kDtype>
inline Halves narrow(Floats x) {
  const Words magnitude = as_words(x) & 0x7fffffff;
  const Words sign = as_words(x) >> 16 & 0x8000;
  const Ints number = below(magnitude, 0x7f800001);
  Words bits;
  if constexpr (kDtype == KDTREE_BF16) {
    const Words rounded = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    bits = number ? rounded : Words{} + 0x7fc0;
  } else {
    const Words rebased = magnitude - (112u << 23);
    const Words normal = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
    // Below 2^-14: adding 0.5 rounds to its last mantissa bit, which is 2^-24, the subnormals'.
    const Words small = as_words(as_floats(magnitude) + 0.5f) - 0x3f000000;
    bits = below(magnitude, 113 << 23) ? small : normal;
    bits = below(magnitude, 143 << 23) ? bits : Words{} + 0x7c00;
    bits = number ? bits : Words{} + 0x7e00;
  }
  return __builtin_convertvector(bits | sign, Halves);
}

// 2^x for x <= 0; 0 below the normal numbers, NaN for NaN.
inline Floats exp2(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  const Floats shifted = x + kRound;
  const Floats f = x - (shifted - kRound);  // -0.5..0.5
  Floats y = splat(1.52527338e-5f);         // ln(2)^k / k!, k = 7..0: 5e-9 off at most
  y = y * f + 1.54035304e-4f;
  y = y * f + 1.33335581e-3f;
  y = y * f + 9.61812911e-3f;
  y = y * f + 5.55041087e-2f;
  y = y * f + 2.40226507e-1f;
  y = y * f + 6.93147181e-1f;
  y = y * f + 1.0f;
  const Floats scaled = as_floats(as_words(y) + (as_words(shifted) << 23));
  return x >= -126.0f ? scaled : x < -126.0f ? Floats{} : x;
}

// ---- scores

int vectors_of(int rows) {
  return (rows + kLanes - 1) / kLanes;
}

// kVectors vectors of rows times kScoreKeys keys, over one chunk of the dimension. `stride` is that
// of q's rows of the transposed block.
template <int kVectors>
inline void score_tile(const float *q, int stride, const float *kv, bool first, float *scores) {
  Floats sum[kScoreKeys][kVectors] = {};
  for (int d = 0; d < kChunk; ++d) {
    Floats x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = load<Floats>(q + d * stride + v * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kScoreKeys; ++k) {
      const float y = kv[k * kDim + d];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[k][v] += y * x[v];
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kScoreKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float *to = scores + k * kRows + v * kLanes;
      store(to, first ? sum[k][v] : load<Floats>(to) + sum[k][v]);
    }
  }
}

// Keys from count to the next multiple of kScoreKeys are scored too; nothing reads those scores.
void score(const Block &block, int count) {
  Scratch &s = *block.scratch;
  const int vectors = vectors_of(block.rows), stride = vectors * kLanes;
  for (int d = 0; d < kDim; d += kChunk)
    for (int k = 0; k < count; k += kScoreKeys)
      for (int v = 0; v < vectors;) {
        const float *q = s.q + d * stride + v * kLanes;
        float *to = &s.scores[k][v * kLanes];
        const int left = vectors - v;
        if (left >= kScoreVectors) {
          score_tile<kScoreVectors>(q, stride, &s.kv[k][d], d == 0, to);
          v += kScoreVectors;
        } else if (kScoreVectors > 2 && left == 2) {
          score_tile<2>(q, stride, &s.kv[k][d], d == 0, to);
          v += 2;
        } else {
          score_tile<1>(q, stride, &s.kv[k][d], d == 0, to);
          v += 1;
        }
      }
}

// Scores to weights 2^(x - max); decay[i] is what the new max leaves of row i's sums so far.
void soften(const Block &block, int count, const uint64_t *seen, float *decay) {
  float (*scores)[kRows] = block.scratch->scores;
  const int stride = vectors_of(block.rows) * kLanes;
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < stride; i += kLanes)
      store(&scores[k][i], load<Floats>(&scores[k][i]) * block.scale);
    if (seen == nullptr) continue;
    for (int i = 0; i < block.rows; ++i)
      if ((seen[k] >> i & 1) == 0) scores[k][i] = -kInfinity;
  }
  for (int i = 0; i < stride; i += kLanes) {
    const Floats before = load<Floats>(block.partial->max + i);
    Floats max = before;
    for (int k = 0; k < count; ++k) {
      const Floats x = load<Floats>(&scores[k][i]);
      max = x > max ? x : max;
    }
    const Floats base = max == -kInfinity ? Floats{} : max;  // a row that has seen nothing yet
    const Floats kept = exp2(before - base);
    Floats sum = {};
    for (int k = 0; k < count; ++k) {
      const Floats weight = exp2(load<Floats>(&scores[k][i]) - base);
      store(&scores[k][i], weight);
      sum += weight;
    }
    store(decay + i, kept);
    store(block.partial->max + i, max);
    store(block.partial->sum + i, load<Floats>(block.partial->sum + i) * kept + sum);
  }
}

// ---- values

// kCount rows' sums of weight * latent, for kValueVectors vectors of the latent.
template <int kCount>
inline void value_tile(const float *weights, const float *kv, int count, const float *decay,
                       float *out) {
  Floats sum[kCount][kValueVectors] = {};
  for (int k = 0; k < count; ++k) {
    Floats x[kValueVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kValueVectors; ++v) x[v] = load<Floats>(kv + k * kDim + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const float y = weights[k * kRows + i];
#pragma GCC unroll 4
      for (int v = 0; v < kValueVectors; ++v) sum[i][v] += y * x[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kValueVectors; ++v) {
      float *to = out + i * kLatent + v * kLanes;
      store(to, load<Floats>(to) * decay[i] + sum[i][v]);
    }
  }
}

void add_values(const Block &block, int count, const float *decay) {
  const Scratch &s = *block.scratch;
  for (int d = 0; d < kLatent; d += kValueVectors * kLanes) {
    int i = 0;
    for (; i + kValueRows <= block.rows; i += kValueRows)
      value_tile<kValueRows>(&s.scores[0][i], &s.kv[0][d], count, decay + i,
                             &block.partial->out[i][d]);
    for (; i < block.rows; ++i)
      value_tile<1>(&s.scores[0][i], &s.kv[0][d], count, decay + i, &block.partial->out[i][d]);
  }
}

// ---- the three entries

void begin(const Block &block, const void *const *q_rows, const void *const *rope_rows) {
  Scratch &s = *block.scratch;
  // Converted where the keys will be, then transposed; lanes past the last row hold zeros.
  for (int i = 0; i < block.rows; ++i) {
    const bool apart = rope_rows != nullptr;
    load_row(block.q_dtype, q_rows[i], apart ? kLatent : kDim, s.kv[i]);
    if (apart) load_row(block.q_dtype, rope_rows[i], kDim - kLatent, s.kv[i] + kLatent);
  }
  const int stride = vectors_of(block.rows) * kLanes;
  for (int d = 0; d < kDim; ++d)
    for (int i = 0; i < stride; ++i) s.q[d * stride + i] = i < block.rows ? s.kv[i][d] : 0.0f;

  __builtin_memset(block.partial->out, 0, sizeof(block.partial->out[0]) * block.rows);
  for (int i = 0; i < kRows; ++i) {
    block.partial->max[i] = -kInfinity;
    block.partial->sum[i] = 0.0f;
  }
}

void attend(const Block &block, const void *const *keys, int count, const uint64_t *seen) {
  float (*kv)[kDim] = block.scratch->kv;
  for (int k = 0; k < count; ++k) load_row(block.kv_dtype, keys[k], kDim, kv[k]);
  for (int k = count; k % kScoreKeys != 0; ++k) __builtin_memset(kv[k], 0, sizeof(kv[k]));
  float decay[kRows];
  score(block, count);
  soften(block, count, seen, decay);
  add_values(block, count, decay);
}

template <int kDtype>
void write_row(const float *const *parts, const float *weights, int count, void *out) {
  for (int d = 0; d < kLatent; d += kLanes) {
    Floats sum = {};
    for (int i = 0; i < count; ++i) sum += weights[i] * load<Floats>(parts[i] + d);
    store(static_cast<uint16_t *>(out) + d, narrow<kDtype>(sum));
  }
}
void write(const float *const *parts, const float *weights, int count, int32_t dtype, void *out) {
  if (dtype == KDTREE_BF16) return write_row<KDTREE_BF16>(parts, weights, count, out);
  write_row<KDTREE_F16>(parts, weights, count, out);
}

}  // namespace

const Kernels KDTREE_KERNELS = {begin, attend, write};

}  // namespace kdtree::cpu::attention
