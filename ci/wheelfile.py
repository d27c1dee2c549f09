"""A wheel opened for reading, and the version and requirement it should have."""

from __future__ import annotations

import email.message
import email.parser
import functools
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from .cli import BuildError

PACKAGE = "flash_kda"


class Wheel:
    """Contents of a wheel file, read into memory (they are a few megabytes)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.name, self.version, _, self.tags = _parse(path.name)
            with zipfile.ZipFile(path) as archive:
                self.files = {
                    info.filename: archive.read(info)
                    for info in archive.infolist()
                    if not info.is_dir()
                }
        except (OSError, zipfile.BadZipFile, InvalidWheelFilename) as error:
            raise BuildError(f"{path} is not a readable wheel: {error}") from None

    @property
    def arch(self) -> str:
        """``x86_64`` or ``aarch64``, as the filename says."""
        platforms = {tag.platform for tag in self.tags}
        return "aarch64" if all(p.endswith("_aarch64") for p in platforms) else "x86_64"

    @functools.cached_property
    def dist_info(self) -> str:
        """Name of the only .dist-info folder."""
        found = {n.partition("/")[0] for n in self.files if ".dist-info/" in n}
        if len(found) != 1:
            raise BuildError(f"{self.path.name} has {len(found)} .dist-info folders, not one")
        return found.pop()

    def message(self, name: str) -> email.message.Message:
        """METADATA or WHEEL, parsed."""
        try:
            data = self.files[f"{self.dist_info}/{name}"]
        except KeyError:
            raise BuildError(f"{self.path.name} has no {name}") from None
        return email.parser.Parser().parsestr(data.decode())

    def torch_requirement(self) -> Requirement | None:
        """The requirement on torch, if there is exactly one."""
        lines = self.message("METADATA").get_all("Requires-Dist", [])
        found = [r for r in map(Requirement, lines) if r.name == "torch"]
        return found[0] if len(found) == 1 else None


def _parse(name: str) -> tuple[str, Version, object, frozenset[Tag]]:
    return parse_wheel_filename(name)


def only_wheel(path: Path, pattern: str = "*.whl") -> Path:
    """``path`` itself, or the one wheel in that folder.

    Raises:
        BuildError: it is not there, or there are several.
    """
    found = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if len(found) != 1 or not found[0].is_file():
        raise BuildError(f"{path} holds {len(found)} wheels ({pattern}), name the one to take")
    return found[0]


def pinned(torch_minor: str | None) -> str:
    """The requirement of a wheel for one torch (``2.8``), or of the plain one (None)."""
    return "torch>=2.4" if torch_minor is None else f"torch=={torch_minor}.*"


def local_torch(local: str | None) -> str | None:
    """``cu129torch2.8`` -> ``2.8``; None for a plain wheel."""
    _, found, minor = (local or "").partition("torch")
    return minor if found else None
