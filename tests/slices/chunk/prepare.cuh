// Stands in for what makes records: records whose rows are fetched and where a record is left.
// Nothing is computed but a mark of the rows, which ends up in all of a MiddleRecord.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstring>
#include <initializer_list>

#include "chunk/chain.cuh"

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace flash_kda {

inline float mark;  // of the warp's rows: 1 + its first token's number times the heads + the head

template <class Layout>
void fetch_chunk(const ForwardParams& p, unsigned char* rows, const TokenRange& tokens, int head,
                 int) {
  const int token = tokens.batch * p.tokens + tokens.begin;
  mark = static_cast<float>(1 + token * p.heads + head);
  device::threads.record(
      {device::kFetch, device::address(rows), head, tokens.batch, tokens.begin, tokens.length});
}

inline unsigned load_raw_beta(const ForwardParams&, const TokenRange&, int, int) { return 0; }
inline float beta_of(const ForwardParams&, unsigned, int, int) { return 0; }

template <int kChannels>
struct Gate {
  Gate(const ForwardParams&, int, int) {}
};

template <class Layout>
struct LanePieces {
  LanePieces(const unsigned char*, int) {}
  uint2 load(int, int) const { return {}; }
  void store(int, int, uint2) const {}
};
inline void unpack(float (&x)[4], uint2) { x[0] = x[1] = x[2] = x[3] = 0; }
inline uint2 pack(const float (&x)[4]) {
  uint2 bits;
  std::memcpy(&bits, x, sizeof bits);
  return bits;
}

template <class Layout>
void decay_rows(float, const unsigned char*, const LanePieces<Layout>&, const Gate<4>&, int,
                float (&growing)[kChunk][4], float (&total)[4], int) {
  for (auto& token : growing) {
    for (float& x : token) x = 1;
  }
  for (float& x : total) x = mark;
}
template <class Layout>
void store_remaining(const LanePieces<Layout>&, const float (&)[kChunk][4], const float (&)[4]) {}
template <class Layout>
void store_decay(unsigned char*, const float (&)[4], int) {}

struct Products {
  float lower[2][4], scores[2][4];
};
template <class Layout>
Products multiply(const unsigned char*, const unsigned char*, int, int) {
  return {};
}
inline void store_lower(float (&)[kChunk][kChunk], const Products&, float, int) {}
inline void solve_unit_lower(float (&)[kChunk], const float (&)[kChunk][kChunk], int) {}
template <int kSize>
void store_inverse(unsigned char*, const float (&)[kChunk], int, int) {}
template <class Layout>
void store_beta(unsigned char*, float, int, int) {}
template <int kSize, bool kLower>
void store_block(unsigned char*, const float (&)[2][4], int, int, int) {}

struct Fragment4 {
  unsigned x[4];
};
template <int kSize>
int square_offset(int row, int column) {
  return (row / 8 * (kSize / 8) + column / 8) * 128 + row % 8 * 16 + column % 8 * 2;
}
inline int image_offset(int row, int byte, int half_bytes) {
  return byte / 128 * half_bytes + row * 128 + byte % 128;
}
inline Fragment4 load_matrices(const unsigned char*) { return {}; }
inline Fragment4 load_matrices_transposed(const unsigned char*) { return {}; }
inline void mma(float (&)[4], const Fragment4&, unsigned, unsigned) {}

}  // namespace flash_kda
