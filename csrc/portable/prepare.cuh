// Prepare: everything of a chunk that does not depend on the state. One warp owns one chunk of one
// head from loads to stores, so no CTA barrier is needed; the four warps of a CTA take neighbouring
// heads, whose rows are neighbours in memory.
//
// Lane l owns channels 4l .. 4l+3 of all 16 tokens: the decay's running sum needs no exchange, and
// only the norms and the two 16 x 16 products cross lanes. The raw rows of k, q and g are copied
// into the places of K~, Q~ and K-, where each lane replaces its own 8 bytes a row: 13,824 bytes a
// warp and no registers for data in flight, so that 16 warps a multiprocessor keep the memory busy.
#pragma once

#include "common/gate.cuh"
#include "common/sequences.cuh"
#include "common/tile.cuh"
#include "launch_shapes.h"
#include "portable/inverse.cuh"
#include "portable/norms.cuh"

namespace flash_kda::portable {

struct PrepareSmem {
  struct alignas(128) Record {
    unsigned char bytes[ChunkRecord::kBytes];
  } warp[kPrepareWarps];
};

// Starts the copy of 16 rows into an image; lanes 0-15 take even rows, 16-31 odd ones. Rows past
// the end belong to the next sequence: they become zeros and are not read, NaN or not.
__device__ __forceinline__ void fetch_rows(unsigned char* image, const void* base,
                                           const TokenStrides& stride, const TokenRange& tokens,
                                           int head, int lane) {
  const int unit = lane & 15, parity = lane >> 4;
  const unsigned char* row = static_cast<const unsigned char*>(base) + 16 * unit +
                             2 * (tokens.batch * stride.batch +
                                  (tokens.begin + parity) * stride.token + head * stride.head);
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    copy_async_16(image + image_offset(i + parity, 16 * unit), row, i + parity < tokens.length);
    row += 4 * stride.token;
  }
}

__device__ __forceinline__ void unpack(float (&x)[4], uint2 packed) {
  x[0] = bf16_low(packed.x), x[1] = bf16_high(packed.x);
  x[2] = bf16_low(packed.y), x[3] = bf16_high(packed.y);
}

