// Rows of logits as aligned 16-byte vectors, wherever they start, for draft_topk and
// tree_accept_logits.
#pragma once

#include <cuda_fp16.h>

#include "cuda/launch.h"
#include "tree/order.h"

namespace kdtree::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// 2^x; 0 where that is below 2^-126.
__device__ __forceinline__ float exp2_near(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A word holds one float32 or two 16-bit logits, the first in its low half.
template <class T>
struct LogitWord;

template <>
struct LogitWord<float> {
  static constexpr uint32_t kMinusInfinity = 0xff800000u;
  static __device__ __forceinline__ float number(uint32_t word, int) {
    return tree::bits_float(word);
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return tree::float_bits(fmaxf(tree::bits_float(a), tree::bits_float(b)));
  }
};

template <>
struct LogitWord<BFloat16> {
  static constexpr uint32_t kMinusInfinity = 0xff80ff80u;
  static __device__ __forceinline__ float number(uint32_t word, int half) {
    return tree::bits_float(half ? word & 0xffff0000u : word << 16);
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};

template <>
struct LogitWord<Float16> {
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00u;
  static __device__ __forceinline__ float number(uint32_t word, int half) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half ? word >> 16 : word)));
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};

template <class T>
struct alignas(16) LogitVector {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t word[4];

  __device__ __forceinline__ float operator[](int i) const {
    return LogitWord<T>::number(word[i * sizeof(T) / 4], i * sizeof(T) / 2 % 2);
  }
  __device__ __forceinline__ void nan_to_minus_infinity() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[i] = LogitWord<T>::larger(word[i], LogitWord<T>::kMinusInfinity);
  }
  // NaN only where all are.
  __device__ __forceinline__ float max() const {
    const uint32_t most = LogitWord<T>::larger(LogitWord<T>::larger(word[0], word[1]),
                                               LogitWord<T>::larger(word[2], word[3]));
    return fmaxf(LogitWord<T>::number(most, 0), LogitWord<T>::number(most, 1));
  }
};

// The part of a row that block `block` of `blocks` takes, in aligned vectors. What lies before the
// row and past its end reads as -inf, and its memory is not touched.
template <class T>
struct LogitPart {
  using Vector = LogitVector<T>;

  const Vector *whole;        // the first vector that lies within the row from end to end
  int begin, num_whole, end;  // vectors of the part, counted from there; begin is 0 or -1
  int share;                  // vectors of the largest part
  uint32_t column, until;     // the first column there, and the first after the part

  __device__ LogitPart(const T *row, int64_t columns, int block, int blocks) {
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    const int vectors = static_cast<int>((before + columns + Vector::kSize - 1) / Vector::kSize);
    share = (vectors + blocks - 1) / blocks;
    const int first = min(block * share, vectors), last = min(first + share, vectors);
    const int whole_first = first == 0 && before > 0 ? 1 : first;
    whole = reinterpret_cast<const Vector *>(row - before) + whole_first;
    begin = first - whole_first;
    num_whole =
        max(0, min(last, static_cast<int>((before + columns) / Vector::kSize)) - whole_first);
    end = last - whole_first;
    column = whole_first * Vector::kSize - before;
    until = static_cast<uint32_t>(
        max(int64_t(0), min(columns, int64_t(last) * Vector::kSize - before)));
  }

  // Modulo 2^32: one comparison with `until` tells whether a column is of the part.
  __device__ __forceinline__ uint32_t first_column(int vector) const {
    return column + static_cast<uint32_t>(vector) * Vector::kSize;
  }
  // From `end` on, -inf.
  __device__ __forceinline__ Vector load(int vector) const {
    Vector result;
    if (static_cast<uint32_t>(vector) < static_cast<uint32_t>(num_whole)) {
      const uint4 words = __ldg(reinterpret_cast<const uint4 *>(whole + vector));
      memcpy(&result, &words, sizeof result);
    } else {
#pragma unroll
      for (uint32_t &word : result.word) word = LogitWord<T>::kMinusInfinity;
      if (vector < end)
        result =
            load_edge(reinterpret_cast<const T *>(whole + vector), first_column(vector), until);
    }
    return result;
  }

 private:
  // Out of line: a row has two of these.
  static __device__ __noinline__ Vector load_edge(const T *at, uint32_t column, uint32_t until) {
    Vector result;
#pragma unroll
    for (uint32_t &word : result.word) word = LogitWord<T>::kMinusInfinity;
#pragma unroll
    for (int i = 0; i < Vector::kSize; ++i)
      if (column + i < until)
        memcpy(reinterpret_cast<char *>(&result) + i * sizeof(T), at + i, sizeof(T));
    return result;
  }
};

// body(first element, as its own type)
template <class Body>
void with_logits_type(int32_t dtype, Body &&body) {
  if (dtype == KDTREE_F32) return body(float{});
  if (dtype == KDTREE_F16) return body(Float16{});
  body(BFloat16{});
}

}  // namespace kdtree::cuda
