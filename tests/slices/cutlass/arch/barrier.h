// Nobody waits.
#pragma once

namespace cutlass::arch {

struct ClusterBarrier {
  using ValueType = unsigned long long;
  static void init(ValueType*, int) {}
  static void arrive(ValueType*) {}
  static void arrive(ValueType*, int, int) {}
  static void wait(ValueType*, unsigned) {}
  static bool test_wait(ValueType*, unsigned, int) { return true; }
};
inline void fence_barrier_init() {}

}  // namespace cutlass::arch
