// Reads cu_seqlens once, on the device, and leaves what the other kernels need: starts that are
// safe to use whatever cu_seqlens holds, the number of records before each sequence, and an order
// that starts the longest sequences first. Or, instead of the order, the shares of `fused`'s
// clusters, if they share chains, for packed batches and others. One CTA; no host ever reads
// cu_seqlens.
#pragma once

#include "common/ptx.cuh"
#include "common/sequences.cuh"
#include "common/shares.cuh"
#include "launch_shapes.h"

namespace flash_kda::portable {

constexpr int kScheduleWarps = kScheduleThreads / 32;
constexpr int kLengthClasses = 128;  // four an octave of chunk counts, longest = 0

__device__ __forceinline__ int length_class(int tokens) {
  const int chunks = chunks_of(tokens);
  if (chunks == 0) return kLengthClasses - 1;
  const int exponent = 31 - __clz(chunks);
  const int quarter =
      exponent >= 2 ? (chunks >> (exponent - 2)) & 3 : (chunks << (2 - exponent)) & 3;
  return kLengthClasses - 2 - (4 * exponent + quarter);
}

struct Max {
  __device__ __forceinline__ int operator()(int a, int b) const { return max(a, b); }
};
struct Sum {
  __device__ __forceinline__ int operator()(int a, int b) const { return a + b; }
};

// Inclusive scan over the CTA, seeded by `carry`, which becomes the total. `totals`: one int a
// warp.
template <class Op>
__device__ __forceinline__ int block_scan(int value, int& carry, int* totals, Op op) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kWarpMask, value, distance);
    if (lane >= distance) value = op(other, value);
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  int total = totals[lane];  // kScheduleWarps == 32
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kWarpMask, total, distance);
    if (lane >= distance) total = op(other, total);
  }
  const int before = __shfl_sync(kWarpMask, total, warp == 0 ? 0 : warp - 1);
  value = op(carry, warp == 0 ? value : op(before, value));
  carry = op(carry, __shfl_sync(kWarpMask, total, 31));
  __syncthreads();  // totals is free again
  return value;
}

__device__ __forceinline__ int read_boundary(const ForwardParams& p, int n) {
  const long long raw = load_integer(p.cu_seqlens, n * p.cu_seqlens_stride, p.cu_seqlens_dtype);
  return static_cast<int>(min(max(raw, 0ll), static_cast<long long>(p.tokens)));
}

__device__ __forceinline__ void share_out(const ForwardParams& p, const int* record_begin,
                                          int longest) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Shares shares(p, record_begin, longest);
  constexpr int kAtOnce = Shares::kTurnsAtOnce;
  for (int first = kAtOnce * warp; first < p.clusters; first += kAtOnce * kScheduleWarps) {
    const Share share = shares.of_turns_from(first, lane);
    const int turn = first + (lane >> 1);
    if (lane % 2 == 0 && turn < p.clusters) p.shares[turn] = share;
  }
  for (int i = threadIdx.x; i < p.clusters * kStateWarps; i += kScheduleThreads) p.handed_on[i] = 0;
  if (threadIdx.x == 0) *p.next_turn = 0;
}

__device__ void schedule(const ForwardParams& p) {
  static_assert(kScheduleWarps == 32, "block_scan reads one total a lane");
  __shared__ int totals[kScheduleWarps];
  __shared__ int class_offset[kLengthClasses];
  __shared__ int ends[kScheduleThreads];
  __shared__ int first_begins[kScheduleThreads + 1];  // of record_begin
  __shared__ int longest;                             // records of a sequence
  const int tid = threadIdx.x;
  allow_next_launch();
  if (p.cu_seqlens == nullptr) {
    share_out(p, nullptr, p.records_per_sequence);
    return;
  }
  if (tid < kLengthClasses) class_offset[tid] = 0;
  if (tid == 0) longest = 0;

  // The running maximum of the boundaries is what makes any cu_seqlens safe: starts never decrease,
  // so all records together are at most T / record_tokens + N, which is what the workspace holds.
  int reached = 0, records = 0;
  for (int base = 0; base <= p.sequences; base += kScheduleThreads) {
    const int n = base + tid;  // a boundary, and the sequence that ends there
    const bool present = n <= p.sequences;
    const int reached_before = reached;
    const int end = block_scan(present ? read_boundary(p, n) : 0, reached, totals, Max{});
    // The sequence starts where the one before it ended; that thread has just computed it.
    ends[tid] = end;
    __syncthreads();
    const bool ends_sequence = present && n > 0;
    const int length = ends_sequence ? end - (tid == 0 ? reached_before : ends[tid - 1]) : 0;
    const int own_records = records_of(length, p.record_tokens);
    const int end_record = block_scan(own_records, records, totals, Sum{});
    if (p.shares != nullptr) {
      const int longest_of_warp = __reduce_max_sync(kWarpMask, own_records);
      if (tid % 32 == 0) atomicMax(&longest, longest_of_warp);
    } else if (ends_sequence) {
      atomicAdd(&class_offset[length_class(length)], 1);
    }
    if (present) {
      p.sequence_start[n] = end;
      p.record_begin[n] = end_record;
      if (n <= kScheduleThreads) first_begins[n] = end_record;
    }
  }
  __syncthreads();
  if (p.shares != nullptr) {
    share_out(p, p.sequences <= kScheduleThreads ? first_begins : p.record_begin, longest);
    return;  // the order is for others
  }

  // Counts -> first position of each class; kLengthClasses / 32 classes a lane of one warp.
  if (tid < 32) {
    constexpr int kPerLane = kLengthClasses / 32;
    int count[kPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      count[i] = class_offset[tid * kPerLane + i];
      sum += count[i];
    }
    int before = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kWarpMask, before, distance);
      if (tid >= distance) before += other;
    }
    before -= sum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      class_offset[tid * kPerLane + i] = before;
      before += count[i];
    }
  }
  __syncthreads();

  // Within a class the order varies from run to run; no result depends on it.
  for (int n = tid; n < p.sequences; n += kScheduleThreads) {
    const int length = p.sequence_start[n + 1] - p.sequence_start[n];
    p.sequence_order[atomicAdd(&class_offset[length_class(length)], 1)] = n;
  }
}

}  // namespace flash_kda::portable
