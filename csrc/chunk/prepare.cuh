// Everything of a chunk that does not depend on the state, by one warp: raw rows of k, q and g
// become the chunk's record (params.h).
//
// Lane l owns channels 4l .. 4l+3 of all 16 tokens: the decay's running sum needs no exchange, and
// only the norms and the two 16 x 16 products cross lanes. The raw rows of k, q and g are copied
// into the places of K~, Q~ and K-, where each lane replaces its own 8 bytes a row: no registers
// hold data in flight, and no memory beside the record is needed.
#pragma once

#include "chunk/beta.cuh"
#include "chunk/norms.cuh"
#include "chunk/products.cuh"
#include "common/gate.cuh"
#include "common/sequences.cuh"
#include "common/tile.cuh"

namespace flash_kda {

// Starts the copy of 16 rows into an image; lanes 0-15 take even rows, 16-31 odd ones. Rows past
// the end belong to the next sequence: they become zeros and are not read, NaN or not.
template <class Layout>
__device__ __forceinline__ void fetch_rows(unsigned char* image, const void* base,
                                           const TokenStrides& stride, const TokenRange& tokens,
                                           int head, int lane) {
  const int unit = lane & 15, parity = lane >> 4;
  const unsigned char* row = static_cast<const unsigned char*>(base) + 16 * unit +
                             2 * (tokens.batch * stride.batch +
                                  (tokens.begin + parity) * stride.token + head * stride.head);
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    copy_async_16(image + image_offset(i + parity, 16 * unit, Layout::kHalfBytes), row,
                  i + parity < tokens.length);
    row += 4 * stride.token;
  }
}

// Starts the copies of a chunk's raw rows to where decay_rows() expects them. `rows` is where the
// chunk's rows begin in the record.
template <class Layout>
__device__ __forceinline__ void fetch_chunk(const ForwardParams& p, unsigned char* rows,
                                            const TokenRange& tokens, int head, int lane) {
  fetch_rows<Layout>(rows + Layout::kKeyDecayed, p.k, p.k_stride, tokens, head, lane);
  fetch_rows<Layout>(rows + Layout::kKeyRemaining, p.g, p.g_stride, tokens, head, lane);
  fetch_rows<Layout>(rows + Layout::kQueryDecayed, p.q, p.q_stride, tokens, head, lane);
}

__device__ __forceinline__ void unpack(float (&x)[4], uint2 packed) {
  x[0] = bf16_low(packed.x), x[1] = bf16_high(packed.x);
  x[2] = bf16_low(packed.y), x[3] = bf16_high(packed.y);
}

__device__ __forceinline__ uint2 pack(const float (&x)[4]) {
  return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

// This lane's 8 bytes of every row of a record's images. The swizzle has eight forms, so eight
// addresses, once in registers, serve all 48 rows; left alone, the compiler works each out
// anew.
template <class Layout>
class LanePieces {
 public:
  __device__ __forceinline__ LanePieces(const unsigned char* rows, int lane) {
    const unsigned base = cute::cast_smem_ptr_to_uint(rows);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      address_[i] = base + image_offset(i, 8 * lane, Layout::kHalfBytes) - 128 * i;
      keep_in_register(address_[i]);
    }
  }
  __device__ __forceinline__ uint2 load(int image, int row) const { return *at(image, row); }
  __device__ __forceinline__ void store(int image, int row, uint2 piece) const {
    *at(image, row) = piece;
  }

 private:
  __device__ __forceinline__ uint2* at(int image, int row) const {
    const unsigned address = address_[row & 7] + image + 128 * row;
    return static_cast<uint2*>(__cvta_shared_to_generic(address));
  }
  unsigned address_[8];
};

// c of all tokens in this lane's channels: the running sum of their log2-decays.
template <class Layout>
__device__ __forceinline__ void sum_log2_decays(float (&sums)[kChunk][4], float log2_lower_bound,
                                                const LanePieces<Layout>& pieces,
                                                const Gate<4>& gate, int length) {
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    // Rows past the end do not decay, whatever the gate of their zeros is.
    const float bound = i < length ? log2_lower_bound : 0.0f;
    float g[4];
    unpack(g, pieces.load(Layout::kKeyRemaining, i));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] = fmaf(bound, gate.openness(j, g[j]), sum[j]);
      sums[i][j] = sum[j];
    }
  }
}

// A few rows of raw k and q, as this lane sees them.
template <class Layout>
struct RawRows {
  static constexpr int kRows = 2;
  uint2 key[kRows], query[kRows];

