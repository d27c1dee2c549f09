// Stands in for a chain and for what moves states: records what it is asked for.
#pragma once

#include "chunk/record_ring.cuh"
#include "chunk/slice.cuh"
#include "chunk/warp_memory.cuh"
#include "common/ptx.cuh"

namespace flash_kda {

constexpr int kStateTiles = 1;
using State = float[1][kStateTiles][4];

template <bool = false>
void load_state(State&, const StateAddress& from, int) {
  device::threads.check_that_is_there(device::address(from.base));
  device::threads.record(
      {device::kLoad, device::address(from.base), from.dtype, from.vectorised ? 1 : 0});
}
inline void load_identity(State&, int row, int) {
  device::threads.record({device::kIdentity, row});
}
template <bool = false>
void store_state(const State&, const StateAddress& to, int) {
  device::threads.record(
      {device::kStore, device::address(to.base), to.dtype, to.vectorised ? 1 : 0});
}

template <class Ring, class Step, class Memory>
class Chain {
 public:
  static constexpr int kTokens = Step::kTokens;
  static constexpr bool kFours = Step::kFours;
  using State = flash_kda::State;

  Chain(const ForwardParams& p, const Ring& ring, Memory&) : p_(p), ring_(ring) {}

  void begin(const ChainSlice& slice, int first_row, bool has_values) {
    device::threads.check_that_schedule_is_there(p_);
    const TokenRange& tokens = slice.range.tokens;
    steps_ = records_of(tokens.length, kTokens);
    done_ = 0;
    device::threads.record({device::kJob, slice.range.sequence, slice.head, slice.segment,
                            tokens.batch, tokens.begin, tokens.length, has_values ? 1 : 0,
                            device::address(p_.v) + slice.token_bytes(p_.v_stride, first_row),
                            device::address(p_.out) + slice.token_bytes(p_.out_stride, first_row)});
  }
  int steps() const { return steps_; }
  void run(State&, int end) {
    if (end < done_ || end > steps_) device::fail("a chain leaves its sequence");
    place_ += end - done_;
    done_ = end;
    device::threads.record({device::kRun, end});
  }
  template <int kCount, class Read>
  void take(Read read) {
    read(ring_, place_ % Ring::kStages);
    place_ += kCount;
  }
  template <int kCount>
  void look_for() const {}
  // There must be a record and values to come.
  void between(const unsigned char* middle, const StateAddress& to) const {
    if (done_ >= steps_) device::fail("a state between chunks behind the last one");
    device::threads.record({device::kBetween, device::address(middle), device::address(to.base),
                            to.dtype, to.vectorised ? 1 : 0});
  }
  void finish() { device::threads.record({device::kFinish}); }

 private:
  const ForwardParams& p_;
  const Ring ring_;
  int steps_ = 0, done_ = 0;
  int place_ = 0;  // stages that it has gone through
};

}  // namespace flash_kda
