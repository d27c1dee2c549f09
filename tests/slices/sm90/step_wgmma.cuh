// Nothing is computed.
#pragma once

namespace flash_kda::sm90 {

template <bool kOutputs>
struct WgmmaStep {};

}  // namespace flash_kda::sm90
