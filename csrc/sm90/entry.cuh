// Entry points of the Hopper family. host/plan.cpp knows their launch shapes.
#pragma once

#include "sm90/fused.cuh"
#include "sm90/prepare_pairs.cuh"
#include "sm90/segments.cuh"

namespace flash_kda::sm90 {

extern __shared__ __align__(1024) unsigned char dynamic_smem[];

template <const FusedShape& kShape>
__device__ __forceinline__ FusedSmem<kShape>& fused_smem() {
  static_assert(sizeof(FusedSmem<kShape>) == kShape.smem_bytes(), "launch_shapes.h");
  return *reinterpret_cast<FusedSmem<kShape>*>(dynamic_smem);
}

template <const RecurrenceShape& kShape>
__device__ __forceinline__ RecurrenceSmem<kShape>& walk_smem() {
  static_assert(sizeof(RecurrenceSmem<kShape>) == kShape.smem_bytes(), "launch_shapes.h");
  return *reinterpret_cast<RecurrenceSmem<kShape>*>(dynamic_smem);
}

}  // namespace flash_kda::sm90

extern "C" __global__ void __launch_bounds__(flash_kda::kFused.threads(), 1)
    __cluster_dims__(flash_kda::kFused.cluster, 1, 1)
        flash_kda_fused(const __grid_constant__ flash_kda::ForwardParams p,
                        const __grid_constant__ flash_kda::RowMaps maps) {
  using namespace flash_kda;
  sm90::fused<kFused>(p, maps, sm90::fused_smem<kFused>());
}

extern "C" __global__ void __launch_bounds__(flash_kda::kPreparePairsThreads,
                                             flash_kda::kPreparePairsCtasPerSm)
    flash_kda_prepare_pairs(const __grid_constant__ flash_kda::ForwardParams p) {
  using namespace flash_kda;
  static_assert(sizeof(sm90::PreparePairsSmem) == kPreparePairsSmemBytes, "launch_shapes.h");
  sm90::prepare_pairs(p, *reinterpret_cast<sm90::PreparePairsSmem*>(sm90::dynamic_smem));
}

extern "C" __global__ void __launch_bounds__(flash_kda::kWalk.threads(), 1)
    flash_kda_walk(const __grid_constant__ flash_kda::ForwardParams p) {
  using namespace flash_kda;
  sm90::walk<kWalk>(p, sm90::walk_smem<kWalk>());
}

extern "C" __global__ void __launch_bounds__(flash_kda::kAffine.threads(),
                                             flash_kda::kAffineCtasPerSm)
    flash_kda_affine(const __grid_constant__ flash_kda::ForwardParams p) {
  using namespace flash_kda;
  sm90::affine<kAffine>(p, sm90::walk_smem<kAffine>());
}

extern "C" __global__ void __launch_bounds__(flash_kda::kCombineThreads)
    flash_kda_combine(const __grid_constant__ flash_kda::ForwardParams p) {
  flash_kda::sm90::combine(p);
}
