// The ring of stages through which one CTA's records pass, and the helper warp that fills it.
#pragma once

#include "chunk/chain.cuh"
#include "chunk/record_ring.cuh"
#include "launch_shapes.h"

namespace flash_kda::portable {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <const RecurrenceShape& kShape>
struct RecurrenceSmem {
  struct alignas(128) Stage {
    unsigned char record[ChunkRecord::kBytes];
  };
  Stage stage[kShape.stages];
  ChainWarpMemory<kShape.tiles> warp[kShape.warps];
  // full: a record has landed. empty: every computing warp has read it.
  FullBarrier::ValueType full[kShape.stages];
  EmptyBarrier::ValueType empty[kShape.stages];
};

template <const RecurrenceShape& kShape>
struct RecordRing : RecordReader<RecurrenceSmem<kShape>, kShape.stages> {
  __device__ __forceinline__ void release(int stage) const {
    EmptyBarrier::arrive(&this->smem.empty[stage]);
  }
};

// The helper thread: keeps the ring filled.
template <const RecurrenceShape& kShape>
__device__ __forceinline__ void copy_records(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                             const ChainSlice& slice) {
  const int chunks = chunks_of(slice.range.tokens.length);
  const long long step = static_cast<long long>(p.heads) * ChunkRecord::kBytes;
  const unsigned char* record =
      p.records + (static_cast<long long>(slice.range.first_chunk) * p.heads + slice.head) *
                      ChunkRecord::kBytes;
  RingPosition<kShape.stages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk >= kShape.stages) EmptyBarrier::wait(&smem.empty[ring.stage], ring.parity ^ 1);
    FullBarrier::arrive_and_expect_tx(&smem.full[ring.stage], ChunkRecord::kBytes);
    bulk_load(smem.stage[ring.stage].record, record, ChunkRecord::kBytes, &smem.full[ring.stage]);
    record += step;
    ring.advance();
  }
}

}  // namespace flash_kda::portable
