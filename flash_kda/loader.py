"""From a tensor's device to loaded GPU code: which cubin fits, is it intact, load it once.

Rules: the driver is looked for first; a device of capability (M, m) takes its exact ``a`` target,
else the best family target; every failure is a LoaderError whose text says what to do.

Nothing is opened before the first CUDA call. The cache belongs to the process that filled it: a
forked child starts with an empty one (CUDA itself does not survive a fork once initialised).
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from . import abi, console, driver, manifest, targets
from .errors import (
    BrokenInstallError,
    CubinOverrideError,
    DriverNotFoundError,
    DriverTooOldError,
    LaunchError,
    LoaderError,
    NoCubinError,
    UnsupportedGPUError,
)

CUBIN_VARIABLE = "FLASH_KDA_CUBIN"
OLD_DRIVER_VARIABLE = "FLASH_KDA_ALLOW_OLD_DRIVER"
OVERRIDE_TARGET = "override"
"""Stands for the target's name when FLASH_KDA_CUBIN names the file."""

_TRITON_HINT = "With flash-linear-attention, FLA_FLASH_KDA=0 selects its Triton path instead."
_ELF_MACHINE_CUDA = 190
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_ELF_NO_BITS = 8  # type of a section that takes no room in the file
_LARGEST_OVERRIDE = 1 << 30


class Module(NamedTuple):
    """GPU code loaded on one device."""

    handle: int
    """What abi.forward takes."""
    target: str
    cubin: str
    """Path of the file."""
    gpu: abi.Gpu


class Selection(NamedTuple):
    """The file chosen for a GPU."""

    target: str
    path: Path
    record: manifest.FileRecord | None
    """What the manifest says of it; None for FLASH_KDA_CUBIN, which nothing vouches for."""


class Explanation(NamedTuple):
    """What loading would do for one GPU: a target and file, or the error that says why not."""

    device: driver.DeviceInfo
    target: str | None
    cubin: str | None
    error: LoaderError | None


def find_driver() -> tuple[int, int]:
    """The driver's CUDA version; DriverNotFoundError where there is no driver."""
    try:
        return driver.driver_version()
    except driver.DriverUnavailable as error:
        reason = str(error).removeprefix("no NVIDIA driver").strip(" :")
        raise DriverNotFoundError(
            f"flash_kda found no NVIDIA driver ({reason}). CUDA tensors need one; CPU tensors "
            "still work, through the slower reference path. Inside a container, start it with GPU "
            "access (for example docker run --gpus all)."
        ) from error
    except driver.DriverCallFailed as error:
        raise LoaderError(f"The NVIDIA driver does not tell its version: {error}.") from error


