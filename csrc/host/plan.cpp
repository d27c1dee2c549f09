#include "host/plan.h"

#include <algorithm>

#include "host/error.h"
#include "host/flash_kda.h"
#include "launch_shapes.h"
#include "params.h"

namespace flash_kda::host {
namespace {

constexpr int64_t kMostCtas = 0x7fffffff;     // of a one-dimensional grid
constexpr int64_t kMostRecords = 0x7ffffff0;  // prepare numbers them in 32 bits; 29 TB of workspace
constexpr int64_t kMostTokens = 0x7fffffe0;   // two chunks below 2^31: kernels add a chunk in int
constexpr int64_t kAlignment = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A sequence has at most (length + 15) / 16 chunks and never more than tokens; and so on.
int64_t records_of(const Problem& problem, int64_t tokens) {
  return std::min(problem.t_total, (problem.t_total + (tokens - 1) * problem.sequences) / tokens);
}

// Where one path overtakes another, measured on an H200 (docs/performance.md).
constexpr int64_t kSegmentsThatPay = 3;     // fewer save too little of the second walk
constexpr int64_t kChunksThatPay = 256;     // of a sequence; from here on two pay, too
constexpr int64_t kChunksThatPrepare = 24;  // from here on few heads gain by preparing beforehand
constexpr int32_t kSmsOfFewChains = 7;      // multiprocessors a chain that make heads few

// What every further segment carries takes no more than 137 bytes a token and head.
constexpr int64_t kChunksOfSegment = 60;
constexpr int64_t kCarriedBytes = kCarried * kHeadDim * kHeadDim * 4;

// Into how many segments sequences of so many chunks are cut: as many as can be walked at once,
// with a multiprocessor for every CTA. More would be walked in several rounds.
int64_t segment_count(int64_t chains, int64_t chunks, int32_t sm_count) {
  const int64_t fitting = sm_count / kWalk.slices() / std::max<int64_t>(chains, 1);
  return std::max<int64_t>(1, std::min(fitting, 1 + chunks / kChunksOfSegment));
}

bool segments_pay(int64_t segments, int64_t chunks) {
  return segments >= kSegmentsThatPay || (segments > 1 && chunks >= kChunksThatPay);
}

// Rows of V are independent, so a head can be cut into slices of V that run on several
// multiprocessors: no extra arithmetic, but every slice reads the records again. It pays while
// there are idle multiprocessors.
Path choose_portable(int64_t chains, int32_t sm_count) {
  if (chains <= sm_count / 4) return kPortableV32;
  if (chains <= sm_count / 2) return kPortableV64;
  return kPortableV128;
}

// As many as the card has room for at once. No GPU of compute capability 9.0 has more.
constexpr int32_t kMostClusters = 72;
int64_t clusters_of(int32_t sm_count) {
  return std::clamp(sm_count / kFused.cluster, 1, kMostClusters);
}

// `chunks`: of a sequence, on average.
Path choose_path(int64_t chains, int64_t chunks, const Gpu& gpu) {
  if (gpu.capability != kHopper) return choose_portable(chains, gpu.sm_count);
  // Cutting sequences triples the chain's arithmetic: each segment is walked twice, the first time
  // with twice the rows. In exchange all are walked at once.
  if (segments_pay(segment_count(chains, chunks, gpu.sm_count), chunks)) return kPathSegments;
  const bool few = chains <= gpu.sm_count / kSmsOfFewChains;
  return few && chunks >= kChunksThatPrepare ? kPortableV32 : kPathFused;
}

// What clusters need that share chains: shares, flags and the next turn, and a state of each.
int64_t share_bytes(int64_t clusters) {
  const int64_t of_cluster = sizeof(Share) + 4 * kStateWarps;
  return ceil_div(clusters * of_cluster + 4, kAlignment) * kAlignment;
}
int64_t sharing_bytes(int64_t clusters) {
  return share_bytes(clusters) + clusters * kHeadDim * kHeadDim * 4;
}

void check_sizes(const Problem& problem) {
  const int64_t t_total = problem.t_total, heads = problem.heads, sequences = problem.sequences;
  if (t_total < 0 || t_total > kMostTokens || heads < 1 || heads > 0x7fffffff || sequences < 0 ||
      sequences > kMostTokens) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "sizes out of range: %lld tokens, %lld heads, %lld sequences (tokens and sequences go to "
         "2^31 - 32, heads from 1 to 2^31 - 1)",
         static_cast<long long>(t_total), static_cast<long long>(heads),
         static_cast<long long>(sequences));
  }
}

}  // namespace

const char* path_name(int32_t path) {
  static constexpr const char* kNames[kPathCount] = {"portable_v128", "portable_v64",
                                                     "portable_v32", "fused", "segments"};
  return path >= 0 && path < kPathCount ? kNames[path] : nullptr;
}

