#pragma once

#include "host/flash_kda.h"
#include "host/module.h"

namespace flash_kda::host {

// Enqueues the kernels of one forward pass. Throws Error; then nothing, or only kernels that write
// the workspace, has been enqueued.
void launch_forward(const Module& module, const flash_kda_forward_args& args);

}  // namespace flash_kda::host
