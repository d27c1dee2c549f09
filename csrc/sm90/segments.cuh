// Records that prepare_pairs has left in the workspace, and a chain by wgmma that walks through
// them. A CTA owns 64 rows of V, one warpgroup; two work on a sequence and head.
//
// Few heads and long sequences: a sequence is cut into segments that are worked on at once. Within
// a segment the state is an affine map of the state before it, S^T -> S^T M + B, exactly: B is the
// state that the segment leaves when it starts from zero, and M what it makes of the identity
// without values. So, one launch after the other:
//
//   prepare_pairs  the records of all pairs of chunks
//   affine         M and B of every segment but the last; of the first one the state after it, and
//                  in the place of M a copy of the initial state
//   combine        the state after each: S <- S M + B, in fp32
//   walk           every segment from its state
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "chunk/copied_ring.cuh"
#include "chunk/sequence.cuh"
#include "sm90/between.cuh"
#include "sm90/step_wgmma.cuh"

namespace flash_kda::sm90 {

template <const RecurrenceShape& kShape, bool kOutputs>
using WalkChain = Chain<CopiedRing<kShape>, WgmmaStep<kShape.record_tokens, kOutputs>,
                        typename RecurrenceMemory<kShape>::Warp>;

// Calls compute(warp, lane) in the computing warps, while another copies the slice's records, once
// the launch before is over.
template <const RecurrenceShape& kShape, bool kOutputs, class Compute>
__device__ __forceinline__ void with_copied_records(const ForwardParams& p,
                                                    RecurrenceSmem<kShape>& smem,
                                                    const ChainSlice& slice, Compute compute) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) smem.init();
  for (int i = warp; i < 2 * kShape.stages; i += kShape.threads() / 32)
    clear_unstored<Record<kShape.record_tokens>>(smem.stage[i >> 1].record, i & 1, lane);
  fence_async_shared();  // wgmma reads them
  __syncthreads();
  if (warp < kShape.warps) {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_alloc<kChainRegisters>();
    compute(warp, lane);
  } else {
    if constexpr (kShape.moves_registers())
      cutlass::arch::warpgroup_reg_dealloc<kHelperRegisters>();
    if (warp == kShape.warps && lane == 0) {
      wait_for_previous_launch();
      copy_records<kShape, kOutputs>(p, smem, slice);
    }
  }
}

// Until the launch before is over, walk and affine do what depends on the call's tensors alone.
template <const RecurrenceShape& kShape>
__device__ __forceinline__ void walk(const ForwardParams& p, RecurrenceSmem<kShape>& smem) {
  if (p.cu_seqlens != nullptr) wait_for_previous_launch();  // where sequences lie
  const int job = blockIdx.x / kShape.slices();
  const int first_row = (blockIdx.x - job * kShape.slices()) * kShape.rows();
  const ChainSlice slice = ChainSlice::of_job(p, job);
  with_copied_records<kShape, true>(p, smem, slice, [&](int warp, int lane) {
    WalkChain<kShape, true> chain(p, {smem}, smem.warp[warp]);
    const int row = first_row + warp * kShape.rows_per_warp();
    chain.begin(slice, row, true);
    Checkpoints checkpoints(p, slice.range.tokens, lane);
    wait_for_previous_launch();  // for the state
    run_from_state_to_state(
        p, chain, slice, checkpoints, row, lane,
        [&](const auto& s, int step, const StateAddress& to) {
          const long long pair =
              static_cast<long long>(slice.range.first_record + step) * p.heads + slice.head;
          store_between(chain, s, p.middles + pair * MiddleRecord::kBytes, to, lane);
        });
  });
}

