#include "capi/check.h"

#include <cstdint>
#include <exception>
#include <new>

#include "cuda/device.h"

namespace kdtree::capi {

namespace {
thread_local std::string last_error;
}  // namespace

const char *last_error_message() {
  return last_error.c_str();
}

int fail(const Error &error) noexcept {
  try {
    last_error = error.message;
  } catch (...) {
    last_error.clear();
  }
  return error.status;
}

int fail_unknown() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc &) {
    return fail({KDTREE_ERROR_MEMORY, "out of host memory"});
  } catch (const std::exception &e) {
    return fail({KDTREE_ERROR_INTERNAL, e.what()});
  } catch (...) {
    return fail({KDTREE_ERROR_INTERNAL, "unknown exception"});
  }
}

Device device_of(int32_t device_type, int32_t device_id) {
  // DLPack's numbers: kDLCPU 1, kDLCUDA 2, kDLCUDAHost 3, kDLCUDAManaged 13.
  if (device_type == 1 || device_type == 3) return Device::cpu;
  if (device_type != 2 && device_type != 13)
    throw TypeError("device_type: expected CPU (1, 3) or CUDA (2, 13), got " +
                    std::to_string(device_type));
  if (device_id < 0)
    throw ValueError("device_id: expected a CUDA ordinal, got " + std::to_string(device_id));
  return Device::cuda;
}

DeviceGuard::DeviceGuard(Device device, int32_t device_id) {
  if (device == Device::cuda) previous_ = cuda::enter_device(device_id);
}
DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cuda::leave_device(previous_);
}

std::string range_text(int64_t low, int64_t high) {
  return high == INT64_MAX ? "at least " + std::to_string(low)
                           : std::to_string(low) + ".." + std::to_string(high);
}

void check_range(const char *name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw ValueError(std::string(name) + ": expected " + range_text(low, high) + ", got " +
                     std::to_string(value));
}

void check_pointer(const char *name, const void *ptr, int64_t alignment) {
  if (ptr == nullptr) throw ValueError(std::string(name) + ": expected an array, got NULL");
  if (reinterpret_cast<uintptr_t>(ptr) % static_cast<uintptr_t>(alignment) != 0)
    throw ValueError(std::string(name) + ": expected an address in multiples of " +
                     std::to_string(alignment) + " bytes, got one that is " +
                     std::to_string(reinterpret_cast<uintptr_t>(ptr) % alignment) + " past");
}

void check_dtype(const char *name, int32_t dtype, std::initializer_list<kdtree_dtype> allowed) {
  std::string names;
  for (kdtree_dtype one : allowed) {
    if (dtype == one) return;
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(one));
  }
  throw TypeError(
      std::string(name) + ": expected " + names + ", got " +
      (dtype_name(dtype) != nullptr ? dtype_name(dtype) : "number " + std::to_string(dtype)));
}

constexpr int64_t kFarthest = int64_t(1) << 60;

Extent extent(const char *name, const void *ptr, int64_t element_size,
              std::initializer_list<Dim> dims) {
  Extent e{name, ptr, 0, element_size};
  if (ptr == nullptr) return {name, ptr, 0, 0};
  for (const Dim &dim : dims) {
    if (dim.size <= 0) return {name, ptr, 0, 0};
    int64_t reach, &end = dim.stride < 0 ? e.low : e.high;
    if (__builtin_mul_overflow(dim.size - 1, dim.stride, &reach) ||
        __builtin_mul_overflow(reach, element_size, &reach) ||
        __builtin_add_overflow(end, reach, &end) || end > kFarthest || end < -kFarthest)
      throw ValueError(std::string(name) + ": expected an array within 2^60 bytes, got " +
                       std::to_string(dim.size) + " elements with stride " +
                       std::to_string(dim.stride));
  }
  return e;
}

int64_t check_lead_dims(int32_t ndim, const int64_t *dims, const char *strides_name,
                        const int64_t *strides, Dim (&lead)[KDTREE_MAX_LEAD_DIMS]) {
  check_range("lead_ndim", ndim, 0, KDTREE_MAX_LEAD_DIMS);
  int64_t rows = 1;
  for (int i = 0; i < KDTREE_MAX_LEAD_DIMS; ++i) {
    lead[i] = {1, 0};
    if (i >= ndim || rows == 0) continue;
    check_range("lead_dims", dims[i], 0, INT32_MAX / rows);
    rows *= dims[i];
    if (dims[i] < 2) continue;
    const int64_t far = (int64_t(1) << 56) / dims[i];  // no extent overflows
    check_range(strides_name, strides[i], -far, far);
    lead[i] = {dims[i], strides[i]};
  }
  return rows;
}

static bool overlap(const Extent &a, const Extent &b) {
  if (a.ptr == nullptr || b.ptr == nullptr || a.low == a.high || b.low == b.high) return false;
  const auto pa = reinterpret_cast<intptr_t>(a.ptr), pb = reinterpret_cast<intptr_t>(b.ptr);
  return pa + a.low < pb + b.high && pb + b.low < pa + a.high;
}

void check_no_overlap(std::initializer_list<Extent> outputs, std::initializer_list<Extent> inputs) {
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    for (const Extent &in : inputs)
      if (overlap(*out, in))
        throw ValueError(std::string(out->name) +
                         ": expected memory of its own, got an overlap with " + in.name);
    for (auto other = out + 1; other != outputs.end(); ++other)
      if (overlap(*out, *other))
        throw ValueError(std::string(out->name) +
                         ": expected memory of its own, got an overlap with " + other->name);
  }
}

}  // namespace kdtree::capi
