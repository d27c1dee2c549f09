// Walks through the launches of one call of a path of the sm90 family, as the kernels would, and
// prints what every warp is given to do. The launcher, the kernels' outlines and their index
// arithmetic are those of csrc; what computes, copies and waits is replaced (the other files here).
//
// Reads a Request, the call's arguments and five arrays, each after its size in bytes.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "host/driver.h"
#include "host/error.h"
#include "host/flash_kda.h"
#include "host/launch.h"
#include "host/module.h"

// Last: it makes some words of the language macros.
#include "device.h"
#include "portable/schedule.cuh"
#include "sm90/fused.cuh"
#include "sm90/prepare_pairs.cuh"
#include "sm90/segments.cuh"

namespace {

using namespace flash_kda;

enum Mode : int32_t { kListAll, kListChains, kCombine, kCount };

struct Request {
  Mode mode;
  host::Path path;
  int32_t sm_count;
  int32_t segments;  // 0: as the plan says
};

// Memory that ends where reading it would end the program.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    void* const base = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) device::fail("out of memory");
    end_ = static_cast<char*>(base) + whole;
    mprotect(end_, page, PROT_NONE);
  }
  char* data() const { return end_ - bytes_; }
  size_t bytes() const { return bytes_; }
  uint64_t address() const {
    return bytes_ == 0 ? 0 : static_cast<uint64_t>(device::address(data()));
  }

 private:
  size_t bytes_;
  char* end_;
};

void read_bytes(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) device::fail("the input is too short");
}
Guarded read_array() {
  int64_t bytes;
  read_bytes(&bytes, sizeof bytes);
  Guarded array(static_cast<size_t>(bytes));
  read_bytes(array.data(), array.bytes());
  return array;
}

enum Kernel : uintptr_t {
  kNone,
  kSchedule,
  kPrepareKernel,
  kAffineKernel,
  kCombineKernel,
  kWalkKernel,
  kFusedKernel
};
constexpr const char* kNames[] = {"",        "schedule", "prepare_pairs", "affine",
                                  "combine", "walk",     "fused"};

struct Launch {
  Kernel kernel;
  unsigned ctas, threads;
  ForwardParams params;
  RowMaps maps;  // of kFusedKernel
};
std::vector<Launch> launches;

CUresult record_launch(const CUlaunchConfig* config, CUfunction function, void** arguments,
                       void**) {
  launches.push_back({static_cast<Kernel>(reinterpret_cast<uintptr_t>(function)), config->gridDimX,
                      config->blockDimX, *static_cast<const ForwardParams*>(arguments[0]),
                      RowMaps{}});
  Launch& launch = launches.back();
  if (launch.kernel == kFusedKernel) launch.maps = *static_cast<const RowMaps*>(arguments[1]);
  return CUDA_SUCCESS;
}

CUresult encode_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                    const cuuint64_t*, const cuuint64_t*, const cuuint32_t* tile, const cuuint32_t*,
                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill) {
  device::Tiles tiles{static_cast<uint64_t>(device::address(base)), 2};
  for (cuuint32_t i = 0; i < rank; ++i) tiles.bytes *= tile[i];
  std::memcpy(map, &tiles, sizeof tiles);
  return CUDA_SUCCESS;
}

