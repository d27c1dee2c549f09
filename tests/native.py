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
int32_t flash_kda_open(const void* image, uint64_t size, int32_t device, uint64_t* module) {
  *module = size * 100 + device * 10 + static_cast<const char*>(image)[0] % 10;
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
