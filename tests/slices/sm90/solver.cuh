// Stands in for the warps that complete records: records the chunks they would complete.
#pragma once

#include "sm90/walk.h"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class SolverWarp {
 public:
  SolverWarp(const ForwardParams& p, FusedSmem<kShape>&, int turn, int cta, int solver, int)
      : p_(p), walk_(p, turn, cta + kShape.cluster * solver) {}

  void run() { record_walk(p_, walk_); }

 private:
  const ForwardParams& p_;
  ChunkWalk<kShape.cluster * kShape.solvers, kShape.stages> walk_;
};

}  // namespace flash_kda::sm90
