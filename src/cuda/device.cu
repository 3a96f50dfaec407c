// Devices: the guard that every CUDA op passes, and what the diagnostics show.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/launch.h"

namespace kdtree::cuda {

// Exists only to ask the runtime what code this build has for a device; its bound tells sm_90a.
constexpr int kSm90Threads = 32;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__global__ void __launch_bounds__(kSm90Threads) probe_kernel() {}
#else
__global__ void __launch_bounds__(2 * kSm90Threads) probe_kernel() {}
#endif

constexpr int kMaxDevices = 256;

// sm80: for the portable path, of sm_80 to 89 or of later ones.
enum class Code { unknown, none, sm80, sm80_later, sm90 };

// Per ordinal. A process keeps its devices.
static std::atomic<Code> code_of[kMaxDevices];

// What this build has for a device, which is the current one.
static Code find_code(int device_id) {
  Code code = device_id < kMaxDevices ? code_of[device_id].load() : Code::unknown;
  if (code == Code::unknown) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error != cudaSuccess && error != cudaErrorNoKernelImageForDevice &&
        error != cudaErrorInvalidDeviceFunction && error != cudaErrorUnsupportedPtxVersion)
      check(error, "cudaFuncGetAttributes");
    cudaGetLastError();
    code = error != cudaSuccess                            ? Code::none
           : attributes.maxThreadsPerBlock == kSm90Threads ? Code::sm90
           : attributes.ptxVersion >= 90                   ? Code::sm80_later
                                                           : Code::sm80;
    if (device_id < kMaxDevices) code_of[device_id].store(code);
  }
  return code;
}

static std::string no_code_text(int device_id) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_id);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_id);
  return "this build of kdtree has no code for cuda:" + std::to_string(device_id) + " (sm_" +
         std::to_string(major) + std::to_string(minor) +
         "); its architectures are listed by `python -m kdtree`";
}

int enter_device(int32_t device_id) {
  int count = 0, previous = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw Error{KDTREE_ERROR_NO_CODE,
                std::string("no usable CUDA driver or GPU: ") + cudaGetErrorString(error)};
  }
  if (device_id >= count)
    throw Error{KDTREE_ERROR_NO_CODE, "device_id: expected below " + std::to_string(count) +
                                          " (the GPUs here), got " + std::to_string(device_id)};
  check(cudaGetDevice(&previous), "cudaGetDevice");
  if (previous != device_id) check(cudaSetDevice(device_id), "cudaSetDevice");
  bool found = false;
  try {
    found = find_code(device_id) != Code::none;
  } catch (...) {
    leave_device(previous);
    throw;
  }
  if (!found) {
    const std::string text = no_code_text(device_id);
    leave_device(previous);
    throw Error{KDTREE_ERROR_NO_CODE, text};
  }
  return previous;
}

void leave_device(int previous) noexcept {
  int current = previous;
  if (cudaGetDevice(&current) == cudaSuccess && current != previous) cudaSetDevice(previous);
}

Path current_path() {
  const char *forced = std::getenv("KDTREE_FORCE_PATH");
  if (forced == nullptr || *forced == '\0') {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return find_code(device) == Code::sm90 ? Path::sm90 : Path::sm80;
  }
  if (std::strcmp(forced, "sm80") == 0) return Path::sm80;
  throw ValueError(std::string("KDTREE_FORCE_PATH: expected sm80, got ") + forced);
}

bool waits_for_previous() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const Code code = find_code(device);
  return code == Code::sm80_later || code == Code::sm90;
}

int num_sms() {
  int device = 0, sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return sms;
}

void device_info(kdtree_device_info_params &info) {
  cudaError_t error = cudaGetDeviceCount(&info.device_count);
  cudaDriverGetVersion(&info.driver_version);
  if (error != cudaSuccess || info.device_count == 0) {
    cudaGetLastError();
    info.device_count = 0;
    std::snprintf(info.reason, sizeof(info.reason), "%s",
                  error == cudaSuccess ? "no GPU" : cudaGetErrorString(error));
    return;
  }
  if (info.device_id < 0 || info.device_id >= info.device_count)
    throw ValueError("device_id: expected below " + std::to_string(info.device_count) + ", got " +
                     std::to_string(info.device_id));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, info.device_id), "cudaGetDeviceProperties");
  std::snprintf(info.name, sizeof(info.name), "%s", properties.name);
  info.cc_major = properties.major;
  info.cc_minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.total_memory = static_cast<int64_t>(properties.totalGlobalMem);
  try {
    leave_device(enter_device(info.device_id));
    std::snprintf(info.path, sizeof(info.path), current_path() == Path::sm90 ? "sm90" : "sm80");
  } catch (const Error &e) {
    std::snprintf(info.reason, sizeof(info.reason), "%s", e.message.c_str());
  }
}

// Calls that a capture, of whatever library, forbids unless told that they are meant.
struct RelaxedCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

// Memory without a stream is cudaMalloc's: cudaFree waits for the device's work on it, and does
// not wait for work on cudaMallocAsync's.
void *allocate(int64_t bytes, void *stream) {
  void *ptr = nullptr;
  const size_t size = static_cast<size_t>(bytes > 0 ? bytes : 1);
  RelaxedCapture relaxed;
  const cudaError_t error = stream == nullptr
                                ? cudaMalloc(&ptr, size)
                                : cudaMallocAsync(&ptr, size, static_cast<cudaStream_t>(stream));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw Error{KDTREE_ERROR_MEMORY, "out of device memory: " + std::to_string(bytes) + " bytes"};
  }
  check(error, stream == nullptr ? "cudaMalloc" : "cudaMallocAsync");
  return ptr;
}

void release(void *ptr, void *stream) {
  RelaxedCapture relaxed;
  if (stream == nullptr) return check(cudaFree(ptr), "cudaFree");
  check(cudaFreeAsync(ptr, static_cast<cudaStream_t>(stream)), "cudaFreeAsync");
}

}  // namespace kdtree::cuda
