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

  // The stages of the ring, before those of its chunks, in which its initial state comes.
  __device__ __forceinline__ int state_stages(const ForwardParams& p) const {
    return is_taken() ? 0 : p.state_stages;
  }

  __device__ __forceinline__ StateAddress initial(const ForwardParams& p, int row) const {
    return is_taken() ? carried(p, taken_from, row) : given(p, row);
  }
  __device__ __forceinline__ StateAddress final(const ForwardParams& p, int row) const {
    return is_handed_on() ? carried(p, handed_on, row) : wanted(p, row);
  }

 private:
  // Where the cluster of that turn leaves the state of the chain that it hands on.
  __device__ __forceinline__ StateAddress carried(const ForwardParams& p, int turn, int row) const {
    return {p.carried + (static_cast<long long>(turn) * kHeadDim + row) * kHeadDim, kFloat32, true};
  }
};

// The pieces that a cluster goes through, one after the other: its share (common/shares.cuh), or
// one chain where every chain has a cluster of its own.
class Jobs {
 public:
  // `turn`: the cluster's, in the order in which they began.
  __device__ __forceinline__ Jobs(const ForwardParams& p, int turn)
      : p_(p), turn_(turn), share_(load_share()), end_ahead_(p.tokens) {
    head_ = share_.first_job / p.sequences;
    sequence_ = share_.first_job - head_ * p.sequences;
    if (share_.pieces > 0) look_ahead();
  }

  // The next one in `piece`; false: there is none. All lanes of a warp call it together, and before
  // it, at their leisure, look_up().
  __device__ __forceinline__ bool next(Piece& piece) {
    if (done_ >= share_.pieces) return false;
    const int batch = p_.cu_seqlens == nullptr ? sequence_ : 0;
    static_cast<ChainSlice&>(piece) =
        ChainSlice({sequence_, {batch, begin_, end_ - begin_}, 0}, head_);
    piece.taken_from = piece.handed_on = Piece::kNobody;
    TokenRange& tokens = piece.range.tokens;
    if (done_ == 0 && share_.first_end != Share::kWhole) {
      tokens.length = share_.first_end * kChunk;
      piece.handed_on = turn_;
    }
    ++done_;
    if (done_ == share_.pieces && share_.last_begin > 0) {
      tokens.begin += share_.last_begin * kChunk;
      tokens.length -= share_.last_begin * kChunk;
      piece.taken_from = turn_ - 1;
    }
    // To the chain before, sequence by sequence and head by head; behind the last piece to none.
    if (--sequence_ < 0) {
      sequence_ = p_.sequences - 1;
      --head_;
    }
    // Looked up a piece ahead: it would be waited for. There is one even behind the last piece.
    look_ahead();
    return true;
  }

  // Where the next piece's sequence lies, from one lane: so it is known to be the same in all.
  __device__ __forceinline__ void look_up() {
    begin_ = __shfl_sync(kWarpMask, begin_ahead_, 0);
    end_ = __shfl_sync(kWarpMask, end_ahead_, 0);
  }

  __device__ __forceinline__ int done() const { return done_; }  // pieces given

 private:
  // From one lane, so that the compiler knows it to be the same in all.
  __device__ __forceinline__ Share load_share() const {
    if (p_.shares == nullptr) return {turn_, 1, Share::kWhole, 0};
    const Share share = p_.shares[turn_];
    return {__shfl_sync(kWarpMask, share.first_job, 0), __shfl_sync(kWarpMask, share.pieces, 0),
            __shfl_sync(kWarpMask, share.first_end, 0),
            __shfl_sync(kWarpMask, share.last_begin, 0)};
  }

  // Loads only. look_up() shuffles later: here the shuffles would wait for the loads.
  __device__ __forceinline__ void look_ahead() {
    if (p_.cu_seqlens == nullptr) return;
    begin_ahead_ = p_.sequence_start[sequence_];
    end_ahead_ = p_.sequence_start[sequence_ + 1];
  }

  const ForwardParams& p_;
  const int turn_;
  const Share share_;
  int head_, sequence_;  // of the next piece
  int begin_ahead_ = 0, end_ahead_;
  int begin_, end_;
  int done_ = 0;  // pieces
};

// Every kStep-th stage of a cluster's work, all its pieces one after the other, and its place in a
// ring of kStages. In a stage is a chunk, or a part of the initial state before the first one.
template <int kStep, int kStages>
class ChunkWalk {
 public:
  static_assert(kStep <= kStages, "a step goes less than once around the ring");

  __device__ __forceinline__ ChunkWalk(const ForwardParams& p, int turn, int first)
      : p_(p), jobs_(p, turn), index_(first), stage_(first) {}

  // To the piece that the stage belongs to; false: the work has fewer stages.
  __device__ __forceinline__ bool find() {
    while (index_ >= job_end_) {
      jobs_.look_up();
      if (!jobs_.next(piece_)) return false;
      state_end_ = job_end_ + piece_.state_stages(p_);
      job_end_ = state_end_ + chunks_of(piece_.range.tokens.length);
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

  __device__ __forceinline__ bool is_state() const { return index_ < state_end_; }
  // Which part of it.
  __device__ __forceinline__ int state_part() const {
    return index_ - state_end_ + p_.state_stages;
  }
  // Otherwise the chunk's number in its piece, and its tokens.
  __device__ __forceinline__ int chunk() const { return index_ - state_end_; }
  __device__ __forceinline__ TokenRange tokens() const {
    TokenRange tokens = piece_.range.tokens;
    const int skipped = chunk() * kChunk;
    tokens.begin += skipped;
    tokens.length = min(kChunk, tokens.length - skipped);
    return tokens;
  }
  __device__ __forceinline__ int index() const { return index_; }  // in the cluster's work
  __device__ __forceinline__ const Piece& piece() const { return piece_; }
  __device__ __forceinline__ int head() const { return piece_.head; }
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ int round() const { return round_; }  // around the ring

 private:
  const ForwardParams& p_;
  Jobs jobs_;
  Piece piece_;
  int index_, stage_, round_ = 0;
  int state_end_ = 0, job_end_ = 0;  // of the piece
};

}  // namespace flash_kda::sm90
