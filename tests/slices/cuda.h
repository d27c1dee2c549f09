// What csrc/host needs of the driver's types, for a launcher whose launches are only recorded.
#pragma once

#include <cstddef>
#include <cstdint>

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

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct alignas(64) CUtensorMap {
  unsigned char opaque[128];
};

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
