// A group of lanes that works on one request together: a warp on the GPU, one lane on the CPU.
// The bodies of src/tree are written once against it:
//
//   template <class Group> KDTREE_HD void body(Group &group, const Request &r, Scratch &scratch)
//
// lane() and size() split the work; what one lane writes to scratch another may read after
// sync(). Collectives must be reached by every lane of the group:
//
//   ballot(x)                     whose x is true
//   any(x)                        whether one's is
//   hand_out(mine, value, place)  the value of the one lane that has `mine`, for all; it stays at
//                                 `place`, in shared memory, which serves for nothing else
//   fence()                       the loads before it are under way before what comes after
//
// Each group has those that its bodies ask for. Tests run the same bodies as fibers, where a
// divergent collective aborts, and as threads under ThreadSanitizer, where a missing sync() is a
// race.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define KDTREE_HD __host__ __device__ __forceinline__
#else
#define KDTREE_HD inline
#endif

namespace kdtree::tree {

struct SerialGroup {
  static constexpr int kSize = 1;
  KDTREE_HD int lane() const { return 0; }
  KDTREE_HD int size() const { return kSize; }
  KDTREE_HD void sync() const {}
  KDTREE_HD void fence() const {}
  KDTREE_HD uint32_t ballot(bool value) const { return value ? 1u : 0u; }
  KDTREE_HD bool any(bool value) const { return value; }
};

#if defined(__CUDACC__)
struct WarpGroup {
  static constexpr int kSize = 32;
  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ int size() const { return kSize; }
  __device__ __forceinline__ void sync() const { __syncwarp(); }
  __device__ __forceinline__ uint32_t ballot(bool value) const {
    return __ballot_sync(0xffffffffu, value);
  }
  // Of a struct of 16-byte words, in shared memory. Its stores depend on `mine` without a branch.
  template <class T>
  __device__ __forceinline__ T hand_out(bool mine, const T &value, T &place) const {
    static_assert(sizeof(T) == 32 && alignof(T) == 16);
    uint4 word[2];
    memcpy(word, &value, sizeof word);
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(&place));
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %0, 0;"
        " @p st.shared.v4.u32 [%1 + 16], {%6, %7, %8, %9};"
        " @p st.shared.v4.u32 [%1], {%2, %3, %4, %5};}" ::"r"(static_cast<int>(mine)),
        "r"(at), "r"(word[0].x), "r"(word[0].y), "r"(word[0].z), "r"(word[0].w), "r"(word[1].x),
        "r"(word[1].y), "r"(word[1].z), "r"(word[1].w)
        : "memory");
    __syncwarp();
    return place;
  }
};

// A block of threads, for bodies that need no more than sync().
template <int kThreads>
struct BlockGroup {
  static constexpr int kSize = kThreads;
  __device__ __forceinline__ int lane() const { return threadIdx.x; }
  __device__ __forceinline__ int size() const { return kSize; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void fence() const { __syncwarp(); }
  __device__ __forceinline__ bool any(bool value) const { return __syncthreads_or(value); }
};
#endif

KDTREE_HD int count_lanes(uint32_t lanes) {
#if defined(__CUDA_ARCH__)
  return __popc(lanes);
#else
  return __builtin_popcount(lanes);
#endif
}

// The lowest lane of a ballot that is not empty.
KDTREE_HD int lowest_lane(uint32_t lanes) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(lanes)) - 1;
#else
  return __builtin_ctz(lanes);
#endif
}

}  // namespace kdtree::tree
