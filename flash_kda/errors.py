"""The exceptions of this package, apart from the ValueError and TypeError of bad arguments."""

from __future__ import annotations


class FlashKDAError(RuntimeError):
    """Base class of every error below."""


class LoaderError(FlashKDAError):
    """The GPU code for a device could not be loaded."""


class DriverNotFoundError(LoaderError):
    """This machine has no NVIDIA driver."""


class DriverTooOldError(LoaderError):
    """The NVIDIA driver is older than the installed kernels need."""


class UnsupportedGPUError(LoaderError):
    """The GPU is of a generation that the kernels do not support (below compute capability 9.0)."""


class NoCubinError(LoaderError):
    """This installation holds no kernels for the GPU."""


class BrokenInstallError(LoaderError):
    """A file of this installation is missing, damaged or of another version."""


class CubinOverrideError(LoaderError):
    """The file named by FLASH_KDA_CUBIN cannot be used."""


class LaunchError(FlashKDAError):
    """The driver refused to start the kernels."""
