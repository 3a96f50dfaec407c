// CUDA devices as the rest of the library sees them; no CUDA header needed to include this.
#pragma once

#include <cstdint>

#include "kdtree.h"

namespace kdtree::cuda {

// Makes device_id current and returns the device that was; throws (KDTREE_ERROR_NO_CODE) when
// there is no driver, no such device, or no code for it in this build.
int enter_device(int32_t device_id);
void leave_device(int previous) noexcept;

// The attention kernels that a device takes; KDTREE_FORCE_PATH=sm80 forces the portable ones.
enum class Path { sm80, sm90 };
Path current_path();  // of the current device
int num_sms();        // of the current device
// Whether the code for the current device is for sm_90 or later: its kernels can wait for the one
// before them themselves.
bool waits_for_previous();

void device_info(kdtree_device_info_params &info);
void *allocate(int64_t bytes, void *stream);
void release(void *ptr, void *stream);

}  // namespace kdtree::cuda
