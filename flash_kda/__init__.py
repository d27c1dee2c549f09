"""Fast forward pass of Kimi Delta Attention (arXiv 2510.26692) for NVIDIA GPUs.

``fwd`` is the operation, ``chunk_kda`` the same under flash-linear-attention's argument names,
``workspace_size`` the scratch memory it needs. CPU tensors work too, slowly. Importing this package
opens no library and does not initialise CUDA; it registers ``torch.ops.flash_kda.fwd``.
"""

from ._version import __version__
from .errors import (
    BrokenInstallError,
    CubinOverrideError,
    DriverNotFoundError,
    DriverTooOldError,
    FlashKDAError,
    LaunchError,
    LoaderError,
    NoCubinError,
    UnsupportedGPUError,
)

try:
    import torch as _torch  # noqa: F401  (asked for first, to say what is missing)
except ModuleNotFoundError as _error:
    if _error.name != "torch":  # something that torch needs, which its own error names
        raise
    raise ImportError(
        "flash_kda needs torch 2.4 or newer, which is not installed: pip install 'torch>=2.4'"
    ) from _error

from .functional import chunk_kda
from .ops import fwd, workspace_size

__all__ = [
    "BrokenInstallError",
    "CubinOverrideError",
    "DriverNotFoundError",
    "DriverTooOldError",
    "FlashKDAError",
    "LaunchError",
    "LoaderError",
    "NoCubinError",
    "UnsupportedGPUError",
    "__version__",
    "chunk_kda",
    "fwd",
    "workspace_size",
]
