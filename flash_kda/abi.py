"""The launcher library's C interface (``csrc/host/flash_kda.h``) through ctypes.

The library is opened at the first call that needs it. It links neither CUDA nor torch, so its
size and planning functions work on machines without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path
from typing import NamedTuple

from . import manifest
from .errors import BrokenInstallError, DriverNotFoundError, LaunchError

ABI_VERSION = 4
"""The interface version this module speaks; the library must answer the same."""

AUTOMATIC_PATH = -1

ARGS = struct.Struct("<16Q35q2f12i")
"""Layout of ``flash_kda_forward_args``."""

# Its parts, one after the other: calls that follow one another differ in the first and the third.
_ADDRESSES = struct.Struct("<16Qq")
_GEOMETRY = struct.Struct("<34q")
_FACTORS = struct.Struct("<2f")
_CODES = struct.Struct("<12i")
_GEOMETRY_AT = _ADDRESSES.size
_FACTORS_AT = _GEOMETRY_AT + _GEOMETRY.size
_CODES_AT = _FACTORS_AT + _FACTORS.size

_OK, _INVALID_ARGUMENT, _NO_DRIVER, _DRIVER_FAILED, _PATH_UNAVAILABLE = range(5)

_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "abi_version": (ctypes.c_int32, ()),
    "last_error": (ctypes.c_char_p, ()),
    "workspace_size": (ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)),
    "plan": (
        ctypes.c_int32,
        (
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.POINTER(ctypes.c_int64),
        ),
    ),
    "path_count": (ctypes.c_int32, ()),
    "path_name": (ctypes.c_char_p, (ctypes.c_int32,)),
    "open": (
        ctypes.c_int32,
        (
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_uint64),
        ),
    ),
    # The module is a uint64_t; ctypes takes integers for pointers, as large here, more quickly.
    "forward": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p)),
}


class Gpu(NamedTuple):
    """What the choice of a path depends on besides a call's sizes."""

    capability: int
    """Compute capability, 10 * major + minor."""
    sm_count: int


class Plan(NamedTuple):
    """How a call runs."""

    path: int
    """An index of Launcher.path_names."""
    workspace_bytes: int


class _Arguments:
    """An argument block."""

    __slots__ = ("address", "buffer", "shape")

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ARGS.size)
        self.address = ctypes.addressof(self.buffer)
        self.shape: tuple[object, ...] | None = None
        """What its second and fourth part hold."""


class _OfThread(threading.local):
    """This thread's block while no call uses it, filled anew by each."""

    def __init__(self) -> None:
        self.spare = [_Arguments()]


