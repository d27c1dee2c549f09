// The state between the two chunks of a pair, for a checkpoint there: one warp's rows of it, by
// mma.sync. The chain's state and its place in the ring stay as they are.
#pragma once

#include "chunk/chain.cuh"
#include "common/tile.cuh"

namespace flash_kda::sm90 {

// `middle`: a MiddleRecord of the pair to come, in global memory.
template <class Chain>
__device__ __forceinline__ void store_between(const Chain& chain,
                                              const float (&s)[1][kStateTiles][4],
                                              const unsigned char* middle, const StateAddress& to,
                                              int lane) {
  static_assert(Chain::kTokens == kPair && Chain::kTiles == 1);
  using Layout = PairRecord;
  const unsigned char* const record = chain.next_record();
  float x[1][kPair / 8][4];
  chain.next_value(x);

  // X = (V - S K~) diag(b) of the first chunk: K~ is stored negated.
  const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n) {
    const Fragment4 key = load_matrices(record + Layout::kKeyDecayed +
                                        image_offset(row, 32 * n + 16 * half, Layout::kHalfBytes));
    const Fragment4 state = as_operand(s[0][2 * n], s[0][2 * n + 1]);
    mma(x[0][0], state, key.x[0], key.x[1]);
    mma(x[0][1], state, key.x[2], key.x[3]);
  }
  scale_columns(x[0][0], x[0][1],
                *reinterpret_cast<const float4*>(record + Layout::kBeta + 16 * (lane & 3)));
  // U = Tm X
  const Fragment4 inverse =
      load_matrices(record + Layout::kInverse + square_offset<kPair>(row, 8 * half));
  float update[2][4] = {};
  const Fragment4 operand = as_operand(x[0][0], x[0][1]);
  mma(update[0], operand, inverse.x[0], inverse.x[1]);
  mma(update[1], operand, inverse.x[2], inverse.x[3]);
  const Fragment4 u = as_operand(update[0], update[1]);

  // S <- gamma S + K-^T U, eight channels at a time: there are no registers for two states.
  const auto* const keys =
      reinterpret_cast<const unsigned short*>(middle + MiddleRecord::kKeyRemaining);
  const auto* const decays = reinterpret_cast<const float*>(middle + MiddleRecord::kDecay);
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
    const float2 decay = *reinterpret_cast<const float2*>(decays + 8 * n + 2 * (lane & 3));
    float after[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) after[i] = s[0][n][i] * (i & 1 ? decay.y : decay.x);
    // Of tokens 2c, 2c + 1 and the same + 8, channel r: the operand's columns.
    const unsigned short* const key = keys + 2 * (lane & 3) * kHeadDim + 8 * n + (lane >> 2);
    mma(after, u, key[0] | key[kHeadDim] << 16, key[8 * kHeadDim] | key[9 * kHeadDim] << 16);
    store_state_tile(after, n, to, lane);
  }
}

}  // namespace flash_kda::sm90
