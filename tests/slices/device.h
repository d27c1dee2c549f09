// Device code on the host: the threads of a warp run in turns on stacks of their own, each up to
// the next intrinsic that concerns them all, where all must meet; the warps of a CTA up to where
// all of them must. What they do is recorded for each of them.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;

namespace device {

[[noreturn]] inline void fail(const char* text) {
  std::fprintf(stderr, "CTA %u, thread %u: %s\n", blockIdx.x, threadIdx.x, text);
  std::exit(3);
}

// From kAwait on by one lane of a warp, kAwait perhaps by all of them, from kSend on by some, the
// others by all of them alike.
enum Event : int64_t {
  kJob,
  kLoad,
  kIdentity,
  kRun,
  kStore,
  kBetween,
  kFinish,
  kChunk,
  kPart,
  kRead,
  kFetch,
  kExpect,
  kTile,
  kGrowing,
  kWait,
  kAwait,
  kCopy,
  kLeave,
  kRaise,
  kSend,
  kPrefetch
};
enum Meeting { kShuffle, kBallot, kSyncWarp, kSyncThreads };

class Threads {
 public:
  static constexpr int kMost = 1024;
  using Events = std::vector<std::vector<int64_t>>;

  // Calls body() in `count` threads, from number `first` of the CTA on.
  void run(int count, int first, std::function<void()> body) {
    body_ = std::move(body);
    for (int i = 0; i < count; ++i) {
      Thread& thread = threads_[i];
      if (thread.stack == nullptr) thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &main_;
      makecontext(&thread.context, &Threads::enter, 0);
      thread.done = thread.waited = thread.stores = false;
      thread.events.clear();
    }
    do {
      for (int warp = 0; warp < count; warp += kWarp) {
        const int size = std::min(kWarp, count - warp);
        do {
          run_warp(first, warp, size);
        } while (!threads_[warp].done && threads_[warp].meeting != kSyncThreads);
        if (threads_[warp].done != threads_[0].done) fail("some warps end while others wait");
      }
    } while (!threads_[0].done);
    show(true);
  }

  // What every thread of the warp has brought.
  const int64_t* meet(Meeting meeting, int64_t value) {
    const int warp = current_ / kWarp * kWarp;
    int64_t* const brought = values_[round_] + warp;
    brought[current_ - warp] = value;
    threads_[current_].meeting = meeting;
    if (meeting == kSyncWarp || meeting == kSyncThreads) threads_[current_].stores = false;
    swapcontext(&threads_[current_].context, &main_);
    return brought;
  }
  int lane() const { return current_ % kWarp; }

  void wait_for_previous_launch() {
    threads_[current_].waited = true;
    show(true);
  }
  // From now on threads that have not waited find zeros there, as if the launch before that makes
  // it had not come so far.
  void hide(void* memory, size_t bytes) {
    hidden_ = static_cast<char*>(memory);
    kept_.resize(bytes);
  }
  // Before anything is done that depends on it.
  template <class Params>
  void check_that_schedule_is_there(const Params& p) const {
    if ((p.cu_seqlens != nullptr || p.shares != nullptr) && !threads_[current_].waited)
      fail("does not wait for the schedule");
  }
  // Before something is read: what lies in the workspace is of a launch before.
  void check_that_is_there(int64_t address) const {
    if (address >= workspace_begin && address < workspace_end && !threads_[current_].waited)
      fail("does not wait for the launch before");
  }
  int64_t workspace_begin = 0, workspace_end = 0;

  // Before other warps are told that states are there. A shuffle orders nothing.
  void check_that_stores_are_ordered() const {
    const int warp = current_ / kWarp * kWarp;
    for (int i = 0; i < kWarp; ++i) {
      if (threads_[warp + i].stores) fail("some lanes may not have stored their rows");
    }
  }

  void record(std::vector<int64_t> event) {
    Thread& thread = threads_[current_];
    thread.stores |= event[0] == kStore;
    thread.events.push_back(std::move(event));
  }
  const Events& events(int thread) const { return threads_[thread].events; }

