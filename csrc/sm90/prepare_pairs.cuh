// Prepare, for the walk: two warps make the record of a pair of chunks and head and leave it in the
// workspace by three bulk copies.
//
// Decays over two chunks leave the range of fp32 and bf16. So each warp makes the images of its
// chunk, a or b, relative to that chunk (chunk/prepare.cuh), and the two square matrices are made
// in blocks:
//
//     [ aa  0  ]    aa and bb from each chunk's own K~, Q~ and K^;
//     [ ba  bb ]    ba from K~ and Q~ of b relative to the pair's start, and K^ of a. What is lost
//                   there to underflow is below 2^-18 of a unit, channel by channel
//
// With L = diag(b) K~ K^^T the blocks of Tm = (I + L)^-1 are the inverses of each chunk's own
// system, by substitution in fp32, and Tm_ba = -Tm_bb L_ba Tm_aa.
#pragma once

#include "chunk/prepare.cuh"
#include "chunk/stored_record.cuh"
#include "launch_shapes.h"

namespace flash_kda::sm90 {

struct PreparePairsSmem {
  struct alignas(128) Pair {
    unsigned char record[PairRecord::kBytes];
    float decay[2][kHeadDim];  // of each chunk
  } pair[kPairsOfCta];
};

class PairWarp {
 public:
  __device__ __forceinline__ PairWarp(const ForwardParams& p, PreparePairsSmem::Pair& pair,
                                      int index, int chunk, int lane)
      : p_(p),
        pair_(pair),
        record_(pair.record),
        rows_(pair.record + chunk * kChunk * 128),
        index_(index),
        chunk_(chunk),
        lane_(lane) {}

  // The raw rows that fetch_chunk() brought -> the record, in place. `length`: tokens of this
  // warp's chunk, none if it is not positive. `middle`: where a MiddleRecord goes, or null.
  __device__ __forceinline__ void make(const Gate<4>& gate, int length, unsigned raw_beta,
                                       unsigned char* middle) {
    float growing[kChunk][4], own[4], other[4];
    const Pieces pieces(rows_, lane_);
    decay_rows(p_.log2_lower_bound, rows_, pieces, gate, length, growing, own, lane_);
    *reinterpret_cast<float4*>(&pair_.decay[chunk_][4 * lane_]) =
        make_float4(own[0], own[1], own[2], own[3]);
    meet();
    const float4 decay = *reinterpret_cast<const float4*>(&pair_.decay[chunk_ ^ 1][4 * lane_]);
    other[0] = decay.x, other[1] = decay.y, other[2] = decay.z, other[3] = decay.w;
    float whole[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) whole[j] = own[j] * other[j];

    const Products products =
        multiply<PairRecord>(rows_, growing_of(chunk_), PairRecord::kHalfBytes, lane_);
    meet();  // K~ and Q~ of b have been read
    // The warps share block ba: K~ of b is the one's, Q~ the other's.
    const int image = chunk_ == 0 ? PairRecord::kQueryDecayed : PairRecord::kKeyDecayed;
    move_to_pair(image);
    __syncwarp();
    Block below = {};
    multiply_below(below, image);
    if (chunk_ == 1) store_decay<PairRecord>(record_, whole, lane_);
    const float b = beta_of(p_, raw_beta, length, lane_);
    // L of the chunk in fp32, until its inverse takes its place.
    static_assert(sizeof(float[kChunk][kChunk]) == PairRecord::kColumnBytes, "L fits");
    unsigned char* const inverse = record_ + PairRecord::kInverse;
    auto& lower =
        *reinterpret_cast<float (*)[kChunk][kChunk]>(inverse + chunk_ * PairRecord::kColumnStride);
    store_lower(lower, products, b, lane_);
    __syncwarp();  // L is complete
    float column[kChunk];
    solve_unit_lower(column, lower, lane_);
    __syncwarp();  // L has been read
    const int first = kChunk * chunk_;
    if (lane_ < kChunk) store_inverse<kPair>(inverse, column, first, lane_);
    store_beta<PairRecord>(record_, b, first, lane_);
    unsigned char* const scores = record_ + PairRecord::kScores;
    store_block<kPair, true>(scores, products.scores, first, first, lane_);
    meet();  // Tm_aa is complete, and K^ of a has been read
    if (chunk_ == 0) {
      // One after the other: the decay of both chunks alone may underflow.
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) growing[i][j] *= own[j];
      }
      store_remaining(pieces, growing, other);
      store_block<kPair, false>(scores, below, kChunk, 0, lane_);
      if (middle != nullptr) store_middle(middle, growing, own);
    } else {
      store_remaining(pieces, growing, own);
      scale_rows(below, b);
      store_inverse_below(inverse, below);
    }
    fence_async_shared();
    meet();  // the record is complete
  }

 private:
  using Pieces = LanePieces<PairRecord>;
  using Block = float[2][4];  // accumulators of 16 x 16

  // The pair's two warps wait for each other.
  __device__ __forceinline__ void meet() const {
    cutlass::arch::NamedBarrier::sync(64, static_cast<uint32_t>(index_));
    stay_behind_wait();
  }

  __device__ __forceinline__ const unsigned char* growing_of(int chunk) const {
    return record_ + PairRecord::kKeyRemaining + chunk * kChunk * 128;
  }

  // K~ or Q~ of chunk b: from its own start to the pair's.
  __device__ __forceinline__ void move_to_pair(int image) const {
    const Pieces pieces(record_ + kChunk * 128, lane_);
    const float4 before = *reinterpret_cast<const float4*>(&pair_.decay[0][4 * lane_]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float x[4];
      unpack(x, pieces.load(image, i));
      x[0] *= before.x, x[1] *= before.y, x[2] *= before.z, x[3] *= before.w;
      pieces.store(image, i, pack(x));
    }
  }

  // That times K^ of chunk a.
  __device__ __forceinline__ void multiply_below(Block& block, int image) const {
    const int a_row = lane_ & 15, a_byte = (lane_ >> 4) * 16;
    const int b_row = (lane_ & 7) + (lane_ >> 4) * 8, b_byte = ((lane_ >> 3) & 1) * 16;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const Fragment4 rows =
          load_matrices(record_ + image +
                        image_offset(kChunk + a_row, step * 32 + a_byte, PairRecord::kHalfBytes));
      const Fragment4 growing = load_matrices(
          growing_of(0) + image_offset(b_row, step * 32 + b_byte, PairRecord::kHalfBytes));
      mma(block[0], rows, growing.x[0], growing.x[1]);
      mma(block[1], rows, growing.x[2], growing.x[3]);
    }
  }

  // Each row by b of its token, which the lane of that number has.
  static __device__ __forceinline__ void scale_rows(Block& block, float b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float b_of_row = __shfl_sync(kWarpMask, b, ((threadIdx.x & 31) >> 2) + 8 * half);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        block[tile][2 * half] *= b_of_row, block[tile][2 * half + 1] *= b_of_row;
    }
  }

  // Tm_ba = Tm_bb (-L_ba) Tm_aa, by way of its right part transposed: then the accumulators of one
  // product are the B operand of the next.
  __device__ __forceinline__ void store_inverse_below(unsigned char* image,
                                                      const Block& negated) const {
    const unsigned char* const matrix = image + (lane_ & 7) * 16;
    const int i = lane_ >> 3;  // of the four 8 x 8 matrices that an ldmatrix loads
    const Fragment4 aa =
        load_matrices_transposed(matrix + square_offset<kPair>(8 * (i >> 1), 8 * (i & 1)));
    const Fragment4 bb =
        load_matrices(matrix + square_offset<kPair>(kChunk + 8 * (i & 1), kChunk + 8 * (i >> 1)));
    float right[2][4] = {}, below[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(right[n], aa, pack_bf16(negated[0][2 * n], negated[0][2 * n + 1]),
          pack_bf16(negated[1][2 * n], negated[1][2 * n + 1]));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(below[n], bb, pack_bf16(right[0][2 * n], right[0][2 * n + 1]),
          pack_bf16(right[1][2 * n], right[1][2 * n + 1]));
    }
    store_block<kPair, false>(image, below, kChunk, 0, lane_);
  }

  // `remaining`: K- of chunk a to its own end.
  __device__ __forceinline__ void store_middle(unsigned char* to,
                                               const float (&remaining)[kChunk][4],
                                               const float (&own)[4]) const {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      *reinterpret_cast<uint2*>(to + MiddleRecord::kKeyRemaining + 2 * kHeadDim * i + 8 * lane_) =
          pack(remaining[i]);
    }
    *reinterpret_cast<float4*>(to + MiddleRecord::kDecay + 16 * lane_) =
        make_float4(own[0], own[1], own[2], own[3]);
  }

  const ForwardParams& p_;
  PreparePairsSmem::Pair& pair_;
  unsigned char* const record_;
  unsigned char* const rows_;  // this warp's chunk in the record
  const int index_;            // of the CTA's pairs
  const int chunk_, lane_;
};

