// Instructions that CuTe does not offer in the form needed here.
#pragma once

#include <cuda_bf16.h>

#include <cute/arch/util.hpp>

#include "params.h"

namespace flash_kda {

constexpr unsigned kWarpMask = 0xffffffffu;  // all lanes

// Flushing forms: every argument here yields a normal number or a zero that is meant (decays go
// down to 2^-115.4, sums of squares start at 1e-6), and the non-flushing ex2 costs three more
// instructions.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + 2^x): the sigmoid of -x / log2(e). Exact to fp32 rounding at both ends, which a tanh
// approximation is not: its absolute error of 2^-11 would be a wrong decay after some thousand
// tokens.
__device__ __forceinline__ float sigmoid_of_negated_log2(float x) {
  return reciprocal_approx(1.0f + exp2_approx(x));
}

// bf16x2 with `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float bf16_low(unsigned packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(unsigned packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

// Global -> shared bulk copy that completes on an mbarrier of this CTA. The CTA form, because the
// cluster form makes the driver reserve gigabytes on sm_120. Bytes and addresses: multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes,
                                          cute::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          cute::cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier))
      : "memory");
}

// A tile of a tensor -> shared memory, swizzled as half of an image is; completes on an mbarrier of
// this CTA. Zeros for tokens past the tensor's last. All lanes of a warp call it and one issues it:
// behind a branch on the lane the compiler would not know the coordinates to be the same in all.
__device__ __forceinline__ void tile_load(unsigned shared, const TensorMap* map, int channel,
                                          int head, int token, int batch, unsigned barrier) {
  asm volatile(
      "{\n"
      ".reg .pred issues;\n"
      "elect.sync _|issues, 0xffffffff;\n"
      "@issues cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];\n"
      "}" ::"r"(shared),
      "l"(map), "r"(channel), "r"(head), "r"(token), "r"(batch), "r"(barrier)
      : "memory");
}
// Brings near what such a copy first needs to know.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// An arrival of a warp, likewise, which announces so many bytes.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "elect.sync _|arrives, 0xffffffff;\n"
      "@arrives mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      "}" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the shared memory of all earlier bulk stores of this thread may be reused. Their writes are
// complete when the grid is, which is what the next kernel waits for.
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A warp arrives on an mbarrier by one lane, behind a __syncwarp(). compute-sanitizer's racecheck
// does not see that this speaks for the other lanes. For its sake alone all of them can be made to
// arrive (docs/testing.md): the same kernels, slower.
#ifdef FLASH_KDA_EVERY_LANE_ARRIVES
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif
__device__ __forceinline__ bool arrives(int lane) { return kArrivalsOfWarp == 32 || lane == 0; }

// Without a branch, behind which the compiler would not take a warp's lanes to be together.
__device__ __forceinline__ void arrive_if(cute::uint64_t* barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.u32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
      "r"(static_cast<unsigned>(arrives))
      : "memory");
}

// CUTLASS's waits do not say that they touch memory: nothing in the program after this moves before
// it.
__device__ __forceinline__ void stay_behind_wait() { asm volatile("" ::: "memory"); }

// Orders accesses to shared memory by the generic proxy that this thread has made or seen before
// later ones by the async proxy.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Shared memory -> the same place in the shared memory of another CTA of the cluster; completes on
// that CTA's mbarrier. `barrier` too is given as the address of this CTA's own. All lanes of a warp
// call it, and one issues it.
__device__ __forceinline__ void bulk_send(unsigned cta, void* shared, unsigned bytes,
                                          cute::uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 to, signal;\n"
      ".reg .pred issues;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 signal, %2, %3;\n"
      "elect.sync _|issues, 0xffffffff;\n"
      "@issues mbarrier.arrive.expect_tx.shared::cluster.b64 _, [signal], %1;\n"
      "@issues cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], "
      "%1, [signal];\n"
      "}" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
      "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(cta)
      : "memory");
}

// The same from global memory; the bytes that arrive are announced to the barrier beforehand, which
// is an arrival. `cta` may be this one.
__device__ __forceinline__ void bulk_load_to(unsigned cta, void* shared, const void* global,
                                             unsigned bytes, cute::uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 to, signal;\n"
      "mapa.shared::cluster.u32 to, %0, %4;\n"
      "mapa.shared::cluster.u32 signal, %3, %4;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [%1], %2, "
      "[signal];\n"
      "}" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(cta)
      : "memory");
}
__device__ __forceinline__ void expect_bytes(unsigned cta, cute::uint64_t* barrier,
                                             unsigned bytes) {
  asm volatile(
      "{\n"
      ".reg .b32 signal;\n"
      "mapa.shared::cluster.u32 signal, %0, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [signal], %1;\n"
      "}" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
      "r"(bytes), "r"(cta)
      : "memory");
}

// Fetches a line of global memory into L2 only.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// Two floats, by an instruction that the compiler does not join with another; and 16 bytes.
template <int kOffset>
__device__ __forceinline__ void load_pair(float& x, float& y, const void* from) {
  asm volatile("ld.v2.f32 {%0, %1}, [%2 + %3];" : "=f"(x), "=f"(y) : "l"(from), "n"(kOffset));
}
template <int kOffset>
__device__ __forceinline__ uint4 load_four(const void* from) {
  uint4 x;
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "n"(kOffset));
  return x;
}

// 16 bytes global -> shared; zeros when `valid` is false (then nothing is read).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(valid ? 16 : 0)
      : "memory");
}
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most kGroups of this thread's latest groups are under way.
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// A flag in global memory: what this thread has seen written before it raises the flag, those see
// who have found it raised. Without a branch, as above.
__device__ __forceinline__ void raise_flag(int* flag, bool raises) {
  asm volatile(
      "{\n"
      ".reg .pred raises;\n"
      "setp.ne.u32 raises, %1, 0;\n"
      "@raises st.release.gpu.global.s32 [%0], 1;\n"
      "}" ::"l"(flag),
      "r"(static_cast<unsigned>(raises))
      : "memory");
}
__device__ __forceinline__ bool flag_raised(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value != 0;
}

// Programmatic dependent launch: wait until the launches before this one have completed and their
// writes are visible / let the next launch begin to occupy free multiprocessors.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void allow_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Keeps `x` in a register: without it the compiler works cheap address arithmetic out again in
// every round of a loop, and a warp that is alone on its scheduler has no time for that.
__device__ __forceinline__ void keep_in_register(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(long long& x) { asm volatile("" : "+l"(x)); }

}  // namespace flash_kda
