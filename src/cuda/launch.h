// What every .cu file needs around its kernels. Nothing here may be `static` or in an anonymous
// namespace on the device side: such symbols carry a hash of the source path, and the build is
// reproducible.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "cuda/device.h"
#include "error.h"
#include "ops.h"

namespace kdtree::cuda {

// Whether an SM of the architecture compiled for has 100 KB of shared memory; others have 164 or
// more.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr bool kSmallShared = true;
#else
constexpr bool kSmallShared = false;
#endif

inline void check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a launch error is ours to report, once
  throw Error{KDTREE_ERROR_CUDA, std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                                     cudaGetErrorString(error)};
}

// kernel<<<grid, block, smem, stream>>>(args...), with the launch checked.
template <class... Params, class... Args>
void launch(const char *what, void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem,
            Stream stream, Args &&...args) {
  kernel<<<grid, block, smem, static_cast<cudaStream_t>(stream)>>>(std::forward<Args>(args)...);
  check(cudaGetLastError(), what);
}

// Kernels that are launched early: what a kernel does to wait for the one before it in the stream,
// and to let the one after it start, once all of its own blocks have.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// launch; with `early`, and code that can wait for it, the kernel may start before the one before
// it has ended.
template <class... Params, class... Args>
void launch_early(const char *what, void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem,
                  Stream stream, bool early, Args &&...args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = smem;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = early && waits_for_previous() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), what);
}

// Raises the dynamic shared memory limit of a kernel on the current device.
template <class... Params>
void allow_smem(void (*kernel)(Params...), size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

// How many blocks of a kernel an SM of the current device runs at once.
template <class... Params>
int blocks_per_sm(void (*kernel)(Params...), int block, size_t smem) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, block, smem),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace kdtree::cuda
