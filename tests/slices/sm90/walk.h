// What rows.cuh and solver.cuh do with a ChunkWalk, less what they do with the chunks.
#pragma once

#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <class Walk>
void record_walk(Walk& walk_) {
  if (!walk_.find()) return;
  for (bool more = true; more;) {
    const TokenRange tokens = walk_.tokens();
    device::threads.record({device::kChunk, walk_.index(), walk_.stage(), walk_.round(),
                            walk_.head(), tokens.batch, tokens.begin, tokens.length,
                            walk_.new_job() ? 1 : 0});
    walk_.advance();
    more = walk_.find();
  }
}

}  // namespace flash_kda::sm90
