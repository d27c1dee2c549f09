// A warp that completes records: from the images of a chunk its two 16 x 16 matrices and the
// inverse. Then it hands the record to all CTAs of the cluster.
#pragma once

#include "chunk/beta.cuh"
#include "chunk/products.cuh"
#include "sm90/ring.cuh"
#include "sm90/send_state.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class SolverWarp {
 public:
  __device__ __forceinline__ SolverWarp(const ForwardParams& p, FusedSmem<kShape>& smem, int turn,
                                        int cta, int solver, int lane)
      : p_(p), smem_(smem), walk_(p, turn, cta + kShape.cluster * solver), cta_(cta), lane_(lane) {}

  __device__ __forceinline__ void run() {
    if (!walk_.find()) return;
    unsigned raw_beta = 0;
    if (!walk_.is_state()) raw_beta = load_raw_beta(p_, walk_.tokens(), walk_.head(), lane_);
#pragma unroll 1
    for (bool more = true; more;) {
      const int stage = walk_.stage(), round = walk_.round();
      const GrowingTurn<kShape> growing(walk_.index());
      const bool is_state = walk_.is_state();
      // After both waits, as with a chunk: nothing comes to the chain before the warp that fetches
      // has found the stage free, or it would wait for a phase that has passed.
      if (is_state) {
        wait_for_images(stage, round);
#pragma unroll 1
        for (int cta = 0; cta < kShape.cluster; ++cta)
          send_state<kShape>(p_, smem_, stage, walk_.piece(), walk_.state_part(), cta, cta_, lane_);
      }
      const float b = beta_of(p_, raw_beta, walk_.tokens().length, lane_);
      walk_.advance();
      more = walk_.find();
      if (more && !walk_.is_state())
        raw_beta = load_raw_beta(p_, walk_.tokens(), walk_.head(), lane_);
      if (is_state) {
        release(growing);
      } else {
        wait_for_images(stage, round);
        solve(smem_.stage[stage].record, b, growing);
        hand_over(stage);
      }
    }
  }

 private:
  __device__ __forceinline__ void wait_for_images(int stage, int round) const {
    RecordRing<kShape>::wait_until_free(smem_, stage, round);
    Barrier::wait(&smem_.images[stage], round & 1);
    stay_behind_wait();
  }
  // Lets the group go on that comes next to the place of K^.
  __device__ __forceinline__ void release(const GrowingTurn<kShape>& growing) const {
    __syncwarp();
    if (arrives(lane_)) growing.release(smem_);
  }

  __device__ __forceinline__ void solve(unsigned char* record, float b,
                                        const GrowingTurn<kShape>& growing) const {
    const Products products =
        multiply<ChunkRecord>(record, growing.image(smem_), ChunkRecord::kHalfImageBytes, lane_);
    store_lower(lower_of(record), products, b, lane_);
    release(growing);  // L is complete, and K^ has been read
    store_beta<ChunkRecord>(record, b, 0, lane_);
    solve_and_store(record, products, lane_);
  }

  __device__ __forceinline__ void hand_over(int stage) const {
    fence_async_shared();  // wgmma reads it, and a bulk copy; the next rows overwrite it
    __syncwarp();
    if (arrives(lane_)) Barrier::arrive(&smem_.full[stage]);
#pragma unroll
    for (int away = 1; away < kShape.cluster; ++away) {
      bulk_send((cta_ + away) % kShape.cluster, smem_.stage[stage].record, ChunkRecord::kBytes,
                &smem_.full[stage]);
    }
  }

  const ForwardParams& p_;
  FusedSmem<kShape>& smem_;
  ChunkWalk<kShape.cluster * kShape.solvers, kShape.stages> walk_;
  const int cta_, lane_;
};

}  // namespace flash_kda::sm90
