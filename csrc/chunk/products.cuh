// The two 16 x 16 matrices of a chunk, and what the record keeps of them, by one warp.
#pragma once

#include "chunk/inverse.cuh"
#include "chunk/norms.cuh"
#include "common/tile.cuh"

namespace flash_kda {

struct Products {
  float lower[2][4];   // K~ K^^T with K~ as the record holds it, negated
  float scores[2][4];  // Q~ K^^T
};

// From a chunk's rows of K~ and Q~ in a record and an image of K^.
template <class Layout>
__device__ __forceinline__ Products multiply(const unsigned char* rows,
                                             const unsigned char* growing_image,
                                             int growing_half_bytes, int lane) {
  const int a_row = lane & 15, a_byte = (lane >> 4) * 16;
  const int b_row = (lane & 7) + (lane >> 4) * 8, b_byte = ((lane >> 3) & 1) * 16;
  Products products = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const unsigned char* a = rows + image_offset(a_row, step * 32 + a_byte, Layout::kHalfBytes);
    const Fragment4 key = load_matrices(a + Layout::kKeyDecayed);
    const Fragment4 query = load_matrices(a + Layout::kQueryDecayed);
    const Fragment4 growing =
        load_matrices(growing_image + image_offset(b_row, step * 32 + b_byte, growing_half_bytes));
    mma(products.lower[0], key, growing.x[0], growing.x[1]);
    mma(products.lower[1], key, growing.x[2], growing.x[3]);
    mma(products.scores[0], query, growing.x[0], growing.x[1]);
    mma(products.scores[1], query, growing.x[2], growing.x[3]);
  }
  return products;
}

// Where L lies in fp32, until the inverse and P take its place.
__device__ __forceinline__ auto lower_of(unsigned char* record) -> float (&)[kChunk][kChunk] {
  static_assert(sizeof(float[kChunk][kChunk]) == 2 * ChunkRecord::kColumnBytes &&
                    ChunkRecord::kScores == ChunkRecord::kInverse + ChunkRecord::kColumnBytes,
                "L takes the place of both");
  return *reinterpret_cast<float (*)[kChunk][kChunk]>(record + ChunkRecord::kInverse);
}

// L = strictly lower(diag(b) K~ K^^T) in fp32. What lies above the diagonal may have overflowed.
__device__ __forceinline__ void store_lower(float (&lower)[kChunk][kChunk],
                                            const Products& products, float b, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane >> 2) + 8 * half;
    const float b_of_row = -__shfl_sync(kWarpMask, b, row);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int column = 8 * tile + 2 * (lane & 3);
      const float* l = &products.lower[tile][2 * half];
      *reinterpret_cast<float2*>(&lower[row][column]) = make_float2(
          column < row ? l[0] * b_of_row : 0.0f, column + 1 < row ? l[1] * b_of_row : 0.0f);
    }
  }
}

// Accumulators as a 16 x 16 block of a square image; with `kLower` without what is above the
// diagonal, which may have overflowed.
template <int kSize, bool kLower>
__device__ __forceinline__ void store_block(unsigned char* image, const float (&x)[2][4],
                                            int first_row, int first_column, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane >> 2) + 8 * half;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int column = 8 * tile + 2 * (lane & 3);
      const float* pair = &x[tile][2 * half];
      *reinterpret_cast<unsigned*>(image +
                                   square_offset<kSize>(first_row + row, first_column + column)) =
          pack_bf16(!kLower || column <= row ? pair[0] : 0.0f,
                    !kLower || column + 1 <= row ? pair[1] : 0.0f);
    }
  }
}

// b of token `lane` of a chunk, whose rows begin `first` tokens after the record's.
template <class Layout>
__device__ __forceinline__ void store_beta(unsigned char* record, float b, int first, int lane) {
  if (lane < kChunk) {
    *reinterpret_cast<float*>(record + Layout::kBeta + 4 * (first + column_position(lane))) = b;
  }
}

// L, complete in lower_of(record) -> the inverse, and beside it P.
__device__ __forceinline__ void solve_and_store(unsigned char* record, const Products& products,
                                                int lane) {
  float column[kChunk];
  solve_unit_lower(column, lower_of(record), lane);
  __syncwarp();  // L has been read
  if (lane < kChunk) store_inverse<kChunk>(record + ChunkRecord::kInverse, column, 0, lane);
  store_block<kChunk, true>(record + ChunkRecord::kScores, products.scores, 0, 0, lane);
}

}  // namespace flash_kda
