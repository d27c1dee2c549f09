// The ring of stages through which the records of one CTA pass that come from the workspace, and
// the helper warp that fills it.
#pragma once

#include "chunk/chain.cuh"
#include "chunk/record_ring.cuh"
#include "chunk/stored_record.cuh"
#include "common/ptx.cuh"
#include "launch_shapes.h"

namespace flash_kda {

using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <const RecurrenceShape& kShape>
struct RecurrenceSmem {
  struct alignas(kShape.stage_alignment) Stage {
    unsigned char record[kShape.record_bytes()];
  };
  Stage stage[kShape.stages];
  typename RecurrenceMemory<kShape>::Warp warp[kShape.warps];
  // full: a record has landed. empty: every computing warp has read it.
  FullBarrier::ValueType full[kShape.stages];
  EmptyBarrier::ValueType empty[kShape.stages];

  // By one thread, before any other uses the ring.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kShape.stages; ++i) {
      FullBarrier::init(&full[i], 1);
      EmptyBarrier::init(&empty[i], kArrivalsOfWarp * kShape.warps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

template <const RecurrenceShape& kShape>
struct CopiedRing : RecordReader<RecurrenceSmem<kShape>, kShape.stages> {
  using RecordReader<RecurrenceSmem<kShape>, kShape.stages>::RecordReader;
  __device__ __forceinline__ void release(int stage, bool arrives) const {
    arrive_if(&this->smem.empty[stage], arrives);
  }
};

// The helper thread: keeps the ring filled.
template <const RecurrenceShape& kShape, bool kQueries>
__device__ __forceinline__ void copy_records(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                             const ChainSlice& slice) {
  const int records = records_of(slice.range.tokens.length, kShape.record_tokens);
  using Layout = Record<kShape.record_tokens>;
  const long long step = static_cast<long long>(p.heads) * Layout::kStoredBytes;
  const unsigned char* record =
      p.records + (static_cast<long long>(slice.range.first_record) * p.heads + slice.head) *
                      Layout::kStoredBytes;
  RingPosition<kShape.stages> ring;
#pragma unroll 1
  for (int i = 0; i < records; ++i) {
    if (i >= kShape.stages) EmptyBarrier::wait(&smem.empty[ring.stage], ring.parity ^ 1);
    load_record<Layout, kQueries>(smem.stage[ring.stage].record, record, &smem.full[ring.stage]);
    record += step;
    ring.advance();
  }
}

}  // namespace flash_kda
