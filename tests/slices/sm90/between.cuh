// Stands in for the state between two chunks: records where it goes and what it is made from.
#pragma once

#include "chunk/chain.cuh"

namespace flash_kda::sm90 {

template <class Chain>
void store_between(const Chain& chain, const float (&)[1][kStateTiles][4],
                   const unsigned char* middle, const StateAddress& to, int) {
  static_assert(Chain::kTokens == kPair, "as in csrc");
  chain.between(middle, to);
}

}  // namespace flash_kda::sm90
