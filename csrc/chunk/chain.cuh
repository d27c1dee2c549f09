// One warp's part of a chain: its rows of the state through all chunks of a sequence. What happens
// to the state in a chunk is a step of its own (step_mma.cuh, sm90/step_wgmma.cuh); here is what
// surrounds it, V on its way in and the output on its way out.
#pragma once

#include "chunk/record_ring.cuh"
#include "chunk/slice.cuh"
#include "chunk/state_io.cuh"
#include "chunk/warp_memory.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"

namespace flash_kda {

// A computing warp with 16 * kTiles rows of V. It lives through all sequences that its CTA works
// on: begin(), run() up to each place where the state is wanted, finish().
//
// `Ring` is where records come from, kStages of them at once: record(stage) or
// record_address(stage), wait(stage, parity), landed(stage, parity) without waiting, and
// release(stage, arrives), called by all lanes once this warp has read the record: those arrive of
// which it is true. `Step` says how many tiles, how many tokens a record is for, and whether there
// are outputs, without which the chain only carries the state on. kFours says how channels are
// permuted (chunk/state_io.cuh). With kByAddress it hands the record to the tensor cores, by its
// address in shared memory, and lets go of it once they are done; without, its lanes load from the
// record, and it lets go of the one before. `Memory` is a ChainWarpMemory.
template <class Ring, class Step, class Memory>
class Chain {
 public:
  static constexpr int kTiles = Step::kTiles;
  static constexpr int kTokens = Step::kTokens;
  static constexpr bool kOutputs = Step::kOutputs;
  static constexpr bool kFours = Step::kFours;
  using State = float[kTiles][kStateTiles][4];

  __device__ __forceinline__ Chain(const ForwardParams& p, const Ring& ring, Memory& memory)
      : p_(p),
        ring_(ring),
        memory_(memory),
        lane_(threadIdx.x & 31),
        value_step_(2 * kTokensAtOnce * p.v_stride.token),
        out_step_(2 * kTokensAtOnce * p.out_stride.token),
        step_(lane_) {
    const int row = (lane_ & 7) + (lane_ >> 4) * 8, half = (lane_ >> 3) & 1;
    piece_ = Memory::unit_offset(lane_ / kUnits, lane_ % kUnits);
    matrix_ = Memory::unit_offset(row, half);
    keep_in_register(piece_);
    keep_in_register(matrix_);
    keep_in_register(value_step_);
    keep_in_register(out_step_);
  }

  // Starts on a sequence, at this warp's first V row. Without values V is zero throughout.
  __device__ __forceinline__ void begin(const ChainSlice& slice, int first_row, bool has_values) {
    const int token = lane_ / kUnits, byte = lane_ % kUnits * 16;
    const int length = slice.range.tokens.length;
    steps_ = records_of(length, kTokens);
    done_ = 0;
    rows_left_ = has_values ? length - token : 0;
    next_value_ = static_cast<const unsigned char*>(p_.v) +
                  slice.token_bytes(p_.v_stride, first_row) + 2 * token * p_.v_stride.token + byte;
    // One step back: outputs are written while the next step is worked on.
    next_out_ = static_cast<unsigned char*>(p_.out) + slice.token_bytes(p_.out_stride, first_row) +
                2 * (token - kTokens) * p_.out_stride.token + byte;
    if constexpr (kMovesBefore) {
      next_value_ -= value_step_;
      next_out_ -= out_step_;
    }
    copy_async_wait<0>();  // of the sequence before: zeros fetched past its end
    __syncwarp();          // all lanes have read its values and outputs
    first_value_ = 0;
    last_value_ = kValues - 1;
#pragma unroll
    for (int i = 0; i < kValues - 1; ++i) fetch_value(i);
  }

  __device__ __forceinline__ int steps() const { return steps_; }