// The first CTAs of a job carry B, the others M. What it writes before it waits nobody reads any
// more: a call's first launch begins when the call before is over, and prepare_pairs has nothing to
// do with what segments carry.
template <const RecurrenceShape& kShape>
__device__ __forceinline__ void affine(const ForwardParams& p, RecurrenceSmem<kShape>& smem) {
  if (p.cu_seqlens != nullptr) wait_for_previous_launch();
  constexpr int kParts = kCarried * kShape.slices();
  const int job = blockIdx.x / kParts, part = blockIdx.x - job * kParts;
  const int which = part / kShape.slices();
  const int first_row = part % kShape.slices() * kShape.rows();
  const ChainSlice slice = ChainSlice::of_job(p, job);
  const bool first = slice.segment == 0, map = which == kCarriedMap;
  float s[1][kStateTiles][4];
  if (first && map) {
    const int row = first_row + (threadIdx.x >> 5) * kShape.rows_per_warp();
    if (threadIdx.x < 32 * kShape.warps) {
      load_state(s, slice.given(p, row), threadIdx.x & 31);
      store_state(s, slice.carried(p, 0, which, row), threadIdx.x & 31);
    }
  } else {
    with_copied_records<kShape, false>(p, smem, slice, [&](int warp, int lane) {
      const int row = first_row + warp * kShape.rows_per_warp();
      WalkChain<kShape, false> chain(p, {smem}, smem.warp[warp]);
      chain.begin(slice, row, !map);
      if (first) {
        load_state(s, slice.given(p, row), lane);
      } else if (map) {
        load_identity(s, row, lane);
      } else {
        load_state(s, {nullptr, kAbsent, false}, lane);
      }
      chain.run(s, chain.steps());
      store_state(s, slice.carried(p, slice.segment, which, row), lane);
    });
  }
  // In effect from the beginning: helper warps that have nothing to do come here at once.
  allow_next_launch();
}

// One CTA: kCombineRows rows of V of one sequence and head, through all segments. A thread owns a
// channel and a part of the sum over k; the maps of the next segment come while it adds.
__device__ __forceinline__ void combine(const ForwardParams& p) {
  constexpr int kParts = kCombineThreads / kHeadDim, kOfPart = kHeadDim / kParts;
  constexpr int kSlices = kHeadDim / kCombineRows, kRowsOfThread = kCombineRows / kParts;
  constexpr int kState = kHeadDim * kHeadDim;
  __shared__ __align__(16) float state[kHeadDim][kCombineRows];
  __shared__ float sums[kParts][kCombineRows][kHeadDim];
  const int channel = threadIdx.x % kHeadDim, part = threadIdx.x / kHeadDim;
  const long long chain = blockIdx.x / kSlices;
  const int first_row = blockIdx.x % kSlices * kCombineRows;
  wait_for_previous_launch();
  allow_next_launch();
  // This thread's place in its own rows, and its part of the map.
  float* carried = p.carried + chain * (p.segments - 1) * kCarried * kState;
  const int own_row = kRowsOfThread * part;
  const int place = (first_row + own_row) * kHeadDim + channel;
  const int map_place = kCarriedMap * kState + kOfPart * part * kHeadDim + channel;
  float map[kOfPart], own[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i)
    state[channel][own_row + i] = carried[place + i * kHeadDim];
  carried += kCarried * kState;
#pragma unroll
  for (int i = 0; i < kOfPart; ++i) map[i] = carried[map_place + i * kHeadDim];
#pragma unroll 1
  for (int segment = 1; segment < p.segments - 1; ++segment) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) own[i] = carried[place + i * kHeadDim];
    __syncthreads();  // the state before is complete
    float partial[kCombineRows] = {};
#pragma unroll
    for (int k = 0; k < kOfPart; ++k) {
#pragma unroll
      for (int i = 0; i < kCombineRows; ++i)
        partial[i] = fmaf(state[kOfPart * part + k][i], map[k], partial[i]);
    }
    if (segment + 1 < p.segments - 1) {
#pragma unroll
      for (int i = 0; i < kOfPart; ++i)
        map[i] = carried[kCarried * kState + map_place + i * kHeadDim];
    }
#pragma unroll
    for (int i = 0; i < kCombineRows; ++i) sums[part][i][channel] = partial[i];
    __syncthreads();  // all parts are there, and the state before has been read
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      float sum = own[i];
#pragma unroll
      for (int j = 0; j < kParts; ++j) sum += sums[j][own_row + i][channel];
      carried[place + i * kHeadDim] = state[channel][own_row + i] = sum;
    }
    carried += kCarried * kState;
  }
}

}  // namespace flash_kda::sm90
