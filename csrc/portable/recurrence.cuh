// Recurrence: the serial chain over the chunks of one sequence and head. A CTA owns a slice of V, a
// warp 16 * kTiles rows of it, and rows of V never meet, so warps share operands but no results.
//
// The state is held transposed, S^T [V rows, K columns], in fp32 accumulators for the whole
// sequence. In that orientation an accumulator rounded to bf16 is the A operand of the next product
// as it lies in registers, and every other operand is a B operand read from the chunk's record. Per
// chunk:
//
//     UK^T = S^T K~^T      O^T = S^T Q~^T       [16 tokens]
//     X^T  = V^T - UK^T    U^T = X^T Tm^T       Tm = (I + L)^-1 diag(b)
//     O^T += U^T P^T       S^T = gamma S^T + U^T K-
//
// A helper warp copies chunks into a ring of stages by bulk copies: one for the record, one a row
// of V, with zeros for rows past the end. The computing warps share the stages and nothing else.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "common/sequences.cuh"
#include "common/tile.cuh"
#include "launch_shapes.h"
#include "portable/state_io.cuh"

namespace flash_kda::portable {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <const RecurrenceShape& kShape>
struct RecurrenceSmem {
  struct alignas(128) Stage {
    unsigned char record[ChunkRecord::kBytes];
    unsigned char value[kChunk * kShape.value_row_bytes()];
  };
  struct alignas(16) Output {
    unsigned char rows[kChunk * kShape.output_row_bytes()];
  };
  Stage stage[kShape.stages];
  Output output[kShape.warps];
  // full: record and V of a chunk have landed; one arrival for the record, one a helper lane for V.
  // empty: every computing warp has read them.
  FullBarrier::ValueType full[kShape.stages];
  EmptyBarrier::ValueType empty[kShape.stages];
};

// Walks the ring: which stage a chunk uses and the parity of its barriers' phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What one CTA works on.
struct ChainSlice {
  SequenceRange range;
  int head;
  int first_row;  // of V

  template <const RecurrenceShape& kShape>
  static __device__ __forceinline__ ChainSlice of_cta(const ForwardParams& p) {
    const int job = blockIdx.x / kShape.slices();
    const int slice = blockIdx.x - job * kShape.slices();
    const int rank = job / p.heads;
    return {ranked_sequence(p, rank), job - rank * p.heads, slice * kShape.rows()};
  }

  // Bytes from a tensor's base to channel `row` of the sequence's first token.
  __device__ __forceinline__ long long token_bytes(const TokenStrides& stride, int row) const {
    const TokenRange& tokens = range.tokens;
    return 2 *
           (tokens.batch * stride.batch + tokens.begin * stride.token + head * stride.head + row);
  }

  // Bytes from a state tensor's base to a slot's state of this head, from V row `row` on.
  __device__ __forceinline__ long long state_bytes(const StateStrides& stride, int dtype,
                                                   long long slot, int row) const {
    return (dtype == kFloat32 ? 4 : 2) * (slot * stride.slot + head * stride.head + row * kHeadDim);
  }

  // Where the sequence's state lies in a tensor of `slots` states; negative: nowhere.
  __device__ __forceinline__ long long slot(const ForwardParams& p, long long slots) const {
    if (p.state_indices == nullptr) return range.sequence;
    const long long slot = load_integer(p.state_indices, range.sequence * p.state_indices_stride,
                                        p.state_indices_dtype);
    return slot < slots ? slot : -1;
  }
};

// The checkpoints of one sequence, in order. Offsets at which none of its chunks ends are passed
// over.
class Checkpoints {
 public:
  __device__ __forceinline__ Checkpoints(const ForwardParams& p, const TokenRange& tokens, int lane)
      : p_(p),
        begin_(static_cast<long long>(tokens.batch) * p.tokens + tokens.begin),
        length_(tokens.length) {
    next_ = count_at_most([&](int c) { return offset(c); }, p.checkpoints, begin_, lane);
    find();
  }

  // The checkpoint to come, and how many chunks lie before it; none: more chunks than there are.
  __device__ __forceinline__ int next() const { return next_; }
  __device__ __forceinline__ int chunks() const { return chunks_; }

  __device__ __forceinline__ void advance() {
    ++next_;
    find();
  }

 private:
  __device__ __forceinline__ long long offset(int c) const {
    return load_integer(p_.checkpoint_offsets, c * p_.checkpoint_offsets_stride,
                        p_.checkpoint_offsets_dtype);
  }
  __device__ __forceinline__ void find() {
    chunks_ = 0x7fffffff;
    for (; next_ < p_.checkpoints; ++next_) {
      const long long tokens = offset(next_) - begin_;
      if (tokens > length_) return;
      if (tokens % kChunk == 0 || tokens == length_) {
        chunks_ = chunks_of(static_cast<int>(tokens));
        return;
      }
    }
  }

