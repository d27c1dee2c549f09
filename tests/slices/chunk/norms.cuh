// What is asked of it beside norms.
#pragma once

namespace flash_kda {

constexpr unsigned kWarpMask = 0xffffffffu;

}  // namespace flash_kda
