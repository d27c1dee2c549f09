#include "host/launch.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "host/driver.h"
#include "host/error.h"
#include "host/tensor_map.h"
#include "launch_shapes.h"

namespace flash_kda::host {
namespace {

constexpr double kLog2E = 1.4426950408889634;

template <class Pointer>
Pointer address(uint64_t value) {
  return reinterpret_cast<Pointer>(value);
}

TokenStrides token_strides(const int64_t (&s)[3]) { return {s[0], s[1], s[2]}; }

// Whether each head's state can be moved by bulk copies of its rows.
bool rows_aligned(uint64_t base, int32_t dtype, const int64_t (&stride)[2]) {
  const int64_t elements = dtype == kFloat32 ? 4 : 8;  // of 16 bytes
  return base % 16 == 0 && stride[0] % elements == 0 && stride[1] % elements == 0;
}

// Whether all fours of neighbouring elements of a state can be moved by one access.
bool fours_aligned(uint64_t base, int32_t dtype, const int64_t (&stride)[2]) {
  const uint64_t bytes = dtype == kFloat32 ? 16 : 8;
  return base % bytes == 0 && stride[0] % 4 == 0 && stride[1] % 4 == 0;
}

ForwardParams make_params(const flash_kda_forward_args& a, const Plan& plan) {
  ForwardParams p{};
  p.q = address<const void*>(a.q);
  p.k = address<const void*>(a.k);
  p.v = address<const void*>(a.v);
  p.g = address<const void*>(a.g);
  p.beta = address<const void*>(a.beta);
  p.out = address<void*>(a.out);
  p.a_log = address<const void*>(a.a_log);
  p.dt_bias = address<const void*>(a.dt_bias);
  p.initial_state = address<const void*>(a.initial_state);
  p.final_state = address<void*>(a.final_state);
  p.cu_seqlens = address<const void*>(a.cu_seqlens);
  p.state_indices = address<const void*>(a.state_indices);
  p.checkpoint_offsets = address<const void*>(a.checkpoint_offsets);
  p.checkpoint_states = address<void*>(a.checkpoint_states);

  p.clusters = static_cast<int>(plan.chain_ctas / kFused.cluster);
  if (plan.workspace_bytes > 0) {
    int* const schedule = address<int*>(a.workspace);
    p.sequence_start = schedule;
    p.record_begin = schedule + a.sequences + 1;
    p.sequence_order = schedule + 2 * (a.sequences + 1);
    p.records = address<unsigned char*>(a.workspace + plan.schedule_bytes);
    p.middles = p.records + plan.record_bytes;
    p.carried = reinterpret_cast<float*>(p.middles + plan.middle_bytes + plan.share_bytes);
  }
  if (plan.share_bytes > 0) {
    p.shares = address<Share*>(a.workspace + plan.schedule_bytes);
    p.handed_on = reinterpret_cast<int*>(p.shares + p.clusters);
    p.next_turn = p.handed_on + p.clusters * kStateWarps;
  }

  p.q_stride = token_strides(a.q_stride);
  p.k_stride = token_strides(a.k_stride);
  p.v_stride = token_strides(a.v_stride);
  p.g_stride = token_strides(a.g_stride);
  p.out_stride = token_strides(a.out_stride);
  p.beta_stride = token_strides(a.beta_stride);
  p.initial_stride = {a.initial_state_stride[0], a.initial_state_stride[1]};
  p.final_stride = {a.final_state_stride[0], a.final_state_stride[1]};
  p.checkpoint_stride = {a.checkpoint_states_stride[0], a.checkpoint_states_stride[1]};
  p.cu_seqlens_stride = a.cu_seqlens_stride;
  p.state_indices_stride = a.state_indices_stride;
  p.checkpoint_offsets_stride = a.checkpoint_offsets_stride;
  p.initial_slots = a.initial_slots;
  p.final_slots = a.final_slots;

  p.scale = a.scale;
  p.log2_lower_bound = static_cast<float>(a.lower_bound * kLog2E);
  p.batch = static_cast<int>(a.batch);
  p.tokens = static_cast<int>(a.tokens);
  p.heads = static_cast<int>(a.heads);
  p.sequences = static_cast<int>(a.sequences);
  p.record_tokens = plan.path == kPathSegments ? kPair : kChunk;
  p.records_per_sequence = static_cast<int>((a.tokens + p.record_tokens - 1) / p.record_tokens);
  p.segments = static_cast<int>(plan.segments);
  p.checkpoints = a.checkpoint_states == 0 ? 0 : static_cast<int>(a.checkpoints);
  p.beta_is_logits = a.beta_is_logits;
  p.beta_dtype = a.beta_dtype;
  p.a_log_dtype = a.a_log_dtype;
  p.dt_bias_dtype = a.dt_bias_dtype;
  p.initial_dtype = a.initial_state_dtype;
  p.final_dtype = a.final_state_dtype;
  p.cu_seqlens_dtype = a.cu_seqlens_dtype;
  p.state_indices_dtype = a.state_indices_dtype;
  p.checkpoint_offsets_dtype = a.checkpoint_offsets_dtype;
  p.checkpoint_dtype = a.checkpoint_states_dtype;
  p.initial_vectorised =
      fours_aligned(a.initial_state, a.initial_state_dtype, a.initial_state_stride);
  p.final_vectorised = fours_aligned(a.final_state, a.final_state_dtype, a.final_state_stride);
  p.checkpoint_vectorised =
      fours_aligned(a.checkpoint_states, a.checkpoint_states_dtype, a.checkpoint_states_stride);
  if (plan.path == kPathFused && a.initial_state != 0 &&
      rows_aligned(a.initial_state, a.initial_state_dtype, a.initial_state_stride)) {
    p.state_stages = kStateStages;
  }
  return p;
}

void check_integers(const char* name, uint64_t base, int32_t dtype) {
  if (base != 0 && dtype != kInt32 && dtype != kInt64) {
    fail(FLASH_KDA_INVALID_ARGUMENT, "%s has dtype code %d, needs int32 or int64", name, dtype);
  }
}

// What Python has checked already is checked again only where a mistake would reach memory.
void check_args(const flash_kda_forward_args& a) {
  const bool packed = a.cu_seqlens != 0;
  if (a.batch < 0 || a.tokens < 0 || a.heads < 1 || a.sequences < 0) {
    fail(FLASH_KDA_INVALID_ARGUMENT, "batch, tokens, heads and sequences must not be negative");
  }
  if (packed ? a.batch != 1 : a.sequences != a.batch) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "batch is %lld with %lld sequences: a packed batch has one row, any other as many "
         "sequences "
         "as rows",
         static_cast<long long>(a.batch), static_cast<long long>(a.sequences));
  }
  const uint64_t tensors[] = {a.q, a.k, a.v, a.g, a.beta, a.out};
  const bool any_missing = std::any_of(std::begin(tensors), std::end(tensors),
                                       [](uint64_t address) { return address == 0; });
  if (a.batch > 0 && a.tokens > 0 && any_missing) {
    fail(FLASH_KDA_INVALID_ARGUMENT, "q, k, v, g, beta and out must have memory");
  }
  check_integers("cu_seqlens", a.cu_seqlens, a.cu_seqlens_dtype);
  check_integers("state_indices", a.state_indices, a.state_indices_dtype);
  check_integers("checkpoint_offsets", a.checkpoint_offsets, a.checkpoint_offsets_dtype);
  if (a.checkpoints < 0 || a.checkpoints > INT32_MAX ||
      (a.checkpoint_states != 0 && a.checkpoints > 0 && a.checkpoint_offsets == 0)) {
    fail(FLASH_KDA_INVALID_ARGUMENT, "%lld checkpoint states need as many checkpoint offsets",
         static_cast<long long>(a.checkpoints));
  }
}

