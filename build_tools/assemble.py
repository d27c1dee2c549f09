"""Puts cubins, launcher and manifest into a package folder."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cache, compile, cutlass, launcher, toolkit
from .common import CSRC, BuildError, csrc_hash, hash_bytes, package_module

MANIFEST_SCHEMA = 1


def requested_targets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The targets that ``FLASH_KDA_CUDA_ARCHS`` asks for; looks for GPUs only for ``auto``.

    Raises:
        BuildError: an unknown target, or ``auto`` without a usable GPU.
    """
    targets = package_module("targets")
    try:
        chosen: tuple[str, ...] = targets.parse_archs(
            environ.get(targets.ARCHS_VARIABLE), gpu_capabilities
        )
    except ValueError as error:
        raise BuildError(str(error)) from None
    return chosen


def gpu_capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of this machine's GPUs; empty without a driver or a GPU.

    Raises:
        BuildError: there is a driver but it does not answer.
    """
    driver = package_module("driver")
    try:
        return [device.capability for device in driver.devices()]
    except driver.DriverUnavailable:
        return []
    except driver.DriverCallFailed as error:
        raise BuildError(
            f"cannot ask the NVIDIA driver for this machine's GPUs ({error}): set "
            "FLASH_KDA_CUDA_ARCHS to all or to a list such as 90a,100a"
        ) from None


def build(
    package: Path,
    targets: Sequence[str],
    *,
    csrc: Path = CSRC,
    environ: Mapping[str, str] = os.environ,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Build everything into ``package`` and return the manifest.

    ``cubin/``, ``lib/`` and ``manifest.json`` are written; none of them is ever in git. Files are
    replaced atomically (a process that runs the old launcher keeps it), cubins of other targets
    are removed, and the manifest comes last.

    Raises:
        BuildError: see ``compile.compile_targets`` and ``launcher.build``.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"flash-kda runs on Linux only, this is {sys.platform}")
    tools = toolkit.locate(environ=environ)
    headers = cutlass.locate(environ)
    abi = launcher.abi_version(csrc)
    launcher.find_compiler(environ)  # fail before the long part
    report(f"NVRTC {tools.version}, CUTLASS {headers.version}, targets {', '.join(targets)}")
    cubins = compile.compile_targets(
        targets,
        tools=tools,
        headers=headers,
        csrc=csrc,
        cache_dir=cache.directory(environ),
        report=report,
    )
    report("linking the launcher")
    library = launcher.build(tools.include_dirs[0], csrc, environ)

    manifest_file = package / "manifest.json"
    manifest_file.unlink(missing_ok=True)
    library_entry = _write(package, f"lib/{launcher.FILE_NAME}", library)
    cubin_entries = []
    for cubin in cubins:
        entry = _write(package, f"cubin/{cubin.file_name}", cubin.data)
        kernels = [dataclasses.asdict(kernel) for kernel in cubin.kernels]
        cubin_entries.append({"target": cubin.target, **entry, "kernels": kernels})
    _remove_others(package / "cubin", {cubin.file_name for cubin in cubins})
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "package_version": package_module("_version").__version__,
        "abi_version": abi,
        "compiler": {"name": "nvrtc", "version": tools.version, "cuda": tools.cuda},
        "cutlass_version": headers.version,
        "csrc_sha256": csrc_hash(csrc),
        "launcher": library_entry,
        "cubins": cubin_entries,
    }
    cache.write_atomic(manifest_file, (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def copy_generated(source: Path, package: Path) -> None:
    """Give ``package`` the generated files of ``source``; a folder that cannot be written is left
    as it is."""
    try:
        (package / "manifest.json").unlink(missing_ok=True)
        for folder in ("lib", "cubin"):
            files = [path for path in (source / folder).iterdir() if path.is_file()]
            for path in files:
                _write(package, f"{folder}/{path.name}", path.read_bytes())
            _remove_others(package / folder, {path.name for path in files})
        cache.write_atomic(package / "manifest.json", (source / "manifest.json").read_bytes())
    except OSError:
        pass


def _write(package: Path, name: str, data: bytes) -> dict[str, Any]:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.write_atomic(path, data)
    return {"file": name, "sha256": hash_bytes(data), "size": len(data)}


def _remove_others(folder: Path, keep: Iterable[str]) -> None:
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()
