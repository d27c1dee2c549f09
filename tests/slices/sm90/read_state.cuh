// Nothing is read: records from where, and whether there is something.
#pragma once

#include "sm90/ring.cuh"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
void read_state(State&, const RecordRing<kShape>&, int first, int dtype, int row, bool present,
                int) {
  device::threads.record({device::kRead, first, dtype, row, present ? 1 : 0});
}

}  // namespace flash_kda::sm90
