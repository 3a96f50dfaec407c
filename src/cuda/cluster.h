// Blocks that work on one row together: a thread block cluster, whose blocks read and write each
// other's shared memory. Before sm_90 there are none, and a "cluster" is one block.
#pragma once

#include "cuda/launch.h"

namespace kdtree::cuda {

constexpr int kMaxCluster = 8;  // what every GPU with clusters can schedule

namespace cluster {

__device__ __forceinline__ int size() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return static_cast<int>(value);
#else
  return 1;
#endif
}

__device__ __forceinline__ int rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return static_cast<int>(value);
#else
  return 0;
#endif
}

// Of the grid: how many clusters, and which this is. Read anew each time: a register less.
__device__ __forceinline__ int clusters() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(value));
  return static_cast<int>(value);
#else
  return gridDim.x;
#endif
}

__device__ __forceinline__ int id() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(value));
  return static_cast<int>(value);
#else
  return blockIdx.x;
#endif
}

// Once all threads have arrived and waited, every block of the cluster has started and opened its
// inboxes. Orders nothing else, which would take a fence.
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Blocks of a cluster that work on one thing together: `size` of them, a power of two.
struct Team {
  int size;
  __device__ __forceinline__ int rank() const { return cluster::rank() & (size - 1); }
  __device__ __forceinline__ int first() const { return cluster::rank() & -size; }  // block
  __device__ __forceinline__ bool alone() const { return size == 1; }
  // Of the grid's teams, the first ones spread over its clusters.
  __device__ __forceinline__ int number() const {
    return id() + clusters() * (cluster::rank() >> __popc(size - 1));
  }
  __device__ __forceinline__ int teams() const {
    return clusters() * (cluster::size() >> __popc(size - 1));
  }
};

#if __CUDA_ARCH__ >= 900
// A shared variable's address, here and in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ uint32_t address(T *shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
template <class T>
__device__ __forceinline__ uint32_t address(T *shared, int rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(result)
               : "r"(address(shared)), "r"(rank));
  return result;
}
#endif

// Lets a block wait for what the blocks of its cluster write to its shared memory: an mbarrier,
// which counts their bytes, so that no writer needs a fence (a release to the cluster is one for
// the whole GPU). A block alone writes to itself and waits at its own barrier; without a cluster
// launch the instructions below are illegal. `alone`: nobody else writes to it.
//
// A round ends when it has been told `announcements` times of bytes to come, and they have come. A
// block may be one round ahead of its peers, so rounds alternate between two inboxes.
struct Inbox {
  uint64_t barrier;

  // By one thread, before it arrives.
  __device__ __forceinline__ void open(int announcements) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)),
                 "r"(announcements)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  // To this block's inbox. What the thread did to shared memory before is seen by all that wait.
  __device__ __forceinline__ void announce(int bytes, bool alone = size() == 1) {
#if __CUDA_ARCH__ >= 900
    if (alone) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // To that of block `rank`.
  __device__ __forceinline__ void announce_to(int rank, int bytes, bool alone = size() == 1) {
#if __CUDA_ARCH__ >= 900
    if (alone) return;
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
                     address(&barrier, rank)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // *to = value in block `rank`: 4, 8 or 16 bytes, announced by somebody.
  template <class T>
  __device__ __forceinline__ void send(const T &value, T *to, int rank, bool alone = size() == 1) {
    if (alone) {
      *to = value;
      return;
    }
#if __CUDA_ARCH__ >= 900
    const uint32_t at = address(to, rank), inbox = address(&barrier, rank);
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    uint32_t word[sizeof(T) / 4];
    memcpy(word, &value, sizeof value);
    if constexpr (sizeof(T) == 4)
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at),
          "r"(word[0]), "r"(inbox)
          : "memory");
    else if constexpr (sizeof(T) == 8)
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
              "r"(at),
          "r"(word[0]), "r"(word[1]), "r"(inbox)
          : "memory");
    else
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
          "[%5];" ::"r"(at),
          "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(inbox)
          : "memory");
#endif
  }
  // By all threads, for the inbox's rounds 0, 1, 2... in turn. What came lies in this block's own
  // shared memory: no more is acquired than that, which leaves L1 as it is.
  __device__ __forceinline__ void wait(int round, bool alone = size() == 1) {
    if (alone) {
      __syncthreads();
      return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address(&barrier)),
        "r"(round & 1)
        : "memory");
#endif
  }
};

}  // namespace cluster

// How many blocks to put on each of `rows` rows: a power of two, as many as `parts` of a row make
// work for and the GPU has room for, with `per_sm` blocks an SM.
template <class... Params>
int choose_cluster(void (*kernel)(Params...), int64_t rows, int64_t parts, int per_sm) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (attributes.binaryVersion < 90) return 1;
  const int64_t room = per_sm * num_sms();
  int size = 1;
  while (size < kMaxCluster && size < parts && 2 * size * rows <= room) size *= 2;
  return size;
}

// A launch of clusters of `size` blocks. It stays where it is: config points to attribute.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int64_t clusters, int size, int block, size_t smem, Stream stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(clusters * size);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = smem;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch &) = delete;
};

// How many clusters the current device runs at once.
template <class... Params>
int clusters_at_once(void (*kernel)(Params...), int size, int block, size_t smem) {
  if (size == 1) return blocks_per_sm(kernel, block, smem) * num_sms();
  const ClusterLaunch launch(1, size, block, smem, nullptr);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config),
        "cudaOccupancyMaxActiveClusters");
  return clusters;
}

// `clusters` clusters of `size` blocks.
template <class... Params, class... Args>
void launch_clusters(const char *what, void (*kernel)(Params...), int64_t clusters, int size,
                     int block, size_t smem, Stream stream, Args &&...args) {
  if (size == 1)
    return launch(what, kernel, dim3(clusters), dim3(block), smem, stream,
                  std::forward<Args>(args)...);
  const ClusterLaunch launch(clusters, size, block, smem, stream);
  check(cudaLaunchKernelEx(&launch.config, kernel, std::forward<Args>(args)...), what);
}

}  // namespace kdtree::cuda
