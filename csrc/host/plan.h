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
};

enum Path : int32_t { kPortableV128, kPortableV64, kPortableV32, kPathCount };

const char* path_name(int32_t path);

const RecurrenceShape& recurrence_shape(Path path);

struct Plan {
  Path path;
  int64_t chunks;           // upper bound over all splits of t_total into `sequences` parts
  int64_t schedule_bytes;   // the integer arrays at the start of the workspace
  int64_t workspace_bytes;  // arrays, then one ChunkRecord a chunk and head
  int64_t prepare_ctas;     // 0: nothing to prepare
  int64_t recurrence_ctas;
};

// `forced_path` is a Path or FLASH_KDA_PATH_AUTO. Throws Error on sizes no launch could have.
Plan make_plan(const Problem& problem, int32_t sm_count, int32_t forced_path);

}  // namespace flash_kda::host
