// Shared memory of one computing warp of a chain: its columns of V on their way in and of the
// output on their way out. No other warp touches either.
#pragma once

#include "params.h"

namespace flash_kda {

// A chain that takes `kTokens` tokens a step keeps V of `kSlots` steps in flight: enough to hide a
// load from memory. The output of a step takes the place of its V.
template <int kTiles, int kTokens, int kSlots>
struct ChainWarpMemory {
  static constexpr int kRowsOfV = 16 * kTiles;
  static constexpr int kRowBytes = 2 * kRowsOfV;  // of a token
  static constexpr int kValues = kSlots;

  alignas(128) unsigned char value[kValues][kTokens * kRowBytes];

  // The 16-byte units of a row are permuted so that the eight rows of an ldmatrix lie in different
  // banks.
  static constexpr int kUnits = kRowBytes / 16;
  static constexpr int unit_offset(int row, int unit) {
    return row * kRowBytes + (unit ^ (row * kUnits / 8 & (kUnits - 1))) * 16;
  }
};

}  // namespace flash_kda
