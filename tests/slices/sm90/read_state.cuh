// Nothing is read: records from where.
#pragma once

#include "sm90/ring.cuh"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
void read_state(State&, const RecordRing<kShape>&, int first, int dtype, int row, int) {
  device::threads.record({device::kRead, first, dtype, row});
}

}  // namespace flash_kda::sm90
