// Stands in for the warps that make images: records the chunks they would make.
#pragma once

#include "sm90/walk.h"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class RowsWarp {
 public:
  RowsWarp(const ForwardParams& p, FusedSmem<kShape>&, int cta, int group, int, int)
      : walk_(p, cta + kShape.cluster * group) {}

  void run() { record_walk(walk_); }

 private:
  ChunkWalk<kShape.cluster, kShape.cluster * kShape.groups, kShape.stages> walk_;
};

}  // namespace flash_kda::sm90
