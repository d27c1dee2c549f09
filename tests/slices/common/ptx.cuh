// Stands in for instructions: records what is copied, and who waits for a flag or raises one.
#pragma once

#include <cstring>

#include "params.h"

namespace flash_kda {

constexpr unsigned kWarpMask = 0xffffffffu;

inline void wait_for_previous_launch() { device::threads.wait_for_previous_launch(); }
inline void allow_next_launch() {}

inline void bulk_load(void* shared, const void* global, unsigned bytes,
                      unsigned long long* barrier) {
  if (device::expected.barrier != barrier || device::expected.bytes < bytes)
    device::fail("a copy that its barrier does not expect");
  device::threads.check_that_is_there(device::address(global));
  device::expected.bytes -= bytes;
  device::threads.record({device::kCopy, device::address(shared), device::address(global), bytes,
                          device::address(barrier)});
}
// To another CTA, whose barrier expects so many bytes.
inline void expect_bytes(unsigned, unsigned long long* barrier, unsigned bytes) {
  if (device::expected.bytes != 0) device::fail("a barrier that expects more than comes");
  device::expected = {barrier, bytes};
}
inline void bulk_load_to(unsigned cta, void* shared, const void* global, unsigned bytes,
                         unsigned long long* barrier) {
  if (device::expected.barrier != barrier || device::expected.bytes < bytes)
    device::fail("a copy that its barrier does not expect");
  device::expected.bytes -= bytes;
  device::threads.record({device::kSend, cta, device::address(shared), device::address(global),
                          bytes, device::address(barrier)});
}
// By all lanes, of which one does it.
inline void arrive_expecting(unsigned barrier, unsigned bytes) {
  if (device::expected.bytes != 0) device::fail("a barrier that expects more than comes");
  device::expected = {reinterpret_cast<const void*>(uintptr_t{barrier}), bytes};
  device::threads.record({device::kExpect, barrier, bytes});
}
inline void tile_load(unsigned shared, const TensorMap* map, int channel, int head, int token,
                      int batch, unsigned barrier) {
  device::Tiles tiles;
  std::memcpy(&tiles, map, sizeof tiles);
  if (device::address(device::expected.barrier) != barrier || device::expected.bytes < tiles.bytes)
    device::fail("a copy that its barrier does not expect");
  device::expected.bytes -= tiles.bytes;
  device::threads.record({device::kTile, shared, static_cast<int64_t>(tiles.base), channel, head,
                          token, batch, barrier});
}
inline void prefetch_map(const TensorMap*) {}
inline void prefetch_line(const void* global) {
  device::threads.record({device::kPrefetch, device::address(global)});
}
inline void bulk_store(void* global, const void* shared, unsigned bytes) {
  device::threads.record({device::kLeave, device::address(global), device::address(shared), bytes});
}
inline void bulk_store_wait_read() {}
inline void copy_async_wait_all() {}
inline void fence_async_shared() {}
inline void stay_behind_wait() {}
inline void keep_in_register(int&) {}
constexpr int kArrivalsOfWarp = 1;
inline bool arrives(int lane) { return lane == 0; }
inline void arrive_if(unsigned long long*, bool) {}

inline void raise_flag(int* flag, bool raises) {
  if (!raises) return;
  device::threads.check_that_stores_are_ordered();
  *flag = 1;
  device::threads.record({device::kRaise, device::address(flag)});
}
inline bool flag_raised(const int* flag) {
  device::threads.record({device::kWait, device::address(flag)});
  return *flag != 0;
}

inline unsigned pack_bf16(float, float) { return 0; }

}  // namespace flash_kda
