"""Facts about this machine's NVIDIA driver and GPUs, read from ``libcuda`` through ctypes.

Imports nothing but the standard library and nothing from this package, so that the build can load
this file by its path before torch is installed. Nothing is opened before the first question.

Device ordinals are the driver's own for this process: ``CUDA_VISIBLE_DEVICES`` has already been
applied by ``libcuda``, so they are also torch's ordinals and the variable is never parsed here.
"""

from __future__ import annotations

import ctypes
import uuid as uuid_module
from pathlib import Path
from typing import Any, NamedTuple

# The second name is where WSL keeps the library when its folder is not on the linker's path.
LIBRARY_NAMES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")

_SUCCESS = 0
_ERROR_NO_DEVICE = 100
_ERROR_NOT_FOUND = 500
_ATTRIBUTE_SM_COUNT = 16
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76


class DriverUnavailable(RuntimeError):
    """``libcuda`` cannot be opened: this machine has no NVIDIA driver."""


class DriverCallFailed(RuntimeError):
    """A driver function answered with an error; ``code`` is the CUresult."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} failed: {text}")
        self.function = function
        self.code = code


class DeviceInfo(NamedTuple):
    """One GPU as the driver describes it."""

    index: int  # type: ignore[assignment]
    """Ordinal in this process, equal to torch's."""
    name: str
    """Product name, for example ``NVIDIA H200``."""
    capability: tuple[int, int]
    """Compute capability (major, minor)."""
    sm_count: int
    """Number of streaming multiprocessors."""
    memory_bytes: int
    """Total device memory in bytes."""
    uuid: str
    """UUID in the form ``GPU-xxxxxxxx-xxxx-...``, or an empty string if the driver has none."""


class Driver:
    """Lazily opened ``libcuda``. Reading the version does not initialise CUDA; devices do."""

    def __init__(self, names: tuple[str, ...] = LIBRARY_NAMES) -> None:
        self._names = names
        self._library: Any = None

    def _open(self) -> Any:
        if self._library is None:
            reasons = []
            for name in self._names:
                try:
                    self._library = ctypes.CDLL(name)
                    break
                except OSError as error:
                    reasons.append(str(error))
            else:
                raise DriverUnavailable("no NVIDIA driver: " + "; ".join(reasons))
        return self._library

    def _text(self, code: int) -> str:
        parts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            pointer = ctypes.c_char_p()
            entry = getattr(self._library, function, None)
            known = entry is not None and entry(code, ctypes.byref(pointer)) == _SUCCESS
            if known and pointer.value:
                parts.append(pointer.value.decode(errors="replace"))
        return f"{': '.join(parts) or 'unknown error'} (CUresult {code})"

    def _call(self, function: str, *arguments: Any) -> None:
        entry = getattr(self._open(), function, None)
        if entry is None:
            raise DriverCallFailed(function, _ERROR_NOT_FOUND, "libcuda has no such function")
        code = entry(*arguments)
        if code != _SUCCESS:
            raise DriverCallFailed(function, code, self._text(code))

    def driver_version(self) -> tuple[int, int]:
        """Newest CUDA version this driver supports, as (major, minor).

        Raises DriverUnavailable without a driver, DriverCallFailed if it does not answer.
        """
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10

    def device_count(self) -> int:
        """Number of visible GPUs; initialises CUDA in this process."""
        try:
            self._call("cuInit", ctypes.c_uint(0))
        except DriverCallFailed as error:
            if error.code == _ERROR_NO_DEVICE:
                return 0
            raise
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, index: int) -> DeviceInfo:
        """Describe the visible GPU with this ordinal; initialises CUDA in this process."""
        self._call("cuInit", ctypes.c_uint(0))
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
        memory = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        return DeviceInfo(
            index=index,
            name=name.value.decode(errors="replace"),
            capability=(
                self._attribute(_ATTRIBUTE_MAJOR, handle),
                self._attribute(_ATTRIBUTE_MINOR, handle),
            ),
            sm_count=self._attribute(_ATTRIBUTE_SM_COUNT, handle),
            memory_bytes=memory.value,
            uuid=self._uuid(handle),
        )

    def devices(self) -> list[DeviceInfo]:
        """Every visible GPU in ordinal order; an empty list when there is none.

        Raises DriverUnavailable without a driver, DriverCallFailed if it does not answer.
        """
        return [self.device(index) for index in range(self.device_count())]

    def _attribute(self, attribute: int, handle: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
        return value.value

    def _uuid(self, handle: ctypes.c_int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        # The _v2 form tells the slices of a partitioned GPU apart; drivers before 11.4 lack it.
        for function in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
            try:
                self._call(function, raw, handle)
            except DriverCallFailed:
                continue
            return f"GPU-{uuid_module.UUID(bytes=bytes(raw))}"
        return ""


_driver = Driver()


def driver_version() -> tuple[int, int]:
    """Newest CUDA version the installed driver supports; see Driver.driver_version."""
    return _driver.driver_version()


def device(index: int) -> DeviceInfo:
    """One visible GPU; see Driver.device."""
    return _driver.device(index)


def devices() -> list[DeviceInfo]:
    """Every visible GPU; see Driver.devices."""
    return _driver.devices()


def kernel_module_version() -> str | None:
    """Version of the loaded NVIDIA kernel module, such as ``575.57.08``; None if not known."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
