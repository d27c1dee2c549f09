// One computing warp's work on one sequence: carry the state through the chunks and leave it at
// every checkpoint.
#pragma once

#include "chunk/chain.cuh"

namespace flash_kda {

// `s`: the state before the sequence, on which the chain has begun; becomes the state after it.
// `checkpoints`: those of the slice, of which none has been left. The last step's output is still
// to be written, by finish_sequence(). Where a chain takes several chunks a step, `store_between(s,
// step, checkpoint)` leaves the state after the first chunk of the step to come.
template <class Chain, class Slice, class StoreBetween>
__device__ __forceinline__ void run_sequence(const ForwardParams& p, Chain& chain,
                                             typename Chain::State& s, const Slice& slice,
                                             Checkpoints& checkpoints, int first_row, int lane,
                                             StoreBetween store_between) {
  const int length = slice.range.tokens.length;
  // Stops at each checkpoint and at the end, outside the loop over chunks.
#pragma unroll 1
  for (;;) {
    const int tokens = checkpoints.tokens();
    const bool leaves = tokens <= length;
    const bool between = leaves && tokens % Chain::kTokens != 0 && tokens < length;
    const int steps = tokens / Chain::kTokens + (between || tokens % Chain::kTokens == 0 ? 0 : 1);
    chain.run(s, leaves ? steps : chain.steps());
    if (!leaves) break;
    const StateAddress to = slice.checkpoint(p, checkpoints.next(), first_row);
    if (Chain::kTokens > kChunk && between) {
      store_between(s, tokens / Chain::kTokens, to);
    } else {
      store_state<Chain::kFours>(s, to, lane);
    }
    checkpoints.advance(p, lane);
  }
}

template <class Chain, class Slice>
__device__ __forceinline__ void run_sequence(const ForwardParams& p, Chain& chain,
                                             typename Chain::State& s, const Slice& slice,
                                             Checkpoints& checkpoints, int first_row, int lane) {
  static_assert(Chain::kTokens == kChunk, "there is nothing between chunks");
  run_sequence(p, chain, s, slice, checkpoints, first_row, lane,
               [](auto&, int, const StateAddress&) {});
}

// What is left behind it: the last output, and the state where the slice's final one goes.
template <class Chain, class Slice>
__device__ __forceinline__ void finish_sequence(const ForwardParams& p, Chain& chain,
                                                const typename Chain::State& s, const Slice& slice,
                                                int first_row, int lane) {
  // Found only now, there are no registers to keep it in; but before finish(), which waits.
  const StateAddress to = slice.final(p, first_row);
  chain.finish();
  store_state<Chain::kFours>(s, to, lane);
}

// All of it, from the slice's initial state, on which the chain has begun, to its final one.
// `store_between`: as above, or none.
template <class Chain, class Slice, class... StoreBetween>
__device__ __forceinline__ void run_from_state_to_state(const ForwardParams& p, Chain& chain,
                                                        const Slice& slice,
                                                        Checkpoints& checkpoints, int first_row,
                                                        int lane, StoreBetween... store_between) {
  typename Chain::State s;
  load_state<Chain::kFours>(s, slice.initial(p, first_row), lane);
  run_sequence(p, chain, s, slice, checkpoints, first_row, lane, store_between...);
  finish_sequence(p, chain, s, slice, first_row, lane);
}

}  // namespace flash_kda
