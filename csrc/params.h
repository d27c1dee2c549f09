// Plain structs and constants that the launcher and the kernels share.
//
// One ForwardParams is handed to every kernel by value. All strides are in elements, all addresses
// are device addresses; an absent optional tensor is a null pointer.
#pragma once

namespace flash_kda {

constexpr int kHeadDim = 128;  // K = V = 128
constexpr int kChunk = 16;     // tokens a chunk

// Element types that arguments may arrive in. The values are part of the C ABI.
enum DType : int {
  kAbsent = 0,
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
  kFloat64 = 4,
  kInt32 = 5,
  kInt64 = 6,
};

struct TokenStrides {  // of a [B, T, H, ...] tensor
  long long batch;
  long long token;
  long long head;
};

struct StateStrides {  // of a [N or P or C, H, V, K] tensor
  long long slot;      // a sequence's, a pool slot's or a checkpoint's
  long long head;
};

// What a step of a chain needs of a head and of its tokens, one chunk or two: one contiguous
// record, so that few bulk copies move it. Below, c is the running sum of the log2-decays from the
// first token on, c_T the sum at the last.
//
// An image of the tokens x 128 channels lies in two halves of 64 channels (common/tile.cuh), and
// each half of the record holds its half of the three images, one after the other. Square images
// are columns of 16 tokens, each of contiguous 8 x 8 blocks, row by row; those of the two
// alternate, so that one product reads both. Above the diagonal they hold zeros. Where a record is
// stored without the blocks of 16 x 16 that are there, what follows moves up.
template <int kTokens>
struct Record {
  static constexpr int kHalfImageBytes = kTokens * kHeadDim;  // 64 channels
  static constexpr int kColumnBytes = kTokens * kChunk * 2;
  static constexpr int kColumnStride = 2 * kColumnBytes;
  static constexpr int kColumns = kTokens / kChunk;
  static constexpr int kHalfBytes = 3 * kHalfImageBytes;
  static constexpr int kKeyDecayed = 0;                                  // -K~ = -k 2^c     bf16
  static constexpr int kQueryDecayed = kKeyDecayed + kHalfImageBytes;    // Q~ = q 2^c         "
  static constexpr int kKeyRemaining = kQueryDecayed + kHalfImageBytes;  // K- = k 2^(c_T - c) "
  static constexpr int kDecay = 2 * kHalfBytes;            // 2^(c_T)  fp32 128, column_position()
  static constexpr int kBeta = kDecay + kHeadDim * 4;      // b        fp32 kTokens, the same
  static constexpr int kInverse = kBeta + kTokens * 4;     // (I + L)^-1          bf16, square
  static constexpr int kScores = kInverse + kColumnBytes;  // lower(Q~ K^^T)            "
  static constexpr int kBytes = kInverse + kColumns * kColumnStride;
  static constexpr int kSecondColumns = kInverse + kColumnStride;  // of a pair
  static constexpr int kBlockBytes = kChunk * kChunk * 2;
  static constexpr int kStoredBytes = kBytes - kColumns * (kColumns - 1) * kBlockBytes;
};
using ChunkRecord = Record<kChunk>;
static_assert(ChunkRecord::kBytes == 13888, "868 bytes a padded token and head");

// Two chunks a step: the state is rounded and decayed half as often.
constexpr int kPair = 2 * kChunk;
using PairRecord = Record<kPair>;
static_assert(PairRecord::kStoredBytes == 28288, "884 bytes a padded token and head");

// For a checkpoint between the two chunks of a pair: the first one's K- and decay, to its own end.
struct MiddleRecord {
  static constexpr int kKeyRemaining = 0;               // bf16 16 x 128, token by token
  static constexpr int kDecay = kChunk * kHeadDim * 2;  // fp32 128
  static constexpr int kBytes = kDecay + kHeadDim * 4;
};

// What a segment of a cut sequence leaves in the workspace: the state after it, which begins as the
// state it would leave if it had started from zero, and the matrix that the state before it is
// multiplied by. The first one starts from the initial state; a copy of that stands in its matrix's
// place.
enum Carried : int { kCarriedState, kCarriedMap, kCarried };

// What a cluster of `fused` works on where there are more chains than clusters: `pieces` chains,
// the first_job-th, the one before it, and so on; of the first and the last perhaps a part only.
// Chain n is head n / N of sequence n % N.
struct alignas(16) Share {
  static constexpr int kWhole = 0x7fffffff;
  int first_job, pieces;
  int first_end;   // chunks of the first one that are this cluster's
  int last_begin;  // chunks of the last one that are the cluster's before
};
constexpr int kStateWarps = 8;  // of a cluster, whose rows together are a state

// How the copy engine finds tiles in a [B, T, H, 128] tensor: what the driver makes of its address,
// sizes and strides (CUtensorMap).
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};
constexpr int kChannelsOfTile = 64;  // and kChunk tokens: half of an image

// The second argument of `fused`.
struct RowMaps {
  TensorMap q, k, g;
};

struct ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  const void* g;
  const void* beta;
  void* out;
  const void* a_log;
  const void* dt_bias;
  const void* initial_state;
  void* final_state;
  const void* cu_seqlens;
  const void* state_indices;       // [N] slots of the state pools; absent: sequence n uses slot n
  const void* checkpoint_offsets;  // [C] ascending positions in the row of tokens
  void* checkpoint_states;         // [C, H, V, K]

  // Workspace. The three arrays exist for packed batches only (cu_seqlens given).
  int* sequence_start;  // [N + 1] first token of each sequence, made monotone and clamped to [0, T]
  int* record_begin;    // [N + 1] records before each sequence
  int* sequence_order;  // [N] sequences, longest first
  unsigned char* records;  // [records][H] of record_tokens each
  unsigned char* middles;  // [records][H] MiddleRecord, of pairs and only if there are checkpoints
  Share* shares;           // [clusters] of `fused`, if there are more chains; then also
  int* handed_on;  // [clusters][kStateWarps] whether a warp's rows of a state are in carried
  int* next_turn;  // [1] which share the cluster that begins next has
  float* carried;  // [N][H][segments - 1][kCarried][V][K], of `fused` [clusters][V][K]

  TokenStrides q_stride, k_stride, v_stride, g_stride, out_stride, beta_stride;
  StateStrides initial_stride, final_stride, checkpoint_stride;
  long long cu_seqlens_stride, state_indices_stride, checkpoint_offsets_stride;
  long long initial_slots, final_slots;

  float scale;
  float log2_lower_bound;  // lower_bound * log2(e): the most negative log2-decay of one token

  int batch, tokens, heads, sequences;
  int record_tokens;         // kChunk or kPair
  int records_per_sequence;  // without cu_seqlens
  int segments;              // parts that every sequence is cut into; 1: not cut
  int job_segments;          // of them, those that this launch of `segments` works on
  int clusters;              // of `fused`
  int state_stages;          // of its ring, in which a chain's initial state comes; 0: in none
  long long jobs;            // sequences x job_segments x H
  int checkpoints;           // C
  int beta_dtype, a_log_dtype, dt_bias_dtype, initial_dtype, final_dtype, cu_seqlens_dtype;
  int state_indices_dtype, checkpoint_offsets_dtype, checkpoint_dtype;
  int beta_is_logits;
  // Whether fours of state elements are naturally aligned.
  int initial_vectorised, final_vectorised, checkpoint_vectorised;
};

}  // namespace flash_kda
