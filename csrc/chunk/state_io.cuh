// The [V, K] state between global memory and accumulators: S[tile][n] is the [16 V x 8 K]
// accumulator of V rows 16 * tile .. and K columns 8 * n .. of the rows that a warp owns.
#pragma once

#include <cuda_bf16.h>

#include "chunk/slice.cuh"
#include "common/tile.cuh"

namespace flash_kda {

constexpr int kStateTiles = kHeadDim / 8;  // accumulators along K

// Neighbouring elements of a state as fp32, in one access when `kVectorised`.
template <class Element, bool kVectorised>
struct StatePair;

template <>
struct StatePair<float, true> {
  static __device__ __forceinline__ float2 load(const float* x) {
    return *reinterpret_cast<const float2*>(x);
  }
  static __device__ __forceinline__ void store(float* x, float a, float b) {
    *reinterpret_cast<float2*>(x) = make_float2(a, b);
  }
};
template <>
struct StatePair<float, false> {
  static __device__ __forceinline__ float2 load(const float* x) { return make_float2(x[0], x[1]); }
  static __device__ __forceinline__ void store(float* x, float a, float b) { x[0] = a, x[1] = b; }
};
template <>
struct StatePair<__nv_bfloat16, true> {
  static __device__ __forceinline__ float2 load(const __nv_bfloat16* x) {
    const unsigned packed = *reinterpret_cast<const unsigned*>(x);
    return make_float2(bf16_low(packed), bf16_high(packed));
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* x, float a, float b) {
    *reinterpret_cast<unsigned*>(x) = pack_bf16(a, b);
  }
};
template <>
struct StatePair<__nv_bfloat16, false> {
  static __device__ __forceinline__ float2 load(const __nv_bfloat16* x) {
    return make_float2(__bfloat162float(x[0]), __bfloat162float(x[1]));
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* x, float a, float b) {
    x[0] = __float2bfloat16(a), x[1] = __float2bfloat16(b);
  }
};

// function(tile, n, half, offset): the pair s[tile][n][2 * half ..] lies `offset` elements after
// the warp's first V row.
template <int kTiles, class Function>
__device__ __forceinline__ void for_each_state_pair(int lane, Function function) {
  const int row = lane >> 2, column = 2 * (lane & 3);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kStateTiles; ++n) {
        function(tile, n, half, (16 * tile + row + 8 * half) * kHeadDim + 8 * n + column);
      }
    }
  }
}

template <class Element, bool kVectorised, int kTiles>
__device__ __forceinline__ void load_state_as(float (&s)[kTiles][kStateTiles][4], const void* base,
                                              int lane) {
  __builtin_assume(__isGlobal(base));
  for_each_state_pair<kTiles>(lane, [&](int tile, int n, int half, int offset) {
    const float2 pair =
        StatePair<Element, kVectorised>::load(static_cast<const Element*>(base) + offset);
    s[tile][n][2 * half] = pair.x;
    s[tile][n][2 * half + 1] = pair.y;
  });
}

template <class Element, bool kVectorised, int kTiles>
__device__ __forceinline__ void store_state_as(const float (&s)[kTiles][kStateTiles][4], void* base,
                                               int lane) {
  __builtin_assume(__isGlobal(base));
  for_each_state_pair<kTiles>(lane, [&](int tile, int n, int half, int offset) {
    StatePair<Element, kVectorised>::store(static_cast<Element*>(base) + offset,
                                           s[tile][n][2 * half], s[tile][n][2 * half + 1]);
  });
}

// From the warp's first V row; an absent state is zero.
template <int kTiles>
__device__ __forceinline__ void load_state(float (&s)[kTiles][kStateTiles][4],
                                           const StateAddress& from, int lane) {
  if (from.dtype == kAbsent) {
    for_each_state_pair<kTiles>(lane, [&](int tile, int n, int half, int) {
      s[tile][n][2 * half] = s[tile][n][2 * half + 1] = 0.0f;
    });
  } else if (from.dtype == kFloat32) {
    if (from.vectorised) {
      load_state_as<float, true>(s, from.base, lane);
    } else {
      load_state_as<float, false>(s, from.base, lane);
    }
  } else if (from.vectorised) {
    load_state_as<__nv_bfloat16, true>(s, from.base, lane);
  } else {
    load_state_as<__nv_bfloat16, false>(s, from.base, lane);
  }
}

// The identity, of which this warp owns the rows from `row` on.
template <int kTiles>
__device__ __forceinline__ void load_identity(float (&s)[kTiles][kStateTiles][4], int row,
                                              int lane) {
  for_each_state_pair<kTiles>(lane, [&](int tile, int n, int half, int offset) {
    const int column = offset % kHeadDim, own_row = row + offset / kHeadDim;
    s[tile][n][2 * half] = own_row == column ? 1.0f : 0.0f;
    s[tile][n][2 * half + 1] = own_row == column + 1 ? 1.0f : 0.0f;
  });
}

template <int kTiles>
__device__ __forceinline__ void store_state(const float (&s)[kTiles][kStateTiles][4],
                                            const StateAddress& to, int lane) {
  if (to.dtype == kAbsent) return;
  if (to.dtype == kFloat32) {
    if (to.vectorised) {
      store_state_as<float, true>(s, to.base, lane);
    } else {
      store_state_as<float, false>(s, to.base, lane);
    }
  } else if (to.vectorised) {
    store_state_as<__nv_bfloat16, true>(s, to.base, lane);
  } else {
    store_state_as<__nv_bfloat16, false>(s, to.base, lane);
  }
}

// The [16 V x 8 K] accumulator of K columns 8 * n .. alone.
__device__ __forceinline__ void store_state_tile(const float (&s)[4], int n, const StateAddress& to,
                                                 int lane) {
  if (to.dtype == kAbsent) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int offset = ((lane >> 2) + 8 * half) * kHeadDim + 8 * n + 2 * (lane & 3);
    const float low = s[2 * half], high = s[2 * half + 1];
    if (to.dtype == kFloat32) {
      float* const x = static_cast<float*>(to.base) + offset;
      if (to.vectorised) {
        StatePair<float, true>::store(x, low, high);
      } else {
        StatePair<float, false>::store(x, low, high);
      }
    } else {
      __nv_bfloat16* const x = static_cast<__nv_bfloat16*>(to.base) + offset;
      if (to.vectorised) {
        StatePair<__nv_bfloat16, true>::store(x, low, high);
      } else {
        StatePair<__nv_bfloat16, false>::store(x, low, high);
      }
    }
  }
}

}  // namespace flash_kda
