// The ring of stages through which one CTA's chunks pass, and the helper warp that fills it.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/tile.cuh"
#include "launch_shapes.h"
#include "portable/chain_slice.cuh"

namespace flash_kda::portable {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <const RecurrenceShape& kShape>
struct RecurrenceSmem {
  struct alignas(128) Stage {
    unsigned char record[ChunkRecord::kBytes];
    unsigned char value[kChunk * kShape.value_row_bytes()];
  };
  struct alignas(16) Output {
    unsigned char rows[kChunk * kShape.output_row_bytes()];
  };
  Stage stage[kShape.stages];
  Output output[kShape.warps];
  // full: record and V of a chunk have landed; one arrival for the record, one a helper lane for V.
  // empty: every computing warp has read them.
  FullBarrier::ValueType full[kShape.stages];
  EmptyBarrier::ValueType empty[kShape.stages];
};

// Walks the ring: which stage a chunk uses and the parity of its barriers' phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The helper warp: keeps the ring filled. Rows of V come by cp.async, 16 bytes a lane, because
// sixteen small bulk copies a chunk would take longer than the chunk.
template <const RecurrenceShape& kShape>
__device__ __forceinline__ void copy_chunks(const ForwardParams& p, RecurrenceSmem<kShape>& smem,
                                            const ChainSlice& slice) {
  constexpr int kUnits = kShape.rows() / 8;   // 16-byte pieces of a token row
  constexpr int kTokensAtOnce = 32 / kUnits;  // rows that the warp copies at once
  static_assert(kTokensAtOnce * kUnits == 32, "lanes share rows evenly");
  const int lane = threadIdx.x & 31;
  const int token = lane / kUnits, byte = lane % kUnits * 16;
  const int chunks = chunks_of(slice.range.tokens.length);
  const long long record_step = static_cast<long long>(p.heads) * ChunkRecord::kBytes;
  const unsigned char* record =
      p.records + (static_cast<long long>(slice.range.first_chunk) * p.heads + slice.head) *
                      ChunkRecord::kBytes;
  const unsigned char* value = static_cast<const unsigned char*>(p.v) +
                               slice.token_bytes(p.v_stride, slice.first_row) +
                               2 * token * p.v_stride.token + byte;
  int tokens_left = slice.range.tokens.length - token;  // from this lane's next row to the end

  RingPosition<kShape.stages> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk >= kShape.stages) EmptyBarrier::wait(&smem.empty[ring.stage], ring.parity ^ 1);
    auto& stage = smem.stage[ring.stage];
    if (lane == 0) {
      FullBarrier::arrive_and_expect_tx(&smem.full[ring.stage], ChunkRecord::kBytes);
      bulk_load(stage.record, record, ChunkRecord::kBytes, &smem.full[ring.stage]);
    }
    record += record_step;
#pragma unroll
    for (int i = 0; i < kChunk; i += kTokensAtOnce) {
      copy_async_16(stage.value + (i + token) * kShape.value_row_bytes() + byte, value,
                    tokens_left > 0);
      value += 2 * kTokensAtOnce * p.v_stride.token;
      tokens_left -= kTokensAtOnce;
    }
    copy_async_arrive(&smem.full[ring.stage]);
    ring.advance();
  }
}

}  // namespace flash_kda::portable