__device__ __forceinline__ void prepare_pairs(const ForwardParams& p, PreparePairsSmem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int index = warp >> 1, chunk = warp & 1;
  if (p.cu_seqlens != nullptr) wait_for_previous_launch();
  const unsigned work = blockIdx.x * kPairsOfCta + index;  // the plan keeps it below 2^31
  const int record = work / static_cast<unsigned>(p.heads);
  const int head = work - record * p.heads;
  TokenRange tokens = record_tokens(p, record, lane);
  if (tokens.length <= 0) return;
  tokens.begin += kChunk * chunk;
  tokens.length = min(kChunk, tokens.length - kChunk * chunk);

  PreparePairsSmem::Pair& pair = smem.pair[index];
  fetch_chunk<PairRecord>(p, pair.record + chunk * kChunk * 128, tokens, head, lane);
  const unsigned raw_beta = load_raw_beta(p, tokens, head, lane);
  const Gate<4> gate(p, head, 4 * lane);
  allow_next_launch();
  copy_async_wait_all();
  __syncwarp();  // every lane's copies have landed
  const long long place = static_cast<long long>(record) * p.heads + head;
  PairWarp(p, pair, index, chunk, lane)
      .make(gate, tokens.length, raw_beta,
            p.checkpoints > 0 ? p.middles + place * MiddleRecord::kBytes : nullptr);
  if (chunk == 0 && lane == 0) {
    unsigned char* const to = p.records + place * PairRecord::kStoredBytes;
    for_each_stored<PairRecord>(
        [&](int at, int bytes, int stored) { bulk_store(to + stored, pair.record + at, bytes); });
    bulk_store_wait_read();
  }
}

}  // namespace flash_kda::sm90
