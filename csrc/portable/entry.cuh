// Entry points of the portable family, for every target. host/plan.cpp knows their launch shapes.
#pragma once

#include "portable/prepare.cuh"
#include "portable/recurrence.cuh"
#include "portable/schedule.cuh"

namespace flash_kda::portable {

extern __shared__ __align__(128) unsigned char dynamic_smem[];

template <const RecurrenceShape& kShape>
__device__ __forceinline__ void recurrence_entry(const ForwardParams& p) {
  static_assert(sizeof(RecurrenceSmem<kShape>) == kShape.smem_bytes(), "launch_shapes.h");
  recurrence<kShape>(p, *reinterpret_cast<RecurrenceSmem<kShape>*>(dynamic_smem));
}

}  // namespace flash_kda::portable

extern "C" __global__ void __launch_bounds__(flash_kda::kScheduleThreads, 1)
    flash_kda_schedule(const __grid_constant__ flash_kda::ForwardParams p) {
  flash_kda::portable::schedule(p);
}

extern "C" __global__ void __launch_bounds__(flash_kda::kPrepareThreads,
                                             flash_kda::kPrepareCtasPerSm)
    flash_kda_prepare(const __grid_constant__ flash_kda::ForwardParams p) {
  using namespace flash_kda::portable;
  static_assert(sizeof(PrepareSmem) == flash_kda::kPrepareSmemBytes, "launch_shapes.h");
  prepare(p, *reinterpret_cast<PrepareSmem*>(dynamic_smem));
}

extern "C" __global__ void __launch_bounds__(flash_kda::kRecurrenceV128.threads(), 2)
    flash_kda_recurrence_v128(const __grid_constant__ flash_kda::ForwardParams p) {
  flash_kda::portable::recurrence_entry<flash_kda::kRecurrenceV128>(p);
}

extern "C" __global__ void __launch_bounds__(flash_kda::kRecurrenceV64.threads(), 1)
    flash_kda_recurrence_v64(const __grid_constant__ flash_kda::ForwardParams p) {
  flash_kda::portable::recurrence_entry<flash_kda::kRecurrenceV64>(p);
}

extern "C" __global__ void __launch_bounds__(flash_kda::kRecurrenceV32.threads(), 1)
    flash_kda_recurrence_v32(const __grid_constant__ flash_kda::ForwardParams p) {
  flash_kda::portable::recurrence_entry<flash_kda::kRecurrenceV32>(p);
}
