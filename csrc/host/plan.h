// Which kernels a call uses and how large their launches and workspace are: pure functions of
// sizes.
#pragma once

#include <cstdint>

#include "launch_shapes.h"

namespace flash_kda::host {

struct Problem {
  int64_t t_total;  // tokens in all batch rows
  int64_t heads;
  int64_t sequences;
  bool packed = true;  // whether cu_seqlens is given; other batches may need less workspace
};

constexpr int32_t kHopper = 90;  // the compute capability that the sm90 family is for

struct Gpu {
  int32_t capability;  // 10 * major + minor
  int32_t sm_count;
};

enum Path : int32_t {
  kPortableV128,
  kPortableV64,
  kPortableV32,
  kPathFused,
  kPathSegments,
  kPathCount
};

const char* path_name(int32_t path);

inline bool is_portable(Path path) { return path <= kPortableV32; }
const RecurrenceShape& recurrence_shape(Path path);  // of a portable path

struct Plan {
  Path path;
  int64_t schedule_bytes;              // room for the integers at the start of the workspace
  int64_t record_bytes, middle_bytes;  // the records after them
  int64_t share_bytes;                 // or how clusters share chains; 0: each chain has its own
  int64_t workspace_bytes;             // all that, and the states that segments or clusters pass on
  int64_t prepare_ctas;                // 0: nothing to prepare
  int64_t segments;                    // parts that every sequence is cut into
  int64_t affine_ctas, combine_ctas;   // 0: not cut
  int64_t chain_ctas;                  // of the kernel with the outputs
};

// `forced_path` is a Path or FLASH_KDA_PATH_AUTO. Throws Error on sizes no launch could have.
Plan make_plan(const Problem& problem, const Gpu& gpu, int32_t forced_path);

// Enough for whatever any GPU takes.
int64_t largest_workspace(const Problem& problem);

}  // namespace flash_kda::host
