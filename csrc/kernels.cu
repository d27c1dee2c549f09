// The one translation unit that becomes a cubin. Kernels carry C names, so that the launcher finds
// them without a demangler; each takes the same parameter struct.
#include "portable/entry.cuh"
