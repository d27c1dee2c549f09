// The one translation unit that becomes a cubin. Kernels carry C names, so that the launcher finds
// them without a demangler; each takes the same parameter struct.
#include "portable/entry.cuh"

// Only compute capability 9.0 has the family that was written for it.
#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH__ == 900 || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "sm90/entry.cuh"
#endif
