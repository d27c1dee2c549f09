// One warp of a group of four that turns the raw rows of a chunk into its images. Warp w owns
// channels 32w .. 32w+31 of all tokens; a lane two of them in half of the tokens, so that the
// running sum of the decay crosses lanes once. The four meet once a chunk, for the norms.
//
// A lane goes through its tokens in the order 0 1 2 3 4 5 6 7 or, in the later half, 4 5 6 7 0 1 2
// 3: rows r and r + 8 of an image lie in the same banks, rows r and r + 12 do not.
//
// Four warps to a chunk, and not one, because the program of one is too long: with 64 elements a
// lane it does not fit the instruction cache beside the chain's (docs/design.md).
#pragma once

#include "chunk/norms.cuh"
#include "common/gate.cuh"
#include "sm90/ring.cuh"
#include "sm90/work.cuh"

namespace flash_kda::sm90 {

template <const FusedShape& kShape>
class RowsWarp {
 public:
  __device__ __forceinline__ RowsWarp(const ForwardParams& p, FusedSmem<kShape>& smem, int turn,
                                      int cta, int group, int warp, int lane)
      : p_(p),
        smem_(smem),
        walk_(p, turn, cta + kShape.cluster * group),
        group_(group),
        warp_(warp),
        lane_(lane) {}

  __device__ __forceinline__ void run() {
    if (!walk_.find()) return;
    fetch();
#pragma unroll 1
    for (bool more = true; more;) {
      const int index = walk_.index(), stage = walk_.stage(), length = walk_.tokens().length;
      if (walk_.head() != head_) {
        head_ = walk_.head();
        gate_ = Gate<2>(p_, head_, channel());
      }
      walk_.advance();
      more = walk_.find();
      // The rows of the next chunk are fetched while this one is worked on, if there is room.
      const bool fetches = more && is_free();
      if (fetches) {
        fetch();
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      __syncwarp();  // every lane's copies have landed
      make_images(smem_.stage[stage].record, index, length);
      fence_async_shared();  // wgmma reads them, and a bulk copy
      __syncwarp();
      if (arrives(lane_)) Barrier::arrive(&smem_.images[stage]);
      if (more && !fetches) {
        wait_until_free();
        fetch();
      }
    }
  }

 private:
  static constexpr int kRows = kChunk / 2;  // of a lane

  __device__ __forceinline__ int half() const { return lane_ >> 4; }  // of the tokens

  // The i-th token of this lane.
  __device__ __forceinline__ int row_of(int i) const {
    return i < kRows / 2 ? 12 * half() + i : 4 * half() + i;
  }

  // This lane's two channels of its rows in one record. The addresses are worked out once a chunk;
  // left alone, the compiler does it for each image anew.
  class Pieces {
   public:
    __device__ __forceinline__ Pieces(const RowsWarp& owner, const unsigned char* record,
                                      int solver) {
      const unsigned base = cute::cast_smem_ptr_to_uint(record);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        address_[i] = base + image_offset(owner.row_of(i), 2 * owner.channel());
        keep_in_register(address_[i]);
      }
      // The halves of K^ are closer to each other than those of the record.
      growing_ = cute::cast_smem_ptr_to_uint(owner.smem_.growing[solver].image) - base -
                 (owner.warp_ >> 1) * (ChunkRecord::kHalfBytes - ChunkRecord::kHalfImageBytes);
    }
    __device__ __forceinline__ unsigned load(int image, int i) const { return *at(image, i); }
    __device__ __forceinline__ void store(int image, int i, float low, float high) const {
      *at(image, i) = pack_bf16(low, high);
    }
    __device__ __forceinline__ void store_growing(int i, float low, float high) const {
      store(growing_, i, low, high);
    }

   private:
    __device__ __forceinline__ unsigned* at(int image, int i) const {
      return static_cast<unsigned*>(__cvta_shared_to_generic(address_[i] + image));
    }
    unsigned address_[kRows];
    int growing_;
  };

  __device__ __forceinline__ int channel() const { return 32 * warp_ + 2 * (lane_ & 15); }

  // A stage of round r is free once all have read the chunk of round r - 1.
  __device__ __forceinline__ bool is_free() const {
    const int round = walk_.round();
    return round == 0 || Barrier::test_wait(&smem_.empty[walk_.stage()], (round - 1) & 1, 1);
  }
  __device__ __forceinline__ void wait_until_free() const {
    RecordRing<kShape>::wait_until_free(smem_, walk_.stage(), walk_.round());
  }

