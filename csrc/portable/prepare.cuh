// Prepare: one warp makes the record of one chunk and head (chunk/prepare.cuh) and leaves it in the
// workspace by one bulk copy. No CTA barrier is needed; the four warps of a CTA take neighbouring
// heads, whose rows are neighbours in memory.
#pragma once

#include "chunk/prepare.cuh"
#include "launch_shapes.h"

namespace flash_kda::portable {

struct PrepareSmem {
  struct alignas(128) Record {
    unsigned char bytes[ChunkRecord::kBytes];
  } warp[kPrepareWarps];
};

__device__ void prepare(const ForwardParams& p, PrepareSmem& smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned char* const record = smem.warp[warp].bytes;
  if (p.cu_seqlens != nullptr) wait_for_previous_launch();
  const unsigned work = blockIdx.x * kPrepareWarps + warp;  // the plan keeps it below 2^31
  const int chunk = work / static_cast<unsigned>(p.heads);
  const int head = work - chunk * p.heads;
  const TokenRange tokens = record_tokens(p, chunk, lane);
  if (tokens.length <= 0) return;

  fetch_chunk<ChunkRecord>(p, record, tokens, head, lane);
  const unsigned raw_beta = load_raw_beta(p, tokens, head, lane);
  const Gate<4> gate(p, head, 4 * lane);
  allow_next_launch();
  copy_async_wait_all();
  __syncwarp();  // every lane's copies have landed
  prepare_record(p, record, gate, tokens.length, raw_beta, lane);

  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    bulk_store(p.records + static_cast<long long>(work) * ChunkRecord::kBytes, record,
               ChunkRecord::kBytes);
    bulk_store_wait_read();
  }
}

}  // namespace flash_kda::portable