const RecurrenceShape& recurrence_shape(Path path) {
  switch (path) {
    case kPortableV64:
      return kRecurrenceV64;
    case kPortableV32:
      return kRecurrenceV32;
    default:
      return kRecurrenceV128;
  }
}

Plan make_plan(const Problem& problem, const Gpu& gpu, int32_t forced_path) {
  check_sizes(problem);
  const auto [t_total, heads, sequences, packed] = problem;
  if (forced_path < FLASH_KDA_PATH_AUTO || forced_path >= kPathCount) {
    fail(FLASH_KDA_PATH_UNAVAILABLE, "there is no kernel path %d", static_cast<int>(forced_path));
  }
  // Products of two sizes stay below 2^62.
  const int64_t chains = sequences * heads;
  const int64_t chunks = records_of(problem, kChunk);
  // Checked before a path is chosen: that multiplies the number of chains once more.
  const int64_t record_count = chunks * heads;
  const int64_t slices = kRecurrenceV32.slices();  // of the path with the most
  if (record_count > kMostRecords || chains > kMostCtas / slices) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "too large for one call: %lld chunks of %lld heads, %lld sequences (chunks x heads and "
         "sequences x heads x %lld must stay below 2^31)",
         static_cast<long long>(chunks), static_cast<long long>(heads),
         static_cast<long long>(sequences), static_cast<long long>(slices));
  }
  const int64_t chunks_of_sequence = sequences == 0 ? 0 : chunks / sequences;
  Plan plan{};
  plan.path = forced_path == FLASH_KDA_PATH_AUTO ? choose_path(chains, chunks_of_sequence, gpu)
                                                 : static_cast<Path>(forced_path);
  if (!is_portable(plan.path) && gpu.capability != kHopper) {
    fail(FLASH_KDA_PATH_UNAVAILABLE,
         "path %s needs a GPU of compute capability 9.0, this one has %d.%d", path_name(plan.path),
         gpu.capability / 10, gpu.capability % 10);
  }
  plan.segments = 1;
  plan.schedule_bytes = ceil_div((3 * sequences + 2) * 4, kAlignment) * kAlignment;
  if (plan.path == kPathFused) {
    const int64_t clusters = clusters_of(gpu.sm_count);
    const bool shared = chains > clusters;
    // Nothing to hand on and no lengths to look up: spares the caller an allocation.
    if (!shared && !packed) plan.schedule_bytes = 0;
    plan.workspace_bytes = plan.schedule_bytes;
    plan.chain_ctas = std::min(chains, clusters) * kFused.cluster;
    if (shared) {
      plan.share_bytes = share_bytes(clusters);
      plan.workspace_bytes += sharing_bytes(clusters);
    }
    return plan;
  }
  if (is_portable(plan.path)) {
    plan.record_bytes = record_count * ChunkRecord::kBytes;
    plan.workspace_bytes = plan.schedule_bytes + plan.record_bytes;
    plan.prepare_ctas = ceil_div(record_count, kPrepareWarps);
    plan.chain_ctas = chains * recurrence_shape(plan.path).slices();
    return plan;
  }
  const int64_t pairs = records_of(problem, kPair) * heads;
  plan.segments = segment_count(chains, chunks_of_sequence, gpu.sm_count);
  const int64_t cut = chains * (plan.segments - 1);
  plan.record_bytes = pairs * PairRecord::kStoredBytes;
  plan.middle_bytes = pairs * MiddleRecord::kBytes;
  plan.workspace_bytes =
      plan.schedule_bytes + plan.record_bytes + plan.middle_bytes + cut * kCarriedBytes;
  plan.prepare_ctas = ceil_div(pairs, kPairsOfCta);
  plan.affine_ctas = cut * kCarried * kAffine.slices();
  if (plan.segments > 2) plan.combine_ctas = chains * (kHeadDim / kCombineRows);
  plan.chain_ctas = chains * plan.segments * kWalk.slices();
  return plan;
}

int64_t largest_workspace(const Problem& problem) {
  const Plan portable = make_plan(problem, {0, 1}, kPortableV128);
  const int64_t pairs = records_of(problem, kPair) * problem.heads;
  const int64_t chunks = records_of(problem, kChunk) * problem.heads;
  // Wherever sequences are cut, they are so many times at most.
  const int64_t cuts = chunks / kChunksOfSegment;
  // Chains are shared out if there are more of them than clusters.
  const int64_t clusters =
      std::clamp<int64_t>(problem.sequences * problem.heads - 1, 0, kMostClusters);
  return std::max({portable.workspace_bytes,
                   portable.schedule_bytes + cuts * kCarriedBytes +
                       pairs * (PairRecord::kStoredBytes + MiddleRecord::kBytes),
                   portable.schedule_bytes + sharing_bytes(clusters)});
}

}  // namespace flash_kda::host