CUfunction function(Kernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

// The launches for another number of segments, as the launcher would do them.
void cut_otherwise(const Request& request) {
  ForwardParams params = launches.back().params;
  while (!launches.empty() && launches.back().kernel > kPrepareKernel) launches.pop_back();
  const int chains = params.sequences * params.heads;
  params.segments = request.segments;
  const auto add = [&](Kernel kernel, int segments, int ctas, int threads) {
    params.job_segments = segments;
    params.jobs = static_cast<long long>(chains) * segments;
    launches.push_back(
        {kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(threads), params, RowMaps{}});
  };
  const int before = request.segments - 1, all = chains * request.segments;
  const int affine_ctas = chains * before * kCarried * kAffine.slices();
  if (before > 0) add(kAffineKernel, before, affine_ctas, kAffine.threads());
  if (before > 1) add(kCombineKernel, before, chains * (kHeadDim / kCombineRows), kCombineThreads);
  add(kWalkKernel, request.segments, all * kWalk.slices(), kWalk.threads());
}

void print_events(const device::Threads::Events& events) {
  static constexpr const char* kEvents[] = {
      "job",   "load",  "identity", "run",   "store",  "between", "finish",
      "chunk", "part",  "read",     "fetch", "expect", "tile",    "growing",
      "wait",  "await", "copy",     "leave", "raise",  "send",    "prefetch"};
  const char* separator = "";
  for (const std::vector<int64_t>& event : events) {
    std::printf("%s[\"%s\"", separator, kEvents[event[0]]);
    for (size_t i = 1; i < event.size(); ++i)
      std::printf(",%lld", static_cast<long long>(event[i]));
    std::printf("]");
    separator = ",";
  }
}

// What some lanes do each by itself is moved to `sent`.
device::Threads::Events without_sent(const device::Threads::Events& events,
                                     device::Threads::Events& sent) {
  device::Threads::Events others;
  for (const std::vector<int64_t>& event : events)
    (event[0] >= device::kSend ? sent : others).push_back(event);
  return others;
}

// What a lane does, less what is one lane's alone: from that kind of event on.
device::Threads::Events in_common(const device::Threads::Events& events, int64_t end) {
  device::Threads::Events common;
  for (const std::vector<int64_t>& event : events) {
    if (event[0] < end) common.push_back(event);
  }
  return common;
}

// Clusters that take turns come from the last one to the first: their turns are not their numbers.
unsigned nth_cta(const Launch& launch, unsigned n) {
  if (launch.kernel != kFusedKernel || launch.params.shares == nullptr) return n;
  const unsigned place = n % kFused.cluster;
  return launch.ctas - kFused.cluster - (n - place) + place;
}

// All warps of all CTAs, one after the other.
template <class Body>
void print_warps(const Launch& launch, int warps, Body body) {
  const char* separator = "";
  gridDim.x = launch.ctas;
  for (unsigned n = 0; n < launch.ctas; ++n) {
    blockIdx.x = nth_cta(launch, n);
    for (int warp = 0; warp < warps; ++warp) {
      device::threads.run(32, 32 * warp, body);
      device::Threads::Events sent;
      const device::Threads::Events events = without_sent(device::threads.events(0), sent);
      const device::Threads::Events common = in_common(events, device::kAwait);
      const device::Threads::Events with_waits = in_common(events, device::kAwait + 1);
      for (int lane = 1; lane < 32; ++lane) {
        const device::Threads::Events own = without_sent(device::threads.events(lane), sent);
        if (own != common && own != with_waits) device::fail("the lanes of a warp do not agree");
      }
      std::printf("%s{\"cta\":%u,\"warp\":%d,\"events\":[", separator, blockIdx.x, warp);
      print_events(events);
      std::printf("],\"sent\":[");
      print_events(sent);
      std::printf("]}");
      separator = ",\n";
    }
  }
}

sm90::FusedSmem<kFused> fused_smem;
sm90::PreparePairsSmem prepare_smem;
template <const RecurrenceShape& kShape>
RecurrenceSmem<kShape> walk_smem;

// Where the stages of a ring and their barriers are.
template <const RecurrenceShape& kShape>
void print_ring() {
  const RecurrenceSmem<kShape>& smem = walk_smem<kShape>;
  std::printf("],\"smem\":[%lld,%zu,%lld,%lld,%zu",
              static_cast<long long>(device::address(smem.stage)), sizeof smem.stage[0],
              static_cast<long long>(device::address(smem.full)),
              static_cast<long long>(device::address(smem.empty)), sizeof smem.full[0]);
}

// Runs `body` in the CTAs of a launch over stages full of ones. What records are stored without has
// to be zero afterwards, if all warps have run, which clear it together.
template <const RecurrenceShape& kShape>
void print_ring_warps(const Launch& launch, bool all, const std::function<void()>& body) {
  using Layout = Record<kShape.record_tokens>;
  RecurrenceSmem<kShape>& smem = walk_smem<kShape>;
  for (auto& stage : smem.stage) std::fill_n(stage.record, Layout::kBytes, 0xff);
  const int warps = all ? static_cast<int>(launch.threads) / 32 : kShape.warps;
  print_warps(launch, warps, body);
  for (const auto& stage : smem.stage) {
    for (const int which : {0, 1}) {
      const unsigned char* block =
          stage.record + Layout::kSecondColumns + which * Layout::kColumnBytes;
      const bool cleared =
          std::all_of(block, block + Layout::kBlockBytes, [](auto byte) { return byte == 0; });
      if (all && launch.ctas > 0 && !cleared) device::fail("a block of zeros was not cleared");
    }
  }
  print_ring<kShape>();
}

// What the schedule leaves.
std::vector<int> scheduled;

template <class Integers>
void print_integers(const char* name, const Integers* values, int64_t count) {
  std::printf("],\"%s\":[", name);
  for (int64_t i = 0; i < count; ++i)
    std::printf("%s%lld", i == 0 ? "" : ",", static_cast<long long>(values[i]));
}

// The marks of the first chunks of pairs, which fill what is kept of them; 0: nothing is.
void print_marks(const ForwardParams& p, int64_t count) {
  constexpr int kWords = MiddleRecord::kBytes / static_cast<int>(sizeof(float));
  const auto* mark = reinterpret_cast<const float*>(p.middles);
  for (int64_t i = 0; i < count; ++i, mark += kWords) {
    const bool same = std::all_of(mark, mark + kWords, [&](float x) { return x == *mark; });
    std::printf("%s%.0f", i == 0 ? "" : ",", static_cast<double>(same ? *mark : -1.0f));
  }
}

// `pairs`: the records that there is room for.
void print_launch(const Launch& launch, bool all, int64_t pairs) {
  const ForwardParams& p = launch.params;
  std::printf(
      "{\"kernel\":\"%s\",\"ctas\":%u,\"threads\":%u,\"segments\":%d,\"job_segments\":%d,"
      "\"jobs\":%lld,\"records\":%lld,\"middles\":%lld,\"carried\":%lld,\"clusters\":%d,"
      "\"shares\":%lld,\"handed_on\":%lld,\"next_turn\":%lld,\"warps\":[",
      kNames[launch.kernel], launch.ctas, launch.threads, p.segments, p.job_segments, p.jobs,
      static_cast<long long>(device::address(p.records)),
      static_cast<long long>(device::address(p.middles)),
      static_cast<long long>(device::address(p.carried)), p.clusters,
      static_cast<long long>(device::address(p.shares)),
      static_cast<long long>(device::address(p.handed_on)),
      static_cast<long long>(device::address(p.next_turn)));
  const int warps = static_cast<int>(launch.threads) / 32;
  if (launch.kernel == kSchedule && p.cu_seqlens != nullptr) {
    print_integers("starts", p.sequence_start, p.sequences + 1);
    print_integers("begins", p.record_begin, p.sequences + 1);
    print_integers("order", scheduled.data(), static_cast<int64_t>(scheduled.size()));
  } else if (launch.kernel == kPrepareKernel && all) {
    print_warps(launch, warps, [&] { sm90::prepare_pairs(p, prepare_smem); });
    std::printf("],\"smem\":[%lld,%zu],\"marks\":[",
                static_cast<long long>(device::address(prepare_smem.pair)),
                sizeof prepare_smem.pair[0]);
    print_marks(p, pairs);
  } else if (launch.kernel == kAffineKernel) {
    print_ring_warps<kAffine>(launch, all, [&] { sm90::affine<kAffine>(p, walk_smem<kAffine>); });
  } else if (launch.kernel == kWalkKernel) {
    print_ring_warps<kWalk>(launch, all, [&] { sm90::walk<kWalk>(p, walk_smem<kWalk>); });
  } else if (launch.kernel == kFusedKernel) {
    print_warps(launch, all ? warps : kFused.warps,
                [&] { sm90::fused<kFused>(p, launch.maps, fused_smem); });
    print_integers("turns", p.next_turn, p.shares == nullptr ? 0 : 1);
    std::printf(
        "],\"smem\":[%lld,%zu,%lld,%lld,%lld,%zu,%lld,%zu,%lld",
        static_cast<long long>(device::address(fused_smem.stage)), sizeof fused_smem.stage[0],
        static_cast<long long>(device::address(fused_smem.full)),
        static_cast<long long>(device::address(fused_smem.empty)),
        static_cast<long long>(device::address(fused_smem.rows)), sizeof fused_smem.full[0],
        static_cast<long long>(device::address(fused_smem.growing)), sizeof fused_smem.growing[0],
        static_cast<long long>(device::address(fused_smem.solved)));
  }
  std::printf("]}");
}

// The tokens of all records, and of some past the last one.
void print_records(const ForwardParams& p, int count) {
  const char* separator = "";
  for (int record = 0; record < count; ++record) {
    TokenRange tokens[32];
    device::threads.run(32, 0, [&] {
      const int lane = static_cast<int>(threadIdx.x);
      device::threads.wait_for_previous_launch();
      tokens[lane] = record_tokens(p, record, lane);
    });
    for (const TokenRange& other : tokens) {
      if (std::memcmp(&other, tokens, sizeof other) != 0)
        device::fail("the lanes of a warp do not agree");
    }
    std::printf("%s[%d,%d,%d]", separator, tokens->batch, tokens->begin, tokens->length);
    separator = ",";
  }
}

void combine(const Launch& launch) {
  for (blockIdx.x = 0; blockIdx.x < launch.ctas; ++blockIdx.x) {
    device::threads.run(static_cast<int>(launch.threads), 0, [&] { sm90::combine(launch.params); });
  }
}

void print_counts(const Guarded& entries, const Guarded& values) {
  const auto* const entry = reinterpret_cast<const int64_t*>(entries.data());
  const auto* const value = reinterpret_cast<const int64_t*>(values.data());
  const int count = static_cast<int>(entries.bytes() / sizeof *entry);
  for (size_t i = 0; i < values.bytes() / sizeof *value; ++i) {
    int found[32];
    device::threads.run(32, 0, [&] {
      const int lane = static_cast<int>(threadIdx.x);
      const auto get = [&](int n) -> long long {
        if (n < 0 || n >= count) device::fail("there is no such entry");
        return entry[n];
      };
      found[lane] = count_at_most(get, count, value[i], lane);
    });
    for (int other : found) {
      if (other != found[0]) device::fail("the lanes of a warp do not agree");
    }
    std::printf("%s%d", i == 0 ? "[" : ",", found[0]);
  }
  std::printf("]");
}

// The schedule, in a workspace that holds anything before, and then another order: any is allowed.
void run_schedule(const ForwardParams& p, const Guarded& order) {
  for (const Launch& launch : launches) {
    if (launch.kernel != kSchedule) continue;
    device::threads.run(static_cast<int>(launch.threads), 0,
                        [&] { portable::schedule(launch.params); });
  }
  if (p.shares != nullptr) {
    const auto raised = [](int flag) { return flag != 0; };
    if (std::any_of(p.handed_on, p.handed_on + p.clusters * kStateWarps, raised))
      device::fail("a flag that is raised beforehand");
  }
  if (p.cu_seqlens == nullptr) return;
  // Whoever shares chains out needs no order.
  if (p.shares == nullptr) scheduled.assign(p.sequence_order, p.sequence_order + p.sequences);
  std::memcpy(p.sequence_order, order.data(), order.bytes());
}

}  // namespace

