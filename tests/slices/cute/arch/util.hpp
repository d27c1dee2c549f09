// Addresses in shared memory are those of the host.
#pragma once

namespace cute {

inline unsigned cast_smem_ptr_to_uint(const void* pointer) {
  return static_cast<unsigned>(device::address(pointer));
}

}  // namespace cute
