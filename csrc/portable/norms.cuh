// L2 norms of the 16 rows of an image, by one warp.
#pragma once

#include "common/tile.cuh"

namespace flash_kda::portable {

constexpr unsigned kWarpMask = 0xffffffffu;

// values[i] summed over the warp, for 16 values at once: lane i and lane i + 16 return the sum of
// values[i]. Each round halves the values a lane keeps, so 16 shuffles do the work of 80.
template <int kWidth>
__device__ __forceinline__ void transposing_round(float (&values)[kChunk], int lane) {
  const bool upper = lane & kWidth;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float sent = upper ? values[i] : values[i + kWidth];
    const float kept = upper ? values[i + kWidth] : values[i];
    values[i] = kept + __shfl_xor_sync(kWarpMask, sent, kWidth);
  }
}

__device__ __forceinline__ float transposing_sum(float (&values)[kChunk], int lane) {
  transposing_round<8>(values, lane);
  transposing_round<4>(values, lane);
  transposing_round<2>(values, lane);
  transposing_round<1>(values, lane);
  return values[0] + __shfl_xor_sync(kWarpMask, values[0], 16);
}

// Of this lane's four channels in one row; `factor` is a power of two.
__device__ __forceinline__ float sum_of_squares(const unsigned char* image, int row, float factor,
                                                int lane) {
  const uint2 x = *reinterpret_cast<const uint2*>(image + image_offset(row, 8 * lane));
  const float a = bf16_low(x.x) * factor, b = bf16_high(x.x) * factor;
  const float c = bf16_low(x.y) * factor, d = bf16_high(x.y) * factor;
  return a * a + b * b + c * c + d * d;
}

// 1 / sqrt(sum x^2 + 1e-6) of row lane % 16.
__device__ __forceinline__ float inverse_norm(const unsigned char* image, int lane) {
  float squares[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) squares[i] = sum_of_squares(image, i, 1.0f, lane);
  const float sum = transposing_sum(squares, lane);
  float inverse = rsqrt_approx(sum + 1e-6f);
  // Rows with a norm above 1.8e19 overflow fp32 when squared: again, with an exact power of two.
  constexpr float kShrink = 0x1p-70f;
  const unsigned overflowed = __ballot_sync(kWarpMask, sum > 3.4e38f) & 0xffffu;
#pragma unroll 1
  for (unsigned left = overflowed; left != 0; left &= left - 1) {
    const int row = __ffs(left) - 1;
    float shrunk = sum_of_squares(image, row, kShrink, lane);
    for (int width = 16; width >= 1; width /= 2) {
      shrunk += __shfl_xor_sync(kWarpMask, shrunk, width);
    }
    if ((lane & 15) == row) inverse = rsqrt_approx(shrunk) * kShrink;
  }
  return inverse;
}

}  // namespace flash_kda::portable