  // Until the solver has read K^ of its chunk before this one. Not until that one's record is full:
  // where the other group is two chunks ahead, the stage may be full a second time by then.
  __device__ __forceinline__ void wait_for_solver(int index) const {
    const int own = index / kShape.cluster, turn = own / kShape.solvers;
    if (turn > 0) Barrier::wait(&smem_.solved[own % kShape.solvers], (turn - 1) & 1);
    stay_behind_wait();
  }

  // Starts the copies of this warp's channels of a chunk to where make_images() finds them. Rows
  // past the end belong to the next sequence: they become zeros and are not read, NaN or not.
  __device__ __forceinline__ void fetch() {
    unsigned char* const record = smem_.stage[walk_.stage()].record;
    const TokenRange tokens = walk_.tokens();
    fetch_rows(record + ChunkRecord::kKeyDecayed, p_.k, p_.k_stride, tokens);
    fetch_rows(record + ChunkRecord::kKeyRemaining, p_.g, p_.g_stride, tokens);
    fetch_rows(record + ChunkRecord::kQueryDecayed, p_.q, p_.q_stride, tokens);
    copy_async_commit();
  }

  __device__ __forceinline__ void fetch_rows(unsigned char* image, const void* base,
                                             const TokenStrides& stride,
                                             const TokenRange& tokens) const {
    const int row = lane_ >> 2, byte = 64 * warp_ + 16 * (lane_ & 3);
    const unsigned char* from =
        static_cast<const unsigned char*>(base) + byte +
        2 * (tokens.batch * stride.batch + (tokens.begin + row) * stride.token +
             walk_.head() * stride.head);
    copy_async_16(image + image_offset(row, byte), from, row < tokens.length);
    copy_async_16(image + image_offset(row + 8, byte), from + 16 * stride.token,
                  row + 8 < tokens.length);
  }

  __device__ __forceinline__ void make_images(unsigned char* record, int index, int length) {
    float (&squares)[kGroupWarps][2 * kChunk] = smem_.group[group_].squares[parity_][0];
    publish_squares(record, squares);
    const Pieces pieces(*this, record, index / kShape.cluster % kShape.solvers);
    float log2_decay[kRows][2], total[2];
    sum_log2_decays(log2_decay, total, pieces, length);
    meet();
    const float inverse_norm = collect_norms(record, squares);
    wait_for_solver(index);
    parity_ ^= 1;
    unsigned next_key = pieces.load(ChunkRecord::kKeyDecayed, 0);
    unsigned next_query = pieces.load(ChunkRecord::kQueryDecayed, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned raw_key = next_key, raw_query = next_query;
      // Before anything is stored: the compiler could not move these loads over a store.
      if (i + 1 < kRows) {
        next_key = pieces.load(ChunkRecord::kKeyDecayed, i + 1);
        next_query = pieces.load(ChunkRecord::kQueryDecayed, i + 1);
      }
      const float k_scale = __shfl_sync(kWarpMask, inverse_norm, row_of(i));
      const float key[2] = {bf16_low(raw_key) * k_scale, bf16_high(raw_key) * k_scale};
      const float decay[2] = {exp2_approx(log2_decay[i][0]), exp2_approx(log2_decay[i][1])};
      const float growing[2] = {key[0] * exp2_approx(-log2_decay[i][0]),
                                key[1] * exp2_approx(-log2_decay[i][1])};
      pieces.store_growing(i, growing[0], growing[1]);
      pieces.store(ChunkRecord::kKeyRemaining, i, growing[0] * total[0], growing[1] * total[1]);
      pieces.store(ChunkRecord::kKeyDecayed, i, key[0] * -decay[0], key[1] * -decay[1]);
      const float q_scale = __shfl_sync(kWarpMask, inverse_norm, kChunk + row_of(i));
      // In this order: the scale alone may be near 2^-100.
      pieces.store(ChunkRecord::kQueryDecayed, i, bf16_low(raw_query) * q_scale * decay[0],
                   bf16_high(raw_query) * q_scale * decay[1]);
    }
    if (half() == 0) {
      *reinterpret_cast<float2*>(record + ChunkRecord::kDecay + 4 * decay_position(channel())) =
          make_float2(total[0], total[1]);
    }
  }

