// What one CTA of the recurrence works on: a sequence, a head, rows of V, and where it stops.
#pragma once

#include "common/sequences.cuh"

namespace flash_kda::portable {

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

}  // namespace flash_kda::portable
