// How a chain's warps find and read the records that stand in the stages of a kernel's shared
// memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/util.hpp>

namespace flash_kda {

// Walks a ring of stages: which one a record uses, and the parity of its barriers' phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What Chain asks of a ring, but for release(): who is told that a stage may be filled again
// differs. `Smem` has stages of records, and an mbarrier for each that says whether its record is
// there.
template <class Smem, int kStageCount>
struct RecordReader {
  static constexpr int kStages = kStageCount;
  Smem& smem;
  // Of the first stage, in shared memory. From one lane: so the compiler knows that it is the same
  // in all, and keeps it. In a cluster it would ask for the CTA's rank again before each step.
  const unsigned first_address;

  __device__ __forceinline__ RecordReader(Smem& smem)
      : smem(smem),
        first_address(__shfl_sync(kWarpMask, cute::cast_smem_ptr_to_uint(smem.stage), 0)) {}

  __device__ __forceinline__ unsigned record_address(int stage) const {
    return first_address + stage * static_cast<unsigned>(sizeof smem.stage[0]);
  }
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