class Launcher {
 public:
  Launcher(CUstream stream, ForwardParams& params, RowMaps& maps)
      : stream_(stream), arguments_{&params, &maps} {}

  // Every launch but the first may begin while the one before it drains, and does what does not
  // depend on it; the kernels wait for it before they read what it wrote. The first must not:
  // others rely on it that the workspace and the caller's tensors are theirs.
  void operator()(CUfunction kernel, int64_t ctas, int threads, int smem_bytes, const char* name) {
    CUlaunchAttribute overlap{};
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(ctas);
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = static_cast<unsigned>(threads);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(smem_bytes);
    config.hStream = stream_;
    config.attrs = &overlap;
    config.numAttrs = first_ ? 0 : 1;
    check(driver().LaunchKernelEx(&config, kernel, arguments_, nullptr), name);
    first_ = false;
  }

 private:
  CUstream stream_;
  void* arguments_[2];  // of which most kernels take the first only
  bool first_ = true;
};

// Where every CTA can have a multiprocessor of its own it must: started while the launch before
// drains, they would crowd on the first ones that fall free.
int spread(const Module& module, int64_t ctas, int smem_bytes) {
  return ctas <= module.gpu.sm_count ? std::max(smem_bytes, module.exclusive_smem) : smem_bytes;
}

