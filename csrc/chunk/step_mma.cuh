// A chunk's step of the state in one warp, by mma.sync: the form that every target can run.
//
// The state is held transposed, S^T [V rows, K columns], in fp32 accumulators for the whole
// sequence. In that orientation an accumulator rounded to bf16 is the A operand of the next product
// as it lies in registers, and every other operand is a B operand read from the chunk's record. Per
// chunk:
//
//     UK^T = S^T K~^T      O^T = S^T Q~^T       [16 tokens]
//     X^T  = (V^T - UK^T) diag(b)               U^T = X^T Tm^T       Tm = (I + L)^-1
//     O^T += U^T P^T       S^T = gamma S^T + U^T K-
#pragma once

#include "chunk/state_io.cuh"
#include "common/tile.cuh"

namespace flash_kda {

template <int kTilesOfWarp>
class MmaStep {
 public:
  static constexpr int kTiles = kTilesOfWarp;
  static constexpr int kTokens = kChunk;
  static constexpr bool kOutputs = true;
  static constexpr bool kByAddress = false;
  static constexpr bool kFours = false;

  __device__ __forceinline__ explicit MmaStep(int lane) {
    const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
    square_matrix_ = square_offset(row, 8 * half);
    decay_ = ChunkRecord::kDecay + 16 * (lane & 3);
    beta_ = ChunkRecord::kBeta + 16 * (lane & 3);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      token_major_[n] = image_offset(row, 32 * n + 16 * half);
      channel_major_[n] = image_offset((lane & 7) + half * 8, 32 * n + (lane >> 4) * 16);
      keep_in_register(token_major_[n]);
      keep_in_register(channel_major_[n]);
    }
    keep_in_register(square_matrix_);
    keep_in_register(decay_);
  }

  // One chunk: s becomes the state after it, o (zero on entry) the unscaled O^T. x is V^T, which
  // value(x) reads, minus S^T K~^T, for which the record holds -K~. The chain is x -> u -> s; what
  // else there is to multiply is placed where the chain has to wait, and so are early() and late().
  // acquire() waits for the record. release() lets go of the one before, and not of this one at the
  // end: it could then overtake loads of which only the addresses have left the warp, and the
  // refill overwrite what they are still to read. A step later the products that use them have been
  // issued, so they have returned.
  template <class Acquire, class Release, class Value, class Early, class Late>
  __device__ __forceinline__ void advance(float (&s)[kTiles][kStateTiles][4],
                                          float (&o)[kTiles][2][4], Acquire acquire,
                                          Release release, Value value, Early early,
                                          Late late) const {
    float v[kTiles][2][4];
    value(v);
    const unsigned char* const record = acquire();
    release();
    float x[kTiles][kPartialSums][2][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[tile][0][i >> 2][i & 3] = v[tile][i >> 2][i & 3];
#pragma unroll
      for (int i = 0; i < 8 * (kPartialSums - 1); ++i)
        x[tile][kPartialSums - 1][i >> 2][i & 3] = 0.0f;
    }
    Fragment4 held[kHoldsState ? kOperands : 1];
#pragma unroll
    for (int n = 0; n < kOperands; ++n) {
      const Fragment4 key = load_token_major(record + ChunkRecord::kKeyDecayed, n);
      const float4 decay = *reinterpret_cast<const float4*>(record + decay_ + 64 * n);
      Fragment4 query;
      if constexpr (!kHoldsState) query = load_token_major(record + ChunkRecord::kQueryDecayed, n);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float (&left)[4] = s[tile][2 * n];
        float (&right)[4] = s[tile][2 * n + 1];
        const Fragment4 state = as_operand(left, right);
        mma(x[tile][n % kPartialSums][0], state, key.x[0], key.x[1]);
        mma(x[tile][n % kPartialSums][1], state, key.x[2], key.x[3]);
        if constexpr (kHoldsState) {
          held[n] = state;
        } else {
          mma(o[tile][0], state, query.x[0], query.x[1]);
          mma(o[tile][1], state, query.x[2], query.x[3]);
        }
        scale_columns(left, right, decay);
      }
    }
    const auto multiply_queries = [&](int first, int end) {
      if constexpr (kHoldsState) {
#pragma unroll
        for (int n = first; n < end; ++n) {
          const Fragment4 query = load_token_major(record + ChunkRecord::kQueryDecayed, n);
          mma(o[0][0], held[n], query.x[0], query.x[1]);
          mma(o[0][1], held[n], query.x[2], query.x[3]);
        }
      }
    };

    const float4 beta = *reinterpret_cast<const float4*>(record + beta_);
    const Fragment4 inverse = load_matrices(record + ChunkRecord::kInverse + square_matrix_);
    const Fragment4 scores = load_matrices(record + ChunkRecord::kScores + square_matrix_);
    multiply_queries(0, kOperands / 2);
    float update[kTiles][2][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kPartialSums == 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[tile][0][i >> 2][i & 3] += x[tile][1][i >> 2][i & 3];
      }
      scale_columns(x[tile][0][0], x[tile][0][1], beta);
      const Fragment4 operand = as_operand(x[tile][0][0], x[tile][0][1]);
      mma(update[tile][0], operand, inverse.x[0], inverse.x[1]);
      mma(update[tile][1], operand, inverse.x[2], inverse.x[3]);
    }
    multiply_queries(kOperands / 2, kOperands);
    Fragment4 u[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      u[tile] = as_operand(update[tile][0], update[tile][1]);
#pragma unroll
    for (int n = 0; n < kOperands; ++n) {
      // K- is stored token by token, which is the transpose of the B operand.
      const Fragment4 key =
          load_matrices_transposed(record + ChunkRecord::kKeyRemaining + channel_major_[n % 4] +
                                   ChunkRecord::kHalfBytes * (n / 4));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma(s[tile][2 * n], u[tile], key.x[0], key.x[1]);
        mma(s[tile][2 * n + 1], u[tile], key.x[2], key.x[3]);
      }
    }
    early();
    late();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      mma(o[tile][0], u[tile], scores.x[0], scores.x[1]);
      mma(o[tile][1], u[tile], scores.x[2], scores.x[3]);
    }
  }

 private:
  static constexpr int kOperands = kHeadDim / 16;  // A operands along K
  // With one tile there are registers to keep the state's operands until the chain waits, and two
  // sums are needed to have four independent products under way.
  static constexpr bool kHoldsState = kTiles == 1;
  static constexpr int kPartialSums = kTiles == 1 ? 2 : 1;

  // B operand of 16 channels, 16 * n .., from an image of K~ or Q~.
  __device__ __forceinline__ Fragment4 load_token_major(const unsigned char* image, int n) const {
    return load_matrices(image + token_major_[n % 4] + ChunkRecord::kHalfBytes * (n / 4));
  }

  // Byte offsets of this lane's row of each kind of ldmatrix. Along an image the swizzle repeats
  // every half, so four offsets serve eight steps.
  int square_matrix_, decay_, beta_;
  int token_major_[4], channel_major_[4];
};

}  // namespace flash_kda
