"""Puts cubins, launcher and manifest into a package folder."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cache, compile, cutlass, launcher, prebuilt, toolkit
from .common import CSRC, PACKAGE, BuildError, csrc_hash, hash_bytes, package_module

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
        BuildError: a file cannot be written; see ``make_parts`` and ``prebuilt.read`` for the
            others.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"flash-kda runs on Linux only, this is {sys.platform}")
    abi = launcher.abi_version(csrc)
    folder = prebuilt.directory(environ)
    if folder is None:
        parts = make_parts(targets, csrc=csrc, environ=environ, report=report)
    else:
        report(f"taking cubins and launcher from {folder}")
        parts = prebuilt.read(folder, targets, csrc, environ)

    manifest: dict[str, Any] = {
        "schema": MANIFEST_SCHEMA,
        "package_version": package_module("_version").__version__,
        "abi_version": abi,
        "compiler": parts.compiler,
        "cutlass_version": parts.cutlass_version,
        "csrc_sha256": csrc_hash(csrc),
    }
    try:
        (package / "manifest.json").unlink(missing_ok=True)
        manifest["launcher"] = _write(package, f"lib/{launcher.FILE_NAME}", parts.library)
        manifest["cubins"] = []
        for cubin in parts.cubins:
            entry = _write(package, f"cubin/{cubin.file_name}", cubin.data)
            kernels = [dataclasses.asdict(kernel) for kernel in cubin.kernels]
            manifest["cubins"].append({"target": cubin.target, **entry, "kernels": kernels})
        _remove_other_cubins(package / "cubin", {cubin.file_name for cubin in parts.cubins})
        _write(package, "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
    except OSError as error:
        raise BuildError(
            f"cannot write into {package} ({error.strerror or error}: {error.filename}): free that "
            "place, or make the folder writable"
        ) from None
    return manifest


def make_parts(
    targets: Sequence[str],
    *,
    csrc: Path = CSRC,
    environ: Mapping[str, str] = os.environ,
    report: Callable[[str], None] = lambda text: None,
) -> prebuilt.Parts:
    """Compile the cubins and link the launcher.

    Raises:
        BuildError: see ``compile.compile_targets`` and ``launcher.build``.
    """
    tools = toolkit.locate(environ=environ)
    headers = cutlass.locate(environ)
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
    return prebuilt.Parts(prebuilt.compiler_entry(tools), headers.version, cubins, library)


def check_wheel(wheel: Path, targets: Sequence[str]) -> None:
    """Refuse a finished wheel whose kernels are not those asked for, whatever mixed them up.

    Raises:
        BuildError: other targets, or a file that is not the one in its manifest.
    """
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read(f"{PACKAGE.name}/manifest.json"))
        entries = [manifest["launcher"], *manifest["cubins"]]
        present = {name for name in archive.namelist() if name.endswith((".cubin", ".so"))}
        intact = present == {f"{PACKAGE.name}/{entry['file']}" for entry in entries} and all(
            hash_bytes(archive.read(f"{PACKAGE.name}/{entry['file']}")) == entry["sha256"]
            for entry in entries
        )
    found = [entry["target"] for entry in manifest["cubins"]]
    if not intact or found != list(targets):
        raise BuildError(
            f"the wheel holds {', '.join(found)}{'' if intact else ' with altered files'} where "
            f"{', '.join(targets)} was asked: something else wrote into this checkout, build again"
        )


def copy_generated(source: Path, package: Path) -> None:
    """Give ``package`` the generated files of ``source``; a folder that cannot be written is left
    as it is."""
    try:
        (package / "manifest.json").unlink(missing_ok=True)
        for folder in ("lib", "cubin"):
            files = [path for path in (source / folder).iterdir() if path.is_file()]
            for path in files:
                _write(package, f"{folder}/{path.name}", path.read_bytes())
            if folder == "cubin":
                _remove_other_cubins(package / folder, {path.name for path in files})
        cache.write_atomic(package / "manifest.json", (source / "manifest.json").read_bytes())
    except OSError:
        pass


def _write(package: Path, name: str, data: bytes) -> dict[str, Any]:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.write_atomic(path, data)
    return {"file": name, "sha256": hash_bytes(data), "size": len(data)}


def _remove_other_cubins(folder: Path, keep: Iterable[str]) -> None:
    for path in folder.glob("flash_kda.*.cubin"):
        if path.name not in keep and path.is_file():
            path.unlink()
