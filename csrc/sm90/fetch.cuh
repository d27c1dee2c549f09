// The warp that fetches the raw rows of a CTA's chunks, as tiles and as early as the ring has room.
//
// A warp of its own, because it must wait for nothing but room: a solver that fetches beside its
// work comes too late, and a warp of a group holds up the other three (docs/design.md).
#pragma once

#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class FetchWarp {
 public:
  __device__ __forceinline__ FetchWarp(const ForwardParams& p, const RowMaps& maps,
                                       FusedSmem<kShape>& smem, int turn, int cta, int lane)
      : p_(p),
        maps_(maps),
        smem_(smem),
        smem_address_(__shfl_sync(kWarpMask, cute::cast_smem_ptr_to_uint(&smem), 0)),
        walk_(p, turn, cta),
        lane_(lane) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (; walk_.find(); walk_.advance()) {
      RecordRing<kShape>::wait_until_free(smem_, walk_.stage(), walk_.round());
      stay_behind_wait();
      const unsigned landed = address_of(RowsTurn<kShape>(walk_.index()).barrier(smem_));
      // A part of a state is not for the group, which goes through the same waits all the same.
      const bool is_state = walk_.is_state();
      arrive_expecting(landed, is_state ? 0 : 3 * 2 * ChunkRecord::kHalfImageBytes);
      if (!is_state) fetch(landed);
    }
  }

 private:
  // To where the group finds them. Rows past the end belong to the next sequence; it clears them.
  __device__ __forceinline__ void fetch(unsigned landed) const {
    const TokenRange tokens = walk_.tokens();
    const unsigned record = address_of(smem_.stage[walk_.stage()].record);
    fetch_rows(record + ChunkRecord::kKeyDecayed, maps_.k, tokens, landed);
    fetch_rows(record + ChunkRecord::kKeyRemaining, maps_.g, tokens, landed);
    fetch_rows(record + ChunkRecord::kQueryDecayed, maps_.q, tokens, landed);
    // A chain has nothing to do until V of its first chunks is there.
    if (walk_.chunk() < FusedWarpMemory::kValues - 1) prefetch_values(tokens);
  }

  __device__ __forceinline__ void fetch_rows(unsigned image, const TensorMap& map,
                                             const TokenRange& tokens, unsigned landed) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_load(image + half * ChunkRecord::kHalfBytes, &map, half * kChannelsOfTile, walk_.head(),
                tokens.begin, tokens.batch, landed);
    }
  }

  __device__ __forceinline__ void prefetch_values(const TokenRange& tokens) const {
    const int row = lane_ >> 1;
    if (row < tokens.length) {
      prefetch_line(static_cast<const unsigned char*>(p_.v) + 128 * (lane_ & 1) +
                    2 * (tokens.batch * p_.v_stride.batch +
                         (tokens.begin + row) * p_.v_stride.token +
                         walk_.head() * p_.v_stride.head));
    }
  }

  // In shared memory, and known to be the same in all lanes.
  __device__ __forceinline__ unsigned address_of(const void* x) const {
    return smem_address_ + static_cast<unsigned>(static_cast<const unsigned char*>(x) -
                                                 reinterpret_cast<const unsigned char*>(&smem_));
  }

  const ForwardParams& p_;
  const RowMaps& maps_;
  FusedSmem<kShape>& smem_;
  const unsigned smem_address_;
  ChunkWalk<kShape.cluster, kShape.stages> walk_;
  const int lane_;
};

}  // namespace flash_kda::sm90
