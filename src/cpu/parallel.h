// Threads for the CPU ops: plain std::thread, started per call, so that nothing lives on that a
// fork would lose. KDTREE_NUM_THREADS limits them.
#pragma once

#include <cstdint>
#include <functional>

namespace kdtree::cpu {

int num_threads();

// body(begin, end) over disjoint ranges that cover [0, count); `grain` is the least work worth a
// thread. Runs in the calling thread when one is enough. The first exception is rethrown.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)> &body);

}  // namespace kdtree::cpu
