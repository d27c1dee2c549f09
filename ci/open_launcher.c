/* Opens the launcher library the way Python does and asks it two things: its interface version, and
 * to load a cubin where no driver is. Built and run by ci/emulate.py, also for other processors. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#include "host/flash_kda.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int32_t (*abi_version)(void) = (int32_t(*)(void))dlsym(library, "flash_kda_abi_version");
  int32_t (*open)(const void*, uint64_t, int32_t, uint64_t*) =
      (int32_t(*)(const void*, uint64_t, int32_t, uint64_t*))dlsym(library, "flash_kda_open");
  const char* (*last_error)(void) = (const char* (*)(void))dlsym(library, "flash_kda_last_error");
  int64_t (*workspace_size)(int64_t, int64_t, int64_t) =
      (int64_t(*)(int64_t, int64_t, int64_t))dlsym(library, "flash_kda_workspace_size");
  if (!abi_version || !open || !last_error || !workspace_size) return 1;
  uint64_t module = 0;
  char image[64] = {0x7f, 'E', 'L', 'F'};
  int32_t status = open(image, sizeof image, 0, &module);
  printf("abi_version=%d\nworkspace=%lld\nopen=%d\n%s\n", (int)abi_version(),
         (long long)workspace_size(8192, 96, 1), (int)status, last_error());
  return 0;
}
