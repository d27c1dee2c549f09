// One warp's part of the recurrence: its rows of the state through all chunks of a sequence.
//
// The state is held transposed, S^T [V rows, K columns], in fp32 accumulators for the whole
// sequence. In that orientation an accumulator rounded to bf16 is the A operand of the next product
// as it lies in registers, and every other operand is a B operand read from the chunk's record. Per
// chunk:
//
//     UK^T = S^T K~^T      O^T = S^T Q~^T       [16 tokens]
//     X^T  = V^T - UK^T    U^T = X^T Tm^T       Tm = (I + L)^-1 diag(b)
//     O^T += U^T P^T       S^T = gamma S^T + U^T K-
#pragma once

#include "common/tile.cuh"
#include "portable/ring.cuh"
#include "portable/state_io.cuh"

namespace flash_kda::portable {

// One computing warp: `rows_per_warp` rows of V through all chunks.
template <const RecurrenceShape& kShape>
class Chain {
 public:
  using Smem = RecurrenceSmem<kShape>;
  static constexpr int kTiles = kShape.tiles;
  using State = float[kTiles][kStateTiles][4];

  __device__ __forceinline__ Chain(const ForwardParams& p, Smem& smem, const ChainSlice& slice,
                                   int warp)
      : smem_(smem),
        lane_(threadIdx.x & 31),
        warp_(warp),
        scale_(p.scale),
        chunks_(chunks_of(slice.range.tokens.length)),
        out_step_(2 * kTokensAtOnce * p.out_stride.token) {
    const int token = lane_ / kUnits, byte = lane_ % kUnits * 16;
    // One chunk back: outputs are written while the next chunk is worked on.
    tokens_left_ = slice.range.tokens.length - token + kChunk;
    next_out_ = static_cast<unsigned char*>(p.out) +
                slice.token_bytes(p.out_stride, slice.first_row + warp * kShape.rows_per_warp()) +
                2 * (token - kChunk) * p.out_stride.token + byte;
    output_piece_ = token * kRowBytes + byte;

    const int row = (lane_ & 7) + (lane_ >> 4) * 8, half = (lane_ >> 3) & 1;
    value_matrix_ = row * kShape.value_row_bytes() + 2 * warp * kShape.rows_per_warp() + 16 * half;
    output_matrix_ = row * kRowBytes + 16 * half;
    square_matrix_ = square_offset(row, 8 * half);
    decay_ = ChunkRecord::kDecay + 16 * (lane_ & 3);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      token_major_[n] = image_offset(row, 32 * n + 16 * half);
      channel_major_[n] = image_offset((lane_ & 7) + half * 8, 32 * n + (lane_ >> 4) * 16);
      keep_in_register(token_major_[n]);
      keep_in_register(channel_major_[n]);
    }
    for (int* offset :
         {&output_piece_, &output_matrix_, &value_matrix_, &square_matrix_, &decay_}) {
      keep_in_register(*offset);
    }
  }

  __device__ __forceinline__ int chunks() const { return chunks_; }

  // Works on until `end` chunks of the sequence are done.
  __device__ __forceinline__ void run(State& s, int end) {
#pragma unroll 1
    for (; done_ < end; ++done_) {
      if (!landed_) FullBarrier::wait(&smem_.full[ring_.stage], ring_.parity);
      release_last_stage();
      Fragment4
          pieces[kRounds];  // of the chunk before: its output's latencies pass behind this one
      read_output(pieces);
      float o[kTiles][2][4] = {};
      advance_state(s, o, smem_.stage[ring_.stage]);
      __syncwarp();  // all lanes have read the last output
      last_stage_ = ring_.stage;
      ring_.advance();
      landed_ = FullBarrier::test_wait(&smem_.full[ring_.stage], ring_.parity, 1);
      write_output(pieces, done_ > 0);
      stage_output(o);
    }
  }

  // Writes the last chunk's output.
  __device__ __forceinline__ void finish() {
    Fragment4 pieces[kRounds];
    read_output(pieces);
    write_output(pieces, done_ > 0);
  }

 private:
  static constexpr int kRowBytes = kShape.output_row_bytes();
  static constexpr int kUnits = kShape.rows_per_warp() / 8;  // 16-byte pieces of a token row
  static constexpr int kTokensAtOnce = 32 / kUnits;          // rows that a warp moves at once
  static constexpr int kRounds = kChunk / kTokensAtOnce;
  static_assert(kRounds * kTokensAtOnce == kChunk, "lanes share a chunk's rows evenly");