class Launcher:
    """An opened launcher library whose interface version has been checked.

    Raises:
        BrokenInstallError: it cannot be opened, lacks a function or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise manifest.broken(path, "the launcher library", str(error)) from error
        # The version comes first: a library of another version may lack the other functions.
        self._functions = {"abi_version": self._function(library, "abi_version")}
        self.abi_version = int(self._functions["abi_version"]())
        if self.abi_version != ABI_VERSION:
            raise manifest.broken(
                path, f"launcher ABI version {ABI_VERSION}", f"version {self.abi_version}"
            )
        self._functions = {name: self._function(library, name) for name in _PROTOTYPES}
        self._forward = self._functions["forward"]
        self._last_error = self._functions["last_error"]
        self._of_thread = _OfThread()
        name_of = self._functions["path_name"]
        self.path_names: tuple[str, ...] = tuple(
            name_of(path_id).decode() for path_id in range(self._functions["path_count"]())
        )
        self._path_ids = {name: path_id for path_id, name in enumerate(self.path_names)}

    def _function(self, library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
        symbol = f"flash_kda_{name}"
        try:
            function = getattr(library, symbol)
        except AttributeError as error:
            raise manifest.broken(
                self.path, f"a launcher with the function {symbol}", "none"
            ) from error
        function.restype, function.argtypes = _PROTOTYPES[name]
        return function

    def workspace_size(self, t_total: int, heads: int, sequences: int) -> int:
        """Bytes that suffice on any GPU; ValueError for sizes the kernels cannot take."""
        size = int(self._functions["workspace_size"](t_total, heads, sequences))
        if size < 0:
            raise ValueError(f"flash_kda: {self._error_text()}")
        return size

    def plan(
        self,
        t_total: int,
        heads: int,
        sequences: int,
        gpu: Gpu,
        forced_path: int = AUTOMATIC_PATH,
        packed: bool = True,
    ) -> Plan:
        """How a call of these sizes runs on such a GPU; ValueError if the path cannot.

        Without cu_seqlens (not ``packed``) it takes the same path and may need less workspace.
        """
        path, size = ctypes.c_int32(), ctypes.c_int64()
        sizes = (t_total, heads, sequences, int(packed))
        results = (ctypes.byref(path), ctypes.byref(size))
        status = self._functions["plan"](*sizes, *gpu, forced_path, *results)
        if status != _OK:
            self._raise(status)
        return Plan(path.value, size.value)

    def path_id(self, name: str) -> int:
        """The index of a path's name; ValueError listing the names if there is no such path."""
        try:
            return self._path_ids[name]
        except KeyError:
            raise ValueError(
                f"FLASH_KDA_PATH: got {name[:200]!r}, needs one of {', '.join(self.path_names)} "
                "(or unset it to choose automatically)"
            ) from None

    def open_module(self, image: bytes, device: int, vouched_for: bool) -> int:
        """Load a cubin on a GPU; the handle stays valid for the life of the process.

        Args:
            image: the file's bytes.
            device: the driver's ordinal of the GPU.
            vouched_for: whether the cubin is known to have been made with this launcher. Of any
                other, ValueError says which of its kernels takes other parameters.
        """
        module = ctypes.c_uint64()
        status = self._functions["open"](
            image, len(image), device, vouched_for, ctypes.byref(module)
        )
        if status != _OK:
            self._raise(status)
        return module.value

    def forward(
        self,
        module: int,
        pointers: tuple[int, ...],
        stream: int,
        workspace_bytes: int,
        geometry: tuple[int, ...],
        scale: float,
        lower_bound: float,
        dtypes: tuple[int, ...],
        beta_is_logits: bool,
        path: int,
    ) -> None:
        """Start the kernels. Nothing is checked here: callers pass what arguments.check allowed.

        Args:
            module: handle from open_module.
            pointers: 15 addresses in the order of the C struct; 0 if absent.
            stream: a CUstream.
            workspace_bytes: size of the workspace.
            geometry: the 34 integers that follow workspace_bytes in the C struct.
            scale, lower_bound: within the range of fp32.
            dtypes: the 9 dtype codes.
            beta_is_logits: whether beta is.
            path: an index of path_names, or AUTOMATIC_PATH.

        Raises:
            ValueError: the launcher refused the arguments or the forced path.
            LaunchError: a driver call failed.
        """
        # Taken away: a call that interrupts this one (of a signal handler) makes itself another.
        spare = self._of_thread.spare
        arguments = spare.pop() if spare else _Arguments()
        buffer = arguments.buffer
        _ADDRESSES.pack_into(buffer, 0, *pointers, stream, workspace_bytes)
        _FACTORS.pack_into(buffer, _FACTORS_AT, scale, lower_bound)
        shape = (geometry, dtypes, beta_is_logits, path)
        if shape != arguments.shape:
            arguments.shape = None  # in case that packing fails
            _GEOMETRY.pack_into(buffer, _GEOMETRY_AT, *geometry)
            _CODES.pack_into(buffer, _CODES_AT, *dtypes, beta_is_logits, path, 0)
            arguments.shape = shape
        status = self._forward(module, arguments.address)
        if not spare:
            spare.append(arguments)
        if status:
            self._raise(status)

    def _error_text(self) -> str:
        text: bytes = self._last_error() or b""
        return text.decode(errors="replace") or "no details"

    def _raise(self, status: int) -> None:
        text = f"flash_kda: {self._error_text()}"
        if status in (_INVALID_ARGUMENT, _PATH_UNAVAILABLE):
            raise ValueError(text)
        if status == _NO_DRIVER:
            raise DriverNotFoundError(text)
        if status == _DRIVER_FAILED:
            raise LaunchError(text)
        raise LaunchError(f"{text} (unknown status {status})")


_launcher: Launcher | None = None
_lock = threading.RLock()  # a call of a signal handler may interrupt its thread's own


def launcher() -> Launcher:
    """The installed launcher library, opened and checked against the manifest once.

    Raises:
        BrokenInstallError: missing, damaged or of another version.
    """
    global _launcher
    if _launcher is None:
        with _lock:
            if _launcher is None:
                opened = _open_installed()
                if _launcher is None:  # else by a call that interrupted this one
                    _launcher = opened
    return _launcher


def _open_installed() -> Launcher:
    installed = manifest.read()
    if installed.abi_version != ABI_VERSION:
        raise manifest.broken(
            installed.path, f"launcher ABI version {ABI_VERSION}", f"{installed.abi_version}"
        )
    # Checked before it is opened: mapping a truncated library can end the process.
    manifest.read_file(installed.launcher)
    return Launcher(installed.launcher.path)


def launcher_or_none() -> Launcher | None:
    """The installed launcher library, or None where it is missing or unusable.

    Only for extra checks on the CPU path, which works in a package without built files.
    """
    try:
        return launcher()
    except BrokenInstallError:
        return None


def abi_version() -> int:
    """Interface version of the installed launcher."""
    return launcher().abi_version


def workspace_size(t_total: int, heads: int, sequences: int) -> int:
    """See Launcher.workspace_size."""
    return launcher().workspace_size(t_total, heads, sequences)


def plan(
    t_total: int,
    heads: int,
    sequences: int,
    gpu: Gpu,
    forced_path: int = AUTOMATIC_PATH,
    packed: bool = True,
) -> Plan:
    """See Launcher.plan."""
    return launcher().plan(t_total, heads, sequences, gpu, forced_path, packed)


def path_names() -> tuple[str, ...]:
    """Names of all paths; a path's index here is its id."""
    return launcher().path_names


def path_id(name: str) -> int:
    """See Launcher.path_id."""
    return launcher().path_id(name)


def open_module(image: bytes, device: int, vouched_for: bool) -> int:
    """See Launcher.open_module."""
    return launcher().open_module(image, device, vouched_for)


def _renew_lock_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock_after_fork)
