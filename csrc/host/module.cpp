#include "host/module.h"

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>

#include "host/driver.h"
#include "host/error.h"
#include "host/flash_kda.h"
#include "launch_shapes.h"

namespace flash_kda::host {
namespace {

// Loading allocates, which a stream capture in progress on this thread would forbid: a first call
// inside a graph capture works because the mode is relaxed around it.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check(driver().ThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { driver().ThreadExchangeStreamCaptureMode(&mode_); }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// A device's primary context, given back unless a module keeps it.
class RetainedContext {
 public:
  explicit RetainedContext(CUdevice device) : device_(device) {
    check(driver().DevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain");
  }
  ~RetainedContext() {
    if (!kept_) driver().DevicePrimaryCtxRelease(device_);
  }
  RetainedContext(const RetainedContext&) = delete;
  RetainedContext& operator=(const RetainedContext&) = delete;

  CUcontext get() const { return context_; }
  void keep() { kept_ = true; }

 private:
  const CUdevice device_;
  CUcontext context_ = nullptr;
  bool kept_ = false;
};

int32_t device_attribute(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

// Of a kernel's index-th parameter; 0: it takes fewer.
size_t parameter_bytes(CUfunction function, size_t index) {
  size_t offset = 0, size = 0;
  const CUresult found = driver().FuncGetParamInfo(function, index, &offset, &size);
  if (found == CUDA_ERROR_INVALID_VALUE) return 0;
  check(found, "cuFuncGetParamInfo");
  return size;
}

// `parameters`: the sizes of the structs that the kernel is given. The driver copies as many bytes
// as the cubin's kernel wants: one of another revision would have it read beyond our structs, or
// take one field for another.
void check_parameters(CUfunction function, const std::string& name,
                      std::initializer_list<size_t> parameters) {
  if (driver().FuncGetParamInfo == nullptr) return;
  size_t index = 0;
  for (const size_t expected : parameters) {
    const size_t size = parameter_bytes(function, index++);
    if (size != expected) {
      fail(FLASH_KDA_INVALID_ARGUMENT,
           "the cubin is of another revision: %s takes %zu bytes of parameters, not %zu",
           name.c_str(), size, expected);
    }
  }
  if (const size_t size = parameter_bytes(function, index)) {
    fail(FLASH_KDA_INVALID_ARGUMENT,
         "the cubin is of another revision: %s takes %zu bytes of parameters more", name.c_str(),
         size);
  }
}

CUfunction find_kernel(CUlibrary library, const std::string& name, int smem_bytes) {
  CUkernel kernel;
  const CUresult found = driver().LibraryGetKernel(&kernel, library, name.c_str());
  check(found, ("cuLibraryGetKernel(" + name + ")").c_str());
  CUfunction function;
  check(driver().KernelGetFunction(&function, kernel), "cuKernelGetFunction");
  if (smem_bytes > 0) {
    check(driver().FuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    smem_bytes),
          ("cuFuncSetAttribute(" + name + ", dynamic shared memory)").c_str());
  }
  return function;
}

}  // namespace

Module* open_module(const void* image, int32_t device, bool vouched_for) {
  const Driver& d = driver();
  auto module = std::make_unique<Module>();
  CUdevice handle;
  check(d.DeviceGet(&handle, device), "cuDeviceGet");
  module->gpu = {10 * device_attribute(handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                     device_attribute(handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                 device_attribute(handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)};
  module->exclusive_smem =
      device_attribute(handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) / 2;
  RetainedContext context(handle);
  module->context = context.get();
  const RelaxedCapture relaxed;
  const CurrentContext current(module->context);
  CUlibrary library;
  check(d.LibraryLoadData(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0),
        "cuLibraryLoadData");
  const auto find = [&](const std::string& name, int smem_bytes,
                        std::initializer_list<size_t> parameters = {sizeof(ForwardParams)}) {
    const CUfunction function = find_kernel(library, name, smem_bytes);
    // Not of the right cubin, which has one parameter less than is asked for: compute-sanitizer
    // reports every call of the driver that fails.
    if (!vouched_for) check_parameters(function, name, parameters);
    return function;
  };
  try {
    module->schedule = find("flash_kda_schedule", 0);
    module->prepare = find("flash_kda_prepare", kPrepareSmemBytes);
    for (const Path path : {kPortableV128, kPortableV64, kPortableV32}) {
      const std::string name = path_name(path);
      module->chain[path] =
          find("flash_kda_recurrence" + name.substr(name.find('_')),
               std::max(recurrence_shape(path).smem_bytes(), module->exclusive_smem));
    }
    if (module->gpu.capability == kHopper) {
      module->prepare_pairs = find("flash_kda_prepare_pairs", kPreparePairsSmemBytes);
      module->chain[kPathFused] =
          find("flash_kda_fused", kFused.smem_bytes(), {sizeof(ForwardParams), sizeof(RowMaps)});
      module->affine =
          find("flash_kda_affine", std::max(kAffine.smem_bytes(), module->exclusive_smem));
      module->combine = find("flash_kda_combine", 0);
      module->chain[kPathSegments] = find("flash_kda_walk", kWalk.smem_bytes());
    }
  } catch (...) {
    d.LibraryUnload(library);
    throw;
  }
  context.keep();
  return module.release();
}

}  // namespace flash_kda::host
