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
  // The next job of this cluster in `slice`; false: there is none.
  __device__ __forceinline__ bool next(const ForwardParams& p, ChainSlice& slice) {
    const int cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const long long job =
        static_cast<long long>(turn_) * clusters + (turn_ & 1 ? clusters - 1 - cluster : cluster);
    if (job >= p.jobs) return false;
    ++turn_;
    const int parts = p.job_segments * p.heads;
    const int rank = static_cast<int>(job) / parts, part = static_cast<int>(job) - rank * parts;
    const int segment = part / p.heads;
    slice = ChainSlice(p, ranked_sequence(p, rank), part - segment * p.heads, segment);
    return true;
  }

 private:
  int turn_ = 0;
};

// Where a ChunkWalk keeps what it needs once a chunk: registers are for what is needed all the
// time.
template <int kCluster>
struct WalkMemory {
  Jobs<kCluster> jobs;
  ChainSlice slice;
  int job_begin, job_end;  // in the cluster's work
};

// Every kStep-th chunk of a cluster's work, all its jobs one after the other, and its place in a
// ring of kStages. The lanes of a warp walk together.
template <int kCluster, int kStep, int kStages>
class ChunkWalk {
 public:
  static_assert(kStep <= kStages, "a step goes less than once around the ring");

  __device__ __forceinline__ ChunkWalk(WalkMemory<kCluster>& memory, int first)
      : memory_(memory), index_(first) {
    memory_.jobs = Jobs<kCluster>();
    memory_.job_begin = memory_.job_end = 0;
    __syncwarp();
  }

  // To the job that the chunk belongs to; false: the work has fewer chunks.
  __device__ __forceinline__ bool find(const ForwardParams& p) {
    int end = memory_.job_end;
    if (index_ < end) return true;
    Jobs<kCluster> jobs = memory_.jobs;
    ChainSlice slice;
    int begin;
    do {
      if (!jobs.next(p, slice)) return false;
      begin = end;
      end += chunks_of(slice.range.tokens.length);
    } while (index_ >= end);
    __syncwarp();  // all lanes have read the job before
    memory_.jobs = jobs;
    memory_.slice = slice;
    memory_.job_begin = begin;
    memory_.job_end = end;
    __syncwarp();
    new_job_ = true;
    return true;
  }

  __device__ __forceinline__ void advance() {
    index_ += kStep;
    new_job_ = false;
  }

  __device__ __forceinline__ TokenRange tokens() const {
    TokenRange tokens = memory_.slice.range.tokens;
    const int skipped = (index_ - memory_.job_begin) * kChunk;
    tokens.begin += skipped;
    tokens.length = min(kChunk, tokens.length - skipped);
    return tokens;
  }
  __device__ __forceinline__ int index() const { return index_; }  // in the cluster's work
  __device__ __forceinline__ int head() const { return memory_.slice.head; }
  __device__ __forceinline__ int stage() const { return index_ % kStages; }
  __device__ __forceinline__ int round() const { return index_ / kStages; }  // around the ring
  __device__ __forceinline__ bool new_job() const { return new_job_; }

 private:
  WalkMemory<kCluster>& memory_;
  int index_;
  bool new_job_ = false;
};

}  // namespace flash_kda::sm90
