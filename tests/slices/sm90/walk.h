// What rows.cuh and solver.cuh do with a ChunkWalk, less what they do with the chunks. `begin()` is
// what comes before each stage's work, `send()` what is done with a part of a state.
#pragma once

#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <class Walk, class Begin, class Send>
void record_walk(const ForwardParams& p, Walk& walk_, Begin begin, Send send) {
  device::threads.check_that_schedule_is_there(p);
  if (!walk_.find()) return;
  for (bool more = true; more;) {
    begin();
    if (walk_.is_state()) {
      device::threads.record({device::kPart, walk_.index(), walk_.stage(), walk_.round(),
                              walk_.head(), walk_.piece().range.sequence, walk_.state_part()});
      send();
    } else {
      const TokenRange tokens = walk_.tokens();
      device::threads.record({device::kChunk, walk_.index(), walk_.stage(), walk_.round(),
                              walk_.head(), tokens.batch, tokens.begin, tokens.length});
    }
    walk_.advance();
    more = walk_.find();
  }
}

inline void record_growing(const void* image) {
  device::threads.record({device::kGrowing, device::address(image)});
}

}  // namespace flash_kda::sm90
