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
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return static_cast<int>(value);
#else
  return 1;
#endif
}

__device__ __forceinline__ int rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return static_cast<int>(value);
#else
  return 0;
#endif
}

// A barrier of all threads of the cluster; shared memory written before it is seen after it.
__device__ __forceinline__ void sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// The same variable in the shared memory of block `rank`. That block must have started, and must
// not end before the access: sync() before and after.
template <class T>
__device__ __forceinline__ T *peer(T *shared, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm volatile("mapa.u64 %0, %1, %2;"
               : "=l"(address)
               : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T *>(address);
#else
  return shared;
#endif
}

}  // namespace cluster

// How many blocks to put on each of `rows` rows: a power of two, as many as the GPU has room for
// (two blocks an SM) and `parts` of a row make work for.
template <class... Params>
int choose_cluster(void (*kernel)(Params...), int64_t rows, int64_t parts) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (attributes.binaryVersion < 90) return 1;
  const int64_t room = 2 * num_sms();
  int size = 1;
  while (size < kMaxCluster && size < parts && 2 * size * rows <= room) size *= 2;
  return size;
}

// One cluster of `size` blocks a row.
template <class... Params, class... Args>
void launch_clusters(const char *what, void (*kernel)(Params...), int64_t rows, int size, int block,
                     size_t smem, Stream stream, Args &&...args) {
  if (size == 1)
    return launch(what, kernel, dim3(rows), dim3(block), smem, stream, std::forward<Args>(args)...);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows * size);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = smem;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), what);
}

}  // namespace kdtree::cuda
