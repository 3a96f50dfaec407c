// The instructions of sm_90: barriers in shared memory, the copy engine, warpgroup products. Shared
// memory addresses are 32-bit.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace kdtree::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void *ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

// ---- barriers: a phase ends when `count` arrivals and all announced bytes are in

__device__ __forceinline__ void init_barrier(uint64_t &barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t &barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(count)
               : "memory");
}
// Arrives, and announces bytes that the copy engine will bring.
__device__ __forceinline__ void arrive_expecting(uint64_t &barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits for the end of the phase whose number is of this parity.
__device__ __forceinline__ void wait(uint64_t &barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}
// Among `threads` threads of the block, by number; 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// The same; whether `x` holds for any of them.
__device__ __forceinline__ bool any_thread(int number, int threads, bool x) {
  int any;
  asm volatile(
      "{.reg .pred in, out; setp.ne.b32 in, %1, 0;"
      " barrier.cta.red.or.pred out, %2, %3, in; selp.s32 %0, 1, 0, out;}"
      : "=r"(any)
      : "r"(int(x)), "r"(number), "r"(threads)
      : "memory");
  return any != 0;
}
// What threads wrote to shared memory becomes visible to products and the copy engine.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int Count>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---- copies

// 16, 8 or 4 bytes to shared memory, or zeros, reading nothing.
template <int Bytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid) {
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %3, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? Bytes : 0), "n"(Bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Pending` committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
// The current phase of `barrier` also waits for this thread's copies so far.
__device__ __forceinline__ void attach_copies(uint64_t &barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
// A box of a tensor of five dimensions to shared memory, from the start of the first two;
// completes on `barrier`.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap &map, int x2, int x3,
                                         int x4, uint64_t &barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(x2), "r"(x3), "r"(x4), "r"(shared_address(&barrier))
      : "memory");
}

// The same box to L2 only.
__device__ __forceinline__ void prefetch_box(const CUtensorMap &map, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %1, %2, %3, %4}];" ::"l"(&map),
      "r"(0), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t *m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// N matrices, transposed.
template <int N>
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&m)[N]) {
  if constexpr (N == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
                 "r"(m[0]), "r"(m[1])
                 : "memory");
  else
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
        : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t *m, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// ---- products of a warpgroup (128 threads), 16-bit operands, float results

// Orders this thread's accesses to registers before products that use them.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `Pending` committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler from using results of products before a wait.
template <class T, int N>
__device__ __forceinline__ void settle(T (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
  }
}

// Operands in shared memory lie in tiles of 8 rows of 64 elements (128 bytes), 16-byte chunk c of
// row r at c ^ r; tiles start at multiples of 1,024 bytes. A descriptor holds the start (which may
// advance by 32 bytes in a row and by whole tiles) and two distances, in units of 16 bytes: in the
// upper half of its low word that to the next 64 columns, where k runs down the rows, and in its
// high word `Stride`, from 8 rows to the next 8.
constexpr int kTile = 1024 / 16;
#define KDTREE_DESCRIPTOR(to, low, stride) "mov.b64 " to ", {" low ", " stride "};"
__host__ __device__ constexpr int descriptor_high(int stride) {
  return 0x40000000 | stride;
}
// k within the rows, or
__device__ __forceinline__ uint32_t along_rows(uint32_t address) {
  return address >> 4 | 1 << 16;
}
// k down the rows, and the next 64 columns in the next tile.
__device__ __forceinline__ uint32_t down_rows(uint32_t address) {
  return address >> 4 | kTile << 16;
}

#define KDTREE_FLOATS_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KDTREE_FLOATS_32(d, i)                                                  \
  KDTREE_FLOATS_8(d, i), KDTREE_FLOATS_8(d, i + 8), KDTREE_FLOATS_8(d, i + 16), \
      KDTREE_FLOATS_8(d, i + 24)

// d (64 x 64) = or += a (64 x 16) b (16 x 64), both along k, the tiles of a one after the other.
#define KDTREE_SCORES(TYPE)                                                                        \
  asm volatile(                                                                                    \
      "{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0;" KDTREE_DESCRIPTOR("a", "%32", "%35") \
          KDTREE_DESCRIPTOR("b", "%33",                                                            \
                            "%36") "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE     \
                                   " "                                                             \
                                   "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
                                   "%14, %15, "                                                    \
                                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "  \
                                   "%28, %29, %30, %31}, "                                         \
                                   "a, b, p, 1, 1, 0, 0;}"                                         \
      : KDTREE_FLOATS_32(d, 0)                                                                     \
      : "r"(a), "r"(b), "n"(Add), "n"(descriptor_high(kTile)), "n"(descriptor_high(Stride))        \
      : "memory")
template <class T, int Add, int Stride>
__device__ __forceinline__ void multiply_scores(float (&d)[32], uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, __half>)
    KDTREE_SCORES("f16");
  else
    KDTREE_SCORES("bf16");
}
#undef KDTREE_SCORES

// d (64 x 128) += a (64 x 16) b (16 x 128), b down k; a from registers, as mma.sync has it.
#define KDTREE_VALUES(TYPE)                                                                  \
  asm volatile(                                                                              \
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, 1, 0;" KDTREE_DESCRIPTOR(                  \
          "b", "%68", "%69") "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE    \
                             " "                                                             \
                             "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
                             "%14, %15, "                                                    \
                             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "  \
                             "%28, %29, %30, %31, "                                          \
                             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
                             "%44, %45, %46, %47, "                                          \
                             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "  \
                             "%60, %61, %62, %63}, "                                         \
                             "{%64, %65, %66, %67}, b, p, 1, 1, 1;}"                         \
      : KDTREE_FLOATS_32(d, 0), KDTREE_FLOATS_32(d, 32)                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(descriptor_high(Stride))     \
      : "memory")
template <class T, int Stride>
__device__ __forceinline__ void multiply_values(float (&d)[64], const uint32_t *a, uint32_t b) {
  if constexpr (std::is_same_v<T, __half>)
    KDTREE_VALUES("f16");
  else
    KDTREE_VALUES("bf16");
}
#undef KDTREE_VALUES

// d (64 x Rows) = or += a (64 x 16) b (16 x Rows), Rows 8 or 16, b along k, its tiles one after the
// other; a along k or, where Down, down k.
#define KDTREE_FEW(ROWS, TYPE, D, A, B, ADD, DOWN, STRIDE_A, STRIDE_B, ...)                   \
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, " ADD                           \
               ", 0;" KDTREE_DESCRIPTOR("a", A, STRIDE_A) KDTREE_DESCRIPTOR(                  \
                   "b", B, STRIDE_B) "wgmma.mma_async.sync.aligned.m64n" ROWS "k16.f32." TYPE \
                                     "." TYPE " {" D "}, a, b, p, 1, 1, " DOWN ", 0;}"        \
               : __VA_ARGS__                                                                  \
               : "r"(a), "r"(b), "n"(Add), "n"(Down), "n"(descriptor_high(Stride)),           \
                 "n"(descriptor_high(kTile))                                                  \
               : "memory")
#define KDTREE_FEW_8(TYPE)                                                                \
  KDTREE_FEW("8", TYPE, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", "%9", "+f"(d[0]), \
             "+f"(d[1]), "+f"(d[2]), "+f"(d[3]))
#define KDTREE_FEW_16(TYPE)                                                                        \
  KDTREE_FEW("16", TYPE, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", "%11", "%12", "%13", \
             KDTREE_FLOATS_8(d, 0))
template <class T, int Rows, int Add, int Down, int Stride>
__device__ __forceinline__ void multiply_few(float (&d)[Rows / 2], uint32_t a, uint32_t b) {
  if constexpr (Rows == 8 && std::is_same_v<T, __half>)
    KDTREE_FEW_8("f16");
  else if constexpr (Rows == 8)
    KDTREE_FEW_8("bf16");
  else if constexpr (std::is_same_v<T, __half>)
    KDTREE_FEW_16("f16");
  else
    KDTREE_FEW_16("bf16");
}
#undef KDTREE_FEW_8
#undef KDTREE_FEW_16
#undef KDTREE_FEW
#undef KDTREE_FLOATS_8
#undef KDTREE_FLOATS_32
#undef KDTREE_DESCRIPTOR

}  // namespace kdtree::cuda::sm90
