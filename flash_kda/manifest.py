"""Reads ``manifest.json``, the build's record of the files of this package, and checks them.

Everything wrong here is a damaged or mixed installation and ends in BrokenInstallError, whose text
names the file, what was expected, what was found and how to install again. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .errors import BrokenInstallError

PACKAGE_DIR = Path(__file__).resolve().parent
MANIFEST_NAME = "manifest.json"
SCHEMA = 1

REINSTALL = (
    "Install it again: pip install --force-reinstall --no-deps . in a checkout of flash-kda, or "
    "the same with a wheel's path instead of the dot."
)

_LARGEST_MANIFEST = 64 << 20  # bytes; a real one has some thousand

_Pair = tuple[int, int]


class FileRecord(NamedTuple):
    """One built file: where it is and what it must contain."""

    path: Path
    sha256: str
    size: int


class Manifest(NamedTuple):
    """The checked contents of ``manifest.json``."""

    path: Path
    package_version: str
    abi_version: int
    compiler_name: str
    compiler_version: str
    compiler_cuda: _Pair
    """CUDA version of the compiler that made the cubins, as (major, minor)."""
    launcher: FileRecord
    cubins: dict[str, FileRecord]
    """Target name, such as ``90a``, to its file."""
    raw: dict[str, Any]
    """The whole document, for tools that print it."""


def broken(path: Path, expected: str, found: str) -> BrokenInstallError:
    """The error for a file that is not what the installation needs."""
    return BrokenInstallError(
        f"This flash-kda installation is damaged. File: {path}. Expected: {expected}. "
        f"Found: {found}. {REINSTALL}"
    )


def read(package_dir: Path | None = None) -> Manifest:
    """Read and check the manifest of this package, or of the one in a folder; opens no other file.

    Raises:
        BrokenInstallError: missing, not JSON, of a newer schema, incomplete, or naming a file
            outside the package.
    """
    package_dir = PACKAGE_DIR if package_dir is None else package_dir
    path = package_dir / MANIFEST_NAME
    try:
        document = json.loads(read_regular(path, _LARGEST_MANIFEST))
        # Escapes can name characters that nothing can print; no build writes them.
        json.dumps(document, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise broken(path, "the build's manifest", "no such file") from error
    except OSError as error:
        raise broken(path, "a readable manifest", str(error)) from error
    except ValueError as error:
        raise broken(path, "valid JSON", _short(str(error))) from error
    except RecursionError as error:
        raise broken(path, "valid JSON", "values nested too deeply") from error
    if not isinstance(document, dict):
        raise broken(path, "a JSON object", f"a JSON {type(document).__name__}")
    schema = document.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise broken(path, f"manifest schema {SCHEMA}", f"the newer schema {_shown(schema)}")
    if type(schema) is not int or schema != SCHEMA:
        raise broken(path, f"manifest schema {SCHEMA}", f"schema {_shown(schema)}")
    return _checked(path, package_dir, document)


def read_file(record: FileRecord) -> bytes:
    """The contents of a recorded file, after checking its size and sha256.

    Raises:
        BrokenInstallError: missing, unreadable, of another length or with another hash.
    """
    try:
        contents = read_regular(record.path, record.size)
    except FileNotFoundError as error:
        raise broken(record.path, f"{record.size} bytes", "no such file") from error
    except OSError as error:
        raise broken(record.path, "a readable file", str(error)) from error
    if len(contents) != record.size:
        found = f"{len(contents)} bytes" if len(contents) <= record.size else "more"
        raise broken(record.path, f"{record.size} bytes", found)
    digest = hashlib.sha256(contents).hexdigest()
    if digest != record.sha256:
        raise broken(record.path, f"sha256 {record.sha256}", f"sha256 {digest}")
    return contents


def read_regular(path: Path, most: int) -> bytes:
    """The contents of a regular file, of which no more than ``most`` + 1 bytes are read.

    Raises:
        OSError: it cannot be read, or is something else: a FIFO would block, a device never end.
    """
    # Opening a FIFO waits for a writer without O_NONBLOCK, which regular files ignore.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(min(max(most, 0), found.st_size) + 1)
    finally:
        os.close(handle)


def _shown(value: object) -> str:
    """A value from the manifest, for an error's one line."""
    try:
        return _short(repr(value))
    except ValueError:
        return "a number of too many digits"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _checked(path: Path, package_dir: Path, document: dict[str, Any]) -> Manifest:
    compiler = _field(path, document, "compiler", dict)
    cuda = _field(path, compiler, "cuda", str, "compiler.")
    version = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})(\.[0-9]+)*", cuda)
    if version is None:
        raise broken(path, "compiler.cuda such as 12.9", _shown(cuda))
    cubins: dict[str, FileRecord] = {}
    for index, entry in enumerate(_field(path, document, "cubins", list)):
        where = f"cubins[{index}]"
        if not isinstance(entry, dict):
            raise broken(path, f"{where} to be an object", _shown(entry))
        target = _field(path, entry, "target", str, f"{where}.")
        if re.fullmatch(r"[0-9]{2,3}[af]", target) is None:
            raise broken(path, f"{where}.target such as 90a", _shown(target))
        if target in cubins:
            raise broken(path, "one cubin for each target", f"two for {target}")
        cubins[target] = _record(path, package_dir, entry, f"{where}.")
    launcher = _field(path, document, "launcher", dict)
    return Manifest(
        path=path,
        package_version=_field(path, document, "package_version", str),
        abi_version=_field(path, document, "abi_version", int),
        compiler_name=_field(path, compiler, "name", str, "compiler."),
        compiler_version=_field(path, compiler, "version", str, "compiler."),
        compiler_cuda=(int(version[1]), int(version[2])),
        launcher=_record(path, package_dir, launcher, "launcher."),
        cubins=cubins,
        raw=document,
    )


def _record(path: Path, package_dir: Path, entry: dict[str, Any], where: str) -> FileRecord:
    name = _field(path, entry, "file", str, where)
    relative = PurePosixPath(name)
    # Compared as text: installers may link the files themselves from a cache elsewhere.
    inside = relative.parts and not relative.is_absolute() and ".." not in relative.parts
    if not inside or "\\" in name or not name.isprintable():
        raise broken(path, f"{where}file to be a path inside {package_dir}", _shown(name))
    sha256 = _field(path, entry, "sha256", str, where).lower()
    if re.fullmatch(r"[0-9a-f]{64}", sha256) is None:
        raise broken(path, f"{where}sha256 of 64 hexadecimal digits", _shown(sha256))
    return FileRecord(
        path=package_dir / relative,
        sha256=sha256,
        size=_field(path, entry, "size", int, where),
    )


def _field(path: Path, entry: dict[str, Any], key: str, kind: type, prefix: str = "") -> Any:
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = f"{prefix}{key} to be of type {kind.__name__}"
        raise broken(path, expected, _shown(value) if key in entry else "no such key")
    return value
