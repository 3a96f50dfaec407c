// A group of lanes that works on one request together: a warp on the GPU, one lane on the CPU.
// The bodies of src/tree are written once against it:
//
//   template <class Group> KDTREE_HD void body(Group &group, const Request &r, Scratch &scratch)
//
// lane() and size() split the work; what one lane writes to scratch another may read after
// sync(). Collectives (sync, ballot, shfl) must be reached by every lane of the group. Tests run
// the same bodies as fibers, where a divergent collective aborts, and as threads under
// ThreadSanitizer, where a missing sync() is a race.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define KDTREE_HD __host__ __device__ __forceinline__
#else
#define KDTREE_HD inline
#endif

namespace kdtree::tree {

struct SerialGroup {
  KDTREE_HD int lane() const { return 0; }
  KDTREE_HD int size() const { return 1; }
  KDTREE_HD void sync() const {}
  KDTREE_HD uint32_t ballot(bool value) const { return value ? 1u : 0u; }
  template <class T>
  KDTREE_HD T shfl(T value, int) const {
    return value;
  }
};

#if defined(__CUDACC__)
struct WarpGroup {
  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ int size() const { return 32; }
  __device__ __forceinline__ void sync() const { __syncwarp(); }
  __device__ __forceinline__ uint32_t ballot(bool value) const {
    return __ballot_sync(0xffffffffu, value);
  }
  template <class T>
  __device__ __forceinline__ T shfl(T value, int source) const {
    return __shfl_sync(0xffffffffu, value, source);
  }
};
#endif

}  // namespace kdtree::tree
