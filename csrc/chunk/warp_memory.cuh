// Shared memory of one computing warp of a chain: its columns of V on their way in, its columns of
// the output on their way out. No other warp touches either.
#pragma once

#include "params.h"

namespace flash_kda {

template <int kTiles>
struct ChainWarpMemory {
  static constexpr int kRowsOfV = 16 * kTiles;
  // Token rows; the padding puts the rows of an ldmatrix in distinct banks.
  static constexpr int kRowBytes = 2 * kRowsOfV + 16;
  static constexpr int kValues = 4;  // chunks of V in flight: enough to hide a load from memory

  alignas(16) unsigned char value[kValues][kChunk * kRowBytes];
  alignas(16) unsigned char output[kChunk * kRowBytes];
};

}  // namespace flash_kda