  const ForwardParams& p_;
  const long long begin_;
  const int length_;
  int next_, chunks_;
};

// The helper warp: keeps the ring filled. Rows of V come by cp.async, 16 bytes a lane, because
// sixteen small bulk copies a chunk would take longer than the chunk.
template <const RecurrenceShape& kShape>
__device__ __forceinline__ void copy_chunks(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                            const ChainSlice& slice) {
  constexpr int kUnits = kShape.rows() / 8;   // 16-byte pieces of a token row
  constexpr int kTokensAtOnce = 32 / kUnits;  // rows that the warp copies at once
  static_assert(kTokensAtOnce * kUnits == 32, "lanes share rows evenly");
  const int lane = threadIdx.x & 31;
  const int token = lane / kUnits, byte = lane % kUnits * 16;
  const int chunks = chunks_of(slice.range.tokens.length);
  const long long record_step = static_cast<long long>(p.heads) * ChunkRecord::kBytes;
  const unsigned char* record =
      p.records + (static_cast<long long>(slice.range.first_chunk) * p.heads + slice.head) *
                      ChunkRecord::kBytes;
  const unsigned char* value = static_cast<const unsigned char*>(p.v) +
                               slice.token_bytes(p.v_stride, slice.first_row) +
                               2 * token * p.v_stride.token + byte;
  int tokens_left = slice.range.tokens.length - token;  // from this lane's next row to the end

  RingPosition<kShape.stages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk >= kShape.stages) EmptyBarrier::wait(&smem.empty[ring.stage], ring.parity ^ 1);
    auto& stage = smem.stage[ring.stage];
    if (lane == 0) {
      FullBarrier::arrive_and_expect_tx(&smem.full[ring.stage], ChunkRecord::kBytes);
      bulk_load(stage.record, record, ChunkRecord::kBytes, &smem.full[ring.stage]);
    }
    record += record_step;
#pragma unroll
    for (int i = 0; i < kChunk; i += kTokensAtOnce) {
      copy_async_16(stage.value + (i + token) * kShape.value_row_bytes() + byte, value,
                    tokens_left > 0);
      value += 2 * kTokensAtOnce * p.v_stride.token;
      tokens_left -= kTokensAtOnce;
    }
    copy_async_arrive(&smem.full[ring.stage]);
    ring.advance();
  }
}

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

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void compute_chunks(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                               const ChainSlice& slice, int warp) {
  const int lane = threadIdx.x & 31;
  const int first_row = slice.first_row + warp * kShape.rows_per_warp();
  typename Chain<kShape>::State s;
  const long long from = slice.slot(p, p.initial_slots), to = slice.slot(p, p.final_slots);
  load_state(s,
             static_cast<const unsigned char*>(p.initial_state) +
                 slice.state_bytes(p.initial_stride, p.initial_dtype, from, first_row),
             from < 0 ? kAbsent : p.initial_dtype, p.initial_vectorised, lane);
  Checkpoints checkpoints(p, slice.range.tokens, lane);
  Chain<kShape> chain(p, smem, slice, warp);
  // Stops at each checkpoint and at the end, outside the loop over chunks.
#pragma unroll 1
  for (;;) {
    const int end = min(chain.chunks(), checkpoints.chunks());
    chain.run(s, end);
    if (end < checkpoints.chunks()) break;
    store_state(s,
                static_cast<unsigned char*>(p.checkpoint_states) +
                    slice.state_bytes(p.checkpoint_stride, p.checkpoint_dtype, checkpoints.next(),
                                      first_row),
                p.checkpoint_dtype, p.checkpoint_vectorised, lane);
    checkpoints.advance();
  }
  chain.finish();
  if (p.final_dtype != kAbsent && to >= 0) {
    store_state(s,
                static_cast<unsigned char*>(p.final_state) +
                    slice.state_bytes(p.final_stride, p.final_dtype, to, first_row),
                p.final_dtype, p.final_vectorised, lane);
  }
}

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void recurrence(const ForwardParams& p, RecurrenceSmem<kShape>& smem) {
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kShape.stages; ++i) {
      FullBarrier::init(&smem.full[i], 1 + 32);
      EmptyBarrier::init(&smem.empty[i], kShape.warps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_launch();
  const ChainSlice slice = ChainSlice::of_cta<kShape>(p);
  if (warp < kShape.warps) {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_alloc<232>();
    compute_chunks<kShape>(p, smem, slice, warp);
  } else {
    if constexpr (kShape.moves_registers()) cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp == kShape.warps) copy_chunks<kShape>(p, smem, slice);
  }
}

}  // namespace flash_kda::portable
