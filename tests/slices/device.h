// Device code on the host: the threads of a warp (or of a CTA) run in turns on stacks of their own,
// each up to the next intrinsic that concerns them all, where all must meet. What they do is
// recorded for each of them.
#pragma once

#include <ucontext.h>

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

// From kAwait on by one lane of a warp, the others by all of them alike.
enum Event : int64_t {
  kJob,
  kLoad,
  kIdentity,
  kRun,
  kStore,
  kBetween,
  kFinish,
  kChunk,
  kFetch,
  kAwait,
  kCopy,
  kLeave
};
enum Meeting { kShuffle, kBallot, kSyncThreads };

class Threads {
 public:
  static constexpr int kMost = 512;
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
      thread.context.uc_link = &turns_;
      makecontext(&thread.context, &Threads::enter, 0);
      thread.done = false;
      thread.events.clear();
    }
    do {
      for (current_ = 0; current_ < count; ++current_) {
        threadIdx.x = static_cast<unsigned>(first + current_);
        swapcontext(&turns_, &threads_[current_].context);
      }
      for (int i = 1; i < count; ++i) {
        if (threads_[i].done != threads_[0].done) fail("some threads end while others wait");
        if (!threads_[0].done && threads_[i].meeting != threads_[0].meeting)
          fail("threads wait for different meetings");
      }
      std::swap(coming_, met_);
    } while (!threads_[0].done);
  }

  // What every thread has brought.
  const int64_t* meet(Meeting meeting, int64_t value) {
    coming_[current_] = value;
    threads_[current_].meeting = meeting;
    swapcontext(&threads_[current_].context, &turns_);
    return met_;
  }

  void record(std::vector<int64_t> event) { threads_[current_].events.push_back(std::move(event)); }
  const Events& events(int thread) const { return threads_[thread].events; }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
    Meeting meeting;
    Events events;
  };

  static void enter();

  Thread threads_[kMost];
  ucontext_t turns_;
  std::function<void()> body_;
  int current_ = 0;
  int64_t values_[2][kMost];
  int64_t *coming_ = values_[0], *met_ = values_[1];
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

inline int64_t address(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

}  // namespace device

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// Of the headers that are not replaced only cluster_sync() has assembly: asm volatile(...).
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
inline void __syncwarp() {}
inline void __syncthreads() { device::threads.meet(device::kSyncThreads, 0); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
