// The Hopper family: one kernel makes the records of chunks in shared memory and carries the state
// through them. One warp fetches rows, groups of warps turn them into images, others solve, others
// are the chain.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "chunk/sequence.cuh"
#include "sm90/fetch.cuh"
#include "sm90/read_state.cuh"
#include "sm90/rows.cuh"
#include "sm90/solver.cuh"
#include "sm90/step_wgmma.cuh"

namespace flash_kda::sm90 {

// Not the aligned forms: the lanes of a warp may come one after the other.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// The cluster's turn, which its first CTA has taken.
template <const FusedShape& kShape>
__device__ __forceinline__ int turn_of_cluster(const ForwardParams& p,
                                               const FusedSmem<kShape>& smem) {
  if (p.shares == nullptr) return blockIdx.x / kShape.cluster;
  int turn;
  asm volatile(
      "{\n"
      ".reg .b32 from;\n"
      "mapa.shared::cluster.u32 from, %1, 0;\n"
      "ld.shared::cluster.s32 %0, [from];\n"
      "}"
      : "=r"(turn)
      : "r"(cute::cast_smem_ptr_to_uint(&smem.turn))
      : "memory");
  return __shfl_sync(kWarpMask, turn, 0);
}

// Calls compute(turn, cta, warp, lane) in the computing warps. Every chain warp must go through
// every chunk of every piece.
template <const FusedShape& kShape, class Compute>
__device__ __forceinline__ void with_records(const ForwardParams& p, const RowMaps& maps,
                                             FusedSmem<kShape>& smem, Compute compute) {
  const int warp = __shfl_sync(kWarpMask, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int cta = blockIdx.x % kShape.cluster;
  if (threadIdx.x == 0) {
    smem.init();
    if (p.shares != nullptr && cta == 0) {
      wait_for_previous_launch();
      smem.turn = atomicAdd(p.next_turn, 1);
    }
  }
  constexpr int kFetches = kShape.warps + kShape.solvers;  // the number of the warp that fetches
  if (threadIdx.x == 32 * kFetches && p.tokens > 0) {
    prefetch_map(&maps.k);
    prefetch_map(&maps.g);
    prefetch_map(&maps.q);
  }
  cluster_sync();
  const int turn = turn_of_cluster<kShape>(p, smem);
  constexpr int kFirstRows = kShape.warps + kShape.helper_warps();
  // Records depend on the call's tensors and, where there is one, on the schedule alone.
  if (warp < kShape.warps || p.cu_seqlens != nullptr || p.shares != nullptr)
    wait_for_previous_launch();
  if (warp < kShape.warps) {
    cutlass::arch::warpgroup_reg_alloc<kShape.chain_registers>();
    compute(turn, cta, warp, lane);
  } else if (warp < kFirstRows) {
    cutlass::arch::warpgroup_reg_dealloc<kShape.solver_registers>();
    if (warp == kFetches) {
      FetchWarp<kShape>(p, maps, smem, turn, cta, lane).run();
    } else {
      SolverWarp<kShape>(p, smem, turn, cta, warp - kShape.warps, lane).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kShape.rows_registers>();
    const int member = warp - kFirstRows;
    RowsWarp<kShape>(p, smem, turn, cta, member / kGroupWarps, member % kGroupWarps, lane).run();
  }
  // The others may still write here or wait for arrivals.
  cluster_sync();
}

// What was left of the first piece may be read: nobody but those who wait for it asks whether it is
// to be. A piece that is handed on is never its cluster's only one. Called before the second piece
// and not behind the first: there the compiler would take nothing of the loop to be the same in all
// lanes any more, and a step would take 80 instructions more.
__device__ __forceinline__ void hand_on(const ForwardParams& p, int flag, int lane) {
  __syncwarp();  // all lanes have left their rows
  raise_flag(&p.handed_on[flag], lane == 0);
}

template <const FusedShape& kShape>
__device__ __forceinline__ void fused(const ForwardParams& p, const RowMaps& maps,
                                      FusedSmem<kShape>& smem) {
  with_records<kShape>(p, maps, smem, [&](int turn, int cta, int warp, int lane) {
    keep_in_register(lane);
    using WarpChain = Chain<RecordRing<kShape>, WgmmaStep<kChunk, true>, FusedWarpMemory>;
    WarpChain chain(p, {smem}, smem.warp[warp]);
    typename WarpChain::State s;
    const int first_row = cta * kShape.slice_rows() + kRowsOfWarp * warp;
    static_assert(kShape.cluster * kShape.warps == kStateWarps);
    const int state_warp = kShape.warps * cta + warp;
    const int flag_of_turn = turn * kStateWarps + state_warp;
    Jobs jobs(p, turn);
    Piece piece;
    jobs.look_up();
#pragma unroll 1
    while (jobs.next(piece)) {
      if (jobs.done() == 2) hand_on(p, flag_of_turn, lane);
      if (piece.is_taken()) {
        const int* const flag = &p.handed_on[piece.taken_from * kStateWarps + state_warp];
        while (!__all_sync(kWarpMask, flag_raised(flag))) __nanosleep(100);
      }
      chain.begin(piece, first_row, true);
      if (piece.state_stages(p) == 0) {
        load_state<true>(s, piece.initial(p, first_row), lane);
      } else {
        const bool present =
            p.state_indices == nullptr || piece.given(p, first_row).dtype != kAbsent;
        chain.template take<kStateStages>([&](const auto& ring, int first) {
          read_state<kShape>(s, ring, first, p.initial_dtype, kRowsOfWarp * warp, present, lane);
        });
      }
      Checkpoints checkpoints(p, piece.range.tokens, lane);
      run_sequence(p, chain, s, piece, checkpoints, first_row, lane);
      // Behind the stores this would be waited for.
      jobs.look_up();
      chain.template look_for<kStateStages>();
      finish_sequence(p, chain, s, piece, first_row, lane);
    }
  });
}

}  // namespace flash_kda::sm90
