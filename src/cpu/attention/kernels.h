// The arithmetic of verify_attn on the CPU, for a block of query rows and a tile of keys at a time.
// kernels.inc.h is the one body; baseline.cpp, avx2.cpp and avx512.cpp compile it for a vector
// width each, and verify_attn.cpp drives the set that the machine can run.
#pragma once

#include <stdint.h>

#include "kdtree.h"

namespace kdtree::cpu::attention {

constexpr int kLatent = KDTREE_LATENT_DIM;
constexpr int kDim = KDTREE_LATENT_DIM + KDTREE_ROPE_DIM;
// A block and a tile, in fp32, are 110 KB each and their output 98 KB: together in a 512 KB L2.
// 48 is a multiple of every register tile's sides and of every vector width.
constexpr int kRows = 48;
constexpr int kKeys = 48;

// Attention of a block of rows over some of the keys: softmax(x) v = out / sum, with x in base 2
// and sum = the sum of 2^(x - max).
struct alignas(64) Partial {
  float out[kRows][kLatent];
  float max[kRows];
  float sum[kRows];
};

struct alignas(64) Scratch {
  float q[kDim * kRows];  // transposed: [kDim][rows, rounded up to whole vectors]
  float kv[kKeys][kDim];
  float scores[kKeys][kRows];  // transposed too: a vector holds rows, so no sum is horizontal
};

struct Block {
  int rows;  // 1..kRows
  int32_t q_dtype, kv_dtype;
  float scale;  // of q k^T, log2(e) included
  Scratch *scratch;
  Partial *partial;
};

struct Kernels {
  // Reads the block's queries and empties its partial. A row is q_rows[i] alone, or, where
  // rope_rows is not NULL, its latent half with the rope half apart.
  void (*begin)(const Block &block, const void *const *q_rows, const void *const *rope_rows);
  // Adds `count` keys, 1..kKeys. Bit i of seen[k]: row i sees key k; seen NULL: all do.
  void (*attend)(const Block &block, const void *const *keys, int count, const uint64_t *seen);
  // One output row: the sum of weights[i] * parts[i][0..kLatent), rounded to dtype.
  void (*write)(const float *const *parts, const float *weights, int count, int32_t dtype,
                void *out);
};

extern const Kernels baseline;
#if defined(__x86_64__)
extern const Kernels avx2;
extern const Kernels avx512;
#endif

}  // namespace kdtree::cpu::attention
