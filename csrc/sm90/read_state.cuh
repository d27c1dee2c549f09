// A chain's initial state from the stages of the ring that send_state.cuh has filled.
#pragma once

#include <cute/numeric/integer_sequence.hpp>

#include "chunk/state_io.cuh"
#include "sm90/ring.cuh"

namespace flash_kda::sm90 {

// The lane's channels of a row of fp32, four of each 16, or of bf16, two pairs of each 16: as they
// are, or zeros. By generic loads: with those of shared memory the compiler moves the state to and
// fro in the loop over chunks. And what comes by fours must be in other registers first, as it must
// when it is stored (chunk/state_io.cuh), which `mask` sees to: all ones, or zero.
template <size_t... kPart>
__device__ __forceinline__ void read_row(float (&s)[kStateTiles][4], int half,
                                         const unsigned char* from, int dtype, unsigned mask,
                                         cute::index_sequence<kPart...>) {
  if (dtype == kFloat32) {
    const uint4 fours[] = {load_four<64 * kPart>(from)...};
#pragma unroll
    for (int i = 0; i < kStateTiles / 2; ++i) {
      float* const left = &s[2 * i][2 * half];
      float* const right = &s[2 * i + 1][2 * half];
      left[0] = __uint_as_float(fours[i].x & mask), left[1] = __uint_as_float(fours[i].y & mask);
      right[0] = __uint_as_float(fours[i].z & mask), right[1] = __uint_as_float(fours[i].w & mask);
    }
  } else {
    (load_pair<32 * kPart>(s[2 * kPart][2 * half], s[2 * kPart + 1][2 * half], from), ...);
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n) {
      const unsigned packed = __float_as_uint(s[n][2 * half]) & mask;
      s[n][2 * half] = bf16_low(packed);
      s[n][2 * half + 1] = bf16_high(packed);
    }
  }
}

// This warp's rows, the first of them `row` of the slice, from the stages that begin with `first`;
// zeros unless the state is `present`.
template <const FusedShape& kShape>
__device__ __forceinline__ void read_state(float (&s)[1][kStateTiles][4],
                                           const RecordRing<kShape>& ring, int first, int dtype,
                                           int row, bool present, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + (lane >> 2) + 8 * half;
    const int part = own / kStateRowsOfStage;
    const int stage = first + part < kShape.stages ? first + part : first + part - kShape.stages;
    const unsigned char* const from = ring.record(stage) +
                                      (own - part * kStateRowsOfStage) * state_row_bytes(dtype) +
                                      4 * element_bytes(dtype) * (lane & 3);
    read_row(s[0], half, from, dtype, present ? ~0u : 0u,
             cute::make_index_sequence<kStateTiles / 2>());
  }
}

}  // namespace flash_kda::sm90
