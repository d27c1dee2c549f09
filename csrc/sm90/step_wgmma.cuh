// A chunk's step of the state in one warpgroup, by wgmma: 64 rows of V, a warp 16 of them.
//
// The same products as in chunk/step_mma.cuh, with the same fragments: an accumulator of wgmma is
// one of mma.sync in each warp, and rounded to bf16 it is the A operand of the next product. What
// differs is that B operands are read from shared memory by the tensor cores themselves. K~ and Q~
// stand one after the other in the record, so that one product of 32 columns serves both.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/numeric/integer_sequence.hpp>

#include "chunk/state_io.cuh"
#include "common/tile.cuh"

namespace flash_kda::sm90 {

namespace gmma = cute::SM90::GMMA;

// How wgmma finds an operand in shared memory. Addresses and distances are in units of 16 bytes.
enum Swizzle : unsigned long long { kSwizzleNone = 0, kSwizzle128 = 1 };

constexpr unsigned long long operand_layout(Swizzle swizzle, int leading_bytes, int stride_bytes) {
  return static_cast<unsigned long long>(swizzle) << 62 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 |
         static_cast<unsigned long long>(leading_bytes >> 4) << 16;
}

// d += a b. `Op` is one of CuTe's wgmma with A in registers.
template <class Op, int kSize, size_t... kIndex>
__device__ __forceinline__ void multiply_add(float (&d)[kSize], const unsigned* a,
                                             unsigned long long b, gmma::ScaleOut scale,
                                             cute::index_sequence<kIndex...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
}
template <class Op, int kSize>
__device__ __forceinline__ void multiply_add(float (&d)[kSize], const unsigned* a,
                                             unsigned long long b,
                                             gmma::ScaleOut scale = gmma::ScaleOut::One) {
  multiply_add<Op>(d, a, b, scale, cute::make_index_sequence<kSize>());
}

// The compiler may not move uses of these registers across.
template <int kSize>
__device__ __forceinline__ void fence_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(d[i]);
}

template <bool kWithOutputs>
class WgmmaStep {
 public:
  static constexpr int kTiles = 1;
  static constexpr bool kOutputs = kWithOutputs;

  __device__ __forceinline__ explicit WgmmaStep(int lane)
      : decay_(ChunkRecord::kDecay + 16 * (lane & 3)) {}

  // As MmaStep::advance(). All warps of the warpgroup call it together.
  template <class Acquire, class Overlap>
  __device__ __forceinline__ void advance(float (&state)[1][kStateTiles][4], float (&x)[1][2][4],
                                          float (&o)[1][2][4], Acquire acquire,
                                          Overlap overlap) const {
    using namespace cute;
    constexpr auto kK = gmma::Major::K;
    auto& s = reinterpret_cast<float (&)[4 * kStateTiles]>(state);
    unsigned a[2 * kStateTiles];
#pragma unroll
    for (int i = 0; i < 2 * kStateTiles; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);

    // V - S K~ in the first eight, S Q~ in the others.
    float xo[kOutputs ? 16 : 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) xo[i] = x[0][i >> 2][i & 3];
    if constexpr (kOutputs) {
#pragma unroll
      for (int i = 8; i < 16; ++i) xo[i] = 0.0f;
    }
    const unsigned char* const record = acquire();
    // Without the CTA's rank, which stands above the offset in a cluster's addresses.
    const unsigned long long base = cast_smem_ptr_to_uint(record) >> 4 & 0x3fff;
    // Rows of 8 tokens are 1024 bytes apart; 16 channels are 32 bytes of a row.
    const unsigned long long decayed =
        base + (ChunkRecord::kKeyDecayed >> 4) | operand_layout(kSwizzle128, 16, 1024);
    using Square = gmma::MMA_64x16x16_F32BF16BF16_RS<kK, kK>;
    using Both = cute::conditional_t<kOutputs, gmma::MMA_64x32x16_F32BF16BF16_RS<kK, kK>, Square>;
    fence_registers(xo);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      multiply_add<Both>(xo, a + 4 * k,
                         decayed + k % 4 * 2 + k / 4 * (ChunkRecord::kHalfBytes >> 4));
    }
    warpgroup_commit_batch();
#pragma unroll
    for (int n = 0; n < kStateTiles / 2; ++n) {
      const float4 decay = load_after_products(record + decay_ + 64 * n);
      float* const d = s + 8 * n;
      d[0] *= decay.x, d[1] *= decay.y, d[2] *= decay.x, d[3] *= decay.y;
      d[4] *= decay.z, d[5] *= decay.w, d[6] *= decay.z, d[7] *= decay.w;
    }
    warpgroup_wait<0>();
    fence_registers(xo);

    unsigned u[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = pack_bf16(xo[2 * i], xo[2 * i + 1]);
    float update[8];
    // 8 x 8 blocks of 128 bytes: the next along a row, the next row of blocks.
    const unsigned long long square = operand_layout(kSwizzleNone, 128, 256);
    fence_registers(update);
    warpgroup_arrive();
    multiply_add<Square>(update, u, base + (ChunkRecord::kInverse >> 4) | square,
                         gmma::ScaleOut::Zero);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    fence_registers(update);

#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = pack_bf16(update[2 * i], update[2 * i + 1]);
    // Its own sum: accumulators that are part of others' would make the compiler serialize.
    float within[8];
    fence_registers(s);
    fence_registers(within);
    warpgroup_arrive();
    // K- is stored token by token: 64 channels of a token, the next 64, the next 8 tokens.
    multiply_add<gmma::MMA_64x128x16_F32BF16BF16_RS<kK, gmma::Major::MN>>(
        s, u,
        base + (ChunkRecord::kKeyRemaining >> 4) |
            operand_layout(kSwizzle128, ChunkRecord::kHalfBytes, 1024));
    if constexpr (kOutputs) {
      multiply_add<Square>(within, u, base + (ChunkRecord::kScores >> 4) | square,
                           gmma::ScaleOut::Zero);
    }
    warpgroup_commit_batch();
    overlap();
    warpgroup_wait<0>();
    fence_registers(s);
    fence_registers(within);
    if constexpr (kOutputs) {
#pragma unroll
      for (int i = 0; i < 8; ++i) o[0][i >> 2][i & 3] = xo[8 + i] + within[i];
    }
  }

 private:
  // Volatile, so that it stays behind the products above: a multiplication that waits for its
  // decay among them would hold up those to come.
  static __device__ __forceinline__ float4 load_after_products(const unsigned char* shared) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(cute::cast_smem_ptr_to_uint(shared)));
    return x;
  }

  int decay_;  // byte offset of this lane
};

}  // namespace flash_kda::sm90
