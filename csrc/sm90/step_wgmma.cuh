// A step of the state in one warpgroup, by wgmma, through one chunk or two: 64 rows of V, a warp 16
// of them.
//
// The same products as in chunk/step_mma.cuh, with the same fragments: an accumulator of wgmma is
// one of mma.sync in each warp, and rounded to bf16 it is the A operand of the next product. What
// differs is that B operands are read from shared memory by the tensor cores themselves. K~ and Q~
// stand one after the other in the record, so that one product serves both.
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
template <class Register, int kSize>
__device__ __forceinline__ void fence_registers(Register (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(d[i]);
}

// wgmma with A in registers and B of so many columns.
template <int kColumns>
struct Wgmma;
template <>
struct Wgmma<16> {
  using Op = gmma::MMA_64x16x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct Wgmma<32> {
  using Op = gmma::MMA_64x32x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct Wgmma<64> {
  using Op = gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};

template <int kTokensOfRecord, bool kWithOutputs>
class WgmmaStep {
 public:
  static constexpr int kTiles = 1;
  static constexpr int kTokens = kTokensOfRecord;
  static constexpr bool kOutputs = kWithOutputs;
  static constexpr bool kByAddress = true;
  static constexpr bool kFours = kTokensOfRecord == kChunk;  // see chunk/state_io.cuh

  __device__ __forceinline__ explicit WgmmaStep(int lane)
      : decay_(Layout::kDecay + 16 * (lane & 3)) {}

  // As MmaStep::advance(). All warps of the warpgroup call it together.
  template <class Acquire, class Release, class Value, class Early, class Late>
  __device__ __forceinline__ void advance(float (&state)[1][kStateTiles][4],
                                          float (&o)[1][kTokens / 8][4], Acquire acquire,
                                          Release release, Value value, Early early,
                                          Late late) const {
    using namespace cute;
    constexpr int kSums = kTokens / 2;  // a lane's of 16 rows and the tokens
    auto& s = reinterpret_cast<float (&)[4 * kStateTiles]>(state);
    unsigned a[2 * kStateTiles];
#pragma unroll
    for (int i = 0; i < 2 * kStateTiles; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);

    // -S K~ in the first half, S Q~ in the other, to which P U is added. All of it takes part in
    // the last product, too: the compiler then keeps it out of the state's registers, and need not
    // move those back and forth.
    float xo[kOutputs ? 2 * kSums : kSums];
    const unsigned record = acquire();
    // Without the CTA's rank, which stands above the offset in a cluster's addresses. Descriptors
    // have to be the same in all lanes, and where the compiler does not know that they are it moves
    // each word of each by itself. So this comes from one lane.
    const unsigned long long base = __shfl_sync(kWarpMask, record >> 4 & 0x3fff, 0);
    // Rows of 8 tokens are 1024 bytes apart; 16 channels are 32 bytes of a row.
    const unsigned long long decayed =
        base + (Layout::kKeyDecayed >> 4) | operand_layout(kSwizzle128, 16, 1024);
    using Square = typename Wgmma<kTokens>::Op;
    using Both = typename Wgmma<kOutputs ? 2 * kTokens : kTokens>::Op;
    fence_registers(a);
    fence_registers(xo);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      multiply_add<Both>(xo, a + 4 * k, decayed + k % 4 * 2 + k / 4 * (Layout::kHalfBytes >> 4),
                         k == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One);
    }
    warpgroup_commit_batch();
    // b V is added afterwards: read before, V would hold the first product up.
    float v[1][kTokens / 8][4];
    value(v);
    float4 beta[kTokens / 16];
    load_betas(beta, record);
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) scale_columns(v[0][2 * i], v[0][2 * i + 1], beta[i]);
    float4 decay[kStateTiles / 4];
    load_decays(decay, record, 0);
    decay_half(s, 0, decay);
    warpgroup_wait<0>();
    fence_registers(xo);

    unsigned u[kSums / 2];
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const float* const pair = &v[0][i >> 1][2 * (i & 1)];
      const float4& b = beta[i / 4];
      const bool left = i % 4 < 2;
      u[i] = pack_bf16(fmaf(xo[2 * i], left ? b.x : b.z, pair[0]),
                       fmaf(xo[2 * i + 1], left ? b.y : b.w, pair[1]));
    }
    float update[kSums];
    // 8 x 8 blocks of 128 bytes: the next along a row, the next row of blocks.
    const unsigned long long square = operand_layout(kSwizzleNone, 128, 256);
    fence_registers(u);
    fence_registers(update);
    warpgroup_arrive();
    multiply_chunks<Square>(update, u, base + (Layout::kInverse >> 4) | square,
                            Layout::kColumnStride, gmma::ScaleOut::Zero);
    warpgroup_commit_batch();
    load_decays(decay, record, 1);
    early();  // before the last product is started, so that late() has what it needs
    decay_half(s, 1, decay);
    warpgroup_wait<0>();
    fence_registers(update);

#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) u[i] = pack_bf16(update[2 * i], update[2 * i + 1]);
    fence_registers(u);
    fence_registers(s);
    fence_registers(xo);
    warpgroup_arrive();
    // K- is stored token by token: 64 channels of a token, the next 64, the next 8 tokens.
    multiply_chunks<gmma::MMA_64x128x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::MN>>(
        s, u,
        base + (Layout::kKeyRemaining >> 4) | operand_layout(kSwizzle128, Layout::kHalfBytes, 1024),
        128 * kChunk, gmma::ScaleOut::One);
    if constexpr (kOutputs) {
      // Tm U in the first half, which nobody needs.
      multiply_chunks<Both>(xo, u, base + (Layout::kInverse >> 4) | square, Layout::kColumnStride,
                            gmma::ScaleOut::One);
    }
    warpgroup_commit_batch();
    late();
    warpgroup_wait<0>();
    fence_registers(s);
    fence_registers(xo);
    // The products are done, and the decays and b in use: nothing reads the record any more.
    release();
    if constexpr (kOutputs) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[0][i >> 2][i & 3] = xo[kSums + i];
    }
  }

 private:
  using Layout = Record<kTokens>;

  // d += u b over all tokens; `chunk_bytes` from those of one chunk in b to the next one's.
  template <class Op, int kSize>
  static __device__ __forceinline__ void multiply_chunks(float (&d)[kSize], const unsigned* u,
                                                         unsigned long long b, int chunk_bytes,
                                                         gmma::ScaleOut scale) {
#pragma unroll
    for (int i = 0; i < kTokens / kChunk; ++i) {
      multiply_add<Op>(d, u + 4 * i, b + i * (chunk_bytes >> 4),
                       i == 0 ? scale : gmma::ScaleOut::One);
    }
  }

  // Of half of the channels, which are decayed while a product runs, and not earlier: more loads
  // beside the first product, which reads shared memory, too, hold it up.
  __device__ __forceinline__ void load_decays(float4 (&decay)[kStateTiles / 4], unsigned record,
                                              int half) const {
#pragma unroll
    for (int i = 0; i < kStateTiles / 4; ++i)
      decay[i] = load_after_products(record + decay_ + 64 * (kStateTiles / 4 * half + i));
  }
  // Of all tokens.
  __device__ __forceinline__ void load_betas(float4 (&beta)[kTokens / 16], unsigned record) const {
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i)
      beta[i] = load_after_products(record + decay_ + (Layout::kBeta - Layout::kDecay) + 64 * i);
  }
  __device__ __forceinline__ void decay_half(float (&s)[4 * kStateTiles], int half,
                                             const float4 (&decay)[kStateTiles / 4]) const {
#pragma unroll
    for (int i = 0; i < kStateTiles / 4; ++i) {
      float* const d = s + 8 * (kStateTiles / 4 * half + i);
      scale_columns(reinterpret_cast<float (&)[4]>(d[0]), reinterpret_cast<float (&)[4]>(d[4]),
                    decay[i]);
    }
  }

  // Volatile, so that it stays behind the products above: a multiplication that waits for its
  // decay among them would hold up those to come. In steps of one chunk ptxas, too, is kept from
  // changing their order, which makes them longer; steps of two have not been tried.
  static __device__ __forceinline__ float4 load_after_products(unsigned shared) {
    float4 x;
    if constexpr (kTokens == kChunk) {
      asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                   : "r"(shared));
    } else {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                   : "r"(shared));
    }
    return x;
  }

  int decay_;  // byte offset of this lane; its betas lie as far behind the record's first
};

}  // namespace flash_kda::sm90
