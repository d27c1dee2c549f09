// The C functions of flash_kda.h over the launcher's own.
#include "host/driver.h"
#include "host/error.h"
#include "host/flash_kda.h"
#include "host/launch.h"
#include "host/module.h"
#include "host/plan.h"

#define FLASH_KDA_EXPORT __attribute__((visibility("default")))

using namespace flash_kda::host;

static_assert(sizeof(flash_kda_forward_args) == (16 + 35) * 8 + 14 * 4, "no padding");

FLASH_KDA_EXPORT int32_t flash_kda_abi_version(void) { return FLASH_KDA_ABI_VERSION; }

FLASH_KDA_EXPORT const char* flash_kda_last_error(void) { return remembered(); }

FLASH_KDA_EXPORT int64_t flash_kda_workspace_size(int64_t t_total, int64_t heads,
                                                  int64_t sequences) {
  int64_t bytes = -1;
  guarded([&] { bytes = largest_workspace({t_total, heads, sequences}); });
  return bytes;
}

FLASH_KDA_EXPORT int32_t flash_kda_plan(int64_t t_total, int64_t heads, int64_t sequences,
                                        int32_t packed, int32_t capability, int32_t sm_count,
                                        int32_t forced_path, int32_t* path,
                                        int64_t* workspace_bytes) {
  return guarded([&] {
    const Problem problem{t_total, heads, sequences, packed != 0};
    const Plan plan = make_plan(problem, {capability, sm_count}, forced_path);
    *path = plan.path;
    *workspace_bytes = plan.workspace_bytes;
  });
}

FLASH_KDA_EXPORT int32_t flash_kda_path_count(void) { return kPathCount; }

FLASH_KDA_EXPORT const char* flash_kda_path_name(int32_t path) { return path_name(path); }

FLASH_KDA_EXPORT int32_t flash_kda_open(const void* image, uint64_t size, int32_t device,
                                        int32_t vouched_for, uint64_t* module) {
  return guarded([&] {
    if (image == nullptr || size < 64) {
      fail(FLASH_KDA_INVALID_ARGUMENT, "the cubin has %llu bytes, too few to be one",
           static_cast<unsigned long long>(size));
    }
    *module = reinterpret_cast<uint64_t>(open_module(image, device, vouched_for != 0));
  });
}

FLASH_KDA_EXPORT int32_t flash_kda_forward(uint64_t module, const flash_kda_forward_args* args) {
  return guarded([&] { launch_forward(*reinterpret_cast<const Module*>(module), *args); });
}
