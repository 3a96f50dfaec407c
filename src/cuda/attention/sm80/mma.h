// The instructions of the portable path: asynchronous copies, matrix loads and products that every
// GPU since sm_80 has. Shared memory addresses are 32-bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kdtree::cuda::sm80 {

__device__ __forceinline__ uint32_t shared_address(const void *ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

// Copies Bytes (4, 8 or 16) to shared memory, or writes zeros and reads nothing.
template <int Bytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid = true) {
  if constexpr (Bytes == 16)  // past L1
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                 "n"(Bytes), "r"(valid ? Bytes : 0)
                 : "memory");
}

// Hides where a value comes from, so that what follows from it is computed again instead of being
// kept in registers through a loop.
__device__ __forceinline__ void forget(unsigned &value) {
  asm volatile("" : "+r"(value));
}

// copy_async of 8 or 16 bytes, where it is wanted.
template <int Bytes>
__device__ __forceinline__ void copy_async_if(bool wanted, uint32_t to, const void *from,
                                              bool valid) {
  if constexpr (Bytes == 16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %3, 0;"
        " @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(to),
        "l"(from), "r"(valid ? 16 : 0), "r"(static_cast<int>(wanted))
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0;"
        " @p cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3; }" ::"r"(to),
        "l"(from), "n"(Bytes), "r"(valid ? Bytes : 0), "r"(static_cast<int>(wanted))
        : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for this thread's copies, but for those of its last Groups groups.
template <int Groups = 0>
__device__ __forceinline__ void wait_copies() {
  if constexpr (Groups == 0)
    asm volatile("cp.async.wait_all;" ::: "memory");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// A barrier of `threads` threads; 0 is that of the whole block.
__device__ __forceinline__ void sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the rows of matrix i. Lane 4g + t gets
// elements 2t, 2t+1 of row g; transposed: elements 2t, 2t+1 of column g.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// d += a b, 16x8x16. Lane 4g + t holds, of d: rows g (d0, d1) and g + 8 (d2, d3), columns 2t, 2t+1;
// of a: row g, k 2t (a0) and 2t + 8 (a2), row g + 8 likewise (a1, a3); of b: column g, k 2t (b0)
// and 2t + 8 (b1); pairs along k.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kdtree::cuda::sm80
