// Which chains a cluster works on, in which order, and which of their chunks a warp makes.
#pragma once

#include "chunk/slice.cuh"

namespace flash_kda::sm90 {

// A chain, or a part of one that is cut between two clusters.
struct Piece : ChainSlice {
  int taken_from;  // the turn of the cluster that works on what comes before; kNobody: nothing does
  int handed_on;   // this cluster's turn if another works on what comes after
  static constexpr int kNobody = -1;

  __device__ __forceinline__ bool is_taken() const { return taken_from != kNobody; }
  __device__ __forceinline__ bool is_handed_on() const { return handed_on != kNobody; }

  __device__ __forceinline__ StateAddress initial(const ForwardParams& p, int row) const {
    return is_taken() ? carried(p, taken_from, row) : given(p, row);
  }
  __device__ __forceinline__ StateAddress final(const ForwardParams& p, int row) const {
    return is_handed_on() ? carried(p, handed_on, row) : ChainSlice::final(p, row);
  }

 private:
  // Where the cluster of that turn leaves the state of the chain that it hands on.
  __device__ __forceinline__ StateAddress carried(const ForwardParams& p, int turn, int row) const {
    return {p.carried + (static_cast<long long>(turn) * kHeadDim + row) * kHeadDim, kFloat32, true};
  }
};

// The pieces that a cluster goes through, one after the other: its share (common/shares.cuh), or
// one chain where every chain has a cluster of its own.
//
// With kAhead it looks up where the sequence of the next piece lies while the warp works on this
// one, and so has nothing to wait for between them.
template <bool kAhead>
class Jobs {
 public:
  // `turn`: the cluster's, in the order in which they began.
  __device__ __forceinline__ Jobs(const ForwardParams& p, int turn) : p_(p), turn_(turn) {
    if constexpr (kAhead) {
      share_ = load_share();
      range_ = range_of_next(share_);
    }
  }

  // The next one in `piece`; false: there is none. All lanes of a warp call it together.
  __device__ __forceinline__ bool next(Piece& piece) {
    const Share share = kAhead ? share_ : load_share();
    if (done_ >= share.pieces) return false;
    const SequenceRange range = kAhead ? range_ : range_of_next(share);
    const int job = share.first_job - done_;
    static_cast<ChainSlice&>(piece) = ChainSlice(range, job / p_.sequences);
    piece.taken_from = piece.handed_on = Piece::kNobody;
    TokenRange& tokens = piece.range.tokens;
    if (done_ == 0 && share.first_end != Share::kWhole) {
      tokens.length = share.first_end * kChunk;
      piece.handed_on = turn_;
    }
    ++done_;
    if (done_ == share.pieces && share.last_begin > 0) {
      tokens.begin += share.last_begin * kChunk;
      tokens.length -= share.last_begin * kChunk;
      piece.taken_from = turn_ - 1;
    }
    if constexpr (kAhead) range_ = range_of_next(share);
    return true;
  }

  __device__ __forceinline__ int done() const { return done_; }  // pieces given

 private:
  // From one lane, so that the compiler knows it to be the same in all.
  __device__ __forceinline__ Share load_share() const {
    if (p_.shares == nullptr) return {turn_, turn_ < p_.jobs, Share::kWhole, 0};
    const Share share = p_.shares[turn_];
    return {__shfl_sync(0xffffffffu, share.first_job, 0), __shfl_sync(0xffffffffu, share.pieces, 0),
            __shfl_sync(0xffffffffu, share.first_end, 0),
            __shfl_sync(0xffffffffu, share.last_begin, 0)};
  }
  // Behind the last piece that of some sequence.
  __device__ __forceinline__ SequenceRange range_of_next(const Share& share) const {
    return sequence_range(p_, max(share.first_job - done_, 0) % p_.sequences);
  }

  const ForwardParams& p_;
  const int turn_;
  int done_ = 0;  // pieces
  Share share_;
  SequenceRange range_;
};

// Every kStep-th chunk of a cluster's work, all its pieces one after the other, and its place in a
// ring of kStages.
template <int kStep, int kStages>
class ChunkWalk {
 public:
  static_assert(kStep <= kStages, "a step goes less than once around the ring");

  __device__ __forceinline__ ChunkWalk(const ForwardParams& p, int turn, int first)
      : jobs_(p, turn), index_(first), stage_(first) {}

  // To the piece that the chunk belongs to; false: the work has fewer chunks.
  __device__ __forceinline__ bool find() {
    while (index_ >= job_end_) {
      if (!jobs_.next(piece_)) return false;
      job_begin_ = job_end_;
      job_end_ += chunks_of(piece_.range.tokens.length);
    }
    return true;
  }

  __device__ __forceinline__ void advance() {
    index_ += kStep;
    stage_ += kStep;
    if (stage_ >= kStages) {
      stage_ -= kStages;
      ++round_;
    }
  }

  __device__ __forceinline__ TokenRange tokens() const {
    TokenRange tokens = piece_.range.tokens;
    const int skipped = (index_ - job_begin_) * kChunk;
    tokens.begin += skipped;
    tokens.length = min(kChunk, tokens.length - skipped);
    return tokens;
  }
  __device__ __forceinline__ int index() const { return index_; }  // in the cluster's work
  __device__ __forceinline__ int head() const { return piece_.head; }
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ int round() const { return round_; }  // around the ring

 private:
  Jobs<false> jobs_;
  Piece piece_;
  int index_, stage_, round_ = 0;
  int job_begin_ = 0, job_end_ = 0;
};

}  // namespace flash_kda::sm90
