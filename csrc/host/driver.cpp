#include "host/driver.h"

#include <dlfcn.h>

#include "host/error.h"
#include "host/flash_kda.h"

namespace flash_kda::host {
namespace {

template <class Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    fail(FLASH_KDA_NO_DRIVER, "libcuda.so.1 has no %s: the NVIDIA driver is too old", name);
  }
}

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(FLASH_KDA_NO_DRIVER, "cannot open libcuda.so.1 (the NVIDIA driver): %s", dlerror());
  }
  Driver d;
  resolve(library, "cuInit", d.Init);
  resolve(library, "cuDeviceGet", d.DeviceGet);
  resolve(library, "cuDeviceGetAttribute", d.DeviceGetAttribute);
  resolve(library, "cuDevicePrimaryCtxRetain", d.DevicePrimaryCtxRetain);
  resolve(library, "cuDevicePrimaryCtxRelease_v2", d.DevicePrimaryCtxRelease);
  resolve(library, "cuCtxGetCurrent", d.CtxGetCurrent);
  resolve(library, "cuCtxPushCurrent_v2", d.CtxPushCurrent);
  resolve(library, "cuCtxPopCurrent_v2", d.CtxPopCurrent);
  resolve(library, "cuLibraryLoadData", d.LibraryLoadData);
  resolve(library, "cuLibraryUnload", d.LibraryUnload);
  resolve(library, "cuLibraryGetKernel", d.LibraryGetKernel);
  resolve(library, "cuKernelGetFunction", d.KernelGetFunction);
  resolve(library, "cuFuncSetAttribute", d.FuncSetAttribute);
  d.FuncGetParamInfo =
      reinterpret_cast<decltype(d.FuncGetParamInfo)>(dlsym(library, "cuFuncGetParamInfo"));
  resolve(library, "cuTensorMapEncodeTiled", d.TensorMapEncodeTiled);
  resolve(library, "cuLaunchKernelEx", d.LaunchKernelEx);
  resolve(library, "cuThreadExchangeStreamCaptureMode", d.ThreadExchangeStreamCaptureMode);
  resolve(library, "cuGetErrorName", d.GetErrorName);
  resolve(library, "cuGetErrorString", d.GetErrorString);
  if (d.Init(0) != CUDA_SUCCESS) {
    fail(FLASH_KDA_NO_DRIVER, "cuInit failed: the NVIDIA driver finds no usable GPU");
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = open_driver();  // a failed opening is tried again at the next call
  return instance;
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr, *text = nullptr;
  driver().GetErrorName(result, &name);
  driver().GetErrorString(result, &text);
  fail(FLASH_KDA_DRIVER_ERROR, "%s failed: %s (%s)", call, name ? name : "unknown error",
       text ? text : "no description");
}

CurrentContext::CurrentContext(CUcontext context) : pushed_(false) {
  CUcontext current = nullptr;
  check(driver().CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != context) {
    check(driver().CtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
}

CurrentContext::~CurrentContext() {
  CUcontext popped;
  if (pushed_) driver().CtxPopCurrent(&popped);
}

}  // namespace flash_kda::host
