// Launch shapes, shared by the kernels (which assert them) and the launcher.
#pragma once

#include "params.h"

namespace flash_kda {

constexpr int kScheduleThreads = 1024;

constexpr int kPrepareWarps = 4;  // each works on its own chunk and head
constexpr int kPrepareThreads = 32 * kPrepareWarps;
constexpr int kPrepareCtasPerSm = 4;
constexpr int kPrepareSmemBytes = kPrepareWarps * ChunkRecord::kBytes;

// A recurrence kernel: `warps` computing warps of `tiles` x 16 rows of V each, `stages` chunks in
// flight, and `helper_warps`, the first of which copies chunks in. Two tiles need more registers a
// thread than two CTAs of equal threads leave: then the helpers are a warpgroup that gives up its
// own.
struct RecurrenceShape {
  int warps, tiles, stages, helper_warps;

  constexpr int threads() const { return 32 * (warps + helper_warps); }
  constexpr bool moves_registers() const { return tiles > 1; }
  constexpr int rows_per_warp() const { return 16 * tiles; }
  constexpr int rows() const { return warps * rows_per_warp(); }  // of V, a CTA
  constexpr int slices() const { return kHeadDim / rows(); }      // CTAs a head
  // Token rows of V and of the output; the padding puts the rows of an ldmatrix in distinct banks.
  constexpr int value_row_bytes() const { return 2 * rows() + 16; }
  constexpr int output_row_bytes() const { return 2 * rows_per_warp() + 16; }
  constexpr int stage_bytes() const { return ChunkRecord::kBytes + kChunk * value_row_bytes(); }
  constexpr int smem_bytes() const {
    const int bytes = stages * (stage_bytes() + 2 * 8) + warps * kChunk * output_row_bytes();
    return (bytes + 127) / 128 * 128;
  }
};

constexpr RecurrenceShape kRecurrenceV128{4, 2, 5, 4};
constexpr RecurrenceShape kRecurrenceV64{4, 1, 6, 1};
constexpr RecurrenceShape kRecurrenceV32{2, 1, 6, 1};

}  // namespace flash_kda
