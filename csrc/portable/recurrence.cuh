// Recurrence: the serial chain over the chunks of one sequence and head. A CTA owns a slice of V, a
// warp 16 * kTiles rows of it, and rows of V never meet, so warps share records but no results.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "chunk/copied_ring.cuh"
#include "chunk/sequence.cuh"
#include "chunk/step_mma.cuh"

namespace flash_kda::portable {

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void recurrence(const ForwardParams& p, RecurrenceSmem<kShape>& smem) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  wait_for_previous_launch();
  const int job = blockIdx.x / kShape.slices();
  const int first_row = (blockIdx.x - job * kShape.slices()) * kShape.rows();
  const int rank = job / p.heads;
  const ChainSlice slice(ranked_sequence(p, rank), job - rank * p.heads);
  if (warp < kShape.warps) {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_alloc<kChainRegisters>();
    Chain<CopiedRing<kShape>, MmaStep<kShape.tiles>, typename RecurrenceMemory<kShape>::Warp> chain(
        p, {smem}, smem.warp[warp]);
    const int row = first_row + warp * kShape.rows_per_warp();
    chain.begin(slice, row, true);
    Checkpoints checkpoints(p, slice.range.tokens, lane);
    run_from_state_to_state(p, chain, slice, checkpoints, row, lane);
  } else {
    if constexpr (kShape.moves_registers())
      cutlass::arch::warpgroup_reg_dealloc<kHelperRegisters>();
    if (warp == kShape.warps && lane == 0) copy_records<kShape, true>(p, smem, slice);
  }
}

}  // namespace flash_kda::portable
