// Plain structs and constants that the launcher and the kernels share.
//
// One ForwardParams is handed to every kernel by value. All strides are in elements, all addresses
// are device addresses; an absent optional tensor is a null pointer.
#pragma once

namespace flash_kda {

constexpr int kHeadDim = 128;  // K = V = 128
constexpr int kChunk = 16;     // tokens a chunk of the portable family

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

// What prepare leaves for the recurrence, per chunk and head: one contiguous record, so that one
// bulk copy moves it. Images of 16 tokens x 128 channels are rows of 256 bytes whose 16-byte units
// are swizzled (common/tile.cuh); 16 x 16 images are four contiguous 8 x 8 blocks.
struct ChunkRecord {
  static constexpr int kImageBytes = kChunk * kHeadDim * 2;
  static constexpr int kSquareBytes = kChunk * kChunk * 2;
  static constexpr int kKeyDecayed = 0;  // -K~ = -k 2^c      bf16 16 x 128
  static constexpr int kQueryDecayed = kKeyDecayed + kImageBytes;    // Q~ = q 2^c     bf16 16 x 128
  static constexpr int kKeyRemaining = kQueryDecayed + kImageBytes;  // K- = k 2^(c_C - c)  "
  static constexpr int kInverse = kKeyRemaining + kImageBytes;  // (I + L)^-1 diag(b) bf16 16 x 16
  static constexpr int kScores = kInverse + kSquareBytes;       // lower(Q~ K^^T)      bf16 16 x 16
  static constexpr int kDecay = kScores + kSquareBytes;  // 2^(c_C)  fp32 128, see decay_position()
  static constexpr int kBytes = kDecay + kHeadDim * 4;
};
static_assert(ChunkRecord::kBytes == 13824, "864 bytes a padded token and head");

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
  int* chunk_begin;     // [N + 1] chunks before each sequence
  int* sequence_order;  // [N] sequences, longest first
  unsigned char* records;  // [chunks][H] ChunkRecord

  TokenStrides q_stride, k_stride, v_stride, g_stride, out_stride, beta_stride;
  StateStrides initial_stride, final_stride, checkpoint_stride;
  long long cu_seqlens_stride, state_indices_stride, checkpoint_offsets_stride;
  long long initial_slots, final_slots;

  float scale;
  float log2_lower_bound;  // lower_bound * log2(e): the most negative log2-decay of one token

  int batch, tokens, heads, sequences;
  int chunks_per_sequence;  // without cu_seqlens
  int checkpoints;          // C
  int beta_dtype, a_log_dtype, dt_bias_dtype, initial_dtype, final_dtype, cu_seqlens_dtype;
  int state_indices_dtype, checkpoint_offsets_dtype, checkpoint_dtype;
  int beta_is_logits;
  // Whether pairs of state elements are naturally aligned.
  int initial_vectorised, final_vectorised, checkpoint_vectorised;
};

}  // namespace flash_kda
