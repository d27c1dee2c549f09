#include "host/tensor_map.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "host/driver.h"

namespace flash_kda::host {
namespace {

// All that the driver is told of a [B, T, H, 128] tensor. Strides are in bytes.
struct Tensor {
  uint64_t base;
  cuuint64_t sizes[4];    // channels, heads, tokens, batch rows: from the innermost out
  cuuint64_t strides[3];  // of all but the channels

  Tensor() = default;
  Tensor(uint64_t base, const int64_t (&stride)[3], const flash_kda_forward_args& a)
      : base(base),
        sizes{kHeadDim, static_cast<cuuint64_t>(a.heads), static_cast<cuuint64_t>(a.tokens),
              static_cast<cuuint64_t>(a.batch)} {
    for (int i = 0; i < 3; ++i) {
      // The driver refuses strides that are no multiples of 16 bytes, even those that nobody takes.
      strides[i] = sizes[i + 1] == 1 ? 2 * kHeadDim : 2 * static_cast<cuuint64_t>(stride[2 - i]);
    }
  }

  bool operator==(const Tensor& other) const {
    return base == other.base &&
           std::equal(std::begin(sizes), std::end(sizes), std::begin(other.sizes)) &&
           std::equal(std::begin(strides), std::end(strides), std::begin(other.strides));
  }
};

TensorMap encode(const char* call, const Tensor& tensor) {
  const cuuint32_t tile[] = {kChannelsOfTile, 1, kChunk, 1}, every[] = {1, 1, 1, 1};
  CUtensorMap encoded;  // in some versions of the header aligned to more than a kernel needs
  check(driver().TensorMapEncodeTiled(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                                      reinterpret_cast<void*>(tensor.base), tensor.sizes,
                                      tensor.strides, tile, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        call);
  TensorMap map;
  static_assert(sizeof map == sizeof encoded);
  std::memcpy(&map, &encoded, sizeof map);
  return map;
}

// Tensors come again: a model's layers are given the same memory, call after call. A map holds
// nothing but what it was made of, so it stays right for whatever lies there.
// `call`: how an error names it.
const TensorMap& map_of(const char* call, const Tensor& tensor) {
  struct Entry {
    Tensor tensor;  // with no base: free
    TensorMap map;
  };
  static thread_local std::array<Entry, 16> entries{};
  static thread_local unsigned next = 0;
  for (const Entry& entry : entries) {
    if (entry.tensor == tensor) return entry.map;
  }
  const TensorMap map = encode(call, tensor);
  Entry& entry = entries[next++ % entries.size()];
  entry = {tensor, map};
  return entry.map;
}

}  // namespace

RowMaps row_maps(const flash_kda_forward_args& a) {
  return {map_of("cuTensorMapEncodeTiled for q", Tensor(a.q, a.q_stride, a)),
          map_of("cuTensorMapEncodeTiled for k", Tensor(a.k, a.k_stride, a)),
          map_of("cuTensorMapEncodeTiled for g", Tensor(a.g, a.g_stride, a))};
}

}  // namespace flash_kda::host
