// Records in the workspace: without the blocks of zeros above the diagonals of their square images,
// which stand in a ring's stages from the beginning.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/ptx.cuh"
#include "params.h"

namespace flash_kda {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;

// Calls piece(place, bytes, place_stored) for each part of a record that is stored.
template <class Layout, class Piece>
__device__ __forceinline__ void for_each_stored(Piece piece) {
  if constexpr (Layout::kColumns == 1) {
    piece(0, Layout::kBytes, 0);
  } else {
    static_assert(Layout::kColumns == 2, "each second column begins with a block of zeros");
    constexpr int kSecond = Layout::kSecondColumns, kBlock = Layout::kBlockBytes;
    piece(0, kSecond, 0);
    piece(kSecond + kBlock, kBlock, kSecond);
    piece(kSecond + 3 * kBlock, kBlock, kSecond + kBlock);
  }
}

// A record from the workspace to a stage, or all of it that a chain without outputs needs.
template <class Layout, bool kQueries>
__device__ __forceinline__ void load_record(unsigned char* to, const unsigned char* from,
                                            FullBarrier::ValueType* full) {
  if constexpr (kQueries) {
    FullBarrier::arrive_and_expect_tx(full, Layout::kStoredBytes);
    for_each_stored<Layout>([&](int place, int bytes, int stored) {
      bulk_load(to + place, from + stored, bytes, full);
    });
  } else {
    static_assert(Layout::kColumns == 2, "a pair");
    // The decay, b and the inverse's first column; then what is stored of its second one.
    constexpr int kRest = Layout::kInverse + Layout::kColumnBytes - Layout::kDecay;
    constexpr int kSecond = Layout::kSecondColumns;
    FullBarrier::arrive_and_expect_tx(full,
                                      4 * Layout::kHalfImageBytes + kRest + Layout::kBlockBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (const int image : {Layout::kKeyDecayed, Layout::kKeyRemaining}) {
        const int place = half * Layout::kHalfBytes + image;
        bulk_load(to + place, from + place, Layout::kHalfImageBytes, full);
      }
    }
    bulk_load(to + Layout::kDecay, from + Layout::kDecay, kRest, full);
    bulk_load(to + kSecond + Layout::kBlockBytes, from + kSecond, Layout::kBlockBytes, full);
  }
}

// One of the two blocks that are not stored, by a warp.
template <class Layout>
__device__ __forceinline__ void clear_unstored(unsigned char* record, int which, int lane) {
  static_assert(Layout::kColumns == 2 && Layout::kBlockBytes == 32 * 16, "16 bytes a lane");
  unsigned char* const block = record + Layout::kSecondColumns + which * Layout::kColumnBytes;
  *reinterpret_cast<uint4*>(block + 16 * lane) = make_uint4(0, 0, 0, 0);
}

}  // namespace flash_kda
