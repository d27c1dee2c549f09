"""Compiled cubins, kept by a hash of everything that went into them.

An entry is one file, written under another name and renamed, so that a reader sees all of it or
nothing and builds that run side by side cannot harm each other.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .common import ROOT, BuildError, hash_bytes

_VARIABLE = "FLASH_KDA_CUBIN_CACHE"


@dataclass(frozen=True)
class Compiled:
    """A cubin and the program log it was compiled with."""

    cubin: bytes
    log: str


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """``FLASH_KDA_CUBIN_CACHE``, else ``build/cubin-cache`` in the checkout.

    The latter survives ``pip install .``, which builds in the checkout itself.
    """
    named = environ.get(_VARIABLE, "").strip()
    return Path(named).expanduser() if named else ROOT / "build" / "cubin-cache"


def key(parts: Mapping[str, object]) -> str:
    """The hash (hex) that names an entry."""
    return hash_bytes(json.dumps(parts, sort_keys=True).encode())


def load(cache: Path, name: str) -> Compiled | None:
    """The entry, or None when it is absent or damaged (then it is simply compiled again)."""
    try:
        entry = json.loads((cache / f"{name}.json").read_text(encoding="utf-8"))
        cubin = base64.b85decode(entry["cubin"])
        return Compiled(cubin, entry["log"]) if hash_bytes(cubin) == entry["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(cache: Path, name: str, compiled: Compiled) -> None:
    """Add an entry.

    Raises:
        BuildError: the folder cannot be written.
    """
    entry = {
        "sha256": hash_bytes(compiled.cubin),
        "log": compiled.log,
        "cubin": base64.b85encode(compiled.cubin).decode(),
    }
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(cache / f"{name}.json", json.dumps(entry).encode())
    except OSError as error:
        raise BuildError(
            f"cannot write the cubin cache {cache} ({error.strerror}): set {_VARIABLE} to a "
            "folder that can be written"
        ) from None


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that no reader ever sees part of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