  // Works on until `end` steps of the sequence are done.
  __device__ __forceinline__ void run(State& s, int end) {
#pragma unroll 1
    for (; done_ < end; ++done_) {
      float o[kTiles][kTokens / 8][4] = {};
      const auto value = [&](float (&x)[kTiles][kTokens / 8][4]) { next_value(x); };
      const auto acquire = [&] {
        if (landed_ == 0) ring_.wait(position_.stage, position_.parity);
        stay_behind_wait();
        if constexpr (Step::kByAddress) {
          return ring_.record_address(position_.stage);
        } else {
          return ring_.record(position_.stage);
        }
      };
      const auto release = [&] {
        if constexpr (Step::kByAddress) {
          release_stage(position_.stage);
        } else if (has_stage_) {
          release_stage(position_.stage == 0 ? Ring::kStages - 1 : position_.stage - 1);
        }
      };
      // What the step does not need passes while it waits.
      uint4 pieces[kRounds];
      const auto early = [&] {
        if constexpr (kOutputs) turn_output(pieces);
      };
      const auto late = [&] {
        if constexpr (kOutputs) write_output(pieces);
        fetch_value(last_value());
        // If it were asked for once the step is over, the answer would be waited for.
        RingPosition<Ring::kStages> next = position_;
        next.advance();
        landed_ = ring_.landed(next.stage, next.parity);
      };
      step_.advance(s, o, acquire, release, value, early, late);
      __syncwarp();  // all lanes have read V
      has_stage_ = true;
      position_.advance();
      last_value_ = first_value_;
      if (++first_value_ == kValues) first_value_ = 0;
      if constexpr (kOutputs) pack_output(o);
    }
  }