  static constexpr int kOperands = kHeadDim / 16;  // A operands along K
  // With one tile there are registers to keep the state's operands until the chain waits, and two
  // sums are needed to have four independent products under way.
  static constexpr bool kHoldsState = kTiles == 1;
  static constexpr int kPartialSums = kTiles == 1 ? 2 : 1;

  // Lets the helper refill the stage of the chunk before. Not at that chunk's end: the arrival
  // could then overtake loads of which only the addresses have left the warp, and the refill
  // overwrite what they are still to read. By now the products that use them have been issued, so
  // they have returned.
  __device__ __forceinline__ void release_last_stage() {
    __syncwarp();
    if (lane_ == 0 && done_ > 0) EmptyBarrier::arrive(&smem_.empty[last_stage_]);
  }

  // One chunk of the recurrence: s becomes the state after it, o (zero on entry) the unscaled O^T.
  // The chain is x -> u -> s; what else there is to multiply is placed where the chain has to wait.
  __device__ __forceinline__ void advance_state(State& s, float (&o)[kTiles][2][4],
                                                const typename Smem::Stage& stage) {
    const unsigned char* const record = stage.record;
    float x[kTiles][kPartialSums][2][4];  // V^T - S^T K~^T; the record holds -K~
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Fragment4 v = load_matrices_transposed(stage.value + value_matrix_ + 32 * tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[tile][0][i >> 1][2 * (i & 1)] = bf16_low(v.x[i]);
        x[tile][0][i >> 1][2 * (i & 1) + 1] = bf16_high(v.x[i]);
      }
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
        left[0] *= decay.x, left[1] *= decay.y, left[2] *= decay.x, left[3] *= decay.y;
        right[0] *= decay.z, right[1] *= decay.w, right[2] *= decay.z, right[3] *= decay.w;
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
      const Fragment4 key = load_matrices_transposed(record + ChunkRecord::kKeyRemaining +
                                                     channel_major_[n % 4] + 128 * (n / 4));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma(s[tile][2 * n], u[tile], key.x[0], key.x[1]);
        mma(s[tile][2 * n + 1], u[tile], key.x[2], key.x[3]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      mma(o[tile][0], u[tile], scores.x[0], scores.x[1]);
      mma(o[tile][1], u[tile], scores.x[2], scores.x[3]);
    }
  }

  // B operand of 16 channels, 16 * n .., from an image of K~ or Q~.
  __device__ __forceinline__ Fragment4 load_token_major(const unsigned char* image, int n) const {
    return load_matrices(image + token_major_[n % 4] + 128 * (n / 4));
  }

  // O^T, scaled, as token rows in this warp's shared memory.
  __device__ __forceinline__ void stage_output(const float (&o)[kTiles][2][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Fragment4 packed;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &o[tile][i >> 1][2 * (i & 1)];
        packed.x[i] = pack_bf16(pair[0] * scale_, pair[1] * scale_);
      }
      store_matrices_transposed(smem_.output[warp_].rows + output_matrix_ + 32 * tile, packed);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void read_output(Fragment4 (&pieces)[kRounds]) const {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const uint4 piece = *reinterpret_cast<const uint4*>(smem_.output[warp_].rows + output_piece_ +
                                                          i * kTokensAtOnce * kRowBytes);
      pieces[i] = {{piece.x, piece.y, piece.z, piece.w}};
    }
  }

  // Rows past the end are somebody else's.
  __device__ __forceinline__ void write_output(const Fragment4 (&pieces)[kRounds], bool exists) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const unsigned (&piece)[4] = pieces[i].x;
      if (exists && tokens_left_ > 0) {
        *reinterpret_cast<uint4*>(next_out_) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
      next_out_ += out_step_;
      tokens_left_ -= kTokensAtOnce;
    }
  }

  Smem& smem_;
  const int lane_, warp_;
  const float scale_;
  const int chunks_;
  int done_ = 0;
  int last_stage_ = 0;
  RingPosition<kShape.stages> ring_;
  bool landed_ = false;       // whether the next chunk's stage is known to be full
  const long long out_step_;  // bytes
  int tokens_left_;           // from this lane's next output row to the end
  unsigned char* next_out_;
  // Byte offsets of this lane: its piece of an output row, and its row of each kind of ldmatrix.
  // Along an image the swizzle repeats every 128 bytes, so four offsets serve eight steps.
  int output_piece_, output_matrix_, value_matrix_, square_matrix_, decay_;
  int token_major_[4], channel_major_[4];
};

}  // namespace flash_kda::portable
