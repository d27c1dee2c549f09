// What a chain works on: a sequence or a part of one, a head, and where its states lie.
#pragma once

#include "common/sequences.cuh"

namespace flash_kda {

__device__ __forceinline__ constexpr int element_bytes(int dtype) {  // of a state
  return dtype == kFloat32 ? 4 : 2;
}

// Where a state of one head lies, from some V row on.
struct StateAddress {
  void* base;
  int dtype;        // kAbsent: nowhere
  bool vectorised;  // whether fours of elements are naturally aligned
};

struct ChainSlice {
  SequenceRange range;  // with several segments: the tokens of this one
  int head;
  int segment;
  bool empty;  // the whole sequence, not just the segment

  ChainSlice() = default;
  __device__ __forceinline__ ChainSlice(const SequenceRange& sequence, int head)
      : range(sequence), head(head), segment(0), empty(range.tokens.length == 0) {}

  // The segment-th of the parts that the plan cuts every sequence into. They are whole records;
  // those past the end of a short sequence are empty.
  __device__ __forceinline__ ChainSlice(const ForwardParams& p, const SequenceRange& sequence,
                                        int head, int segment)
      : range(sequence), head(head), segment(segment), empty(range.tokens.length == 0) {
    const int records = records_of(range.tokens.length, p.record_tokens);
    const int step = (records + p.segments - 1) / p.segments * p.record_tokens;
    const int skipped = min(segment * step, range.tokens.length);
    range.tokens.begin += skipped;
    range.first_record += skipped / p.record_tokens;
    range.tokens.length = min(step, range.tokens.length - skipped);
  }

  // The job-th of all that a launch works on.
  __device__ __forceinline__ static ChainSlice of_job(const ForwardParams& p, long long job) {
    const int parts = p.job_segments * p.heads;
    const int rank = static_cast<int>(job) / parts, part = static_cast<int>(job) - rank * parts;
    const int segment = part / p.heads;
    return ChainSlice(p, ranked_sequence(p, rank), part - segment * p.heads, segment);
  }

  // Bytes from a tensor's base to channel `row` of the first token.
  __device__ __forceinline__ long long token_bytes(const TokenStrides& stride, int row) const {
    const TokenRange& tokens = range.tokens;
    return 2 *
           (tokens.batch * stride.batch + tokens.begin * stride.token + head * stride.head + row);
  }

  // The state before this sequence or segment. While segments write final states the caller's
  // initial state may be gone already, if both are one tensor; so the first segment's is a copy.
  __device__ __forceinline__ StateAddress initial(const ForwardParams& p, int row) const {
    if (p.segments == 1) return given(p, row);
    // Without tokens the state stays as it is, in every bit (NaNs in bf16 aside); the maps would
    // add its elements to zeros.
    return segment == 0 || empty ? carried(p, 0, kCarriedMap, row)
                                 : carried(p, segment - 1, kCarriedState, row);
  }

  // The caller's initial state.
  __device__ __forceinline__ StateAddress given(const ForwardParams& p, int row) const {
    return state(p, const_cast<void*>(p.initial_state), p.initial_stride, p.initial_dtype,
                 p.initial_vectorised, slot(p, p.initial_slots), row);
  }

  __device__ __forceinline__ StateAddress final(const ForwardParams& p, int row) const {
    if (segment + 1 < p.segments) return {nullptr, kAbsent, false};
    return wanted(p, row);
  }

  // The caller's final state.
  __device__ __forceinline__ StateAddress wanted(const ForwardParams& p, int row) const {
    return state(p, p.final_state, p.final_stride, p.final_dtype, p.final_vectorised,
                 slot(p, p.final_slots), row);
  }

  __device__ __forceinline__ StateAddress checkpoint(const ForwardParams& p, int index,
                                                     int row) const {
    return state(p, p.checkpoint_states, p.checkpoint_stride, p.checkpoint_dtype,
                 p.checkpoint_vectorised, index, row);
  }

  // What a segment other than the last leaves in the workspace.
  __device__ __forceinline__ StateAddress carried(const ForwardParams& p, int segment, int which,
                                                  int row) const {
    const long long chain = static_cast<long long>(range.sequence) * p.heads + head;
    const long long index = (chain * (p.segments - 1) + segment) * kCarried + which;
    return {p.carried + (index * kHeadDim + row) * kHeadDim, kFloat32, true};
  }

 private:
  __device__ __forceinline__ StateAddress state(const ForwardParams& p, void* base,
                                                const StateStrides& stride, int dtype,
                                                bool vectorised, long long slot, int row) const {
    if (slot < 0) return {nullptr, kAbsent, false};
    const long long index = slot * stride.slot + head * stride.head + row * kHeadDim;
    return {static_cast<unsigned char*>(base) + element_bytes(dtype) * index, dtype, vectorised};
  }

  // Where the sequence's state lies in a tensor of `slots` states; negative: nowhere.
  __device__ __forceinline__ long long slot(const ForwardParams& p, long long slots) const {
    if (p.state_indices == nullptr) return range.sequence;
    const long long slot = load_integer(p.state_indices, range.sequence * p.state_indices_stride,
                                        p.state_indices_dtype);
    return slot < slots ? slot : -1;
  }
};

// The places in one sequence at which checkpoints are wanted, in order: ends of its chunks. Offsets
// elsewhere and those that do not ascend are passed over. The lanes of a warp read 32 offsets at
// once: the chain would wait for each, one by one.
class Checkpoints {
 public:
  static constexpr int kNone = 0x7fffffff;

  __device__ __forceinline__ Checkpoints(const ForwardParams& p, const TokenRange& tokens, int lane)
      : begin_(static_cast<long long>(tokens.batch) * p.tokens + tokens.begin),
        length_(tokens.length) {
    if (p.checkpoints == 0) {
      tokens_ = kNone;
      return;
    }
    next_ = count_at_most([&](int c) { return offset(p, c); }, p.checkpoints, begin_, lane);
    known_end_ = next_;
    find(p, lane);
  }

  // The checkpoint to come, and how many of the sequence's tokens lie before it; kNone: there is
  // none.
  __device__ __forceinline__ int next() const { return next_; }
  __device__ __forceinline__ int tokens() const { return tokens_; }

  __device__ __forceinline__ void advance(const ForwardParams& p, int lane) {
    ++next_;
    find(p, lane);
  }

 private:
  static __device__ __forceinline__ long long offset(const ForwardParams& p, int c) {
    return load_integer(p.checkpoint_offsets, c * p.checkpoint_offsets_stride,
                        p.checkpoint_offsets_dtype);
  }
  __device__ __forceinline__ void find(const ForwardParams& p, int lane) {
    const int last = tokens_;
    tokens_ = kNone;
    for (; next_ < p.checkpoints; ++next_) {
      if (next_ >= known_end_) {
        known_end_ = next_ + 32;
        const long long tokens =
            next_ + lane < p.checkpoints ? offset(p, next_ + lane) - begin_ : 0;
        // Far outside it does not matter where.
        known_ = static_cast<int>(min(max(tokens, -1ll), static_cast<long long>(kNone)));
      }
      const int tokens = __shfl_sync(kWarpMask, known_, next_ - known_end_ + 32);
      if (tokens > length_) return;
      if (tokens < last) continue;  // not ascending: that state has passed
      if (tokens % kChunk == 0 || tokens == length_) {
        tokens_ = tokens;
        return;
      }
    }
  }

  long long begin_;
  int length_;
  int next_ = 0, tokens_ = 1;
  int known_;  // tokens before offset known_end_ - 32 + lane
  int known_end_ = 0;
};

}  // namespace flash_kda
