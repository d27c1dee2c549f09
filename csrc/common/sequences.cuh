// Where the tokens of a chunk or of a sequence lie, for fixed-length and packed batches alike.
#pragma once

#include "common/ptx.cuh"
#include "params.h"

namespace flash_kda {

struct TokenRange {
  int batch;   // row of the [B, T, ...] tensors
  int begin;   // first token in that row
  int length;  // tokens; 0 when there is nothing to do
};

__device__ __forceinline__ int records_of(int tokens, int record_tokens) {
  return (tokens + (record_tokens - 1)) / record_tokens;  // a pair more may be 2^31
}
__device__ __forceinline__ int chunks_of(int tokens) { return records_of(tokens, kChunk); }

__device__ __forceinline__ long long load_integer(const void* base, long long index, int dtype) {
  return dtype == kInt64 ? static_cast<const long long*>(base)[index]
                         : static_cast<const int*>(base)[index];
}

// How many of `count` ascending entries are at most `value`, found by a whole warp: each round
// reads 32 evenly spaced entries, so one round serves 32 entries and two serve 1024.
template <class Entry>
__device__ __forceinline__ int count_at_most(Entry entry, int count, long long value, int lane) {
  int low = 0;
  while (count > 0) {
    const int step = (count + 31) / 32;
    const int index = lane * step;
    const bool reached = index < count && entry(low + index) <= value;
    const int reached_entries = __popc(__ballot_sync(kWarpMask, reached));
    if (reached_entries == 0) break;
    const int last = (reached_entries - 1) * step;
    low += last + 1;
    count = min(step, count - last) - 1;
  }
  return low;
}

// Tokens of the record-th of all records. All lanes of the warp call it together.
__device__ __forceinline__ TokenRange record_tokens(const ForwardParams& p, int record, int lane) {
  if (p.cu_seqlens == nullptr) {
    const int sequence = record / p.records_per_sequence;
    const int begin = (record - sequence * p.records_per_sequence) * p.record_tokens;
    if (sequence >= p.batch) return {0, 0, 0};
    return {sequence, begin, min(p.record_tokens, p.tokens - begin)};
  }
  if (record >= p.record_begin[p.sequences]) return {0, 0, 0};
  // The last sequence that begins at or before the record, which skips those without any.
  const int sequence =
      count_at_most([&](int n) { return p.record_begin[n]; }, p.sequences, record, lane) - 1;
  const int begin =
      p.sequence_start[sequence] + (record - p.record_begin[sequence]) * p.record_tokens;
  return {0, begin, min(p.record_tokens, p.sequence_start[sequence + 1] - begin)};
}

struct SequenceRange {
  int sequence;
  TokenRange tokens;
  int first_record;
};

__device__ __forceinline__ SequenceRange sequence_range(const ForwardParams& p, int sequence) {
  if (p.cu_seqlens == nullptr) {
    return {sequence, {sequence, 0, p.tokens}, sequence * p.records_per_sequence};
  }
  const int begin = p.sequence_start[sequence];
  return {sequence, {0, begin, p.sequence_start[sequence + 1] - begin}, p.record_begin[sequence]};
}

// The rank-th sequence in launch order (longest first when packed).
__device__ __forceinline__ SequenceRange ranked_sequence(const ForwardParams& p, int rank) {
  return sequence_range(p, p.cu_seqlens == nullptr ? rank : p.sequence_order[rank]);
}

}  // namespace flash_kda
