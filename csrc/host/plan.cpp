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

// Rows of V are independent, so a head can be cut into slices of V that run on several
// multiprocessors: no extra arithmetic, but every slice reads the records again. It pays while
// there are idle multiprocessors.
Path choose_path(int64_t chains, int32_t sm_count) {
  if (chains <= sm_count / 4) return kPortableV32;
  if (chains <= sm_count / 2) return kPortableV64;
  return kPortableV128;
}

}  // namespace

const char* path_name(int32_t path) {
  switch (path) {
    case kPortableV128:
      return "portable_v128";
    case kPortableV64:
      return "portable_v64";
    case kPortableV32:
      return "portable_v32";
    default:
      return nullptr;
  }
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

Plan make_plan(const Problem& problem, int32_t sm_count, int32_t forced_path) {
  const auto [t_total, heads, sequences] = problem;
  if (t_total < 0 || t_total > kMostTokens || heads < 1 || heads > 0x7fffffff || sequences < 0 ||
      sequences > kMostTokens) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "sizes out of range: %lld tokens, %lld heads, %lld sequences (tokens and sequences go to "
         "2^31 - 32, heads from 1 to 2^31 - 1)",
         static_cast<long long>(t_total), static_cast<long long>(heads),
         static_cast<long long>(sequences));
  }
  if (forced_path < FLASH_KDA_PATH_AUTO || forced_path >= kPathCount) {
    fail(FLASH_KDA_PATH_UNAVAILABLE, "there is no kernel path %d", static_cast<int>(forced_path));
  }
  // Products of two sizes stay below 2^62.
  const int64_t chains = sequences * heads;
  Plan plan;
  plan.path = forced_path == FLASH_KDA_PATH_AUTO ? choose_path(chains, sm_count)
                                                 : static_cast<Path>(forced_path);
  // A sequence has at most (length + 15) / 16 chunks and never more than tokens.
  plan.chunks = std::min(t_total, (t_total + (kChunk - 1) * sequences) / kChunk);
  plan.schedule_bytes = ceil_div((3 * sequences + 2) * 4, kAlignment) * kAlignment;
  const int64_t record_count = plan.chunks * heads;
  const int64_t slices = recurrence_shape(plan.path).slices();
  if (record_count > kMostRecords || chains > kMostCtas / slices) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "too large for one call: %lld chunks of %lld heads, %lld sequences (chunks x heads and "
         "sequences x heads x %lld must stay below 2^31)",
         static_cast<long long>(plan.chunks), static_cast<long long>(heads),
         static_cast<long long>(sequences), static_cast<long long>(slices));
  }
  plan.workspace_bytes = plan.schedule_bytes + record_count * ChunkRecord::kBytes;
  plan.prepare_ctas = ceil_div(record_count, kPrepareWarps);
  plan.recurrence_ctas = chains * slices;
  return plan;
}

}  // namespace flash_kda::host