 private:
  static constexpr int kWarp = 32;
  static constexpr size_t kStackBytes = 64 * 1024;
  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done, waited;
    bool stores;  // since it last synchronized
    Meeting meeting;
    Events events;
  };

  static void enter();

  void show(bool shown) {
    if (shown == shown_) return;
    shown_ = shown;
    if (shown) {
      std::copy_n(kept_.data(), kept_.size(), hidden_);
    } else {
      std::copy_n(hidden_, kept_.size(), kept_.data());
      std::fill_n(hidden_, kept_.size(), '\0');
    }
  }

  // Up to the next meeting. What is brought to the one after it must not replace what was brought
  // to this one, which others are still to read.
  void run_warp(int first, int warp, int size) {
    round_ ^= 1;
    for (current_ = warp; current_ < warp + size; ++current_) {
      threadIdx.x = static_cast<unsigned>(first + current_);
      show(threads_[current_].waited);
      swapcontext(&main_, &threads_[current_].context);
    }
    const Thread& leader = threads_[warp];
    for (int i = warp + 1; i < warp + size; ++i) {
      if (threads_[i].done != leader.done) fail("some threads end while others wait");
      if (!leader.done && threads_[i].meeting != leader.meeting)
        fail("threads wait for different meetings");
    }
  }

  Thread threads_[kMost];
  char* hidden_ = nullptr;
  std::vector<char> kept_;  // what it holds
  bool shown_ = true;
  ucontext_t main_;
  std::function<void()> body_;
  int current_ = 0;
  int round_ = 0;
  int64_t values_[2][kMost];
};

inline Threads threads;

inline void Threads::enter() {
  threads.body_();
  threads.threads_[threads.current_].done = true;
}

// What a barrier has been told to expect.
struct Expected {
  const void* barrier;
  unsigned bytes;
};
inline Expected expected;

// What a map holds here: the tensor's address and the bytes of a tile.
struct Tiles {
  uint64_t base;
  unsigned bytes;
};

inline int64_t address(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

}  // namespace device

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// Of the headers that are not replaced two functions of sm90/fused.cuh have assembly, asm
// volatile(...): one that synchronizes, and one that program.cpp has a stand-in for.
#define asm
#define volatile(...)

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  if (mask != 0xffffffffu || lane < 0 || lane > 31) device::fail("__shfl_sync of other lanes");
  return static_cast<T>(device::threads.meet(device::kShuffle, value)[lane]);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  if (mask != 0xffffffffu) device::fail("__ballot_sync of some lanes");
  const int64_t* const met = device::threads.meet(device::kBallot, predicate);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(met[lane]) << lane;
  return votes;
}
inline bool __all_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) == 0xffffffffu;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  if (mask != 0xffffffffu || distance < 0 || distance > 31)
    device::fail("__shfl_up_sync of other lanes");
  const int lane = device::threads.lane();
  const int64_t* const met = device::threads.meet(device::kShuffle, value);
  return static_cast<T>(met[lane < distance ? lane : lane - distance]);
}
inline int __reduce_max_sync(unsigned mask, int value) {
  if (mask != 0xffffffffu) device::fail("__reduce_max_sync of some lanes");
  const int64_t* const met = device::threads.meet(device::kShuffle, value);
  int most = value;
  for (int lane = 0; lane < 32; ++lane) most = std::max(most, static_cast<int>(met[lane]));
  return most;
}
inline void __syncwarp() { device::threads.meet(device::kSyncWarp, 0); }
inline void __syncthreads() { device::threads.meet(device::kSyncThreads, 0); }
inline void __nanosleep(unsigned) { device::fail("waits for what nobody has done before"); }
inline int atomicAdd(int* place, int value) {
  *place += value;
  return *place - value;
}
inline int atomicMax(int* place, int value) {
  const int before = *place;
  *place = std::max(before, value);
  return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return __builtin_clz(static_cast<unsigned>(x)); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
