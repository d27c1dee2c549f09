"""Cubins and launchers that an earlier step made, taken instead of compiling here.

A release compiles cubins once per toolkit and links the launcher once per platform; the wheels are
then put together where neither compiler exists. The folder that
``FLASH_KDA_PREBUILT`` names holds::

    cubins-12.9/cubins.json, flash_kda.sm_90a.cubin, ...
    launcher-x86_64/launcher.json, libflash_kda.so

The JSON files record the hash of csrc/, so that parts of other sources are never packed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, cutlass, launcher, toolkit
from .common import CSRC, BuildError, csrc_hash, hash_bytes, package_module, user_path
from .compile import Cubin, is_for
from .ptxas_log import KernelResources

VARIABLE = "FLASH_KDA_PREBUILT"
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Parts:
    """What a wheel is made of besides Python files."""

    compiler: dict[str, str]
    """The manifest's entry: name, version, cuda."""
    cutlass_version: str
    cubins: list[Cubin]
    library: bytes


def directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of ready parts, or None to compile them.

    Raises:
        BuildError: it names a user without a home directory.
    """
    named = environ.get(VARIABLE, "").strip()
    return user_path(VARIABLE, named) if named else None


def machine() -> str:
    """The processor that is built for: ``x86_64``, ``aarch64``; Python's own unless overridden."""
    return sysconfig.get_platform().rpartition("-")[2] or platform.machine()


def compiler_entry(tools: toolkit.Toolkit) -> dict[str, str]:
    """How the manifest describes the compiler."""
    return {"name": "nvrtc", "version": tools.version, "cuda": tools.cuda}


def write_cubins(
    root: Path,
    tools: toolkit.Toolkit,
    headers: cutlass.Cutlass,
    cubins: Sequence[Cubin],
    csrc: Path = CSRC,
) -> Path:
    """Store the cubins of one toolkit under ``root``; returns their folder."""
    folder = root / f"cubins-{tools.cuda}"
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "cubins.json"
    record.unlink(missing_ok=True)
    for stale in folder.glob("*.cubin"):
        stale.unlink()
    entries = []
    for cubin in cubins:
        cache.write_atomic(folder / cubin.file_name, cubin.data)
        entries.append(
            {
                "target": cubin.target,
                "file": cubin.file_name,
                "sha256": hash_bytes(cubin.data),
                "kernels": [dataclasses.asdict(kernel) for kernel in cubin.kernels],
            }
        )
    document = {
        "csrc_sha256": csrc_hash(csrc),
        "compiler": compiler_entry(tools),
        "cutlass_version": headers.version,
        "cubins": entries,
    }
    cache.write_atomic(record, (json.dumps(document, indent=2) + "\n").encode())
    return folder


def write_launcher(root: Path, processor: str, library: bytes, csrc: Path = CSRC) -> Path:
    """Store the launcher of one platform under ``root``; returns its folder."""
    folder = root / f"launcher-{processor}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launcher.json").unlink(missing_ok=True)
    cache.write_atomic(folder / launcher.FILE_NAME, library)
    document = {"csrc_sha256": csrc_hash(csrc), "sha256": hash_bytes(library)}
    cache.write_atomic(folder / "launcher.json", (json.dumps(document, indent=2) + "\n").encode())
    return folder


def read(
    root: Path,
    targets: Sequence[str],
    csrc: Path = CSRC,
    environ: Mapping[str, str] = os.environ,
) -> Parts:
    """The parts for these targets, the requested toolkit and the processor built for.

    Raises:
        BuildError: something is missing, damaged, or made from other sources.
    """
    folder = root / f"cubins-{toolkit.requested_cuda(environ)}"
    document = _record(folder / "cubins.json", csrc, _CUBINS)
    if (cuda := document["compiler"]["cuda"]) != toolkit.requested_cuda(environ):
        raise BuildError(f"{VARIABLE}: {folder} holds cubins of CUDA {cuda}: make it again")
    made = {entry["target"]: entry for entry in document["cubins"]}
    if missing := [target for target in targets if target not in made]:
        raise BuildError(
            f"{folder} has no cubin for {', '.join(missing)} (only {', '.join(made)}): compile "
            f"them, or ask for fewer targets"
        )
    cubins = []
    for target in targets:
        entry = made[target]
        file = folder / Path(entry["file"]).name
        data = _contents(file, entry["sha256"])
        if not is_for(target, data):
            raise BuildError(f"{VARIABLE}: {file} is no cubin for {target}: make it again")
        if not entry["kernels"]:
            raise BuildError(f"{VARIABLE}: {folder} records no kernels for {target}: make it again")
        kernels = [
            KernelResources(**{name: kernel[name] for name in _KERNEL})
            for kernel in entry["kernels"]
        ]
        cubins.append(Cubin(target, data, kernels, log="", from_cache=True))
    place = root / f"launcher-{machine()}"
    sha256 = _record(place / "launcher.json", csrc, _LAUNCHER)["sha256"]
    library = _contents(place / launcher.FILE_NAME, sha256)
    return Parts(document["compiler"], document["cutlass_version"], cubins, library)


_KERNEL = {
    field.name: str if field.name == "name" else int
    for field in dataclasses.fields(KernelResources)
}
_LAUNCHER = {"csrc_sha256": str, "sha256": str}
_CUBINS = {
    "csrc_sha256": str,
    "compiler": {"name": str, "version": str, "cuda": str},
    "cutlass_version": str,
    "cubins": [{"target": str, "file": str, "sha256": str, "kernels": [_KERNEL]}],
}


def _record(path: Path, csrc: Path, shape: Any) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(_read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BuildError(
            f"{VARIABLE}: cannot read {path} ({error}): the step that makes it did not finish, run "
            "it again, or unset the variable to compile here"
        ) from None
    if isinstance(document, dict) and document.get("csrc_sha256") != csrc_hash(csrc):
        raise BuildError(f"{VARIABLE}: {path.parent} was made from another csrc/: make it again")
    if not _fits(document, shape):
        raise BuildError(f"{VARIABLE}: {path} lacks what it must record: make it again")
    return document


def _fits(value: Any, shape: Any) -> bool:
    """Whether JSON is made like the shape: types, lists of one shape, and objects with its keys."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_fits(value.get(k), shape[k]) for k in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    return type(value) is shape


def _read(path: Path) -> bytes:
    contents: bytes = package_module("manifest").read_regular(path, _LARGEST)
    return contents


def _contents(path: Path, sha256: str) -> bytes:
    try:
        data = _read(path)
    except (OSError, ValueError) as error:
        raise BuildError(f"{VARIABLE}: cannot read {path} ({error})") from None
    if hash_bytes(data) != sha256:
        raise BuildError(f"{VARIABLE}: {path} is damaged (its sha256 differs): make it again")
    return data
