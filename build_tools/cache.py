"""Compiled cubins, kept by a hash of everything that went into them.

An entry is one file, written under another name and renamed, so that a reader sees all of it or
nothing and builds that run side by side cannot harm each other.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .common import ROOT, BuildError, hash_bytes, package_module, user_path

_VARIABLE = "FLASH_KDA_CUBIN_CACHE"
_LARGEST_ENTRY = 1 << 30


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
    return user_path(_VARIABLE, named) if named else ROOT / "build" / "cubin-cache"


def key(parts: Mapping[str, object]) -> str:
    """The hash (hex) that names an entry."""
    return hash_bytes(json.dumps(parts, sort_keys=True).encode())


def load(cache: Path, name: str) -> Compiled | None:
    """The entry, or None when it is absent or damaged (then it is simply compiled again)."""
    read_regular = package_module("manifest").read_regular
    try:
        entry = json.loads(read_regular(cache / f"{name}.json", _LARGEST_ENTRY))
        found = Compiled(base64.b85decode(entry["cubin"]), entry["log"])
        # Its name alone could be another entry's, of another target.
        intact = entry["key"] == name and entry["sha256"] == _digest(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    # What was hashed may itself have been nonsense.
    return found if intact and found.log and found.cubin.startswith(b"\x7fELF") else None


def store(cache: Path, name: str, compiled: Compiled) -> None:
    """Add an entry.

    Raises:
        BuildError: the folder cannot be written.
    """
    entry = {
        "key": name,
        "sha256": _digest(compiled),
        "log": compiled.log,
        "cubin": base64.b85encode(compiled.cubin).decode(),
    }
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = cache / f"{name}.json"
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)  # no build made it, and no file can replace it
        write_atomic(file, json.dumps(entry).encode())
    except OSError as error:
        raise BuildError(
            f"cannot write the cubin cache {cache} ({error.strerror}): set {_VARIABLE} to a "
            "folder that can be written"
        ) from None


def _digest(compiled: Compiled) -> str:
    return hash_bytes(hash_bytes(compiled.cubin).encode() + compiled.log.encode())


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
