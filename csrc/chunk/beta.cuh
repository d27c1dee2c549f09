// Beta of a chunk, one token a lane.
#pragma once

#include "common/gate.cuh"
#include "common/sequences.cuh"

namespace flash_kda {

// The raw bits of beta of token `lane`, to be understood by beta_of() once they are needed: here
// they would be waited for.
__device__ __forceinline__ unsigned load_raw_beta(const ForwardParams& p, const TokenRange& tokens,
                                                  int head, int lane) {
  if (lane >= tokens.length) return 0;
  const long long index = tokens.batch * p.beta_stride.batch +
                          (tokens.begin + lane) * p.beta_stride.token + head * p.beta_stride.head;
  return p.beta_dtype == kFloat32 ? static_cast<const unsigned*>(p.beta)[index]
                                  : static_cast<const unsigned short*>(p.beta)[index];
}

// b of token `lane`; 0 past the end.
__device__ __forceinline__ float beta_of(const ForwardParams& p, unsigned raw, int length,
                                         int lane) {
  const float beta = __uint_as_float(p.beta_dtype == kFloat32 ? raw : raw << 16);
  return lane >= length ? 0.0f : p.beta_is_logits ? sigmoid(beta) : beta;
}

}  // namespace flash_kda
