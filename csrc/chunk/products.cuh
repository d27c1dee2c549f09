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

// From the images of K~ and Q~ in a record and one of K^.
template <bool kQueries>
__device__ __forceinline__ Products multiply(const unsigned char* record,
                                             const unsigned char* growing_image,
                                             int growing_half_bytes, int lane) {
  const int a_row = lane & 15, a_byte = (lane >> 4) * 16;
  const int b_row = (lane & 7) + (lane >> 4) * 8, b_byte = ((lane >> 3) & 1) * 16;
  Products products = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const unsigned char* a = record + image_offset(a_row, step * 32 + a_byte);
    const Fragment4 key = load_matrices(a + ChunkRecord::kKeyDecayed);
    const Fragment4 growing =
        load_matrices(growing_image + image_offset(b_row, step * 32 + b_byte, growing_half_bytes));
    mma(products.lower[0], key, growing.x[0], growing.x[1]);
    mma(products.lower[1], key, growing.x[2], growing.x[3]);
    if constexpr (kQueries) {
      const Fragment4 query = load_matrices(a + ChunkRecord::kQueryDecayed);
      mma(products.scores[0], query, growing.x[0], growing.x[1]);
      mma(products.scores[1], query, growing.x[2], growing.x[3]);
    }
  }
  return products;
}

// Where L lies in fp32, until the inverse and P take its place.
__device__ __forceinline__ auto lower_of(unsigned char* record) -> float (&)[kChunk][kChunk] {
  static_assert(sizeof(float[kChunk][kChunk]) == 2 * ChunkRecord::kSquareBytes &&
                    ChunkRecord::kScores == ChunkRecord::kInverse + ChunkRecord::kSquareBytes,
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

// P = lower(Q~ K^^T), bf16.
__device__ __forceinline__ void store_scores(unsigned char* image, const Products& products,
                                             int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane >> 2) + 8 * half;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int column = 8 * tile + 2 * (lane & 3);
      const float* s = &products.scores[tile][2 * half];
      *reinterpret_cast<unsigned*>(image + square_offset(row, column)) =
          pack_bf16(column <= row ? s[0] : 0.0f, column + 1 <= row ? s[1] : 0.0f);
    }
  }
}

// L, complete in lower_of(record) -> the inverse, and beside it P.
template <bool kQueries>
__device__ __forceinline__ void solve_and_store(unsigned char* record, const Products& products,
                                                float b, int lane) {
  float column[kChunk];
  solve_unit_lower(column, lower_of(record), lane);
  __syncwarp();  // L has been read
  store_inverse(record + ChunkRecord::kInverse, column, b, lane);
  if constexpr (kQueries) store_scores(record + ChunkRecord::kScores, products, lane);
}

}  // namespace flash_kda
