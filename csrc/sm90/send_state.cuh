// The state that a chain begins with, by way of the ring: a bulk copy for each row into the stages
// before those of the chain's first chunk, long before the chain comes to them. Loaded by the chain
// itself, it would be waited for, and its accesses keep the load/store unit busy for a microsecond.
#pragma once

#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

// One warp sends the part-th rows of a CTA's slice of the state to a stage of that CTA, which is
// free. Where there is none, it says so and the chain knows.
template <const FusedShape& kShape>
__device__ __forceinline__ void send_state(const ForwardParams& p, FusedSmem<kShape>& smem,
                                           int stage, const Piece& piece, int part, int to_cta,
                                           int own_cta, int lane) {
  static_assert(kStateStages * kStateRowsOfStage >= kShape.slice_rows() &&
                    kStateRowsOfStage * state_row_bytes(kFloat32) <= sizeof smem.stage[0],
                "all rows fit");
  const int first = part * kStateRowsOfStage;
  const int rows = min(kStateRowsOfStage, kShape.slice_rows() - first);
  const StateAddress from =
      piece.given(p, to_cta * kShape.slice_rows() + first + min(lane, rows - 1));
  const int row_bytes = kHeadDim * element_bytes(from.dtype);
  const bool present = from.dtype != kAbsent;
  fence_async_shared();  // what stood in the stage has been written and read
  // As many arrivals as a record makes.
  if (to_cta == own_cta ? arrives(lane) : lane == 0)
    expect_bytes(to_cta, &smem.full[stage], present && lane == 0 ? rows * row_bytes : 0);
  __syncwarp();
  if (present && lane < rows) {
    bulk_load_to(to_cta, smem.stage[stage].record + lane * state_row_bytes(from.dtype), from.base,
                 row_bytes, &smem.full[stage]);
  }
  __syncwarp();
}

}  // namespace flash_kda::sm90
