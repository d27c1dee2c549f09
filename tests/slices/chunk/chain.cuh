// Stands in for a chain and for what moves states: records what it is asked for.
#pragma once

#include "chunk/slice.cuh"
#include "chunk/warp_memory.cuh"

namespace flash_kda {

inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}

constexpr int kStateTiles = 1;
using State = float[1][kStateTiles][4];

inline void load_state(State&, const StateAddress& from, int) {
  device::threads.record(
      {device::kLoad, device::address(from.base), from.dtype, from.vectorised ? 1 : 0});
}
inline void load_identity(State&, int row, int) {
  device::threads.record({device::kIdentity, row});
}
inline void store_state(const State&, const StateAddress& to, int) {
  device::threads.record(
      {device::kStore, device::address(to.base), to.dtype, to.vectorised ? 1 : 0});
}

template <class Ring, class Step>
class Chain {
 public:
  using State = flash_kda::State;

  Chain(const ForwardParams& p, const Ring&, ChainWarpMemory<1>&) : p_(p) {}

  void begin(const ChainSlice& slice, int first_row, bool has_values) {
    const TokenRange& tokens = slice.range.tokens;
    chunks_ = chunks_of(tokens.length);
    done_ = 0;
    device::threads.record({device::kJob, slice.range.sequence, slice.head, slice.segment,
                            tokens.batch, tokens.begin, tokens.length, has_values ? 1 : 0,
                            device::address(p_.v) + slice.token_bytes(p_.v_stride, first_row),
                            device::address(p_.out) + slice.token_bytes(p_.out_stride, first_row)});
  }
  int chunks() const { return chunks_; }
  void run(State&, int end) {
    if (end < done_ || end > chunks_) device::fail("a chain leaves its chunks");
    done_ = end;
    device::threads.record({device::kRun, end});
  }
  void finish() { device::threads.record({device::kFinish}); }

 private:
  const ForwardParams& p_;
  int chunks_ = 0, done_ = 0;
};

}  // namespace flash_kda
