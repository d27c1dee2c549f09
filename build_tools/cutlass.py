"""Where the CUTLASS headers are: an explicit directory, the submodule, or PyPI's package."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .common import ROOT, BuildError, hash_files, readable, user_path

REQUIREMENT = "nvidia-cutlass==4.2.0.0"
HEADER_FOLDERS = ("cute", "cutlass")
_HEADERS = frozenset({".h", ".hpp", ".hxx", ".cuh", ".inl"})
_VARIABLE = "FLASH_KDA_CUTLASS_DIR"
_VERSION_HEADER = Path("cutlass") / "version.h"


@dataclass(frozen=True)
class Cutlass:
    """The headers (``include`` holds ``cute/`` and ``cutlass/``) and their version, ``4.2.0``."""

    include: Path
    version: str

    def tree_hash(self) -> str:
        """A hash over all headers, so that an edited tree is never taken for the released one."""
        found = (p for d in HEADER_FOLDERS for p in (self.include / d).rglob("*.*"))
        files = sorted(p for p in found if p.suffix in _HEADERS and p.is_file())
        return hash_files(files, self.include)


def locate(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Cutlass:
    """Find CUTLASS: ``FLASH_KDA_CUTLASS_DIR``, else ``cutlass/include``, else nvidia-cutlass.

    The variable may name CUTLASS's top folder or its include folder.

    Raises:
        BuildError: none of them has the headers.
    """
    named = environ.get(_VARIABLE, "").strip()
    if named:
        folder = user_path(_VARIABLE, named)
        with readable(_VARIABLE):
            for candidate in (folder / "include", folder):
                if (candidate / _VERSION_HEADER).is_file():
                    return _describe(candidate)
        raise BuildError(
            f"{_VARIABLE} is {named}, but there is no include/cutlass/version.h in it: point it at "
            "a CUTLASS 4.2 checkout, or unset it"
        )
    for found in (root / "cutlass" / "include", _package_include()):
        if found is not None and (found / _VERSION_HEADER).is_file():
            return _describe(found)
    raise BuildError(
        "the CUTLASS headers are missing: run `git submodule update --init cutlass`, or "
        f"`pip install --no-deps {REQUIREMENT}`, or set {_VARIABLE} to a CUTLASS 4.2 checkout"
    )


def missing_requirements(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """What pip has to install before ``locate`` can succeed."""
    try:
        locate(environ, root)
    except BuildError:
        if environ.get(_VARIABLE, "").strip():
            raise
        return [REQUIREMENT]
    return []


def _package_include() -> Path | None:
    try:
        found = metadata.distribution("nvidia-cutlass")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file("cutlass_library/source/include"))).resolve()


def _describe(include: Path) -> Cutlass:
    text = (include / _VERSION_HEADER).read_text(encoding="utf-8", errors="replace")
    numbers = [
        re.search(rf"^#define CUTLASS_{part} (\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    version = ".".join(number[1] for number in numbers if number)
    if not all(numbers) or not (include / "cute" / "tensor.hpp").is_file():
        raise BuildError(f"{include} is not a complete CUTLASS include folder: fetch it again")
    if int(version.split(".")[0]) < 4:
        raise BuildError(f"CUTLASS {version} in {include} is too old: flash-kda needs 4.2 or newer")
    return Cutlass(include.resolve(), version)
