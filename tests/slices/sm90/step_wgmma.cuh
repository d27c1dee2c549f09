// Nothing is computed.
#pragma once

namespace flash_kda::sm90 {

template <int kTokensOfRecord, bool kWithOutputs>
struct WgmmaStep {
  static constexpr int kTokens = kTokensOfRecord;
  static constexpr bool kFours = kTokens == kChunk;
};

}  // namespace flash_kda::sm90