__device__ __forceinline__ uint2 pack(const float (&x)[4]) {
  return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

__device__ __forceinline__ uint2& lane_piece(unsigned char* image, int row, int lane) {
  return *reinterpret_cast<uint2*>(image + image_offset(row, 8 * lane));
}

// Raw rows -> K~ and Q~ and, in the place of K-, K^ = k 2^-c. Leaves K^ in fp32 too, and in `total`
// the decay of the whole chunk.
__device__ __forceinline__ void decay_rows(const ForwardParams& p, unsigned char* record,
                                           const Gate<4>& gate, int length, float q_inverse_norm,
                                           float k_inverse_norm, float (&growing)[kChunk][4],
                                           float (&total)[4], int lane) {
  float log2_decay[4] = {};  // c of the current token
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float q_scale = __shfl_sync(kWarpMask, q_inverse_norm, i);
    const float k_scale = __shfl_sync(kWarpMask, k_inverse_norm, i);
    uint2& key_piece = lane_piece(record + ChunkRecord::kKeyDecayed, i, lane);
    uint2& query_piece = lane_piece(record + ChunkRecord::kQueryDecayed, i, lane);
    uint2& gate_piece = lane_piece(record + ChunkRecord::kKeyRemaining, i, lane);
    float key[4], query[4], g[4];
    unpack(key, key_piece);
    unpack(query, query_piece);
    unpack(g, gate_piece);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Rows past the end do not decay, whatever the gate of their zeros is.
      if (i < length) log2_decay[j] += p.log2_lower_bound * gate.openness(j, g[j]);
      const float decay = exp2_approx(log2_decay[j]);
      const float unit_key = key[j] * k_scale;
      query[j] = query[j] * q_scale * decay;  // in this order: the scale alone may be near 2^-100
      key[j] = unit_key * -decay;
      growing[i][j] = unit_key * exp2_approx(-log2_decay[j]);
    }
    key_piece = pack(key);
    query_piece = pack(query);
    gate_piece = pack(growing[i]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = exp2_approx(log2_decay[j]);
}

struct Products {
  float lower[2][4];   // K~ K^^T with K~ as the record holds it, negated
  float scores[2][4];  // Q~ K^^T
};

__device__ __forceinline__ Products multiply(const unsigned char* record, int lane) {
  const int a_row = lane & 15, a_byte = (lane >> 4) * 16;
  const int b_row = (lane & 7) + (lane >> 4) * 8, b_byte = ((lane >> 3) & 1) * 16;
  Products products = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const unsigned char* a = record + image_offset(a_row, step * 32 + a_byte);
    const Fragment4 key = load_matrices(a + ChunkRecord::kKeyDecayed);
    const Fragment4 query = load_matrices(a + ChunkRecord::kQueryDecayed);
    const Fragment4 growing = load_matrices(record + ChunkRecord::kKeyRemaining +
                                            image_offset(b_row, step * 32 + b_byte));
    mma(products.lower[0], key, growing.x[0], growing.x[1]);
    mma(products.lower[1], key, growing.x[2], growing.x[3]);
    mma(products.scores[0], query, growing.x[0], growing.x[1]);
    mma(products.scores[1], query, growing.x[2], growing.x[3]);
  }
  return products;
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

__device__ void prepare(const ForwardParams& p, PrepareSmem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned char* const record = smem.warp[warp].bytes;
  if (p.cu_seqlens != nullptr) wait_for_previous_launch();
  const unsigned work = blockIdx.x * kPrepareWarps + warp;  // the plan keeps it below 2^31
  const int chunk = work / static_cast<unsigned>(p.heads);
  const int head = work - chunk * p.heads;
  const TokenRange tokens = chunk_tokens(p, chunk, lane);
  if (tokens.length <= 0) return;

  fetch_rows(record + ChunkRecord::kKeyDecayed, p.k, p.k_stride, tokens, head, lane);
  fetch_rows(record + ChunkRecord::kQueryDecayed, p.q, p.q_stride, tokens, head, lane);
  fetch_rows(record + ChunkRecord::kKeyRemaining, p.g, p.g_stride, tokens, head, lane);

  float b = 0.0f;  // of token `lane`
  if (lane < tokens.length) {
    const long long index = tokens.batch * p.beta_stride.batch +
                            (tokens.begin + lane) * p.beta_stride.token + head * p.beta_stride.head;
    b = load_any(p.beta, index, p.beta_dtype);
    if (p.beta_is_logits) b = sigmoid(b);
  }
  const Gate<4> gate(p, head, 4 * lane);
  allow_next_launch();
  copy_async_wait_all();
  __syncwarp();  // every lane's copies have landed

  const float k_inverse_norm = inverse_norm(record + ChunkRecord::kKeyDecayed, lane);
  const float q_inverse_norm = inverse_norm(record + ChunkRecord::kQueryDecayed, lane);
  float growing[kChunk][4], total[4];
  decay_rows(p, record, gate, tokens.length, q_inverse_norm, k_inverse_norm, growing, total, lane);
  __syncwarp();
  const Products products = multiply(record, lane);

  // L in fp32 lies where the inverse and P will be written once it has been read.
  auto& lower = *reinterpret_cast<float (*)[kChunk][kChunk]>(record + ChunkRecord::kInverse);
  static_assert(sizeof(lower) == 2 * ChunkRecord::kSquareBytes, "L takes the place of both");
  store_lower(lower, products, b, lane);
  __syncwarp();  // L is complete, and K^ has been read
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float remaining[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) remaining[j] = growing[i][j] * total[j];
    lane_piece(record + ChunkRecord::kKeyRemaining, i, lane) = pack(remaining);
  }
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    *reinterpret_cast<float2*>(record + ChunkRecord::kDecay + 4 * decay_position(4 * lane + j)) =
        make_float2(total[j], total[j + 1]);
  }
  float column[kChunk];
  solve_unit_lower(column, lower, lane);
  __syncwarp();  // L has been read
  store_inverse(record + ChunkRecord::kInverse, column, b, lane);
  store_scores(record + ChunkRecord::kScores, products, lane);

  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    bulk_store(p.records + static_cast<long long>(work) * ChunkRecord::kBytes, record,
               ChunkRecord::kBytes);
    bulk_store_wait_read();
  }
}

}  // namespace flash_kda::portable
