// One computing warp's work on one sequence: load the state, carry it through the chunks, leave it
// at every checkpoint and at the end.
#pragma once

#include "chunk/chain.cuh"

namespace flash_kda {

template <class Ring, class Step>
__device__ __forceinline__ void run_sequence(const ForwardParams& p, Chain<Ring, Step>& chain,
                                             const ChainSlice& slice, int first_row, int lane) {
  typename Chain<Ring, Step>::State s;
  const StateAddress final = slice.final(p, first_row);
  chain.begin(slice, first_row, true);
  load_state(s, slice.initial(p, first_row), lane);
  Checkpoints checkpoints(p, slice.range.tokens, lane);
  // Stops at each checkpoint and at the end, outside the loop over chunks.
#pragma unroll 1
  for (;;) {
    const int end = min(chain.chunks(), checkpoints.chunks());
    chain.run(s, end);
    if (end < checkpoints.chunks()) break;
    store_state(s, slice.checkpoint(p, checkpoints.next(), first_row), lane);
    checkpoints.advance();
  }
  chain.finish();
  store_state(s, final, lane);
}

}  // namespace flash_kda