namespace flash_kda::sm90 {

// All CTAs have the same shared memory here, the cluster's first one, too.
template <>
int turn_of_cluster<kFused>(const ForwardParams& p, const FusedSmem<kFused>& smem) {
  constexpr const FusedShape& kShape = kFused;
  if (p.shares == nullptr) return blockIdx.x / kShape.cluster;
  return smem.turn;
}

}  // namespace flash_kda::sm90

namespace flash_kda::host {

const Driver& driver() {
  static const Driver recorder = [] {
    Driver driver{};
    driver.LaunchKernelEx = record_launch;
    driver.TensorMapEncodeTiled = encode_map;
    return driver;
  }();
  return recorder;
}
void check(CUresult, const char*) {}
CurrentContext::CurrentContext(CUcontext) : pushed_(false) {}
CurrentContext::~CurrentContext() {}

}  // namespace flash_kda::host

int main() {
  Request request;
  flash_kda_forward_args args;
  read_bytes(&request, sizeof request);
  read_bytes(&args, sizeof args);
  const Guarded indices = read_array(), offsets = read_array();
  const Guarded bounds = read_array(), order = read_array(), carried = read_array();
  if (request.mode == kCount) {
    print_counts(offsets, indices);
    return 0;
  }

  host::Module module{};
  module.gpu = {host::kHopper, request.sm_count};
  module.schedule = function(kSchedule);
  module.prepare_pairs = function(kPrepareKernel);
  module.affine = function(kAffineKernel);
  module.combine = function(kCombineKernel);
  module.chain[host::kPathFused] = function(kFusedKernel);
  module.chain[host::kPathSegments] = function(kWalkKernel);

  const int status = host::guarded([&] {
    const host::Plan plan = host::make_plan({args.batch * args.tokens, args.heads, args.sequences},
                                            module.gpu, request.path);
    int64_t needed = plan.workspace_bytes;
    if (request.segments > 0) {
      const int64_t states = args.sequences * args.heads * (request.segments - 1) * kCarried;
      needed = std::max(needed, plan.schedule_bytes + plan.record_bytes + plan.middle_bytes +
                                    states * kHeadDim * kHeadDim * 4);
    }
    // It begins at a multiple of 256, and so it ends at one here.
    const Guarded workspace(static_cast<size_t>((needed + 255) / 256 * 256));
    args.workspace = workspace.address();
    args.workspace_bytes = needed;
    device::threads.workspace_begin = static_cast<int64_t>(args.workspace);
    device::threads.workspace_end = device::threads.workspace_begin + needed;
    std::memset(workspace.data(), 0xa5,
                static_cast<size_t>(plan.schedule_bytes + plan.share_bytes));
    args.cu_seqlens = bounds.address();
    args.state_indices = indices.address();
    args.checkpoint_offsets = offsets.address();
    args.path = request.path;
    if (!launches.empty()) device::fail("launches before the call");
    host::launch_forward(module, args);
    if (launches.empty()) return;
    const ForwardParams& p = launches.back().params;
    run_schedule(p, order);
    if (request.segments > 0) cut_otherwise(request);

    if (request.mode == kCombine) {
      std::memcpy(launches.back().params.carried, carried.data(), carried.bytes());
      device::threads.hide(launches.back().params.carried, carried.bytes());
      for (const Launch& launch : launches) {
        if (launch.kernel == kCombineKernel) combine(launch);
      }
      std::fwrite(launches.back().params.carried, 1, carried.bytes(), stdout);
      return;
    }
    device::threads.hide(workspace.data(),
                         static_cast<size_t>(plan.schedule_bytes + plan.share_bytes));
    std::printf("{\"workspace\":%lld,\"workspace_bytes\":%lld,\"schedule_bytes\":%lld,",
                static_cast<long long>(args.workspace), static_cast<long long>(needed),
                static_cast<long long>(plan.schedule_bytes));
    std::printf("\"launches\":[");
    const char* separator = "";
    for (const Launch& launch : launches) {
      std::printf("%s", separator);
      print_launch(launch, request.mode == kListAll, plan.middle_bytes / MiddleRecord::kBytes);
      separator = ",\n";
    }
    std::printf("],\"records\":[");
    if (request.mode == kListAll) {
      const ForwardParams& last = launches.back().params;
      const bool packed = args.cu_seqlens != 0;
      const int count =
          packed ? last.record_begin[last.sequences] : last.batch * last.records_per_sequence;
      // Without any no prepare kernel is launched, which would divide by the records of a row.
      if (packed || count > 0) print_records(last, count + 3);
    }
    std::printf("]}\n");
  });
  if (status != 0) device::fail(host::remembered());
  return 0;
}
