// Stands in for the warps that complete records: records the chunks they would complete.
#pragma once

#include "sm90/send_state.cuh"
#include "sm90/walk.h"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class SolverWarp {
 public:
  SolverWarp(const ForwardParams& p, FusedSmem<kShape>& smem, int turn, int cta, int solver,
             int lane)
      : p_(p), smem_(smem), walk_(p, turn, cta + kShape.cluster * solver), cta_(cta), lane_(lane) {}

  void run() {
    const auto begin = [&] {
      const GrowingTurn<kShape> growing(walk_.index());
      record_growing(growing.image(smem_));
    };
    record_walk(p_, walk_, begin, [&] {
      for (int cta = 0; cta < kShape.cluster; ++cta) {
        send_state<kShape>(p_, smem_, walk_.stage(), walk_.piece(), walk_.state_part(), cta, cta_,
                           lane_);
      }
    });
  }

 private:
  const ForwardParams& p_;
  FusedSmem<kShape>& smem_;
  ChunkWalk<kShape.cluster * kShape.solvers, kShape.stages> walk_;
  const int cta_, lane_;
};

}  // namespace flash_kda::sm90
