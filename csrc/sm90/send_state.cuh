// The state that a chain begins with, by way of the ring: a bulk copy for each row into the stages
// before those of the chain's first chunk, long before the chain comes to them. Loaded by the chain
// itself, it would be waited for, and its accesses keep the load/store unit busy for a microsecond.
#pragma once

#include "chunk/state_io.cuh"
#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

// In a stage: so many rows, each with a gap behind it, for the sake of banks.
constexpr int kStateRowBytes = 4 * kHeadDim + 32;
constexpr int kStateRowsOfStage = 22;

// One warp sends the part-th rows of a CTA's slice of the state to a stage of that CTA, which is
// free. Where there is none, it says so and the chain knows.
template <const FusedShape& kShape>
__device__ __forceinline__ void send_state(const ForwardParams& p, FusedSmem<kShape>& smem,
                                           int stage, const Piece& piece, int part, int to_cta,
                                           int own_cta, int lane) {
  static_assert(kStateStages * kStateRowsOfStage >= kShape.slice_rows() &&
                    kStateRowsOfStage * kStateRowBytes <= sizeof smem.stage[0],
                "all rows fit");
  const int first = part * kStateRowsOfStage;
  const int rows = min(kStateRowsOfStage, kShape.slice_rows() - first);
  const StateAddress from =
      piece.given(p, to_cta * kShape.slice_rows() + first + min(lane, rows - 1));
  const int row_bytes = kHeadDim * (from.dtype == kFloat32 ? 4 : 2);
  const bool present = from.dtype != kAbsent;
  fence_async_shared();  // what stood in the stage has been written and read
  // As many arrivals as a record makes.
  if (to_cta == own_cta ? arrives(lane) : lane == 0)
    expect_bytes(to_cta, &smem.full[stage], present && lane == 0 ? rows * row_bytes : 0);
  __syncwarp();
  if (present && lane < rows) {
    bulk_load_to(to_cta, smem.stage[stage].record + lane * kStateRowBytes, from.base, row_bytes,
                 &smem.full[stage]);
  }
  __syncwarp();
}

// The lane's channels of a row of fp32, or of bf16: two pairs of each 16. By generic loads: with
// those of shared memory the compiler moves the state to and fro in the loop over chunks.
template <size_t... kPart>
__device__ __forceinline__ void read_row(float (&s)[kStateTiles][4], int half,
                                         const unsigned char* from, int dtype,
                                         cute::index_sequence<kPart...>) {
  if (dtype == kFloat32) {
    (load_pair<64 * kPart>(s[2 * kPart][2 * half], s[2 * kPart][2 * half + 1], from), ...);
    (load_pair<64 * kPart + 8>(s[2 * kPart + 1][2 * half], s[2 * kPart + 1][2 * half + 1], from),
     ...);
  } else {
    (load_pair<32 * kPart>(s[2 * kPart][2 * half], s[2 * kPart + 1][2 * half], from), ...);
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n) {
      const unsigned packed = __float_as_uint(s[n][2 * half]);
      s[n][2 * half] = bf16_low(packed);
      s[n][2 * half + 1] = bf16_high(packed);
    }
  }
}

// This warp's rows, the first of them `row` of the slice, from the stages that begin with `first`.
template <const FusedShape& kShape>
__device__ __forceinline__ void read_state(float (&s)[1][kStateTiles][4],
                                           const RecordRing<kShape>& ring, int first, int dtype,
                                           int row, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + (lane >> 2) + 8 * half;
    const int part = own / kStateRowsOfStage;
    const int stage = first + part < kShape.stages ? first + part : first + part - kShape.stages;
    const unsigned char* const from = ring.record(stage) +
                                      (own - part * kStateRowsOfStage) * kStateRowBytes +
                                      (dtype == kFloat32 ? 16 : 8) * (lane & 3);
    read_row(s[0], half, from, dtype, cute::make_index_sequence<kStateTiles / 2>());
  }
}

}  // namespace flash_kda::sm90
