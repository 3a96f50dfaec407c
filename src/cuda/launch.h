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

// Raises the dynamic shared memory limit of a kernel on the current device.
template <class... Params>
void allow_smem(void (*kernel)(Params...), size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace kdtree::cuda
