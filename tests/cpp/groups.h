// Two more groups for the bodies of src/tree, of 32 lanes each, for machines without a GPU:
//
//   FiberGroup   lanes are fibers of one thread. A collective that not all lanes reach at the same
//                place in the source aborts, with both places in the message.
//   ThreadGroup  lanes are threads. Only sync() orders memory, as on the GPU: values go through
//                relaxed atomics, so under ThreadSanitizer a missing sync() is a data race.
#pragma once

#include <ucontext.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kdtree::test {

constexpr int kLanes = 32;
using Values = std::array<uint64_t, kLanes>;

// The collectives, over `Values exchange(const char *place, int line, uint64_t value)` and
// `void sync(int line)` of a group.
template <class Self>
class Collectives {
 public:
  static constexpr int kSize = kLanes;
  int size() const { return kSize; }
  uint32_t ballot(bool value, int line = __builtin_LINE()) {
    const Values values = self().exchange("ballot", line, value);
    uint32_t lanes = 0;
    for (int i = 0; i < kLanes; ++i) lanes |= static_cast<uint32_t>(values[i]) << i;
    return lanes;
  }
  bool any(bool value, int line = __builtin_LINE()) { return ballot(value, line) != 0; }
  template <class T>
  T hand_out(bool mine, const T &value, T &place, int line = __builtin_LINE()) {
    const uint32_t owners = ballot(mine, line);
    if (owners == 0 || (owners & (owners - 1)) != 0) {
      std::fprintf(stderr, "hand_out by lanes %x at line %d\n", owners, line);
      std::abort();
    }
    if (mine) place = value;
    self().sync();
    return place;
  }
  void fence() {}

 private:
  Self &self() { return static_cast<Self &>(*this); }
};

// ---- fibers

class Fibers {
 public:
  // Runs body(lane) on every lane, from collective to collective.
  void run(std::function<void(int)> body) {
    body_ = std::move(body);
    for (int lane = 0; lane < kLanes; ++lane) {
      Lane &l = lanes_[lane];
      if (l.stack == nullptr) l.stack = std::make_unique<char[]>(kStack);
      l.done = false;
      getcontext(&l.context);
      l.context.uc_stack.ss_sp = l.stack.get();
      l.context.uc_stack.ss_size = kStack;
      l.context.uc_link = &scheduler_;
      makecontext(&l.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                  static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 32),
                  static_cast<unsigned>(reinterpret_cast<uintptr_t>(this)));
    }
    while (true) {
      for (current_ = 0; current_ < kLanes; ++current_)
        swapcontext(&scheduler_, &lanes_[current_].context);
      for (int lane = 1; lane < kLanes; ++lane) check(lanes_[0], lanes_[lane], lane);
      if (lanes_[0].done) return;
    }
  }

  Values exchange(const char *place, int line, uint64_t value) {
    Lane &l = lanes_[current_];
    l.place = place;
    l.line = line;
    slot_[phase_][current_] = value;
    const int phase = phase_;
    if (current_ == kLanes - 1) phase_ ^= 1;  // the last lane of a round to arrive
    swapcontext(&l.context, &scheduler_);
    return slot_[phase];
  }

 private:
  static constexpr size_t kStack = 128 << 10;
  struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    const char *place;
    int line;
    bool done;
  };

  static void enter(unsigned high, unsigned low) {
    auto *self = reinterpret_cast<Fibers *>(static_cast<uintptr_t>(high) << 32 | low);
    self->body_(self->current_);
    self->lanes_[self->current_].done = true;
  }

  static void check(const Lane &a, const Lane &b, int lane) {
    if (a.done && b.done) return;
    if (!a.done && !b.done && a.line == b.line && std::strcmp(a.place, b.place) == 0) return;
    std::fprintf(stderr, "divergent collective: lane 0 %s line %d, lane %d %s line %d\n",
                 a.done ? "finished after" : a.place, a.line, lane,
                 b.done ? "finished after" : b.place, b.line);
    std::abort();
  }

  std::array<Lane, kLanes> lanes_{};
  std::function<void(int)> body_;
  ucontext_t scheduler_;
  Values slot_[2];  // a lane may reach the next collective before another has read this one's
  int phase_ = 0;
  int current_ = 0;
};

class FiberGroup : public Collectives<FiberGroup> {
 public:
  FiberGroup(Fibers &fibers, int lane) : fibers_(fibers), lane_(lane) {}
  int lane() const { return lane_; }
  void sync(int line = __builtin_LINE()) { fibers_.exchange("sync", line, 0); }
  Values exchange(const char *place, int line, uint64_t value) {
    return fibers_.exchange(place, line, value);
  }

 private:
  Fibers &fibers_;
  int lane_;
};

inline void run_fibers(const std::function<void(FiberGroup &)> &body) {
  static Fibers fibers;
  fibers.run([&](int lane) {
    FiberGroup group(fibers, lane);
    body(group);
  });
}

// ---- threads

struct Threads {
  std::barrier<> barrier{kLanes};
  // Halves of a value, each below the number of its collective. Two sets are enough: who writes to
  // a set again has seen every lane at the collective after the one it held.
  std::atomic<uint64_t> half[2][kLanes][2] = {};
};

class ThreadGroup : public Collectives<ThreadGroup> {
 public:
  ThreadGroup(Threads &threads, int lane) : threads_(threads), lane_(lane) {}
  int lane() const { return lane_; }
  void sync() { threads_.barrier.arrive_and_wait(); }
  Values exchange(const char *, int, uint64_t value) {
    const uint64_t number = ++count_;
    auto &set = threads_.half[number % 2];
    for (int h = 0; h < 2; ++h)
      set[lane_][h].store(number << 32 | (value >> 32 * h & 0xffffffffu),
                          std::memory_order_relaxed);
    Values values{};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int h = 0; h < 2; ++h) {
        uint64_t word;
        while ((word = set[lane][h].load(std::memory_order_relaxed)) >> 32 != number)
          std::this_thread::yield();
        values[lane] |= (word & 0xffffffffu) << 32 * h;
      }
    }
    return values;
  }

 private:
  Threads &threads_;
  int lane_;
  uint64_t count_ = 0;
};

inline void run_threads(const std::function<void(ThreadGroup &)> &body) {
  Threads threads;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane)
    lanes.emplace_back([&, lane] {
      ThreadGroup group(threads, lane);
      body(group);
    });
  for (std::thread &lane : lanes) lane.join();
}

}  // namespace kdtree::test
