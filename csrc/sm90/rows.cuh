// One warp of a group of four that turns the raw rows of a chunk, which fetch.cuh brings, into its
// images. Warp w owns channels 32w .. 32w+31 of all tokens; a lane two of them in half of the
// tokens, so that the running sum of the decay crosses lanes once. The four wait for each other
// once a chunk, for the norms.
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
        lane_(lane),
        pieces_(*this) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (; walk_.find(); walk_.advance()) {
      const int index = walk_.index(), stage = walk_.stage(), length = walk_.tokens().length;
      if (!walk_.is_state() && walk_.head() != head_) {
        head_ = walk_.head();
        gate_ = Gate<2>(p_, head_, channel());
      }
      const RowsTurn<kShape> rows(index);
      Barrier::wait(rows.barrier(smem_), rows.parity());
      stay_behind_wait();
      const GrowingTurn<kShape> growing(index);
      if (walk_.is_state()) {
        growing.wait_until_free(smem_);  // as with a chunk: later turns are told apart by it
      } else {
        unsigned char* const record = smem_.stage[stage].record;
        if (length < kChunk) clear_rows(record, length);
        make_images(record, growing, length);
        // No fence for the async proxy: the solver has one, between these stores and all that reads
        // the images by that proxy or, a round later, overwrites them.
        __syncwarp();
      }
      if (arrives(lane_)) Barrier::arrive(&smem_.images[stage]);
    }
  }

 private:
  static constexpr int kRows = kChunk / 2;  // of a lane

  __device__ __forceinline__ int half() const { return lane_ >> 4; }  // of the tokens

  // The i-th token of this lane.
  __device__ __forceinline__ int row_of(int i) const {
    return i < kRows / 2 ? 12 * half() + i : 4 * half() + i;
  }

  // This lane's two channels of its rows in an image: byte offsets, worked out once for all chunks.
  class Pieces {
   public:
    __device__ __forceinline__ explicit Pieces(const RowsWarp& owner) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = owner.row_of(i), channel = owner.channel() & 63;
        raw_[i] = image_offset(row, 2 * channel);
        place_[i] = image_offset(row, 2 * channel_position(channel));
        keep_in_register(raw_[i]);
        keep_in_register(place_[i]);
      }
    }
    // `image`: the address in shared memory of the half of an image that has this warp's channels,
    // the same in all lanes.
    __device__ __forceinline__ unsigned load(unsigned image, int i) const {
      return *word(image + raw_[i]);
    }
    __device__ __forceinline__ void store(unsigned image, int i, float low, float high) const {
      *word(image + place_[i]) = pack_bf16(low, high);
    }

   private:
    static __device__ __forceinline__ unsigned* word(unsigned shared) {
      return static_cast<unsigned*>(__cvta_shared_to_generic(shared));
    }
    unsigned raw_[kRows], place_[kRows];
  };

  __device__ __forceinline__ int channel() const { return 32 * warp_ + 2 * (lane_ & 15); }

  // Rows past the end belong to the next sequence: this warp's channels of them become zeros, NaN
  // or not.
  __device__ __forceinline__ void clear_rows(unsigned char* record, int length) const {
    const int byte = 64 * warp_ + 16 * (lane_ & 3);
#pragma unroll
    for (int row = lane_ >> 2; row < kChunk; row += 8) {
      if (row < length) continue;
      unsigned char* const unit = record + image_offset(row, byte);
      for (const int image :
           {ChunkRecord::kKeyDecayed, ChunkRecord::kKeyRemaining, ChunkRecord::kQueryDecayed})
        *reinterpret_cast<uint4*>(unit + image) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void make_images(unsigned char* record,
                                              const GrowingTurn<kShape>& growing_turn, int length) {
    float (&squares)[kGroupWarps][2 * kChunk] = smem_.group[group_].squares[parity_][0];
    publish_squares(record, squares);
    const unsigned half_image =
        cute::cast_smem_ptr_to_uint(record) + (warp_ >> 1) * ChunkRecord::kHalfBytes;
    const unsigned growing_image = cute::cast_smem_ptr_to_uint(growing_turn.image(smem_)) +
                                   (warp_ >> 1) * ChunkRecord::kHalfImageBytes;
    __syncwarp();  // all lanes have published
    if (arrives(lane_)) Barrier::arrive(&smem_.squares[group_]);
    float log2_decay[kRows][2], total[2];
    sum_log2_decays(log2_decay, total, half_image, length);
    Barrier::wait(&smem_.squares[group_], parity_);
    stay_behind_wait();
    collect_norms(record, squares);
    growing_turn.wait_until_free(smem_);
    parity_ ^= 1;
    float4 k_scales, q_scales;  // of four tokens
    unsigned next_keys[2], next_queries[2];
    unsigned keys[2], queries[2];
    load_raw(next_keys, next_queries, half_image, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i % 2 == 0) {
        keys[0] = next_keys[0], keys[1] = next_keys[1];
        queries[0] = next_queries[0], queries[1] = next_queries[1];
        // Before anything is stored: the compiler could not move these loads over a store.
        if (i + 2 < kRows) load_raw(next_keys, next_queries, half_image, i + 2);
        __syncwarp();  // all lanes have loaded the two rows that are replaced now
      }
      const unsigned raw_key = keys[i % 2], raw_query = queries[i % 2];
      if (i % 4 == 0) {
        k_scales = inverse_norms_of(row_of(i));
        q_scales = inverse_norms_of(kChunk + row_of(i));
      }
      const float k_scale = of_four(k_scales, i % 4), q_scale = of_four(q_scales, i % 4);
      const float key[2] = {bf16_low(raw_key) * k_scale, bf16_high(raw_key) * k_scale};
      const float decay[2] = {exp2_approx(log2_decay[i][0]), exp2_approx(log2_decay[i][1])};
      const float growing[2] = {key[0] * exp2_approx(-log2_decay[i][0]),
                                key[1] * exp2_approx(-log2_decay[i][1])};
      pieces_.store(growing_image, i, growing[0], growing[1]);
      pieces_.store(half_image + ChunkRecord::kKeyRemaining, i, growing[0] * total[0],
                    growing[1] * total[1]);
      pieces_.store(half_image + ChunkRecord::kKeyDecayed, i, key[0] * -decay[0],
                    key[1] * -decay[1]);
      // In this order: the scale alone may be near 2^-100.
      pieces_.store(half_image + ChunkRecord::kQueryDecayed, i,
                    bf16_low(raw_query) * q_scale * decay[0],
                    bf16_high(raw_query) * q_scale * decay[1]);
    }
    if (half() == 0) {
      *reinterpret_cast<float2*>(record + ChunkRecord::kDecay + 4 * channel()) =
          make_float2(total[0], total[1]);
    }
  }

  // Of two rows.
  __device__ __forceinline__ void load_raw(unsigned (&keys)[2], unsigned (&queries)[2],
                                           unsigned half_image, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      keys[i] = pieces_.load(half_image + ChunkRecord::kKeyDecayed, first + i);
      queries[i] = pieces_.load(half_image + ChunkRecord::kQueryDecayed, first + i);
    }
  }

  // The decay of the chunk so far, and in `total` all of it, no longer as a logarithm.
  __device__ __forceinline__ void sum_log2_decays(float (&sums)[kRows][2], float (&total)[2],
                                                  unsigned half_image, int length) const {
    float sum[2][2] = {};  // of the first four tokens in this lane's order, and of the others
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned g = pieces_.load(half_image + ChunkRecord::kKeyRemaining, i);
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

  // Leaves 1 / sqrt(sum x^2 + 1e-6) of the rows of k and q for this warp: lane l < 16 that of row l
  // of k, lane 16 + l of row l of q.
  __device__ __forceinline__ void collect_norms(unsigned char* record,
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
    smem_.group[group_].inverse_norms[warp_][lane_] = inverse;
    __syncwarp();
  }
  // Of four rows, the first a multiple of four; those of q stand behind those of k.
  __device__ __forceinline__ float4 inverse_norms_of(int row) const {
    return *reinterpret_cast<const float4*>(&smem_.group[group_].inverse_norms[warp_][row]);
  }
  static __device__ __forceinline__ float of_four(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
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
    stay_behind_wait();
  }

  const ForwardParams& p_;
  FusedSmem<kShape>& smem_;
  ChunkWalk<kShape.cluster * kShape.groups, kShape.stages> walk_;
  const int group_, warp_, lane_;
  const Pieces pieces_;
  int parity_ = 0;
  int head_ = -1;  // of the gate
  Gate<2> gate_;
};

}  // namespace flash_kda::sm90
