// How a chain's warps read the records that stand in the stages of a kernel's shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flash_kda {

// What Chain asks of a ring, but for release(): who is told that a stage may be filled again
// differs. `Smem` has stages of records, and an mbarrier for each that says whether its record is
// there.
template <class Smem, int kStageCount>
struct RecordReader {
  static constexpr int kStages = kStageCount;
  Smem& smem;

  __device__ __forceinline__ const unsigned char* record(int stage) const {
    return smem.stage[stage].record;
  }
  __device__ __forceinline__ void wait(int stage, unsigned parity) const {
    cutlass::arch::ClusterBarrier::wait(&smem.full[stage], parity);
  }
  __device__ __forceinline__ bool landed(int stage, unsigned parity) const {
    return cutlass::arch::ClusterBarrier::test_wait(&smem.full[stage], parity, 1);
  }
};

}  // namespace flash_kda