  // Takes what stands in the next `count` stages and is no record: read(ring, stage) with the first
  // of them.
  template <int kCount, class Read>
  __device__ __forceinline__ void take(Read read) {
    RingPosition<Ring::kStages> next = position_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (landed_ < kCount) ring_.wait(next.stage, next.parity);
      next.advance();
    }
    stay_behind_wait();
    read(ring_, position_.stage);
    fence_async_shared();  // what was read has arrived; the next that comes may be a bulk copy
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      release_stage(position_.stage);
      position_.advance();
    }
    landed_ = ring_.landed(position_.stage, position_.parity);
  }

  // Finds out whether all is there that take() is to read next, so that take() need not wait for
  // the answer.
  template <int kCount>
  __device__ __forceinline__ void look_for() {
    RingPosition<Ring::kStages> next = position_;
    bool landed = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      landed &= ring_.landed(next.stage, next.parity);
      next.advance();
    }
    if (landed) landed_ = kCount;
  }

  // For the state in the middle of the step to come: its record, once it is there, and V^T.
  __device__ __forceinline__ const unsigned char* next_record() const {
    ring_.wait(position_.stage, position_.parity);
    stay_behind_wait();
    return ring_.record(position_.stage);
  }
  __device__ __forceinline__ void next_value(float (&x)[kTiles][kTokens / 8][4]) const {
    copy_async_wait<kValues - 2>();
    __syncwarp();  // every lane's copies of V have landed
    read_value(x);
  }

  // Writes the last step's output.
  __device__ __forceinline__ void finish() {
    if constexpr (kOutputs) {
      uint4 pieces[kRounds];
      turn_output(pieces);
      write_output(pieces);
    }
  }

 private:
  static constexpr int kRowBytes = Memory::kRowBytes;
  static constexpr int kValues = Memory::kValues;
  static constexpr int kUnits = Memory::kRowsOfV / 8;  // 16-byte pieces of a token row
  static constexpr int kTokensAtOnce = 32 / kUnits;    // rows that a warp moves at once
  static constexpr int kRounds = kTokens / kTokensAtOnce;
  // Whether addresses move on right before an access and not right behind one, where the last one
  // is still to be read and would be waited for. With pairs of chunks a step is shorter for it; in
  // `fused` the calls took longer (docs/performance.md).
  static constexpr bool kMovesBefore = kTokens == kPair;
  // Likewise, whether the slot of the step before is kept, or found from the next one.
  static constexpr bool kKeepsSlots = kTokens == kPair;
  static_assert(kRounds * kTokensAtOnce == kTokens && kTokensAtOnce % 8 == 0,
                "lanes share a step's rows evenly, and units are permuted by row % 8");

  // The slot of the step before: its V has been read.
  __device__ __forceinline__ int last_value() const {
    if constexpr (kKeepsSlots) return last_value_;
    return first_value_ == 0 ? kValues - 1 : first_value_ - 1;
  }

  // Starts the copy of this warp's columns of V in one step; zeros past the end.
  __device__ __forceinline__ void fetch_value(int slot) {
    unsigned char* const to = memory_.value[slot] + piece_;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if constexpr (kMovesBefore) next_value_ += value_step_;
      copy_async_16(to + i * kTokensAtOnce * kRowBytes, next_value_, rows_left_ > 0);
      if constexpr (!kMovesBefore) next_value_ += value_step_;
      rows_left_ -= kTokensAtOnce;
    }
    copy_async_commit();
  }

  // Where a lane's row of an ldmatrix lies: of 16 tokens and 16 rows of V.
  __device__ __forceinline__ int matrix_offset(int tile, int chunk) const {
    return (matrix_ ^ 32 * tile) + chunk * kChunk * kRowBytes;
  }

  // V^T of a step.
  __device__ __forceinline__ void read_value(float (&x)[kTiles][kTokens / 8][4]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
        const Fragment4 v =
            load_matrices_transposed(memory_.value[first_value_] + matrix_offset(tile, chunk));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* const pair = &x[tile][2 * chunk + (i >> 1)][2 * (i & 1)];
          pair[0] = bf16_low(v.x[i]), pair[1] = bf16_high(v.x[i]);
        }
      }
    }
  }

  // Lets a stage be refilled.
  __device__ __forceinline__ void release_stage(int stage) const {
    __syncwarp();
    ring_.release(stage, arrives(lane_));
  }

  // O^T, scaled.
  __device__ __forceinline__ void pack_output(const float (&o)[kTiles][kTokens / 8][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &o[tile][2 * chunk + (i >> 1)][2 * (i & 1)];
          output_[tile][chunk].x[i] = pack_bf16(pair[0] * p_.scale, pair[1] * p_.scale);
        }
      }
    }
  }

  // The output of the step before as pieces of token rows, by way of the place of its V.
  __device__ __forceinline__ void turn_output(uint4 (&pieces)[kRounds]) {
    unsigned char* const rows = memory_.value[last_value()];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int chunk = 0; chunk < kTokens / kChunk; ++chunk)
        store_matrices_transposed(rows + matrix_offset(tile, chunk), output_[tile][chunk]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      pieces[i] = *reinterpret_cast<const uint4*>(rows + piece_ + i * kTokensAtOnce * kRowBytes);
    }
    __syncwarp();  // all lanes have read them: V may come
  }

  // Writes it, if there was a step before. Rows past the end are somebody else's.
  __device__ __forceinline__ void write_output(const uint4 (&pieces)[kRounds]) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if constexpr (kMovesBefore) next_out_ += out_step_;
      // V is fetched kValues steps ahead of the output.
      if (done_ > 0 && rows_left_ > i * kTokensAtOnce - kValues * kTokens)
        *reinterpret_cast<uint4*>(next_out_) = pieces[i];
      if constexpr (!kMovesBefore) next_out_ += out_step_;
    }
  }

  const ForwardParams& p_;
  const Ring ring_;
  Memory& memory_;
  const int lane_;
  RingPosition<Ring::kStages> position_;
  int landed_ = 0;          // so many of the stages to come are known to be filled
  bool has_stage_ = false;  // whether the stage before is still to be released
  int steps_ = 0, done_ = 0;
  // The slots of V of the next step and of the one before.
  int first_value_ = 0, last_value_ = kValues - 1;
  int rows_left_;  // from this lane's next row of V to the end
  const unsigned char* next_value_;
  unsigned char* next_out_;
  Fragment4 output_[kTiles][kTokens / kChunk];  // of the step before
  // Byte offsets of this lane: its piece of a row of V or the output, and its row of an ldmatrix.
  int piece_, matrix_;
  long long value_step_, out_step_;  // bytes
  const Step step_;
};

}  // namespace flash_kda
