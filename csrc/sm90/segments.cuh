// Few heads and long sequences: a sequence is cut into segments that are worked on at once. Within
// a segment the state is an affine map of the state before it, S^T -> S^T M + B, exactly: B is the
// state that the segment leaves when it starts from zero, and M what it makes of the identity
// without values. So, one launch after the other:
//
//   affine   M and B of every segment but the last; of the first one the state after it, and in the
//            place of M a copy of the initial state
//   combine  the state after each: S <- S M + B, in fp32
//   fused    every segment from its state
#pragma once

#include "sm90/fused.cuh"

namespace flash_kda::sm90 {

// CTA 0 of a cluster carries B, CTA 1 M.
template <const FusedShape& kShape>
__device__ __forceinline__ void affine(const ForwardParams& p, FusedSmem<kShape>& smem) {
  static_assert(kShape.cluster == kCarried && kShape.slice_rows() == kHeadDim);
  with_records<kShape, false>(p, smem, [&](int cta, int warp, int lane) {
    Chain<RecordRing<kShape>, WgmmaStep<false>> chain(p, {smem}, smem.warp[warp]);
    const int row = kRowsOfWarp * warp;
    Jobs<kShape.cluster> jobs(p);
    ChainSlice slice;
#pragma unroll 1
    while (jobs.next(slice)) {
      float s[1][kStateTiles][4];
      chain.begin(slice, row, cta == kCarriedState);
      const bool first = slice.segment == 0, map = cta == kCarriedMap;
      if (first) {
        load_state(s, slice.given(p, row), lane);
        if (map) store_state(s, slice.carried(p, 0, kCarriedMap, row), lane);
      } else if (map) {
        load_identity(s, row, lane);
      } else {
        load_state(s, {nullptr, kAbsent, false}, lane);
      }
      chain.run(s, chain.chunks());
      if (!first || !map) store_state(s, slice.carried(p, slice.segment, cta, row), lane);
    }
  });
  allow_next_launch();
}

// One CTA: kCombineRows rows of V of one sequence and head, through all segments. Thread t owns
// channel t.
__device__ __forceinline__ void combine(const ForwardParams& p) {
  __shared__ __align__(16) float state[kHeadDim][kCombineRows];
  constexpr int kSlices = kHeadDim / kCombineRows;
  const int channel = threadIdx.x;
  const long long chain = blockIdx.x / kSlices;
  const int first_row = blockIdx.x % kSlices * kCombineRows;
  wait_for_previous_launch();
  allow_next_launch();
  constexpr int kState = kHeadDim * kHeadDim;
  float* carried = p.carried + chain * (p.segments - 1) * kCarried * kState;
  float sums[kCombineRows];
#pragma unroll
  for (int i = 0; i < kCombineRows; ++i) sums[i] = carried[(first_row + i) * kHeadDim + channel];
#pragma unroll 1
  for (int segment = 1; segment < p.segments - 1; ++segment) {
    carried += kCarried * kState;
    __syncthreads();  // the state before has been read
#pragma unroll
    for (int i = 0; i < kCombineRows; ++i) state[channel][i] = sums[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCombineRows; ++i) sums[i] = carried[(first_row + i) * kHeadDim + channel];
    const float* map = carried + kCarriedMap * kState + channel;
#pragma unroll 32
    for (int k = 0; k < kHeadDim; ++k) {
      const float factor = map[k * kHeadDim];
#pragma unroll
      for (int i = 0; i < kCombineRows; ++i) sums[i] = fmaf(state[k][i], factor, sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kCombineRows; ++i) carried[(first_row + i) * kHeadDim + channel] = sums[i];
  }
}

}  // namespace flash_kda::sm90
