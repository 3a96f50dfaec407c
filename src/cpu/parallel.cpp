#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kdtree::cpu {

int num_threads() {
  if (const char *text = std::getenv("KDTREE_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n > 0) return std::min(n, 1024);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)> &body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  const int64_t threads = std::min<int64_t>(num_threads(), (count + grain - 1) / grain);
  if (threads <= 1) return body(0, count);

  // Chunks are handed out as threads ask, so that a slow one does not hold up the rest.
  const int64_t chunk = std::max(grain, (count + threads * 8 - 1) / (threads * 8));
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  auto work = [&] {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk);
      if (begin >= count) return;
      try {
        body(begin, std::min(count, begin + chunk));
      } catch (...) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> pool;
  pool.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int64_t i = 1; i < threads; ++i) pool.emplace_back(work);
  } catch (...) {
    // No more threads to be had: fewer do.
  }
  work();
  for (std::thread &thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace kdtree::cpu
