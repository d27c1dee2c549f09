// Launch shapes, shared by the kernels (which assert them) and the launcher.
#pragma once

#include "chunk/warp_memory.cuh"
#include "params.h"

namespace flash_kda {

constexpr int aligned(int bytes, int alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

constexpr int kScheduleThreads = 1024;

constexpr int kPrepareWarps = 4;  // each works on its own chunk and head
constexpr int kPrepareThreads = 32 * kPrepareWarps;
constexpr int kPrepareCtasPerSm = 4;
constexpr int kPrepareSmemBytes = kPrepareWarps * aligned(ChunkRecord::kBytes, 128);

// A recurrence kernel: `warps` computing warps of `tiles` x 16 rows of V each, `stages` records of
// `record_tokens` in flight, and `helper_warps`, the first of which copies records in. Two tiles
// need more registers a thread than two CTAs of equal threads leave, as wgmma does: then the
// helpers are a warpgroup that gives up its own. V of `values` records is fetched ahead.
struct RecurrenceShape {
  int warps, tiles, stages, helper_warps;
  int record_tokens = kChunk, values = 4, stage_alignment = 128;

  constexpr int threads() const { return 32 * (warps + helper_warps); }
  constexpr bool moves_registers() const { return helper_warps == 4; }
  constexpr int rows_per_warp() const { return 16 * tiles; }
  constexpr int rows() const { return warps * rows_per_warp(); }  // of V, a CTA
  constexpr int slices() const { return kHeadDim / rows(); }      // CTAs a head
  constexpr int record_bytes() const {
    return record_tokens == kChunk ? ChunkRecord::kBytes : PairRecord::kBytes;
  }
  constexpr int smem_bytes() const {
    const int warp_bytes = values * record_tokens * 2 * rows_per_warp();
    const int stage_bytes = aligned(record_bytes(), stage_alignment);
    return aligned(stages * (stage_bytes + 2 * 8) + warps * warp_bytes, stage_alignment);
  }
};

// Of a thread, where two CTAs of two warpgroups each share a multiprocessor and registers move.
constexpr int kChainRegisters = 232, kHelperRegisters = 24;

template <const RecurrenceShape& kShape>
struct RecurrenceMemory {
  using Warp = ChainWarpMemory<kShape.tiles, kShape.record_tokens, kShape.values>;
};

constexpr RecurrenceShape kRecurrenceV128{4, 2, 5, 4};
constexpr RecurrenceShape kRecurrenceV64{4, 1, 5, 1};
constexpr RecurrenceShape kRecurrenceV32{2, 1, 5, 1};

// By wgmma, whose swizzle counts from multiples of 1024: the sm90 family's walk through records of
// pairs, and what finds the maps of segments, of which two CTAs share a multiprocessor.
constexpr RecurrenceShape kWalk{4, 1, 6, 1, kPair, 4, 1024};
constexpr RecurrenceShape kAffine{4, 1, 3, 4, kPair, 4, 1024};
constexpr int kAffineCtasPerSm = 2;

constexpr int kPairsOfCta = 2;  // two warps make the record of each
constexpr int kPreparePairsThreads = 2 * 32 * kPairsOfCta;
constexpr int kPreparePairsCtasPerSm = 3;
constexpr int kPreparePairsSmemBytes =
    kPairsOfCta * aligned(PairRecord::kBytes + 2 * kHeadDim * 4, 128);

constexpr int kGroupWarps = 4;
constexpr int kRowTurns = 4;       // chunks of a group whose raw rows may be under way
constexpr int kGrowingImages = 4;  // places for K^ of a CTA's chunks
using FusedWarpMemory = ChainWarpMemory<1, kChunk, 4>;

// A fused kernel: a cluster works on all rows of the state of one sequence and head, each of its
// `cluster` CTAs on a slice of them with `warps` computing warps of 16 rows. Meanwhile a warp that
// fetches, `groups` of kGroupWarps warps and `solvers` in each CTA make the records of the chunks
// to come, for all CTAs of the cluster, in a ring of `stages`.
struct FusedShape {
  int cluster, warps, solvers, groups, stages;
  // Of a thread, of each kind of warps. A warpgroup can only be given what others have given back.
  // The warp that fetches is in the solvers'.
  int chain_registers, solver_registers, rows_registers;

  constexpr int helper_warps() const { return solvers + 1; }  // and the one that fetches
  constexpr int threads() const { return 32 * (warps + helper_warps() + kGroupWarps * groups); }
  constexpr int slice_rows() const { return kHeadDim / cluster; }  // of V
  constexpr bool registers_suffice() const {
    const int begun_with = 65536 / threads() / 8 * 8 * threads();
    return 32 * (warps * chain_registers + helper_warps() * solver_registers +
                 kGroupWarps * groups * rows_registers) <=
           begun_with;
  }
  constexpr int smem_bytes() const {
    const int stage_bytes = aligned(ChunkRecord::kBytes, 1024);
    const int group_bytes = (2 * 2 + 1) * kGroupWarps * 2 * kChunk * 4 + (1 + kRowTurns) * 8;
    const int bytes = stages * (stage_bytes + 3 * 8) + warps * int(sizeof(FusedWarpMemory)) +
                      groups * group_bytes +
                      kGrowingImages * (2 * ChunkRecord::kHalfImageBytes + 8);
    return aligned(bytes, 1024);
  }
};

constexpr int kRowsOfWarp = 16;
constexpr int kStateStages = 3;  // of the ring, that a state takes on its way to a chain
constexpr FusedShape kFused{2, 4, 3, 2, 14, 216, 88, 104};
static_assert(kFused.registers_suffice(), "or a warpgroup waits for its registers forever");
static_assert(kFused.warps % 4 == 0 && kFused.helper_warps() % 4 == 0,
              "all warps of a warpgroup ask for the same registers");

constexpr int kCombineRows = 16;  // of V, a CTA
constexpr int kCombineThreads = 4 * kHeadDim;

}  // namespace flash_kda
