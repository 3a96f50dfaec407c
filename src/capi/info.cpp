// The calls about the library itself.
#include <cstring>
#include <new>

#include "capi/check.h"
#include "cuda/device.h"

using namespace kdtree;

extern "C" int kdtree_abi_version(void) {
  return KDTREE_ABI_VERSION;
}
extern "C" int kdtree_max_qlen(void) {
  return KDTREE_MAX_QLEN;
}

extern "C" const char *kdtree_status_string(int status) {
  switch (status) {
    case KDTREE_OK: return "ok";
    case KDTREE_ERROR_VALUE: return "invalid value";
    case KDTREE_ERROR_TYPE: return "invalid type";
    case KDTREE_ERROR_NO_CODE: return "no driver, no such GPU, or no code for this GPU";
    case KDTREE_ERROR_CUDA: return "CUDA error";
    case KDTREE_ERROR_MEMORY: return "out of memory";
    case KDTREE_ERROR_INTERNAL: return "internal error";
  }
  return "unknown status";
}

extern "C" const char *kdtree_last_error(void) {
  return capi::last_error_message();
}

extern "C" const char *kdtree_build_info(void) {
  return "{\"version\": \"" KDTREE_VERSION "\", \"commit\": \"" KDTREE_COMMIT
         "\", \"cuda_archs\": \"" KDTREE_ARCHS "\", \"cuda_toolkit\": \"" KDTREE_TOOLKIT "\"}";
}

extern "C" int kdtree_device_info(kdtree_device_info_params *params) {
  return capi::guarded([&] {
    kdtree_device_info_params info{};
    if (params == nullptr || params->struct_size != static_cast<int64_t>(sizeof(info)))
      throw ValueError("params.struct_size: expected " + std::to_string(sizeof(info)) + ", got " +
                       (params == nullptr ? "NULL" : std::to_string(params->struct_size)));
    info.struct_size = params->struct_size;
    info.device_id = params->device_id;
    cuda::device_info(info);
    *params = info;
  });
}

extern "C" int kdtree_malloc(int32_t device_type, int32_t device_id, int64_t bytes, void *stream,
                             void **ptr) {
  return capi::guarded([&] {
    const capi::Device device = capi::device_of(device_type, device_id);
    capi::check_pointer("ptr", ptr, alignof(void *));
    capi::check_range("bytes", bytes, 0, INT64_MAX);
    if (device == capi::Device::cpu) {
      *ptr = ::operator new(static_cast<size_t>(bytes), std::align_val_t(64));
      return;
    }
    capi::DeviceGuard guard(device, device_id);
    *ptr = cuda::allocate(bytes, stream);
  });
}

extern "C" int kdtree_free(int32_t device_type, int32_t device_id, void *ptr, void *stream) {
  return capi::guarded([&] {
    const capi::Device device = capi::device_of(device_type, device_id);
    if (ptr == nullptr) return;
    if (device == capi::Device::cpu) return ::operator delete(ptr, std::align_val_t(64));
    capi::DeviceGuard guard(device, device_id);
    cuda::release(ptr, stream);
  });
}
