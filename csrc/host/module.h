// A cubin loaded on one device.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/plan.h"

namespace flash_kda::host {

struct Module {
  CUcontext context;
  Gpu gpu;
  int32_t exclusive_smem;  // dynamic shared memory with which no two CTAs fit one multiprocessor
  CUfunction schedule;
  CUfunction prepare;
  CUfunction prepare_pairs, affine, combine;  // null but on compute capability 9.0
  CUfunction chain[kPathCount];               // the kernel with the outputs of each path
};

// Never freed: kernels may still be running when the process ends. `vouched_for`: whether the image
// is known to have been made with this launcher.
Module* open_module(const void* image, int32_t device, bool vouched_for);

}  // namespace flash_kda::host
