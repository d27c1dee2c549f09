// The [V, K] state between global memory and accumulators: S[tile][n] is the [16 V x 8 K]
// accumulator of V rows 16 * tile .. and K columns 8 * n .. of the rows that a warp owns.
//
// With kFours the K columns are permuted within each 16, as the images of the record must be too
// (channel_position() in common/tile.cuh): what a lane has of two neighbouring accumulators are
// then four neighbouring channels and not twice two, and half as many accesses store a state.
#pragma once

#include <cuda_bf16.h>

#include "chunk/slice.cuh"
#include "common/tile.cuh"

namespace flash_kda {

constexpr int kStateTiles = kHeadDim / 8;  // accumulators along K

// Four neighbouring elements of a state as fp32, or two, x and y, in one access when `kVectorised`.
template <bool kFours, bool kVectorised>
__device__ __forceinline__ float4 load_elements(const float* x) {
  if constexpr (kFours && kVectorised) {
    // Not in one access, see moved().
    float4 four;
    load_pair<0>(four.x, four.y, x);
    load_pair<8>(four.z, four.w, x);
    return four;
  } else if constexpr (kVectorised) {
    const float2 pair = *reinterpret_cast<const float2*>(x);
    return make_float4(pair.x, pair.y, 0.0f, 0.0f);
  } else {
    return make_float4(x[0], x[1], kFours ? x[2] : 0.0f, kFours ? x[3] : 0.0f);
  }
}
template <bool kFours, bool kVectorised>
__device__ __forceinline__ float4 load_elements(const __nv_bfloat16* x) {
  if constexpr (kFours && kVectorised) {
    const uint2 packed = *reinterpret_cast<const uint2*>(x);
    return make_float4(bf16_low(packed.x), bf16_high(packed.x), bf16_low(packed.y),
                       bf16_high(packed.y));
  } else if constexpr (kVectorised) {
    const unsigned packed = *reinterpret_cast<const unsigned*>(x);
    return make_float4(bf16_low(packed), bf16_high(packed), 0.0f, 0.0f);
  } else {
    return make_float4(__bfloat162float(x[0]), __bfloat162float(x[1]),
                       kFours ? __bfloat162float(x[2]) : 0.0f,
                       kFours ? __bfloat162float(x[3]) : 0.0f);
  }
}
template <bool kFours, bool kVectorised>
__device__ __forceinline__ void store_elements(float* x, float4 from) {
  if constexpr (kFours && kVectorised) {
    *reinterpret_cast<float4*>(x) = from;
  } else if constexpr (kVectorised) {
    *reinterpret_cast<float2*>(x) = make_float2(from.x, from.y);
  } else {
    x[0] = from.x, x[1] = from.y;
    if constexpr (kFours) x[2] = from.z, x[3] = from.w;
  }
}
template <bool kFours, bool kVectorised>
__device__ __forceinline__ void store_elements(__nv_bfloat16* x, float4 from) {
  if constexpr (kFours && kVectorised) {
    *reinterpret_cast<uint2*>(x) = make_uint2(pack_bf16(from.x, from.y), pack_bf16(from.z, from.w));
  } else if constexpr (kVectorised) {
    *reinterpret_cast<unsigned*>(x) = pack_bf16(from.x, from.y);
  } else {
    x[0] = __float2bfloat16(from.x), x[1] = __float2bfloat16(from.y);
    if constexpr (kFours) x[2] = __float2bfloat16(from.z), x[3] = __float2bfloat16(from.w);
  }
}

// In other registers. An access of four elements needs four registers in a row; the accumulators of
// wgmma are in a row, too, but not in this one. Without this the compiler moves them to and fro in
// the loop over chunks, and with this here and at loads it does so again. Grids have one layer, so
// what is added is zero, which the compiler does not know.
__device__ __forceinline__ float4 moved(float4 x) {
  unsigned zero;
  asm("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
  const auto move = [&](float y) { return __uint_as_float(__float_as_uint(y) | zero); };
  return make_float4(move(x.x), move(x.y), move(x.z), move(x.w));
}

// function(tile, n, half, offset): the elements from s[tile][n][2 * half] on lie `offset` elements
// after the warp's first V row; with kFours those from s[tile][n + 1][2 * half] on behind them.
template <bool kFours, int kTiles, class Function>
__device__ __forceinline__ void for_each_state_piece(int lane, Function function) {
  constexpr int kAccumulators = kFours ? 2 : 1;
  const int row = lane >> 2, column = 2 * kAccumulators * (lane & 3);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kStateTiles; n += kAccumulators) {
        function(tile, n, half, (16 * tile + row + 8 * half) * kHeadDim + 8 * n + column);
      }
    }
  }
}

template <bool kFours, class Element, bool kVectorised, int kTiles>
__device__ __forceinline__ void load_state_as(float (&s)[kTiles][kStateTiles][4], const void* base,
                                              int lane) {
  __builtin_assume(__isGlobal(base));
  for_each_state_piece<kFours, kTiles>(lane, [&](int tile, int n, int half, int offset) {
    float4 piece = load_elements<kFours, kVectorised>(static_cast<const Element*>(base) + offset);
    s[tile][n][2 * half] = piece.x;
    s[tile][n][2 * half + 1] = piece.y;
    if constexpr (kFours) {
      s[tile][n + 1][2 * half] = piece.z;
      s[tile][n + 1][2 * half + 1] = piece.w;
    }
  });
}

