"""Paths, the build's error class, and access to the package's torch-free modules."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "flash_kda"

_SOURCE_SUFFIXES = frozenset({".cu", ".cuh", ".h", ".hpp", ".inl", ".cpp", ".map"})
_ALIAS = "_flash_kda_sources"


class BuildError(Exception):
    """Something the user can put right; the text is one line that says what and how."""


def package_module(name: str) -> types.ModuleType:
    """Import ``flash_kda/<name>.py`` without running ``flash_kda/__init__.py``.

    The package's ``__init__`` imports torch, which need not be there at build time. The alias
    package has the same directory as its path, so relative imports between torch-free modules
    keep working.

    Raises:
        BuildError: there is no such file.
    """
    if _ALIAS not in sys.modules:
        package = types.ModuleType(_ALIAS)
        package.__path__ = [str(PACKAGE)]
        package.__spec__ = importlib.machinery.ModuleSpec(_ALIAS, None, is_package=True)
        sys.modules[_ALIAS] = package
    require_file(PACKAGE / f"{name}.py")
    return importlib.import_module(f"{_ALIAS}.{name}")


def user_path(variable: str, text: str) -> Path:
    """The absolute path that an environment variable names, in which ``~`` may stand for a home
    directory. Compilers run elsewhere, where a relative one would name something else.

    Raises:
        BuildError: it names a user who has none.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise BuildError(
            f"{variable} is {text}, which names no home directory: correct it"
        ) from None


@contextlib.contextmanager
def readable(variable: str) -> Iterator[None]:
    """Turn what the system refuses of the paths below a variable's into a BuildError."""
    try:
        yield
    except OSError as error:
        name = str(error.filename)
        shown = name if len(name) <= 200 else f"{name[:200]}..."
        raise BuildError(
            f"{variable}: cannot read {shown} ({error.strerror}): correct it, or unset it"
        ) from None


def source_files(directory: Path) -> list[Path]:
    """The C++ and CUDA files under ``directory``, sorted by their relative path."""
    found = (p for p in directory.rglob("*") if p.suffix in _SOURCE_SUFFIXES and p.is_file())
    return sorted(found, key=lambda path: path.relative_to(directory).as_posix())


def hash_files(files: Iterable[Path], relative_to: Path) -> str:
    """A sha256 (hex) over names and contents, independent of where the tree lies."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(relative_to).as_posix()
        digest.update(f"{name}\0{hash_bytes(file.read_bytes())}\n".encode())
    return digest.hexdigest()


def hash_bytes(data: bytes) -> str:
    """The sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def csrc_hash(csrc: Path = CSRC) -> str:
    """The hash of every source file under csrc/, as recorded in the manifest."""
    return hash_files(source_files(csrc), csrc)


def require_file(path: Path) -> Path:
    """``path`` itself, or a one-line BuildError when a source file is not there."""
    if not path.is_file():
        raise BuildError(
            f"source file {path} is missing: the checkout or sdist is incomplete, "
            "get a fresh copy of flash-kda's sources"
        )
    return path
