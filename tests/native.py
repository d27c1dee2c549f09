"""Small C++ libraries that tests compile to stand in for ``libcuda`` and for the launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADER_DIR = ROOT / "csrc" / "host"

LAUNCHER = r"""
#include <cstring>
#include <unistd.h>
#include "flash_kda.h"
#ifndef ABI
#define ABI FLASH_KDA_ABI_VERSION
#endif
static flash_kda_forward_args last;
static int32_t status, plans;
extern "C" {
int32_t flash_kda_abi_version(void) { return ABI; }
#ifndef ONLY_VERSION
const char* flash_kda_last_error(void) { return "the stand-in's text"; }
int64_t flash_kda_workspace_size(int64_t tokens, int64_t heads, int64_t sequences) {
  return status ? -1 : 1000000 * tokens + 1000 * heads + sequences;
}
int32_t flash_kda_plan(int64_t tokens, int64_t heads, int64_t sequences, int32_t packed,
                       int32_t capability, int32_t sms, int32_t forced, int32_t* path,
                       int64_t* bytes) {
  ++plans;
  *path = forced < 0 ? capability == 90 && sms > 100 : forced;
  const bool none = !packed && *path == 1;
  *bytes = none ? 0 : (*path + 1) * 10000 * tokens + 1000 * heads + sequences;
  return status;
}
int32_t flash_kda_path_count(void) { return 2; }
const char* flash_kda_path_name(int32_t path) { return path ? "wide" : "narrow"; }
int32_t flash_kda_open(const void* image, uint64_t size, int32_t device, int32_t vouched_for,
                       uint64_t* module) {
  *module = 10000 * vouched_for + size * 100 + device * 10 +
            static_cast<const char*>(image)[0] % 10;
  return status;
}
int32_t flash_kda_forward(uint64_t module, const flash_kda_forward_args* args) {
  if (module == 77) {  // for the test with threads: do the arguments stay as they are?
    const flash_kda_forward_args before = *args;
    usleep(2000);
    return std::memcmp(&before, args, sizeof before) != 0 || args->q != args->stream;
  }
  last = *args;
  return status;
}
const void* stand_in_last(void) { return &last; }
void stand_in_status(int32_t value) { status = value; }
int32_t stand_in_plans(void) { return plans; }
#endif
}
"""

DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
extern "C" {
int cuDriverGetVersion(int* version) {
  *version = setting("FAKE_VERSION", 12090);
  return 0;
}
int cuInit(unsigned) { return setting("FAKE_INIT", 0); }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGet(int* handle, int index) { *handle = 40 + index; return index < 2 ? 0 : 101; }
int cuDeviceGetName(char* name, int size, int handle) {
  snprintf(name, size, "Fake GPU %d", handle);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int handle) { *bytes = size_t(handle) << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int handle) {
  *value = attribute == 16 ? 132 : attribute == 75 ? (handle == 40 ? 9 : 10) : handle == 40 ? 0 : 3;
  return 0;
}
int cuDeviceGetUuid(unsigned char* bytes, int handle) { memset(bytes, handle, 16); return 0; }
int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "fake trouble"; return 0; }
}
"""