// Of two neighbouring accumulators a lane has a pair of channels each. Neighbouring lanes exchange
// pairs, so that an even one has four neighbouring channels of the first accumulator, an odd one of
// the second, and stores them.
__device__ __forceinline__ void store_exchanged(float* to, float2 first, float2 second, bool odd) {
  const float x = __shfl_xor_sync(kWarpMask, odd ? first.x : second.x, 1);
  const float y = __shfl_xor_sync(kWarpMask, odd ? first.y : second.y, 1);
  *reinterpret_cast<float4*>(to) =
      make_float4(odd ? x : first.x, odd ? y : first.y, odd ? second.x : x, odd ? second.y : y);
}
__device__ __forceinline__ void store_exchanged(__nv_bfloat16* to, float2 first, float2 second,
                                                bool odd) {
  const unsigned a = pack_bf16(first.x, first.y), b = pack_bf16(second.x, second.y);
  const unsigned x = __shfl_xor_sync(kWarpMask, odd ? a : b, 1);
  *reinterpret_cast<uint2*>(to) = odd ? make_uint2(x, b) : make_uint2(a, x);
}

// Where channels are not permuted: half as many accesses as by pairs, in bf16 in half the time.
template <class Element, int kTiles>
__device__ __forceinline__ void store_state_exchanged(const float (&s)[kTiles][kStateTiles][4],
                                                      Element* base, int lane) {
  const bool odd = lane & 1;
  Element* const to = base + (lane >> 2) * kHeadDim + 8 * (lane & 1) + 4 * (lane >> 1 & 1);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kStateTiles; n += 2) {
        const float* const first = &s[tile][n][2 * half];
        const float* const second = &s[tile][n + 1][2 * half];
        store_exchanged(to + (16 * tile + 8 * half) * kHeadDim + 8 * n,
                        make_float2(first[0], first[1]), make_float2(second[0], second[1]), odd);
      }
    }
  }
}

template <bool kFours, class Element, bool kVectorised, int kTiles>
__device__ __forceinline__ void store_state_as(const float (&s)[kTiles][kStateTiles][4], void* base,
                                               int lane) {
  __builtin_assume(__isGlobal(base));
  if constexpr (kVectorised && !kFours) {
    store_state_exchanged(s, static_cast<Element*>(base), lane);
  } else {
    for_each_state_piece<kFours, kTiles>(lane, [&](int tile, int n, int half, int offset) {
      const int next = kFours ? n + 1 : n;
      float4 piece = make_float4(s[tile][n][2 * half], s[tile][n][2 * half + 1],
                                 s[tile][next][2 * half], s[tile][next][2 * half + 1]);
      if constexpr (kFours) piece = moved(piece);
      store_elements<kFours, kVectorised>(static_cast<Element*>(base) + offset, piece);
    });
  }
}

// From the warp's first V row; an absent state is zero.
template <bool kFours = false, int kTiles>
__device__ __forceinline__ void load_state(float (&s)[kTiles][kStateTiles][4],
                                           const StateAddress& from, int lane) {
  if (from.dtype == kAbsent) {
    for_each_state_piece<false, kTiles>(lane, [&](int tile, int n, int half, int) {
      s[tile][n][2 * half] = s[tile][n][2 * half + 1] = 0.0f;
    });
  } else if (from.dtype == kFloat32) {
    if (from.vectorised) {
      load_state_as<kFours, float, true>(s, from.base, lane);
    } else {
      load_state_as<kFours, float, false>(s, from.base, lane);
    }
  } else if (from.vectorised) {
    load_state_as<kFours, __nv_bfloat16, true>(s, from.base, lane);
  } else {
    load_state_as<kFours, __nv_bfloat16, false>(s, from.base, lane);
  }
}

// The identity, of which this warp owns the rows from `row` on.
template <int kTiles>
__device__ __forceinline__ void load_identity(float (&s)[kTiles][kStateTiles][4], int row,
                                              int lane) {
  for_each_state_piece<false, kTiles>(lane, [&](int tile, int n, int half, int offset) {
    const int column = offset % kHeadDim, own_row = row + offset / kHeadDim;
    s[tile][n][2 * half] = own_row == column ? 1.0f : 0.0f;
    s[tile][n][2 * half + 1] = own_row == column + 1 ? 1.0f : 0.0f;
  });
}

template <bool kFours = false, int kTiles>
__device__ __forceinline__ void store_state(const float (&s)[kTiles][kStateTiles][4],
                                            const StateAddress& to, int lane) {
  if (to.dtype == kAbsent) return;
  if (to.dtype == kFloat32) {
    if (to.vectorised) {
      store_state_as<kFours, float, true>(s, to.base, lane);
    } else {
      store_state_as<kFours, float, false>(s, to.base, lane);
    }
  } else if (to.vectorised) {
    store_state_as<kFours, __nv_bfloat16, true>(s, to.base, lane);
  } else {
    store_state_as<kFours, __nv_bfloat16, false>(s, to.base, lane);
  }
}

// The [16 V x 8 K] accumulator of K columns 8 * n .. alone.
__device__ __forceinline__ void store_state_tile(const float (&s)[4], int n, const StateAddress& to,
                                                 int lane) {
  if (to.dtype == kAbsent) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int offset = ((lane >> 2) + 8 * half) * kHeadDim + 8 * n + 2 * (lane & 3);
    const float4 piece = make_float4(s[2 * half], s[2 * half + 1], 0.0f, 0.0f);
    if (to.dtype == kFloat32) {
      float* const x = static_cast<float*>(to.base) + offset;
      if (to.vectorised) {
        store_elements<false, true>(x, piece);
      } else {
        store_elements<false, false>(x, piece);
      }
    } else {
      __nv_bfloat16* const x = static_cast<__nv_bfloat16*>(to.base) + offset;
      if (to.vectorised) {
        store_elements<false, true>(x, piece);
      } else {
        store_elements<false, false>(x, piece);
      }
    }
  }
}

}  // namespace flash_kda
