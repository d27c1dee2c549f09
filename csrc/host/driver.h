// The few driver entry points the launcher needs, resolved from libcuda.so.1 on first use.
#pragma once

#include <cuda.h>

namespace flash_kda::host {

struct Driver {
  CUresult (*Init)(unsigned);
  CUresult (*DeviceGet)(CUdevice*, int);
  CUresult (*DeviceGetAttribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*DevicePrimaryCtxRelease)(CUdevice);
  CUresult (*CtxGetCurrent)(CUcontext*);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*LibraryLoadData)(CUlibrary*, const void*, CUjit_option*, void**, unsigned,
                              CUlibraryOption*, void**, unsigned);
  CUresult (*LibraryUnload)(CUlibrary);
  CUresult (*LibraryGetKernel)(CUkernel*, CUlibrary, const char*);
  CUresult (*KernelGetFunction)(CUfunction*, CUkernel);
  CUresult (*FuncSetAttribute)(CUfunction, CUfunction_attribute, int);
  CUresult (*FuncGetParamInfo)(CUfunction, size_t, size_t*, size_t*);  // null before CUDA 12.4
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                   const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                   const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*ThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*);
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*GetErrorString)(CUresult, const char**);
};

// Thread-safe; throws Error when the driver or one of its functions is missing.
const Driver& driver();

// Throws Error naming the call and the driver's own words.
void check(CUresult result, const char* call);

// Makes `context` current for a scope, and leaves the caller's context as it was.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_;
};

}  // namespace flash_kda::host
