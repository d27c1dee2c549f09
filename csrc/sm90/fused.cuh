// The Hopper family: one kernel makes the records of chunks in shared memory and carries the state
// through them. Groups of warps turn rows into images, others solve, others are the chain.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "chunk/sequence.cuh"
#include "sm90/rows.cuh"
#include "sm90/solver.cuh"
#include "sm90/step_wgmma.cuh"

namespace flash_kda::sm90 {

// Not the aligned forms: the lanes of a warp may come one after the other.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Calls compute(cta, warp, lane) in the computing warps. Every chain warp must go through every
// chunk of every job.
template <const FusedShape& kShape, class Compute>
__device__ __forceinline__ void with_records(const ForwardParams& p, FusedSmem<kShape>& smem,
                                             Compute compute) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int cta = blockIdx.x % kShape.cluster;
  if (threadIdx.x == 0) smem.init();
  cluster_sync();
  constexpr int kFirstRows = kShape.warps + kShape.solvers;
  // Records depend on the call's tensors and, in a packed batch, on the schedule alone.
  if (warp < kShape.warps || p.cu_seqlens != nullptr) wait_for_previous_launch();
  if (warp < kShape.warps) {
    cutlass::arch::warpgroup_reg_alloc<kShape.chain_registers>();
    compute(cta, warp, lane);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kShape.other_registers()>();
    if (warp < kFirstRows) {
      SolverWarp<kShape>(p, smem, cta, warp - kShape.warps, lane).run();
    } else {
      const int member = warp - kFirstRows;
      RowsWarp<kShape>(p, smem, cta, member / kGroupWarps, member % kGroupWarps, lane).run();
    }
  }
  // The others may still write here or wait for arrivals.
  cluster_sync();
}

template <const FusedShape& kShape>
__device__ __forceinline__ void fused(const ForwardParams& p, FusedSmem<kShape>& smem) {
  with_records<kShape>(p, smem, [&](int cta, int warp, int lane) {
    Chain<RecordRing<kShape>, WgmmaStep<kChunk, true>, FusedWarpMemory> chain(p, {smem},
                                                                              smem.warp[warp]);
    const int first_row = cta * kShape.slice_rows() + kRowsOfWarp * warp;
    Jobs<kShape.cluster> jobs(p);
    ChainSlice slice;
#pragma unroll 1
    while (jobs.next(slice)) run_sequence(p, chain, slice, first_row, lane);
  });
}

}  // namespace flash_kda::sm90
