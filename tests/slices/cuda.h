// What csrc/host needs of the driver's types, for a launcher whose launches are only recorded.
#pragma once

#include <cstddef>

enum CUresult { CUDA_SUCCESS };
enum CUdevice_attribute {};
enum CUfunction_attribute {};
enum CUjit_option {};
enum CUlibraryOption {};
enum CUstreamCaptureMode {};
using CUdevice = int;
using CUcontext = struct Context*;
using CUlibrary = struct Library*;
using CUkernel = struct Kernel*;
using CUfunction = struct Function*;
using CUstream = struct Stream*;

enum CUlaunchAttributeID { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};
