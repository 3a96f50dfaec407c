// A row of logits as aligned 16-byte vectors, wherever the row starts, for draft_topk and
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

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(BFloat16 value) {
  return tree::bits_float(uint32_t(value.bits) << 16);
}
__device__ __forceinline__ float to_float(Float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}
__device__ __forceinline__ void set_minus_infinity(float &value) {
  value = -INFINITY;
}
__device__ __forceinline__ void set_minus_infinity(BFloat16 &value) {
  value.bits = 0xff80;
}
__device__ __forceinline__ void set_minus_infinity(Float16 &value) {
  value.bits = 0xfc00;
}

// The first `columns` elements from `logits` on. Vector v holds columns first(v) and on; the ones
// before the row and past its end read as -inf, and their memory is not touched.
template <class T>
struct LogitRow {
  static constexpr int kPerVector = 16 / sizeof(T);
  struct alignas(16) Vector {
    T value[kPerVector];
  };

  const T *logits;
  int64_t columns;
  int before;  // elements of vector 0 that lie before the row

  __device__ LogitRow(const T *row, int64_t num_columns)
      : logits(row),
        columns(num_columns),
        before(static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))) {}

  __device__ int num_vectors() const {
    return static_cast<int>((before + columns + kPerVector - 1) / kPerVector);
  }
  __device__ int64_t first(int vector) const { return int64_t(vector) * kPerVector - before; }

  __device__ Vector load(int vector) const {
    const int64_t at = first(vector);
    Vector result;
    if (at >= 0 && at + kPerVector <= columns) {
      const uint4 words = __ldg(reinterpret_cast<const uint4 *>(logits + at));
      memcpy(&result, &words, sizeof result);
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        if (at + i >= 0 && at + i < columns)
          result.value[i] = logits[at + i];
        else
          set_minus_infinity(result.value[i]);
      }
    }
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
