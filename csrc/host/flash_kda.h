/* The C ABI of libflash_kda.so: the launcher that Python calls through ctypes (flash_kda/abi.py).
 *
 * It opens libcuda.so.1 on first need and links neither libcuda nor libcudart nor libtorch.
 * Functions that return a status return FLASH_KDA_OK or leave a text in flash_kda_last_error() of
 * the calling thread. Nothing here synchronises with the device.
 */
#ifndef FLASH_KDA_H_
#define FLASH_KDA_H_

#include <stdint.h>

/* Raised with every change of a signature or of flash_kda_forward_args. */
#define FLASH_KDA_ABI_VERSION 4

#define FLASH_KDA_OK 0
#define FLASH_KDA_INVALID_ARGUMENT 1
#define FLASH_KDA_NO_DRIVER 2
#define FLASH_KDA_DRIVER_ERROR 3
#define FLASH_KDA_PATH_UNAVAILABLE 4

#define FLASH_KDA_PATH_AUTO (-1)

#if defined(__cplusplus)
extern "C" {
#endif

/* Device addresses are 0 and dtypes 0 for absent tensors; strides are in elements. dtype codes:
 * DType in params.h. Packed without gaps: sixteen and thirty-five 8-byte fields, then fourteen of 4
 * bytes.
 */
typedef struct flash_kda_forward_args {
  uint64_t q, k, v, g, beta, out, a_log, dt_bias, initial_state, final_state, cu_seqlens;
  uint64_t state_indices, checkpoint_offsets, checkpoint_states, workspace;
  uint64_t stream; /* CUstream */
  int64_t workspace_bytes;
  int64_t batch, tokens, heads, sequences; /* B, T, H, N */
  int64_t initial_slots, final_slots;      /* states that initial_state and final_state hold */
  int64_t checkpoints;                     /* C */
  int64_t q_stride[3], k_stride[3], v_stride[3], g_stride[3],
      out_stride[3]; /* batch, token, head */
  int64_t beta_stride[3];
  int64_t initial_state_stride[2], final_state_stride[2]; /* slot, head */
  int64_t checkpoint_states_stride[2];                    /* checkpoint, head */
  int64_t cu_seqlens_stride, state_indices_stride, checkpoint_offsets_stride;
  float scale, lower_bound;
  int32_t beta_dtype, a_log_dtype, dt_bias_dtype, initial_state_dtype, final_state_dtype;
  int32_t cu_seqlens_dtype, state_indices_dtype, checkpoint_offsets_dtype, checkpoint_states_dtype;
  int32_t beta_is_logits;
  int32_t path; /* FLASH_KDA_PATH_AUTO or an index below flash_kda_path_count() */
  int32_t reserved;
} flash_kda_forward_args;

int32_t flash_kda_abi_version(void);

/* Of the calling thread's last failed call; valid until its next call. */
const char* flash_kda_last_error(void);

/* Bytes of workspace that suffice on any GPU for t_total tokens (all batch rows together) in
 * `sequences` sequences of any lengths, or -1. */
int64_t flash_kda_workspace_size(int64_t t_total, int64_t heads, int64_t sequences);

/* Which path a call of this shape takes on a device of compute capability `capability` (10 * major
 * + minor) with sm_count multiprocessors, and the bytes of workspace it needs there, perhaps none.
 * packed: whether it has cu_seqlens. The path is the same without, the bytes may be fewer. */
int32_t flash_kda_plan(int64_t t_total, int64_t heads, int64_t sequences, int32_t packed,
                       int32_t capability, int32_t sm_count, int32_t forced_path, int32_t* path,
                       int64_t* workspace_bytes);
int32_t flash_kda_path_count(void);
const char* flash_kda_path_name(int32_t path);

/* Loads a cubin on a device (driver ordinal) in its primary context. The module stays loaded for
 * the life of the process. vouched_for: whether it is known to belong to this launcher; of another
 * it is asked whether its kernels take the parameters that they will be given. */
int32_t flash_kda_open(const void* image, uint64_t size, int32_t device, int32_t vouched_for,
                       uint64_t* module);

/* Enqueues one forward pass. Copies `args`; touches device memory only through the stream. */
int32_t flash_kda_forward(uint64_t module, const flash_kda_forward_args* args);

#if defined(__cplusplus)
}
#endif

#endif /* FLASH_KDA_H_ */
