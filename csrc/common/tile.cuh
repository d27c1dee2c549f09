// Shared-memory tiles and warp-level matrix products (mma.sync m16n8k16, bf16 in, fp32 out).
//
// Fragment names, for lane = 4 * r + c of a warp (r = 0..7, c = 0..3):
//   accumulator [16 x 8]:  d0 d1 = row r, columns 2c 2c+1;  d2 d3 = row r + 8
//   A [16 x 16]:           a0 = row r, columns 2c 2c+1;  a1 = row r + 8;  a2, a3 = the same + 8
//   columns
// so two neighbouring accumulators, rounded to bf16, are one A operand with no data movement.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "common/ptx.cuh"
#include "params.h"

namespace flash_kda {

// Byte offset in a 16 x 128 bf16 image, in two halves of 64 channels: rows of 128 bytes whose
// 16-byte unit u stands at u ^ (row % 8), so that the eight rows of an ldmatrix fall into different
// banks. It is also the 128-byte swizzle that wgmma reads, whichever of its two orders is the major
// one.
__device__ __forceinline__ constexpr int image_offset(int row, int byte_in_row,
                                                      int half_bytes = ChunkRecord::kHalfBytes) {
  return (byte_in_row >> 7) * half_bytes + row * 128 + ((byte_in_row & 127) ^ (row & 7) << 4);
}

// Byte offset in a square bf16 image of a record for kTokens.
template <int kTokens = kChunk>
__device__ __forceinline__ constexpr int square_offset(int row, int column) {
  return (column >> 4) * Record<kTokens>::kColumnStride +
         ((row >> 3) * 2 + (column >> 3 & 1)) * 128 + (row & 7) * 16 + (column & 7) * 2;
}

// Where a channel stands in an image of permuted channels, in which pair 2c + t of each 16 channels
// is pair 4t + c: columns 2c, 2c + 1 of two neighbouring accumulators are then channels 4c to 4c
// + 3.
__device__ __forceinline__ constexpr int channel_position(int channel) {
  return (channel & ~15) + (channel >> 1 & 1) * 8 + (channel >> 2 & 3) * 2 + (channel & 1);
}

// Where a record holds what accumulators are multiplied by, column by column: the decay of a
// channel or b of a token. Lane 4r + c of the chain needs columns 2c, 2c+1 of two neighbouring
// accumulators and finds them in 16 bytes.
__device__ __forceinline__ int column_position(int column) {
  return (column & ~15) + (column & 6) * 2 + (column >> 3 & 1) * 2 + (column & 1);
}

// Two neighbouring accumulators, every column by what is found there.
__device__ __forceinline__ void scale_columns(float (&left)[4], float (&right)[4],
                                              const float4& by) {
  left[0] *= by.x, left[1] *= by.y, left[2] *= by.x, left[3] *= by.y;
  right[0] *= by.z, right[1] *= by.w, right[2] *= by.z, right[3] *= by.w;
}

struct Fragment4 {
  unsigned x[4];
};

__device__ __forceinline__ Fragment4 load_matrices(const unsigned char* lane_address) {
  Fragment4 f;
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(lane_address), f.x[0],
                                f.x[1], f.x[2], f.x[3]);
  return f;
}

__device__ __forceinline__ Fragment4 load_matrices_transposed(const unsigned char* lane_address) {
  Fragment4 f;
  cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(lane_address), f.x[0],
                                f.x[1], f.x[2], f.x[3]);
  return f;
}

__device__ __forceinline__ void store_matrices_transposed(unsigned char* lane_address,
                                                          const Fragment4& f) {
  cute::SM90_U16x8_STSM_T::copy(f.x[0], f.x[1], f.x[2], f.x[3],
                                *reinterpret_cast<cute::uint128_t*>(lane_address));
}

// d += a b
__device__ __forceinline__ void mma(float (&d)[4], const Fragment4& a, unsigned b0, unsigned b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a.x[0], a.x[1], a.x[2], a.x[3],
                                            b0, b1, d[0], d[1], d[2], d[3]);
}

// d += a b, of half as many columns of a and rows of b: a0 and a1, and b0.
__device__ __forceinline__ void mma_of_8(float (&d)[4], unsigned a0, unsigned a1, unsigned b) {
  cute::SM80_16x8x8_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a0, a1, b, d[0], d[1], d[2],
                                           d[3]);
}

// Two neighbouring [16 x 8] accumulators as one [16 x 16] A operand.
__device__ __forceinline__ Fragment4 as_operand(const float (&left)[4], const float (&right)[4]) {
  return {{pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
           pack_bf16(right[2], right[3])}};
}

}  // namespace flash_kda