// The launches of a call stay together on their stream: those of another thread, with the same
// workspace, would come between them. Other streams have other mutexes, or nearly always: a launch
// waits where its stream is full.
std::mutex& mutex_of(uint64_t stream) {
  static std::mutex mutexes[64];
  return mutexes[(stream >> 4 ^ stream >> 10 ^ stream >> 16) % std::size(mutexes)];
}

void launch_portable(const Module& module, const Plan& plan, Launcher& launch) {
  if (plan.prepare_ctas > 0) {
    launch(module.prepare, plan.prepare_ctas, kPrepareThreads, kPrepareSmemBytes,
           "launching flash_kda_prepare");
  }
  const RecurrenceShape& shape = recurrence_shape(plan.path);
  launch(module.chain[plan.path], plan.chain_ctas, shape.threads(),
         spread(module, plan.chain_ctas, shape.smem_bytes()), "launching flash_kda_recurrence");
}

// Parameters are copied by each launch, so that the next one may change them.
void set_jobs(ForwardParams& params, int64_t chains, int64_t segments) {
  params.job_segments = static_cast<int>(segments);
  params.jobs = chains * segments;
}

void launch_fused(const Module& module, const Plan& plan, int64_t chains, ForwardParams& params,
                  Launcher& launch) {
  set_jobs(params, chains, 1);
  launch(module.chain[plan.path], plan.chain_ctas, kFused.threads(), kFused.smem_bytes(),
         "launching flash_kda_fused");
}

void launch_segments(const Module& module, const Plan& plan, int64_t chains, ForwardParams& params,
                     Launcher& launch) {
  if (plan.prepare_ctas > 0) {
    launch(module.prepare_pairs, plan.prepare_ctas, kPreparePairsThreads, kPreparePairsSmemBytes,
           "launching flash_kda_prepare_pairs");
  }
  if (plan.affine_ctas > 0) {
    set_jobs(params, chains, plan.segments - 1);
    launch(module.affine, plan.affine_ctas, kAffine.threads(),
           spread(module, plan.affine_ctas, kAffine.smem_bytes()), "launching flash_kda_affine");
  }
  if (plan.combine_ctas > 0) {
    launch(module.combine, plan.combine_ctas, kCombineThreads, 0, "launching flash_kda_combine");
  }
  set_jobs(params, chains, plan.segments);
  launch(module.chain[plan.path], plan.chain_ctas, kWalk.threads(), kWalk.smem_bytes(),
         "launching flash_kda_walk");
}

}  // namespace

void launch_forward(const Module& module, const flash_kda_forward_args& args) {
  check_args(args);
  int64_t t_total;
  if (__builtin_mul_overflow(args.batch, args.tokens, &t_total)) t_total = INT64_MAX;
  const Problem problem{t_total, args.heads, args.sequences, args.cu_seqlens != 0};
  const Plan plan = make_plan(problem, module.gpu, args.path);
  if (args.sequences == 0) return;
  if (plan.workspace_bytes > 0 && (args.workspace_bytes < plan.workspace_bytes ||
                                   args.workspace == 0 || args.workspace % 256 != 0)) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "workspace has %lld bytes at 0x%llx, needs %lld at a multiple of 256",
         static_cast<long long>(args.workspace_bytes),
         static_cast<unsigned long long>(args.workspace),
         static_cast<long long>(plan.workspace_bytes));
  }

  ForwardParams params = make_params(args, plan);
  const std::lock_guard<std::mutex> alone(mutex_of(args.stream));
  const CurrentContext current(module.context);
  RowMaps maps{};
  if (plan.path == kPathFused && args.tokens > 0) maps = row_maps(args);
  Launcher launch(address<CUstream>(args.stream), params, maps);
  if (args.cu_seqlens != 0 || params.shares != nullptr) {
    launch(module.schedule, 1, kScheduleThreads, 0, "launching flash_kda_schedule");
  }
  if (is_portable(plan.path)) {
    launch_portable(module, plan, launch);
  } else if (plan.path == kPathFused) {
    launch_fused(module, plan, args.sequences * args.heads, params, launch);
  } else {
    launch_segments(module, plan, args.sequences * args.heads, params, launch);
  }
}

}  // namespace flash_kda::host
