// Scalars of the attention kernels: exponentials in base 2, and 16-bit pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

namespace kdtree::cuda::attention {

// 2^x, within 2 ulp; 2^-inf = 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ln(2^top * sum)
__device__ __forceinline__ float natural_log(float top, float sum) {
  return (top + log2f(sum)) * 0.693147180559945309f;
}

// Two floats as a pair of T, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t &>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t &>(pair);
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>)
    return __half22float2(reinterpret_cast<const __half2 &>(pair));
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

// Two e4m3 values as a pair of T; exact for both.
template <class T>
__device__ __forceinline__ uint32_t widen(uint16_t two) {
  const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const float2 f = __half22float2(pair);
    return pack<T>(f.x, f.y);
  }
  return reinterpret_cast<const uint32_t &>(pair);
}

// Four of them as two pairs of f16, the first two in `low`.
__device__ __forceinline__ void widen_four(uint32_t four, uint32_t &low, uint32_t &high) {
#if __CUDA_ARCH__ >= 890  // an instruction each; without `mov` there would be a shift as well
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;"
      " cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high)
      : "r"(four));
#else
  low = widen<__half>(static_cast<uint16_t>(four));
  high = widen<__half>(static_cast<uint16_t>(four >> 16));
#endif
}

// Eight of them.
template <class T>
__device__ __forceinline__ uint4 widen(uint2 eight) {
  return {widen<T>(static_cast<uint16_t>(eight.x)), widen<T>(static_cast<uint16_t>(eight.x >> 16)),
          widen<T>(static_cast<uint16_t>(eight.y)), widen<T>(static_cast<uint16_t>(eight.y >> 16))};
}

}  // namespace kdtree::cuda::attention
