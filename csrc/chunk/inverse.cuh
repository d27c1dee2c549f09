// (I + L)^-1 of a strictly lower 16 x 16 matrix by forward substitution in fp32. A Neumann series
// in half precision is faster and loses everything once keys repeat (docs/design.md).
#pragma once

#include "common/tile.cuh"

namespace flash_kda {

// Lane j (and j + 16) solves for column j; all lanes read the same rows of L.
__device__ __forceinline__ void solve_unit_lower(float (&x)[kChunk],
                                                 const float (&lower)[kChunk][kChunk], int lane) {
  const int column = lane & 15;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float even = i == column ? 1.0f : 0.0f, odd = 0.0f;  // two sums: half the latency
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 row = *reinterpret_cast<const float4*>(&lower[i][m]);
      even = fmaf(-row.x, x[m], even);
      if (m + 1 < i) odd = fmaf(-row.y, x[m + 1], odd);
      if (m + 2 < i) even = fmaf(-row.z, x[m + 2], even);
      if (m + 3 < i) odd = fmaf(-row.w, x[m + 3], odd);
    }
    x[i] = even + odd;
  }
}

// (I + L)^-1 as a 16 x 16 block on the diagonal of a bf16 square image, from its columns: lane
// j < 16 holds column j.
template <int kSize>
__device__ __forceinline__ void store_inverse(unsigned char* image, const float (&x)[kChunk],
                                              int first, int lane) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    *reinterpret_cast<__nv_bfloat16*>(image + square_offset<kSize>(first + i, first + lane)) =
        __float2bfloat16(x[i]);
  }
}

}  // namespace flash_kda
