"""Where the CUDA compiler (NVRTC) and its headers are, and which packages bring them.

They come from PyPI packages, wherever pip put them on ``sys.path``, or from an installed CUDA
toolkit that ``FLASH_KDA_CUDA_HOME`` names. ``FLASH_KDA_CUDA`` selects the release.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .common import BuildError, hash_bytes, package_module, readable, user_path

DEFAULT_CUDA = "12.9"
_VARIABLE = "FLASH_KDA_CUDA_HOME"

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "12.9": (
        "nvidia-cuda-nvrtc-cu12==12.9.86",
        "nvidia-cuda-runtime-cu12==12.9.79",
        "nvidia-cuda-cccl-cu12==12.9.27",
    ),
    "13.0": ("cuda-toolkit[nvrtc,cudart,cccl,crt]==13.0.2",),
}
"""What pip is asked for when the toolkit of that release is not there."""

# Distribution names per CUDA major version, in the order nvrtc, then those with headers.
_DISTRIBUTIONS = {
    "12": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12"),
    "13": ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt"),
}
# One header per include directory that a compilation needs.
_LANDMARKS = ("cuda.h", "cuda_bf16.h", "cuda/std/version")


@dataclass(frozen=True)
class Toolkit:
    """A usable compiler.

    Attributes:
        cuda: release, ``"12.9"``.
        version: full version of NVRTC, ``"12.9.86"``.
        library: libnvrtc.
        builtins: libnvrtc-builtins, which has to be loaded first by its full path because
            libnvrtc looks for it on the library path only.
        include_dirs: directories with cuda.h, the CUDA C++ headers and CCCL (``cuda/std``).
    """

    cuda: str
    version: str
    library: Path
    builtins: Path | None
    include_dirs: tuple[Path, ...]

    def header_hash(self) -> str:
        """A hash of the headers that name their versions; they change with every release."""
        names = ("cuda.h", "cuda_bf16.hpp", "cuda/std/__cccl/version.h", "cuda/version")
        files = [d / n for d in self.include_dirs for n in names if (d / n).is_file()]
        return hash_bytes("".join(hash_bytes(f.read_bytes()) for f in files).encode())


def requested_cuda(environ: Mapping[str, str] = os.environ) -> str:
    """The CUDA release to build with: ``FLASH_KDA_CUDA``, else 12.9.

    Raises:
        BuildError: a release this project is not built with.
    """
    value = environ.get("FLASH_KDA_CUDA", DEFAULT_CUDA).strip() or DEFAULT_CUDA
    if value not in REQUIREMENTS:
        raise BuildError(
            f"FLASH_KDA_CUDA is {value!r}, which flash-kda is not built with (12.9 is the oldest "
            f"compiler it supports): use {' or '.join(REQUIREMENTS)}"
        )
    return value


def locate(cuda: str | None = None, environ: Mapping[str, str] = os.environ) -> Toolkit:
    """Find the toolkit of release ``cuda`` (None: the requested one).

    Raises:
        BuildError: it is absent, incomplete, or of another release; says what to install.
    """
    cuda = requested_cuda(environ if cuda is None else {"FLASH_KDA_CUDA": cuda})
    home = environ.get(_VARIABLE, "").strip()
    if not home:
        return _from_packages(cuda)
    with readable(_VARIABLE):
        return _from_home(user_path(_VARIABLE, home), cuda)


def missing_requirements(cuda: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The requirements that pip has to install before ``locate(cuda)`` can succeed."""
    try:
        locate(cuda, environ)
    except BuildError:
        if environ.get(_VARIABLE, "").strip():
            raise  # an explicitly named toolkit is never silently replaced by another one
        return [r for r in REQUIREMENTS[cuda] if not _satisfied(r)]
    return []


def check_release(version: str, cuda: str, where: str, advice: str) -> None:
    """Refuse a compiler that is too old or not of the release asked for.

    Raises:
        BuildError: with ``where`` it was found and ``advice`` on what to do.
    """
    targets = package_module("targets")
    try:
        targets.check_toolkit(version)
    except ValueError as error:
        raise BuildError(f"{error} (found in {where}): {advice}") from None
    if version.split(".")[:2] != cuda.split("."):
        raise BuildError(f"found CUDA compiler {version} in {where}, but {cuda} is asked: {advice}")


def _satisfied(requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    try:
        return "[" not in name and metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def _from_packages(cuda: str) -> Toolkit:
    names = _DISTRIBUTIONS[cuda.split(".")[0]]
    advice = "pip install " + " ".join(f"'{r}'" if "[" in r else r for r in REQUIREMENTS[cuda])
    files: list[Path] = []
    version = ""
    for name in names:
        # There may be more than one on sys.path, such as another release that torch depends on.
        candidates = list(metadata.distributions(name=name))
        if not candidates:
            raise BuildError(f"the CUDA {cuda} package {name} is not installed: {advice}")
        found = next((c for c in candidates if c.version.startswith(f"{cuda}.")), candidates[0])
        check_release(found.version, cuda, name, advice)
        version = version or found.version  # the first one is NVRTC itself
        files += [Path(str(found.locate_file(file))) for file in found.files or ()]
    return Toolkit(
        cuda=cuda,
        version=version,
        library=_library(files, "libnvrtc", advice),
        builtins=_library(files, "libnvrtc-builtins", advice),
        include_dirs=_include_dirs({f.as_posix() for f in files}, names, advice),
    )


def _library(files: list[Path], stem: str, advice: str) -> Path:
    pattern = re.compile(re.escape(stem) + r"\.so(\.\d+)*")
    for file in files:
        if pattern.fullmatch(file.name) and file.is_file():
            return file.resolve()
    raise BuildError(f"{stem}.so is missing from the installed CUDA packages: {advice}")


def _include_dirs(files: set[str], names: tuple[str, ...], advice: str) -> tuple[Path, ...]:
    directories: list[Path] = []
    for landmark in _LANDMARKS:
        found = [f for f in files if f.endswith("/include/" + landmark) or _cccl(f, landmark)]
        if not found:
            raise BuildError(f"{landmark} is missing from {', '.join(names[1:])}: {advice}")
        directory = Path(min(found, key=len)[: -len(landmark) - 1]).resolve()
        if directory not in directories:
            directories.append(directory)
    return tuple(directories)


def _cccl(file: str, landmark: str) -> bool:
    return file.endswith("/include/cccl/" + landmark)  # where CUDA 13 keeps cuda/std


def _from_home(home: Path, cuda: str) -> Toolkit:
    advice = f"point {_VARIABLE} at a CUDA {cuda} toolkit, or unset it to use PyPI's"
    lib = next((home / d for d in ("lib64", "lib") if (home / d / "libnvrtc.so").is_file()), None)
    if lib is None:
        raise BuildError(f"no lib64/libnvrtc.so under {_VARIABLE}={home}: {advice}")
    library = (lib / "libnvrtc.so").resolve()
    version = library.name.partition(".so.")[2]
    check_release(version, cuda, str(library), advice)
    builtins = next(iter(sorted(library.parent.glob("libnvrtc-builtins.so.*"))), None)
    directories: list[Path] = []
    for landmark in _LANDMARKS:
        candidates = [home / "include", home / "include" / "cccl"]
        place = next((c for c in candidates if (c / landmark).is_file()), None)
        if place is None:
            raise BuildError(f"no include/{landmark} under {_VARIABLE}={home}: {advice}")
        if place not in directories:
            directories.append(place)
    return Toolkit(cuda, version, library, builtins, tuple(directories))