  // The decay of the chunk so far, and in `total` all of it, no longer as a logarithm.
  __device__ __forceinline__ void sum_log2_decays(float (&sums)[kRows][2], float (&total)[2],
                                                  const Pieces& pieces, int length) const {
    float sum[2][2] = {};  // of the first four tokens in this lane's order, and of the others
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned g = pieces.load(ChunkRecord::kKeyRemaining, i);
      sums[i][0] = gate_.openness(0, bf16_low(g));
      sums[i][1] = gate_.openness(1, bf16_high(g));
    }
    if (length < kChunk) {
      // Rows past the end do not decay, whatever the gate of their zeros is.
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (row_of(i) >= length) sums[i][0] = sums[i][1] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float (&part)[2] = sum[i / (kRows / 2)];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        sums[i][j] = part[j] = fmaf(p_.log2_lower_bound, sums[i][j], part[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float first = sum[0][j], second = sum[1][j];
      const float other = __shfl_xor_sync(kWarpMask, first + second, 16);
      total[j] = exp2_approx(first + second + other);
      const float before_first = half() == 0 ? 0.0f : other + second;
      const float before_second = half() == 0 ? first : other;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sums[i][j] += i < kRows / 2 ? before_first : before_second;
    }
  }

  // Sums of squares over this warp's channels, of all rows of k and q.
  __device__ __forceinline__ void publish_squares(const unsigned char* record,
                                                  float (&squares)[kGroupWarps][2 * kChunk]) {
    publish(record + ChunkRecord::kKeyDecayed, squares[warp_]);
    publish(record + ChunkRecord::kQueryDecayed, squares[warp_] + kChunk);
  }
  __device__ __forceinline__ void publish(const unsigned char* image, float* squares) const {
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      add_squares(upper, lower,
                  load_matrices(image + image_offset(lane_ & 15,
                                                     64 * warp_ + 32 * step + (lane_ >> 4) * 16)));
    }
    const int row = lane_ >> 2;
    if ((lane_ & 3) == row >> 1) {  // the diagonal of row r is at column r
      squares[row] = row & 1 ? upper[1] : upper[0];
      squares[row + 8] = row & 1 ? lower[3] : lower[2];
    }
  }

  // 1 / sqrt(sum x^2 + 1e-6): lane l < 16 of row l of k, lane 16 + l of row l of q.
  __device__ __forceinline__ float collect_norms(unsigned char* record,
                                                 float (&squares)[kGroupWarps][2 * kChunk]) {
    const float sum = sum_of_warps(squares);
    float inverse = inverse_norm(sum);
    // All warps of the group see the same sums, so they meet again together.
    const bool again_needed = overflowed(sum);
    if (__any_sync(kWarpMask, again_needed)) {
      float (&again)[kGroupWarps][2 * kChunk] = smem_.group[group_].squares[parity_][1];
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        publish_shrunk(record + ChunkRecord::kKeyDecayed, i, again[warp_]);
        publish_shrunk(record + ChunkRecord::kQueryDecayed, i, again[warp_] + kChunk);
      }
      meet();
      if (again_needed) inverse = inverse_norm_of_shrunk(sum_of_warps(again));
    }
    return inverse;
  }
  __device__ __forceinline__ float sum_of_warps(
      const float (&squares)[kGroupWarps][2 * kChunk]) const {
    return (squares[0][lane_] + squares[1][lane_]) + (squares[2][lane_] + squares[3][lane_]);
  }
  __device__ __forceinline__ void publish_shrunk(const unsigned char* image, int i,
                                                 float* squares) const {
    const int row = kRows * half() + i;
    const unsigned raw = *reinterpret_cast<const unsigned*>(
        image + image_offset(row, 64 * warp_ + 4 * (lane_ & 15)));
    const float a = bf16_low(raw) * kShrink, b = bf16_high(raw) * kShrink;
    float sum = a * a + b * b;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2) sum += __shfl_xor_sync(kWarpMask, sum, width);
    if ((lane_ & 15) == 0) squares[row] = sum;
  }

  // The four warps of the group wait for each other.
  __device__ __forceinline__ void meet() const {
    cutlass::arch::NamedBarrier::sync(32 * kGroupWarps, static_cast<uint32_t>(group_));
  }

  const ForwardParams& p_;
  FusedSmem<kShape>& smem_;
  ChunkWalk<kShape.cluster * kShape.groups, kShape.stages> walk_;
  const int group_, warp_, lane_;
  int parity_ = 0;
  int head_ = -1;  // of the gate
  Gate<2> gate_;
};

}  // namespace flash_kda::sm90
