// How chains are shared out to the clusters of `fused` where there are more chains than clusters.
//
// All chains stand in a row, head by head, each as long as it takes, and the row is cut into equal
// shares: so what depends on the head alone seldom changes within one, and clusters read the heads
// of the same tokens, which are neighbours in memory, at about the same time. A cluster goes
// through its share from the end to the beginning. So it begins with the first chunks of a chain
// that goes on in the next share, and whoever has that one comes to the rest at its own end: by
// then the state is there, or soon. No share is shorter than a chain, so no chain is cut twice.
#pragma once

#include "common/sequences.cuh"

namespace flash_kda {

class Shares {
 public:
  // What a chain takes beside its chunks, its states above all, as so many chunks.
  static constexpr int kChainCost = 4;
  static constexpr int kTurnsAtOnce = 16;  // that a warp looks up

  // `record_begin`: as p.record_begin, perhaps nearer. `longest`: chunks of the longest sequence.
  __device__ __forceinline__ Shares(const ForwardParams& p, const int* record_begin, int longest)
      : p_(p),
        record_begin_(record_begin),
        of_head_(cost_before(p.sequences)),
        all_(of_head_ * p.heads),
        size_(max((all_ + p.clusters - 1) / p.clusters, longest + 1ll * kChainCost)),
        heads_of_cost_(1.0 / static_cast<double>(of_head_)) {}

  // Of kTurnsAtOnce turns, beginning with `first`, by a warp: lane 2i finds that of the i-th, while
  // the next one searches for its end.
  __device__ __forceinline__ Share of_turns_from(int first, int lane) const {
    const long long begin = size_ * (first + (lane >> 1)), end = min(begin + size_, all_);
    const bool some = begin < end;
    const Place place = some ? find(lane & 1 ? end - 1 : begin) : Place{0, 0, 0};
    const Place last = {__shfl_sync(kWarpMask, place.job, lane | 1),
                        __shfl_sync(kWarpMask, place.done, lane | 1),
                        __shfl_sync(kWarpMask, place.cost, lane | 1)};
    if (!some) return {0, 0, Share::kWhole, 0};
    // It is gone through from the end.
    Share share = {last.job, last.job - place.job + 1, Share::kWhole,
                   max(place.done - kChainCost, 0)};
    if (last.done + 1 < last.cost) {
      share.first_end = last.done + 1 - kChainCost;
      if (share.first_end <= 0) {  // before its chunks: all of it is the next share's
        share.first_end = Share::kWhole;
        --share.first_job;
        --share.pieces;
      }
    }
    return share;
  }

 private:
  struct Place {
    int job, done, cost;  // what of the chain's cost lies before
  };

  // Of a head's chains of all sequences before.
  __device__ __forceinline__ long long cost_before(int sequence) const {
    const long long count = sequence;
    const long long chunks =
        p_.cu_seqlens == nullptr ? count * p_.records_per_sequence : record_begin_[sequence];
    return chunks + count * kChainCost;
  }

  __device__ __forceinline__ Place find(long long x) const {
    // x < 2^36; a division of integers takes as long as all the rest. The quotient may be one off.
    int head = static_cast<int>(static_cast<double>(x) * heads_of_cost_);
    long long rest = x - head * of_head_;
    if (rest < 0) --head, rest += of_head_;
    if (rest >= of_head_) ++head, rest -= of_head_;
    int sequence = 0, after = p_.sequences;  // the last sequence that begins there or before
    while (after - sequence > 1) {
      const int middle = sequence + (after - sequence) / 2;
      (cost_before(middle) <= rest ? sequence : after) = middle;
    }
    const long long begin = cost_before(sequence);
    return {head * p_.sequences + sequence, static_cast<int>(rest - begin),
            static_cast<int>(cost_before(sequence + 1) - begin)};
  }

  const ForwardParams& p_;
  const int* const record_begin_;
  const long long of_head_, all_, size_;
  const double heads_of_cost_;
};

}  // namespace flash_kda
