// Where the tokens of a chunk or of a sequence lie, for fixed-length and packed batches alike.
#pragma once

#include "params.h"

namespace flash_kda {

struct TokenRange {
  int batch;   // row of the [B, T, ...] tensors
  int begin;   // first token in that row
  int length;  // tokens; 0 when there is nothing to do
};

__device__ __forceinline__ int chunks_of(int tokens) { return (tokens + kChunk - 1) / kChunk; }

// The last n in [0, count) with begins[n] <= value, found by a whole warp: each round reads 32
// evenly spaced entries, so one round serves 32 sequences and two serve 1024. begins[0] <= value is
// given. Of equal entries the last is taken, which skips sequences without chunks.
__device__ __forceinline__ int find_sequence(const int* begins, int count, int value, int lane) {
  int low = 0;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int index = lane * step;
    const bool reached = index < count && begins[low + index] <= value;
    const int block = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
    low += block * step;
    count = min(step, count - block * step);
  }
  return low;
}

// Tokens of the global chunk `chunk`. All lanes of the warp call it together.
__device__ __forceinline__ TokenRange chunk_tokens(const ForwardParams& p, int chunk, int lane) {
  if (p.cu_seqlens == nullptr) {
    const int sequence = chunk / p.chunks_per_sequence;
    const int begin = (chunk - sequence * p.chunks_per_sequence) * kChunk;
    if (sequence >= p.batch) return {0, 0, 0};
    return {sequence, begin, min(kChunk, p.tokens - begin)};
  }
  if (chunk >= p.chunk_begin[p.sequences]) return {0, 0, 0};
  const int sequence = find_sequence(p.chunk_begin, p.sequences, chunk, lane);
  const int begin = p.sequence_start[sequence] + (chunk - p.chunk_begin[sequence]) * kChunk;
  return {0, begin, min(kChunk, p.sequence_start[sequence + 1] - begin)};
}

struct SequenceRange {
  int sequence;
  TokenRange tokens;
  int first_chunk;
};

// The rank-th sequence in launch order (longest first when packed).
__device__ __forceinline__ SequenceRange ranked_sequence(const ForwardParams& p, int rank) {
  if (p.cu_seqlens == nullptr) {
    return {rank, {rank, 0, p.tokens}, rank * p.chunks_per_sequence};
  }
  const int sequence = p.sequence_order[rank];
  const int begin = p.sequence_start[sequence];
  return {sequence, {0, begin, p.sequence_start[sequence + 1] - begin}, p.chunk_begin[sequence]};
}

}  // namespace flash_kda