LAUNCHING_DRIVER = r"""
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>
namespace {
// A map is what it was made of.
struct TensorMap {
  uint64_t base, sizes[4], strides[3];
  uint32_t tile[4], every[4], type, rank, interleave, swizzle, promotion, fill, none[2];
};
static_assert(sizeof(TensorMap) == 128);
struct RowMaps {
  TensorMap q, k, g;
};
std::mutex mutex;
std::set<std::string> names;
std::atomic<int> encoded{0};
RowMaps maps;  // of the last launch of flash_kda_fused
std::vector<std::pair<uint64_t, const char*>> launches;
std::string failing;  // the function that fails, or a kernel
std::atomic<int> code{0}, countdown{0}, every{0}, loaded{0}, retained{0}, attempts{0};
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 7;
int result(const char* function) {
  const std::lock_guard<std::mutex> alone(mutex);
  return failing == function && --countdown == 0 ? code.load() : 0;
}
}  // namespace
extern "C" {
void stand_in_fail(const char* function, int at, int with) {
  const std::lock_guard<std::mutex> alone(mutex);
  failing = function;
  countdown = at;
  code = with;
}
void stand_in_fail_every(int n) { every = n; }
void stand_in_reset() {
  stand_in_fail("", 0, 0);
  every = attempts = encoded = 0;
  launches.clear();
}
int stand_in_encoded() { return encoded; }
const void* stand_in_maps() { return &maps; }
int stand_in_launches() { return static_cast<int>(launches.size()); }
const char* stand_in_kernel(int n) { return launches[n].second; }
uint64_t stand_in_stream(int n) { return launches[n].first; }
int stand_in_contexts() { return static_cast<int>(contexts.size()); }
int stand_in_loaded() { return loaded; }
int stand_in_retained() { return retained; }
int stand_in_capture_mode() { return capture_mode; }

int cuInit(unsigned) { return result("cuInit"); }
int cuDeviceGet(int* handle, int index) { *handle = index; return result("cuDeviceGet"); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 233472;
  return result("cuDeviceGetAttribute");
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &launches;
  const int status = result("cuDevicePrimaryCtxRetain");
  retained += status == 0;
  return status;
}
int cuDevicePrimaryCtxRelease_v2(int) { --retained; return 0; }
int cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return result("cuCtxGetCurrent");
}
int cuCtxPushCurrent_v2(void* context) {
  const int status = result("cuCtxPushCurrent");
  if (status == 0) contexts.push_back(context);
  return status;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
#ifndef OLD
int cuLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**,
                      unsigned) {
  *library = &names;
  const int status = result("cuLibraryLoadData");
  loaded += status == 0;
  return status;
}
#endif
int cuLibraryUnload(void*) { --loaded; return 0; }
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  const int status = result(name);
  const std::lock_guard<std::mutex> alone(mutex);
  *kernel = const_cast<char*>(names.insert(name).first->c_str());
  return status;
}
int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return result("cuKernelGetFunction");
}
int cuFuncSetAttribute(void*, int, int) { return result("cuFuncSetAttribute"); }
#ifdef PARAMETERS
#ifndef MORE  // parameters behind those that a kernel should take
#define MORE 0
#endif
static std::vector<size_t> parameters_of(void* function) {
  std::vector<size_t> sizes{PARAMETERS};
  const bool is_fused = !std::strcmp(static_cast<const char*>(function), "flash_kda_fused");
  if (is_fused && MAPS > 0) sizes.push_back(MAPS);
  sizes.insert(sizes.end(), MORE, 8);
  return sizes;
}
static int asked_beyond = 0;
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const std::vector<size_t> sizes = parameters_of(function);
  if (index >= sizes.size()) {
    ++asked_beyond;
    return 1;
  }
  *offset = 8 * index;
  *size = sizes[index];
  return result("cuFuncGetParamInfo");
}
int stand_in_asked_beyond() { return asked_beyond; }
#endif
int cuTensorMapEncodeTiled(TensorMap* map, int type, unsigned rank, void* base,
                           const uint64_t* sizes, const uint64_t* strides, const uint32_t* tile,
                           const uint32_t* every, int interleave, int swizzle, int promotion,
                           int fill) {
  const int status = result("cuTensorMapEncodeTiled");
  if (status != 0) return status;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) return 1;
  *map = {};
  map->base = reinterpret_cast<uint64_t>(base);
  std::memcpy(map->sizes, sizes, sizeof map->sizes);
  std::memcpy(map->strides, strides, sizeof map->strides);
  std::memcpy(map->tile, tile, sizeof map->tile);
  std::memcpy(map->every, every, sizeof map->every);
  map->type = type, map->rank = rank, map->interleave = interleave, map->swizzle = swizzle;
  map->promotion = promotion, map->fill = fill;
  ++encoded;
  return 0;
}
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void**) {
  const int status = result("cuLaunchKernelEx");
  if (status != 0) return status;
  if (every > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));  // so that others may come between
    if (++attempts % every == 0) return 719;
  }
  uint64_t stream;  // behind seven numbers of 4 bytes
  std::memcpy(&stream, static_cast<const char*>(config) + 32, sizeof stream);
  const std::lock_guard<std::mutex> alone(mutex);
  launches.emplace_back(stream, static_cast<const char*>(function));
  if (!std::strcmp(launches.back().second, "flash_kda_fused"))
    maps = *static_cast<const RowMaps*>(arguments[1]);
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return result("cuThreadExchangeStreamCaptureMode");
}
int cuGetErrorName(int code, const char** text) {
  if (code == 1234) return 1;  // unknown to it, and *text stays as it is
  *text = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_FAKE";
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  if (code == 1234) return 1;
  *text = "fake trouble";
  return 0;
}
}
"""


def compiler() -> str:
    """A C++ compiler; skips the test where there is none."""
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def build(source: str, output: Path, *options: str) -> Path:
    """Compile a shared library."""
    file = output.with_suffix(".cpp")
    file.write_text(source)
    command = [compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{HEADER_DIR}", *options]
    subprocess.run([*command, str(file), "-o", str(output)], check=True)
    return output


def link(sources: list[Path], program: Path, *options: str) -> Path:
    """Compile a program from several files."""
    command = [compiler(), "-std=c++17", "-O1", *options, *map(str, sources)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def run(source: str, folder: Path) -> str:
    """Compile and run a program; returns what it prints."""
    file, program = folder / "program.cpp", folder / "program"
    file.write_text(source)
    command = [compiler(), "-std=c++17", f"-I{HEADER_DIR}", str(file), "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
