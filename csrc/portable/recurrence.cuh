// Recurrence: the serial chain over the chunks of one sequence and head. A CTA owns a slice of V, a
// warp 16 * kTiles rows of it, and rows of V never meet, so warps share operands but no results.
//
// A helper warp copies chunks into a ring of stages: the record by one bulk copy, the rows of V by
// cp.async, with zeros for rows past the end. The computing warps share the stages and nothing
// else.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "portable/chain.cuh"

namespace flash_kda::portable {

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void compute_chunks(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                               const ChainSlice& slice, int warp) {
  const int lane = threadIdx.x & 31;
  const int first_row = slice.first_row + warp * kShape.rows_per_warp();
  typename Chain<kShape>::State s;
  const long long from = slice.slot(p, p.initial_slots), to = slice.slot(p, p.final_slots);
  load_state(s,
             static_cast<const unsigned char*>(p.initial_state) +
                 slice.state_bytes(p.initial_stride, p.initial_dtype, from, first_row),
             from < 0 ? kAbsent : p.initial_dtype, p.initial_vectorised, lane);
  Checkpoints checkpoints(p, slice.range.tokens, lane);
  Chain<kShape> chain(p, smem, slice, warp);
  // Stops at each checkpoint and at the end, outside the loop over chunks.
#pragma unroll 1
  for (;;) {
    const int end = min(chain.chunks(), checkpoints.chunks());
    chain.run(s, end);
    if (end < checkpoints.chunks()) break;
    store_state(s,
                static_cast<unsigned char*>(p.checkpoint_states) +
                    slice.state_bytes(p.checkpoint_stride, p.checkpoint_dtype, checkpoints.next(),
                                      first_row),
                p.checkpoint_dtype, p.checkpoint_vectorised, lane);
    checkpoints.advance();
  }
  chain.finish();
  if (p.final_dtype != kAbsent && to >= 0) {
    store_state(s,
                static_cast<unsigned char*>(p.final_state) +
                    slice.state_bytes(p.final_stride, p.final_dtype, to, first_row),
                p.final_dtype, p.final_vectorised, lane);
  }
}

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void recurrence(const ForwardParams& p, RecurrenceSmem<kShape>& smem) {
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kShape.stages; ++i) {
      FullBarrier::init(&smem.full[i], 1 + 32);
      EmptyBarrier::init(&smem.empty[i], kShape.warps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_launch();
  const ChainSlice slice = ChainSlice::of_cta<kShape>(p);
  if (warp < kShape.warps) {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_alloc<232>();
    compute_chunks<kShape>(p, smem, slice, warp);
  } else {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp == kShape.warps) copy_chunks<kShape>(p, smem, slice);
  }
}

}  // namespace flash_kda::portable
