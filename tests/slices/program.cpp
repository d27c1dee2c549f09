// Walks through the launches of one call of the path that cuts sequences, as the kernels would, and
// prints what every warp is given to do. The launcher, the kernels' outlines and their index
// arithmetic are those of csrc; what computes, copies and waits is replaced (the other files here).
//
// Reads a Request, the call's arguments and six arrays, each after its size in bytes.

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
#include "sm90/segments.cuh"

namespace {

using namespace flash_kda;

enum Mode : int32_t { kListAll, kListChains, kCombine, kCount };

struct Request {
  Mode mode;
  int32_t sm_count;
  int32_t segments;  // 0: as the plan says
  int32_t clusters;  // of each launch; only if `segments` is given
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

enum Kernel : uintptr_t { kNone, kSchedule, kAffineKernel, kCombineKernel, kFusedKernel };
constexpr const char* kNames[] = {"", "schedule", "affine", "combine", "fused"};

struct Launch {
  Kernel kernel;
  unsigned ctas, threads;
  ForwardParams params;
};
std::vector<Launch> launches;

CUresult record_launch(const CUlaunchConfig* config, CUfunction function, void** arguments,
                       void**) {
  launches.push_back({static_cast<Kernel>(reinterpret_cast<uintptr_t>(function)), config->gridDimX,
                      config->blockDimX, *static_cast<const ForwardParams*>(arguments[0])});
  return CUDA_SUCCESS;
}

CUfunction function(Kernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

// One launch of a given number of clusters after the other, as launch_fused() would do it.
void cut_otherwise(const Request& request) {
  ForwardParams params = launches.back().params;
  launches.resize(launches.front().kernel == kSchedule ? 1 : 0);
  const int chains = params.sequences * params.heads;
  params.segments = request.segments;
  const auto add = [&](Kernel kernel, int segments, int ctas, int threads) {
    params.job_segments = segments;
    params.jobs = static_cast<long long>(chains) * segments;
    launches.push_back(
        {kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(threads), params});
  };
  const int before = request.segments - 1;
  if (before > 0) add(kAffineKernel, before, kAffine.cluster * request.clusters, kAffine.threads());
  if (before > 1) add(kCombineKernel, before, chains * (kHeadDim / kCombineRows), kHeadDim);
  add(kFusedKernel, request.segments, kFused.cluster * request.clusters, kFused.threads());
}

void print_events(const device::Threads::Events& events) {
  static constexpr const char* kEvents[] = {"job",   "load",   "identity", "run",
                                            "store", "finish", "chunk"};
  const char* separator = "";
  for (const std::vector<int64_t>& event : events) {
    std::printf("%s[\"%s\"", separator, kEvents[event[0]]);
    for (size_t i = 1; i < event.size(); ++i)
      std::printf(",%lld", static_cast<long long>(event[i]));
    std::printf("]");
    separator = ",";
  }
}

// All warps of all CTAs, one after the other.
template <class Body>
void print_warps(const Launch& launch, int warps, Body body) {
  const char* separator = "";
  gridDim.x = launch.ctas;
  for (blockIdx.x = 0; blockIdx.x < launch.ctas; ++blockIdx.x) {
    for (int warp = 0; warp < warps; ++warp) {
      device::threads.run(32, 32 * warp, body);
      for (int lane = 1; lane < 32; ++lane) {
        if (device::threads.events(lane) != device::threads.events(0))
          device::fail("the lanes of a warp do not agree");
      }
      std::printf("%s{\"cta\":%u,\"warp\":%d,\"events\":[", separator, blockIdx.x, warp);
      print_events(device::threads.events(0));
      std::printf("]}");
      separator = ",\n";
    }
  }
}

template <const FusedShape& kShape>
sm90::FusedSmem<kShape> smem;

void print_launch(const Launch& launch, bool all) {
  const ForwardParams& p = launch.params;
  std::printf(
      "{\"kernel\":\"%s\",\"ctas\":%u,\"threads\":%u,\"segments\":%d,\"job_segments\":%d,"
      "\"jobs\":%lld,\"carried\":%lld,\"warps\":[",
      kNames[launch.kernel], launch.ctas, launch.threads, p.segments, p.job_segments, p.jobs,
      static_cast<long long>(device::address(p.carried)));
  const int threads = static_cast<int>(launch.threads);
  if (launch.kernel == kAffineKernel) {
    print_warps(launch, all ? threads / 32 : kAffine.warps,
                [&] { sm90::affine<kAffine>(p, smem<kAffine>); });
  } else if (launch.kernel == kFusedKernel) {
    print_warps(launch, all ? threads / 32 : kFused.warps,
                [&] { sm90::fused<kFused>(p, smem<kFused>); });
  }
  std::printf("]}");
}

// The tokens of all chunks, and of some past the last one.
void print_chunks(const ForwardParams& p, int count) {
  const char* separator = "";
  for (int chunk = 0; chunk < count; ++chunk) {
    TokenRange tokens[32];
    device::threads.run(32, 0, [&] {
      const int lane = static_cast<int>(threadIdx.x);
      tokens[lane] = chunk_tokens(p, chunk, lane);
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

}  // namespace

namespace flash_kda::host {

const Driver& driver() {
  static const Driver recorder = [] {
    Driver driver{};
    driver.LaunchKernelEx = record_launch;
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
  const Guarded start = read_array(), chunk_begin = read_array(), order = read_array();
  const Guarded carried = read_array();
  if (request.mode == kCount) {
    print_counts(offsets, indices);
    return 0;
  }

  host::Module module{};
  module.gpu = {host::kHopper, request.sm_count};
  module.schedule = function(kSchedule);
  module.affine = function(kAffineKernel);
  module.combine = function(kCombineKernel);
  module.chain[host::kPathSegments] = function(kFusedKernel);

  int64_t needed = 0, schedule_bytes = 0;
  const int status = host::guarded([&] {
    const host::Plan plan = host::make_plan({args.batch * args.tokens, args.heads, args.sequences},
                                            module.gpu, host::kPathSegments);
    needed = plan.workspace_bytes;
    schedule_bytes = plan.schedule_bytes;
    if (request.segments > 0) {
      const int64_t states = args.sequences * args.heads * (request.segments - 1) * kCarried;
      needed = std::max(needed, schedule_bytes + states * kHeadDim * kHeadDim * 4);
    }
    const Guarded workspace(static_cast<size_t>(needed));
    args.workspace = workspace.address();
    args.workspace_bytes = needed;
    args.state_indices = indices.address();
    args.checkpoint_offsets = offsets.address();
    args.path = host::kPathSegments;
    if (!launches.empty()) device::fail("launches before the call");
    host::launch_forward(module, args);
    if (launches.empty()) return;
    const ForwardParams& p = launches.back().params;
    if (args.cu_seqlens != 0) {  // what the schedule leaves
      std::memcpy(p.sequence_start, start.data(), start.bytes());
      std::memcpy(p.chunk_begin, chunk_begin.data(), chunk_begin.bytes());
      std::memcpy(p.sequence_order, order.data(), order.bytes());
    }
    if (request.segments > 0) cut_otherwise(request);

    if (request.mode == kCombine) {
      std::memcpy(launches.back().params.carried, carried.data(), carried.bytes());
      for (const Launch& launch : launches) {
        if (launch.kernel == kCombineKernel) combine(launch);
      }
      std::fwrite(launches.back().params.carried, 1, carried.bytes(), stdout);
      return;
    }
    std::printf("{\"workspace\":%lld,\"workspace_bytes\":%lld,\"schedule_bytes\":%lld,",
                static_cast<long long>(args.workspace), static_cast<long long>(needed),
                static_cast<long long>(schedule_bytes));
    std::printf("\"launches\":[");
    const char* separator = "";
    for (const Launch& launch : launches) {
      std::printf("%s", separator);
      print_launch(launch, request.mode == kListAll);
      separator = ",\n";
    }
    std::printf("],\"chunks\":[");
    if (request.mode == kListAll) {
      const ForwardParams& last = launches.back().params;
      const bool packed = args.cu_seqlens != 0;
      const int count =
          packed ? last.chunk_begin[last.sequences] : last.batch * last.chunks_per_sequence;
      // Without any prepare() is not launched, which would divide by the chunks of a row.
      if (packed || count > 0) print_chunks(last, count + 3);
    }
    std::printf("]}\n");
  });
  if (status != 0) device::fail(host::remembered());
  return 0;
}
