// The part of the DLPack ABI (version 1.3) that the binding reads: https://dmlc.github.io/dlpack.
#pragma once

#include <stdint.h>

namespace kdtree::dlpack {

struct Device {
  int32_t type;  // 1 CPU, 2 CUDA, 3 CUDA pinned host, 13 CUDA managed
  int32_t id;
};

struct DataType {
  uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 10 float8_e4m3fn
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void *data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t *shape;
  int64_t *strides;  // in elements; NULL: compact row-major
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void *context;
  void (*deleter)(ManagedTensor *);
};

struct Version {
  uint32_t major, minor;
};

constexpr uint64_t kReadOnly = 1, kIsCopied = 2;

struct ManagedTensorVersioned {
  Version version;
  void *context;
  void (*deleter)(ManagedTensorVersioned *);
  uint64_t flags;
  Tensor tensor;
};

// What a type offers as `__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api": views
// of its arrays without a Python call, and the stream that its library works on.
struct ExchangeApi {
  Version version;
  ExchangeApi *previous;
  int (*allocate)(Tensor *, ManagedTensorVersioned **, void *,
                  void (*)(void *, const char *, const char *));
  int (*managed_from_object)(void *, ManagedTensorVersioned **);
  int (*managed_to_object)(ManagedTensorVersioned *, void **);
  int (*tensor_from_object)(void *, Tensor *);
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
};

}  // namespace kdtree::dlpack
