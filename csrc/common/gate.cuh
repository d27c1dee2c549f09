// Scalars of the definition: the gate, beta, and the parameters that may arrive in any float type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/ptx.cuh"
#include "params.h"

namespace flash_kda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargest = 0x1.fffffep127f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class Element, int kCount>
__device__ __forceinline__ void load_as(float (&values)[kCount], const void* base,
                                        long long index) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = to_float(static_cast<const Element*>(base)[index + i]);
}

// kCount neighbouring elements of an array of any float type, in element-wise accesses: parameters
// come with no alignment beyond their type's.
template <int kCount>
__device__ __forceinline__ void load_any(float (&values)[kCount], const void* base, long long index,
                                         int dtype) {
  switch (dtype) {
    case kFloat32:
      return load_as<float>(values, base, index);
    case kBFloat16:
      return load_as<__nv_bfloat16>(values, base, index);
    case kFloat16:
      return load_as<__half>(values, base, index);
    default:
      return load_as<double>(values, base, index);
  }
}

__device__ __forceinline__ float load_any(const void* base, long long index, int dtype) {
  float value[1];
  load_any(value, base, index, dtype);
  return value[0];
}

__device__ __forceinline__ float sigmoid(float x) { return sigmoid_of_negated_log2(-kLog2E * x); }

// The log2-decay of a token in one channel is log2_lower_bound * sigmoid(exp(A_log) * (g +
// dt_bias)). With slope = -exp(A_log) * log2(e) the sigmoid is 1 / (1 + 2^(slope * (g + dt_bias))).
// The bias is added before the slope multiplies: the two may cancel, and slope may be large. This
// is the gate of kCount neighbouring channels.
template <int kCount>
struct Gate {
  float slope;
  float bias[kCount];

  Gate() = default;
  __device__ __forceinline__ Gate(const ForwardParams& p, int head, int channel) : slope(-kLog2E) {
    if (p.a_log_dtype != kAbsent) {
      slope *= expf(load_any(p.a_log, head, p.a_log_dtype));
      // Finite, so that slope * 0 is 0; this steep the gate is a step already, but for arguments of
      // less than 2^-123. NaN stays NaN.
      if (slope < -kLargest) slope = -kLargest;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) bias[i] = 0.0f;
    if (p.dt_bias_dtype != kAbsent) {
      load_any(bias, p.dt_bias, static_cast<long long>(head) * kHeadDim + channel, p.dt_bias_dtype);
      // It may be infinite, from fp64. Where the slope is zero it does not matter; NaN stays NaN.
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (slope == 0.0f && bias[i] == bias[i]) bias[i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ float openness(int i, float g) const {
    return sigmoid_of_negated_log2(slope * (g + bias[i]));
  }
};

}  // namespace flash_kda
