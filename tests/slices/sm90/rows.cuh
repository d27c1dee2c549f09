// Stands in for the warps that make images: records the chunks they would make, and what they wait
// for before.
#pragma once

#include "sm90/walk.h"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class RowsWarp {
 public:
  RowsWarp(const ForwardParams& p, FusedSmem<kShape>& smem, int turn, int cta, int group, int, int)
      : p_(p), smem_(smem), walk_(p, turn, cta + kShape.cluster * group) {}

  void run() {
    const auto begin = [&] {
      const int index = walk_.index();
      const RowsTurn<kShape> rows(index);
      Barrier::wait(rows.barrier(smem_), rows.parity());
      const GrowingTurn<kShape> growing(index);
      growing.wait_until_free(smem_);
      record_growing(growing.image(smem_));
    };
    record_walk(p_, walk_, begin, [] {});
  }

 private:
  const ForwardParams& p_;
  FusedSmem<kShape>& smem_;
  ChunkWalk<kShape.cluster * kShape.groups, kShape.stages> walk_;
};

}  // namespace flash_kda::sm90