  __device__ __forceinline__ RawRows(const LanePieces<Layout>& pieces, int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      key[i] = pieces.load(Layout::kKeyDecayed, first + i);
      query[i] = pieces.load(Layout::kQueryDecayed, first + i);
    }
  }
};

// Raw rows -> K~ and Q~ and, in the place of K-, K^ = k 2^-c. `growing`, c on entry, becomes K^ in
// fp32; `total` the decay of the whole chunk.
template <class Layout>
__device__ __forceinline__ void decay_rows(float log2_lower_bound, const unsigned char* rows_begin,
                                           const LanePieces<Layout>& pieces, const Gate<4>& gate,
                                           int length, float (&growing)[kChunk][4],
                                           float (&total)[4], int lane) {
  using Rows = RawRows<Layout>;
  const InverseNorms k_norms = inverse_norms<Layout>(rows_begin + Layout::kKeyDecayed, lane);
  const InverseNorms q_norms = inverse_norms<Layout>(rows_begin + Layout::kQueryDecayed, lane);
  sum_log2_decays(growing, log2_lower_bound, pieces, gate, length);
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = exp2_approx(growing[kChunk - 1][j]);
  Rows next(pieces, 0);
  __syncwarp();  // all lanes have read the rows that are replaced now
#pragma unroll
  for (int first = 0; first < kChunk; first += Rows::kRows) {
    const Rows rows = next;
    // Before anything is stored: the compiler could not move these loads over a store.
    if (first + Rows::kRows < kChunk) next = Rows(pieces, first + Rows::kRows);
#pragma unroll
    for (int row = 0; row < Rows::kRows; ++row) {
      const int i = first + row;
      const float k_scale = k_norms.of_row(i);
      float key[4], decay[4];
      unpack(key, rows.key[row]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        decay[j] = exp2_approx(growing[i][j]);
        const float unit_key = key[j] * k_scale;
        growing[i][j] = unit_key * exp2_approx(-growing[i][j]);
        key[j] = unit_key * -decay[j];
      }
      pieces.store(Layout::kKeyDecayed, i, pack(key));
      pieces.store(Layout::kKeyRemaining, i, pack(growing[i]));
      const float q_scale = q_norms.of_row(i);
      float query[4];
      unpack(query, rows.query[row]);
      // In this order: the scale alone may be near 2^-100.
#pragma unroll
      for (int j = 0; j < 4; ++j) query[j] = query[j] * q_scale * decay[j];
      pieces.store(Layout::kQueryDecayed, i, pack(query));
    }
  }
}

// K- = K^ 2^(c_T), in the place of K^.
template <class Layout>
__device__ __forceinline__ void store_remaining(const LanePieces<Layout>& pieces,
                                                const float (&growing)[kChunk][4],
                                                const float (&to_end)[4]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float remaining[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) remaining[j] = growing[i][j] * to_end[j];
    pieces.store(Layout::kKeyRemaining, i, pack(remaining));
  }
}

// The decay of all tokens of a record, in this lane's channels.
template <class Layout>
__device__ __forceinline__ void store_decay(unsigned char* record, const float (&total)[4],
                                            int lane) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    *reinterpret_cast<float2*>(record + Layout::kDecay + 4 * column_position(4 * lane + j)) =
        make_float2(total[j], total[j + 1]);
  }
}

// The raw rows that fetch_chunk() brought -> the record, in place. The whole warp calls it, after a
// __syncwarp() behind the copies; raw_beta is load_raw_beta()'s. Other warps may read the record
// after one more.
__device__ __forceinline__ void prepare_record(const ForwardParams& p, unsigned char* record,
                                               const Gate<4>& gate, int length, unsigned raw_beta,
                                               int lane) {
  float growing[kChunk][4], total[4];
  const LanePieces<ChunkRecord> pieces(record, lane);
  decay_rows(p.log2_lower_bound, record, pieces, gate, length, growing, total, lane);
  __syncwarp();
  const Products products = multiply<ChunkRecord>(record, record + ChunkRecord::kKeyRemaining,
                                                  ChunkRecord::kHalfBytes, lane);

  const float b = beta_of(p, raw_beta, length, lane);
  auto& lower = lower_of(record);
  store_lower(lower, products, b, lane);
  __syncwarp();  // L is complete, and K^ has been read
  store_remaining(pieces, growing, total);
  store_decay<ChunkRecord>(record, total, lane);
  store_beta<ChunkRecord>(record, b, 0, lane);
  solve_and_store(record, products, lane);
}

}  // namespace flash_kda
