// The ring of records in each CTA of a cluster. All CTAs go through the same chunks; chunk i of the
// cluster's work stands in stage i % kStages of every one, and is made by CTA i % cluster. The
// number of stages is a multiple of the cluster's, so a stage belongs to one CTA for good.
#pragma once

#include "chunk/chain.cuh"
#include "chunk/record_ring.cuh"
#include "common/ptx.cuh"
#include "launch_shapes.h"

namespace flash_kda::sm90 {

using Barrier = cutlass::arch::ClusterBarrier;

// A state on its way to a chain takes kStateStages stages, so many rows in each, with a gap of an
// eighth behind each for the sake of banks: of rows of fp32 two are read at once, of bf16 four, if
// no stage ends between.
constexpr int kStateRowsOfStage = 22;
__device__ __forceinline__ constexpr int state_row_bytes(int dtype) {
  return element_bytes(dtype) * (kHeadDim + kHeadDim / 8);
}

// Where the warps of a group bring their sums of squares together: of 16 rows of k, then of q.
struct GroupMemory {
  // Chunks alternate between two, so that the next one's sums do not overtake; each has a second
  // set for rows that have to be summed again.
  float squares[2][2][kGroupWarps][2 * kChunk];
  // What each warp makes of them: the inverse norms of the rows.
  float inverse_norms[kGroupWarps][2 * kChunk];
};

template <const FusedShape& kShape>
struct FusedSmem {
  static_assert(kShape.stages % kShape.cluster == 0, "a stage has one owner");
  // A barrier's parity tells a phase from its neighbours, not from those beyond: whoever waits for
  // a phase must know that the one before is complete and the one after is not. The latter holds
  // because every phase is waited for by those without whom the next does not come
  // (docs/design.md). The former: of `empty` it follows from this warp's own chunk before, whose
  // stage was free, so that what stood there a round earlier had been read, and with it, if there
  // are enough stages, what stood two rounds earlier in this one. Of `images` it follows from
  // `empty`, which is waited for first. Of `rows` and `solved` each warp has waited for the phase
  // before itself: a place of either belongs to one group. That no later rows are fetched before
  // all four warps have these follows from the ring, in which kRowTurns chunks of each group do not
  // fit.
  static constexpr int kOwnStages = kShape.stages / kShape.cluster;
  static_assert(kOwnStages >= kShape.solvers && kRowTurns * kShape.groups >= kOwnStages &&
                    kGrowingImages % kShape.groups == 0,
                "parities are unambiguous");
  struct alignas(1024) Stage {  // wgmma's swizzle counts from multiples of 1024
    unsigned char record[ChunkRecord::kBytes];
  };
  struct alignas(128) Growing {
    unsigned char image[2 * ChunkRecord::kHalfImageBytes];
  };
  Stage stage[kShape.stages];
  Growing growing[kGrowingImages];  // K^, which only the products need
  FusedWarpMemory warp[kShape.warps];
  GroupMemory group[kShape.groups];
  int turn;  // of the cluster, in its first CTA
  // rows: the raw rows of a group's chunk are there; the fetching warp's arrival, and bytes.
  // images: the four images of a chunk are complete; an arrival of each warp of a group.
  // squares: the warps of a group have published their sums of squares of a chunk.
  // solved: K^ of a chunk has been read; its solver's arrival.
  // full: the record is complete; one arrival, of the solver, or of the CTA that sent it.
  // empty: every computing warp of the cluster has read it; arrivals go to the stage's owner.
  Barrier::ValueType rows[kShape.groups][kRowTurns];
  Barrier::ValueType images[kShape.stages];
  Barrier::ValueType squares[kShape.groups];
  Barrier::ValueType solved[kGrowingImages];
  Barrier::ValueType full[kShape.stages];
  Barrier::ValueType empty[kShape.stages];

  // By one thread, before any other uses the ring.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kShape.stages; ++i) {
      const bool is_own = i % kShape.cluster == static_cast<int>(blockIdx.x % kShape.cluster);
      Barrier::init(&images[i], kArrivalsOfWarp * kGroupWarps);
      Barrier::init(&full[i], is_own ? kArrivalsOfWarp : 1);
      Barrier::init(&empty[i], kArrivalsOfWarp * kShape.cluster * kShape.warps);
    }
    for (int i = 0; i < kShape.groups; ++i) {
      Barrier::init(&squares[i], kArrivalsOfWarp * kGroupWarps);
      for (int turn = 0; turn < kRowTurns; ++turn) Barrier::init(&rows[i][turn], 1);
    }
    for (int i = 0; i < kGrowingImages; ++i) Barrier::init(&solved[i], kArrivalsOfWarp);
    cutlass::arch::fence_barrier_init();
  }
};

// Where raw rows of the cluster's index-th chunk are waited for.
template <const FusedShape& kShape>
class RowsTurn {
 public:
  __device__ __forceinline__ explicit RowsTurn(unsigned index)
      : group_(index / kShape.cluster % kShape.groups),
        turn_(index / kShape.cluster / kShape.groups) {}
  __device__ __forceinline__ Barrier::ValueType* barrier(FusedSmem<kShape>& smem) const {
    return &smem.rows[group_][turn_ % kRowTurns];
  }
  __device__ __forceinline__ unsigned parity() const { return turn_ / kRowTurns & 1; }

 private:
  const unsigned group_, turn_;
};

// Where K^ of that chunk stands, and when its place is free.
template <const FusedShape& kShape>
class GrowingTurn {
 public:
  __device__ __forceinline__ explicit GrowingTurn(unsigned index)
      : place_(index / kShape.cluster % kGrowingImages),
        turn_(index / kShape.cluster / kGrowingImages) {}
  __device__ __forceinline__ unsigned char* image(FusedSmem<kShape>& smem) const {
    return smem.growing[place_].image;
  }
  // Until the solver has read what stood there before.
  __device__ __forceinline__ void wait_until_free(FusedSmem<kShape>& smem) const {
    if (turn_ > 0) Barrier::wait(&smem.solved[place_], (turn_ - 1) & 1);
    stay_behind_wait();
  }
  __device__ __forceinline__ void release(FusedSmem<kShape>& smem) const {
    Barrier::arrive(&smem.solved[place_]);
  }

 private:
  const unsigned place_, turn_;
};

template <const FusedShape& kShape>
struct RecordRing : RecordReader<FusedSmem<kShape>, kShape.stages> {
  using RecordReader<FusedSmem<kShape>, kShape.stages>::RecordReader;
  // Until the chunk that stood in the stage a round earlier has been read.
  __device__ __forceinline__ static void wait_until_free(FusedSmem<kShape>& smem, int stage,
                                                         int round) {
    if (round > 0) Barrier::wait(&smem.empty[stage], (round - 1) & 1);
  }

  // No wider than the reads that came before it: these have returned. A release for the whole
  // cluster would also wait for the output's stores, a microsecond each chunk. What the memory
  // model does not promise without it is that arrivals at the other CTA are performed in order: one
  // would have to be overtaken by that of the next round of the ring for a parity to mislead.
  __device__ __forceinline__ void release(int stage, bool arrives) const {
    Barrier::arrive(&this->smem.empty[stage], static_cast<unsigned>(stage) % kShape.cluster,
                    arrives);
  }
};

}  // namespace flash_kda::sm90