def check_driver(
    found: tuple[int, int],
    compiler: tuple[int, int] | None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Refuse a driver that is too old for the cubins.

    Args:
        found: CUDA version of the driver.
        compiler: CUDA version of the compiler that made the cubins, or None if that is not known.
        environ: where FLASH_KDA_ALLOW_OLD_DRIVER is looked up.

    Raises:
        DriverTooOldError: below CUDA 12.9, or below the compiler's major version.
    """
    needed = targets.MIN_TOOLKIT
    if compiler is not None and compiler[0] > needed[0]:
        needed = (compiler[0], 0)
    if found >= needed:
        return
    major = compiler[0] if compiler is not None else needed[0]
    if found[0] == major:
        if environ.get(OLD_DRIVER_VARIABLE, "").strip() == "1":
            return
        advice = (
            f"{OLD_DRIVER_VARIABLE}=1 tries this driver all the same, relying on CUDA's "
            "minor-version compatibility."
        )
    else:
        advice = (
            f"{OLD_DRIVER_VARIABLE}=1 cannot help here: it tries minor-version compatibility, "
            f"which holds within one CUDA major version, and these kernels are of CUDA {major}."
        )
        if found >= targets.MIN_TOOLKIT:
            advice += " The flash-kda built with CUDA 12.9 runs on this driver."
    branch = "driver branch 575 or newer" if needed[0] == 12 else "driver branch 580 or newer"
    module_version = driver.kernel_module_version()
    version = f" (version {module_version})" if module_version else ""
    raise DriverTooOldError(
        f"The NVIDIA driver{version} is too old for these flash_kda kernels. Found: CUDA "
        f"{found[0]}.{found[1]}. Needed: CUDA {needed[0]}.{needed[1]} or newer, which comes with "
        f"{branch} (CUDA 12.9: 575+, CUDA 13: 580+). {advice} {_TRITON_HINT}"
    )


def select(
    device: driver.DeviceInfo,
    installed: manifest.Manifest,
    environ: Mapping[str, str] = os.environ,
) -> Selection:
    """Choose the cubin for a GPU; opens no file.

    Raises:
        BrokenInstallError: the package holds no cubin at all.
        UnsupportedGPUError: the GPU is below compute capability 9.0.
        NoCubinError: no cubin of this installation runs on the GPU.
    """
    override = environ.get(CUBIN_VARIABLE)
    if override:
        return Selection(OVERRIDE_TARGET, Path(override), None)
    major, minor = device.capability
    gpu = f"GPU {device.index} ({device.name}) has compute capability {major}.{minor}"
    present = ", ".join(installed.cubins) or "none"
    if device.capability < targets.MIN_CAPABILITY:
        raise UnsupportedGPUError(
            f"{gpu}; flash_kda needs 9.0 or newer (Hopper, Blackwell), and no value of "
            f"{targets.ARCHS_VARIABLE} builds kernels for this one. Targets present in this "
            f"installation: {present}. {_TRITON_HINT}"
        )
    if not installed.cubins:
        raise manifest.broken(installed.path, "at least one cubin", "an empty list of cubins")
    target = targets.choose(device.capability, installed.cubins)
    if target is None:
        wanted = targets.target_for(device.capability)
        if wanted is None:
            advice = (
                "This version of flash_kda has no target for it, whatever "
                f"{targets.ARCHS_VARIABLE} says; a newer one may."
            )
        else:
            advice = (
                f"To get them, build for it in a checkout of flash-kda: {targets.ARCHS_VARIABLE}="
                f"{wanted} pip install --force-reinstall --no-deps . (a comma list builds for "
                "several), or install a wheel that has them."
            )
        raise NoCubinError(
            f"{gpu}, and this installation of flash_kda holds no kernels for it. Targets present: "
            f"{present}. {advice} {_TRITON_HINT}"
        )
    record = installed.cubins[target]
    return Selection(target, record.path, record)


def read_selected(selection: Selection) -> bytes:
    """The cubin's contents, checked against the manifest (or for being a cubin, if overridden)."""
    if selection.record is None:
        return _read_override(selection.path)
    return manifest.read_file(selection.record)


def explain(
    device: driver.DeviceInfo,
    installed: manifest.Manifest | None = None,
    driver_version: tuple[int, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Explanation:
    """Say which cubin a GPU gets, or exactly why none, without loading anything on it.

    Args:
        device: the GPU, real or made up.
        installed: the manifest; None reads the installed one.
        driver_version: CUDA version of the driver; None asks the installed one.
        environ: where the FLASH_KDA_* variables are looked up.
    """
    try:
        version = find_driver() if driver_version is None else driver_version
        installed = _suitable_manifest(version, installed, environ)
        selection = select(device, installed, environ)
        read_selected(selection)
    except LoaderError as error:
        return Explanation(device, None, None, error)
    return Explanation(device, selection.target, str(selection.path), None)


def module_for(device: torch.device) -> Module:
    """The loaded GPU code for a CUDA device that has an index; loads it at the first call.

    Raises:
        LoaderError: one of its subclasses for each reason why there is none.
    """
    index = device.index
    module = _modules.get(index)
    if module is None:
        with _lock:
            module = _modules.get(index)
            if module is None:
                loaded = _load(index)
                # Another, if a call that interrupted this one has loaded it meanwhile.
                module = _modules.setdefault(index, loaded)
    return module


def _load(index: int) -> Module:
    version = find_driver()
    installed = _suitable_manifest(version, None, os.environ)
    try:
        # The driver's ordinals are torch's: both live behind the same cuInit of this process.
        gpu = driver.device(index)
    except driver.DriverCallFailed as error:
        raise LoaderError(f"The NVIDIA driver does not describe GPU {index}: {error}.") from error
    selection = select(gpu, installed)
    image = read_selected(selection)
    try:
        handle = abi.open_module(image, index, selection.record is not None)
    except (LaunchError, ValueError) as error:
        if selection.record is None:
            raise CubinOverrideError(
                f"{_override(selection.path)}: the driver cannot load this file on GPU "
                f"{index} ({gpu.name}): {error}. Point it to a flash_kda cubin for this GPU and "
                "version, or unset it."
            ) from error
        raise LoaderError(
            f"The NVIDIA driver cannot load {selection.path} (intact, target {selection.target}) "
            f"on GPU {index} ({gpu.name}): {error}."
        ) from error
    return Module(handle, selection.target, str(selection.path), planning_facts(gpu))


def planning_facts(gpu: driver.DeviceInfo) -> abi.Gpu:
    """What the choice of a path depends on."""
    major, minor = gpu.capability
    return abi.Gpu(10 * major + minor, gpu.sm_count)


def _suitable_manifest(
    version: tuple[int, int],
    installed: manifest.Manifest | None,
    environ: Mapping[str, str],
) -> manifest.Manifest:
    """The manifest, if a driver of this version can run what it lists."""
    if installed is None:
        try:
            installed = manifest.read()
        except BrokenInstallError:
            check_driver(version, None, environ)
            raise
    # A file named by FLASH_KDA_CUBIN may come from another compiler than the installed ones.
    compiler = None if environ.get(CUBIN_VARIABLE) else installed.compiler_cuda
    check_driver(version, compiler, environ)
    return installed


def _override(path: Path) -> str:
    """How errors name it, on one line."""
    return f"{CUBIN_VARIABLE}={console.line(str(path))}"


def _read_override(path: Path) -> bytes:
    try:
        contents = manifest.read_regular(path, _LARGEST_OVERRIDE)
    except OSError as error:
        raise CubinOverrideError(
            f"{_override(path)}: cannot read this file ({error.strerror or error}). Point it "
            "to a flash_kda cubin, or unset it to use the installed ones."
        ) from error
    machine = int.from_bytes(contents[18:20], "little")
    if contents[:5] != b"\x7fELF\x02" or machine != _ELF_MACHINE_CUDA:
        raise CubinOverrideError(
            f"{_override(path)}: not a CUDA cubin (expected a 64-bit ELF file for machine "
            f"{_ELF_MACHINE_CUDA}, found {len(contents)} bytes starting with {contents[:8]!r}). "
            "Point it to a flash_kda cubin, or unset it to use the installed ones."
        )
    if not _is_complete(contents):
        raise CubinOverrideError(
            f"{_override(path)}: this cubin is damaged (its headers reach past its "
            f"{len(contents)} bytes). Point it to an intact flash_kda cubin, or unset it to use "
            "the installed ones."
        )
    return contents


def _is_complete(cubin: bytes) -> bool:
    """Whether all that the ELF headers name lies inside; drivers trust the headers."""
    if len(cubin) < _ELF_HEADER.size:
        return False
    header = _ELF_HEADER.unpack_from(cubin)
    programs_at, sections_at = header[5], header[6]
    program_size, program_count, section_size, section_count, names = header[9:14]
    if section_count == 0 or section_size < 64 or names >= section_count:
        return False
    if program_count and program_size < 56:
        return False
    if max(
        sections_at + section_size * section_count, programs_at + program_size * program_count
    ) > len(cubin):
        return False
    for index in range(section_count):
        kind, offset, size = struct.unpack_from(
            "<4xI16xQQ", cubin, sections_at + index * section_size
        )
        if kind != _ELF_NO_BITS and offset + size > len(cubin):
            return False
    for index in range(program_count):
        offset, size = struct.unpack_from("<8xQ16xQ", cubin, programs_at + index * program_size)
        if offset + size > len(cubin):
            return False
    return True


_modules: dict[int, Module] = {}
_lock = threading.RLock()  # a call of a signal handler may interrupt its thread's own


def _forget_after_fork() -> None:
    """In a forked child: handles of the parent mean nothing, and another thread held the lock."""
    global _lock
    _modules.clear()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
