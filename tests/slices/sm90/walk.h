// What rows.cuh and solver.cuh do with a ChunkWalk, less what they do with the chunks.
#pragma once

#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <class Walk>
void record_walk(const ForwardParams& p, Walk& walk_) {
  device::threads.check_that_schedule_is_there(p);
  if (!walk_.find()) return;
  for (bool more = true; more;) {
    const TokenRange tokens = walk_.tokens();
    device::threads.record({device::kChunk, walk_.index(), walk_.stage(), walk_.round(),
                            walk_.head(), tokens.batch, tokens.begin, tokens.length});
    walk_.advance();
    more = walk_.find();
  }
}

}  // namespace flash_kda::sm90
