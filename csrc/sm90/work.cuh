// Which chains a cluster works on, in which order, and which of their chunks a warp makes.
#pragma once

#include "chunk/slice.cuh"

namespace flash_kda::sm90 {

// A cluster goes through its jobs, each a sequence or segment and a head, one after the other.
// They are dealt out in turns of alternating direction, so that those who got the longest
// sequence of one turn get the shortest of the next.
template <int kCluster>
class Jobs {
 public:
  __device__ __forceinline__ explicit Jobs(const ForwardParams& p) : p_(p) {}

  // The next job of this cluster in `slice`; false: there is none.
  __device__ __forceinline__ bool next(ChainSlice& slice) {
    const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const long long job =
        static_cast<long long>(turn_) * clusters + (turn_ & 1 ? clusters - 1 - cluster : cluster);
    if (job >= p_.jobs) return false;
    ++turn_;
    slice = ChainSlice::of_job(p_, job);
    return true;
  }

 private:
  const ForwardParams& p_;
  int turn_ = 0;
};

// Every kStep-th chunk of a cluster's work, all its jobs one after the other, and its place in a
// ring of kStages.
template <int kCluster, int kStep, int kStages>
class ChunkWalk {
 public:
  static_assert(kStep <= kStages, "a step goes less than once around the ring");

  __device__ __forceinline__ ChunkWalk(const ForwardParams& p, int first)
      : jobs_(p), index_(first), stage_(first) {}

  // To the job that the chunk belongs to; false: the work has fewer chunks.
  __device__ __forceinline__ bool find() {
    while (index_ >= job_end_) {
      if (!jobs_.next(slice_)) return false;
      job_begin_ = job_end_;
      job_end_ += chunks_of(slice_.range.tokens.length);
      new_job_ = true;
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
    new_job_ = false;
  }

  __device__ __forceinline__ TokenRange tokens() const {
    TokenRange tokens = slice_.range.tokens;
    const int skipped = (index_ - job_begin_) * kChunk;
    tokens.begin += skipped;
    tokens.length = min(kChunk, tokens.length - skipped);
    return tokens;
  }
  __device__ __forceinline__ int index() const { return index_; }  // in the cluster's work
  __device__ __forceinline__ int head() const { return slice_.head; }
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ int round() const { return round_; }  // around the ring
  __device__ __forceinline__ bool new_job() const { return new_job_; }

 private:
  Jobs<kCluster> jobs_;
  ChainSlice slice_;
  int index_, stage_, round_ = 0;
  int job_begin_ = 0, job_end_ = 0;
  bool new_job_ = false;
};

}  // namespace flash_kda::sm90
