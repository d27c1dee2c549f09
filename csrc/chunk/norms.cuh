// L2 norms of the 16 rows of an image, by one warp.
#pragma once

#include "common/tile.cuh"

namespace flash_kda {

// The inverse norms of an image's rows, as the warp holds them: lane 4r + r/2 has those of rows r
// and r + 8, where the diagonals of two accumulators are.
struct InverseNorms {
  float upper, lower;

  // Of row `row`, a constant, for all lanes.
  __device__ __forceinline__ float of_row(int row) const {
    const int r = row & 7;
    return __shfl_sync(kWarpMask, row < 8 ? upper : lower, 4 * r + (r >> 1));
  }
};

// Rows with a norm above 1.8e19 overflow fp32 when squared: they are summed again, scaled by an
// exact power of two.
constexpr float kShrink = 0x1p-70f;
__device__ __forceinline__ bool overflowed(float sum_of_squares) {
  return !(sum_of_squares <= 3.4e38f);  // NaN too, and stays NaN
}
__device__ __forceinline__ float inverse_norm(float sum_of_squares) {
  return rsqrt_approx(sum_of_squares + 1e-6f);
}
__device__ __forceinline__ float inverse_norm_of_shrunk(float sum_of_squares) {
  return rsqrt_approx(sum_of_squares) * kShrink;
}

// Adds the squares of 16 channels to the sums: the diagonals of X X^T, whose A operand holds its B
// operands too. Eight channels at a time, because then they need not be moved to other registers.
// Products of bf16 are exact in fp32.
__device__ __forceinline__ void add_squares(float (&upper)[4], float (&lower)[4],
                                            const Fragment4& rows) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    mma_of_8(upper, rows.x[i], rows.x[i + 1], rows.x[i]);
    mma_of_8(lower, rows.x[i], rows.x[i + 1], rows.x[i + 1]);
  }
}

// Sum of x^2 over a row, scaled before squaring; all lanes return it.
template <class Layout>
__device__ __forceinline__ float scaled_sum_of_squares(const unsigned char* image, int row,
                                                       float factor, int lane) {
  const uint2 x =
      *reinterpret_cast<const uint2*>(image + image_offset(row, 8 * lane, Layout::kHalfBytes));
  const float a = bf16_low(x.x) * factor, b = bf16_high(x.x) * factor;
  const float c = bf16_low(x.y) * factor, d = bf16_high(x.y) * factor;
  float sum = a * a + b * b + c * c + d * d;
#pragma unroll
  for (int width = 16; width >= 1; width /= 2) sum += __shfl_xor_sync(kWarpMask, sum, width);
  return sum;
}

// 1 / sqrt(sum x^2 + 1e-6) of all rows.
template <class Layout>
__device__ __forceinline__ InverseNorms inverse_norms(const unsigned char* image, int lane) {
  float upper[4] = {}, lower[4] = {};
  const int row = lane & 15, byte = (lane >> 4) * 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    add_squares(upper, lower,
                load_matrices(image + image_offset(row, step * 32 + byte, Layout::kHalfBytes)));
  }
  const bool odd = lane & 4;  // the diagonal of row r = lane / 4 is at column r
  const float upper_sum = odd ? upper[1] : upper[0], lower_sum = odd ? lower[3] : lower[2];
  InverseNorms inverse = {inverse_norm(upper_sum), inverse_norm(lower_sum)};
  // Elsewhere than on the diagonals nothing is meant, but nothing is larger either.
  if (__any_sync(kWarpMask, overflowed(upper_sum) || overflowed(lower_sum))) {
#pragma unroll 1
    for (int r = 0; r < kChunk; ++r) {
      const float sum = scaled_sum_of_squares<Layout>(image, r, 1.0f, lane);
      if (!overflowed(sum)) continue;
      const float value =
          inverse_norm_of_shrunk(scaled_sum_of_squares<Layout>(image, r, kShrink, lane));
      if (lane >> 2 == (r & 7)) (r < 8 ? inverse.upper : inverse.lower) = value;
    }
  }
  return inverse;
}

}  // namespace flash_kda
