// What every file of src/capi does in the same order: read the params, check them, choose the
// device, call. A check throws kdtree::Error; entry() turns it into a status and keeps its message.
#pragma once

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>

#include "dtype.h"
#include "error.h"
#include "kdtree.h"
#include "ops.h"

namespace kdtree::capi {

// Which memory the call works on; also the check of device_type and device_id.
enum class Device { cpu, cuda };
Device device_of(int32_t device_type, int32_t device_id);

// Makes a CUDA device current for a scope. Throws when there is no driver, no such device or no
// code for it in this build; does nothing for Device::cpu.
class DeviceGuard {
 public:
  DeviceGuard(Device device, int32_t device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

 private:
  int previous_ = -1;
};

// Runs body() and maps what it throws to a status, with the message in kdtree_last_error().
int fail(const Error &error) noexcept;
int fail_unknown() noexcept;
const char *last_error_message();  // of the calling thread
template <class Body>
int guarded(Body &&body) noexcept {
  try {
    body();
    return KDTREE_OK;
  } catch (const Error &error) {
    return fail(error);
  } catch (...) {
    return fail_unknown();
  }
}

// The caller's struct as this library knows it: members it lacks read as zero, members that only
// it knows must be zero.
template <class Params>
Params read_params(const Params *params) {
  if (params == nullptr) throw ValueError("params: expected a struct, got NULL");
  const int64_t size = params->struct_size;
  constexpr int64_t known = sizeof(Params);
  if (size < static_cast<int64_t>(offsetof(Params, device_id) + sizeof(int32_t)) || size > 4096)
    throw ValueError("params.struct_size: expected " + std::to_string(known) + ", got " +
                     std::to_string(size));
  const char *bytes = reinterpret_cast<const char *>(params);
  for (int64_t i = known; i < size; ++i)
    if (bytes[i] != 0)
      throw ValueError("params.struct_size: expected at most " + std::to_string(known) +
                       " (this library is older than its caller), got " + std::to_string(size));
  Params copy{};
  std::memcpy(&copy, params, size < known ? size : known);
  return copy;
}

// The whole of an op: `check(p)` throws on bad input and returns false when there is nothing to
// do; then the implementation for the device runs.
template <class Params, class Check>
int run_op(const Params *params, void *stream, Check &&check, void (*on_cpu)(const Params &),
           void (*on_cuda)(const Params &, Stream)) noexcept {
  return guarded([&] {
    Params p = read_params(params);
    const Device device = device_of(p.device_type, p.device_id);
    if (!check(p, device)) return;
    if (device == Device::cpu) return on_cpu(p);
    DeviceGuard guard(device, p.device_id);
    on_cuda(p, stream);
  });
}

// ---- checks of single arguments
std::string range_text(int64_t low, int64_t high);
void check_range(const char *name, int64_t value, int64_t low, int64_t high);
// Non-NULL, and aligned to `alignment` bytes.
void check_pointer(const char *name, const void *ptr, int64_t alignment);
// One of the dtypes given.
void check_dtype(const char *name, int32_t dtype, std::initializer_list<kdtree_dtype> allowed);

// ---- overlap of outputs with inputs and with each other
// The bytes that an array spans, from its dims and strides in elements (any sign).
struct Extent {
  const char *name;
  const void *ptr;
  int64_t low, high;  // byte offsets [low, high) from ptr; empty arrays have low == high
};
struct Dim {
  int64_t size, stride;
};
Extent extent(const char *name, const void *ptr, int64_t element_size,
              std::initializer_list<Dim> dims);
// How many rows leading dimensions make, 0..INT32_MAX; `lead` becomes them, filled up with ones.
int64_t check_lead_dims(int32_t ndim, const int64_t *dims, const char *strides_name,
                        const int64_t *strides, Dim (&lead)[KDTREE_MAX_LEAD_DIMS]);
// NULL pointers are skipped.
void check_no_overlap(std::initializer_list<Extent> outputs, std::initializer_list<Extent> inputs);

}  // namespace kdtree::capi
