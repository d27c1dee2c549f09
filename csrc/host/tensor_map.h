// What the copy engine needs to find tiles in the tensors of a call.
#pragma once

#include "host/flash_kda.h"
#include "params.h"

namespace flash_kda::host {

// Of q, k and g of a call that has tokens. Throws Error naming the tensor that the driver refuses.
RowMaps row_maps(const flash_kda_forward_args& args);

}  // namespace flash_kda::host
