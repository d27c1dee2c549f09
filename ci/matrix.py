"""Checks ci/matrix.json, and prints it the way GitHub's matrix wants it.

  check    validate only
  legs     what to build: one wheel per toolkit and architecture
  cells    what to test: one torch and Python for each of them
  toolkits, architectures    what to compile cubins, link launchers for

With --github the JSON is also appended to $GITHUB_OUTPUT as "matrix=...".
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from build_tools import toolkit
from build_tools.common import package_module

from . import cli
from .cli import BuildError

FILE = Path(__file__).with_name("matrix.json")
_KEYS = {
    "schema",
    "targets",
    "default_toolkit",
    "glibc",
    "platform",
    "size_limit_bytes",
    "build_python",
    "architectures",
    "torches",
    "legs",
}
_CELL_KEYS = {"torch", "torch_cuda", "python", "targets", "note", "experimental"}


@dataclass(frozen=True)
class Cell:
    """One torch and Python that a leg's wheel is tested with."""

    torch: str
    torch_cuda: str
    """CUDA release that this torch was built with: nothing to do with our compiler."""
    python: str
    targets: tuple[str, ...] = ()
    """The targets that this torch can use; empty means all of the wheel's."""
    note: str = ""
    experimental: bool = False
    """Its failure blocks nothing, and it gets no wheel of its own."""

    @property
    def torch_minor(self) -> str:
        """``2.8`` for 2.8.0."""
        return ".".join(self.torch.split(".")[:2])


@dataclass(frozen=True)
class Leg:
    """One wheel to build."""

    toolkit: str
    arch: str
    cells: tuple[Cell, ...]
    absent: dict[str, str] = field(hash=False)
    """torch release -> why it is not tested here."""

    @property
    def cuda(self) -> str:
        """``cu129`` for 12.9."""
        return "cu" + self.toolkit.replace(".", "")

    @property
    def name(self) -> str:
        return f"{self.cuda}-{self.arch}"


@dataclass(frozen=True)
class Matrix:
    """The checked file."""

    targets: tuple[str, ...]
    default_toolkit: str
    glibc: str
    platform: str
    size_limit_bytes: int
    build_python: str
    architectures: dict[str, dict[str, str]] = field(hash=False)
    torches: tuple[str, ...]
    legs: tuple[Leg, ...]

    @property
    def toolkits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(leg.toolkit for leg in self.legs))

    def leg(self, name: str) -> Leg:
        """The leg called, say, ``cu129-x86_64``."""
        for leg in self.legs:
            if leg.name == name:
                return leg
        names = ", ".join(leg.name for leg in self.legs)
        raise BuildError(f"ci/matrix.json has no leg {name!r}: use one of {names}")

    def base_local(self, toolkit_release: str) -> str | None:
        """The local version of a toolkit's plain wheel: none for the default one."""
        if toolkit_release == self.default_toolkit:
            return None
        return "cu" + toolkit_release.replace(".", "")

    def combinations(self) -> dict[str, list[tuple[Leg, Cell]]]:
        """Local version (``cu129torch2.8``) -> the legs and cells that get such a wheel."""
        found: dict[str, list[tuple[Leg, Cell]]] = {}
        for leg in self.legs:
            for cell in leg.cells:
                if not cell.experimental:
                    local = f"{leg.cuda}torch{cell.torch_minor}"
                    found.setdefault(local, []).append((leg, cell))
        return found

    def build_identifiers(self) -> list[str]:
        """What ``cibuildwheel --print-build-identifiers`` has to print for all architectures."""
        return [f"{self.build_python}-manylinux_{arch}" for arch in self.architectures]


def load(path: Path = FILE) -> Matrix:
    """Read and check the matrix.

    Raises:
        BuildError: names the first mistake.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(f"cannot read {path}: {error}") from None
    try:
        return _check(document)
    except (KeyError, TypeError, AttributeError, InvalidVersion) as error:
        raise BuildError(f"{path.name}: malformed entry: {error!r}") from None


def _require(condition: object, text: str) -> None:
    if not condition:
        raise BuildError(f"matrix.json: {text}")


def _check(document: dict[str, Any]) -> Matrix:
    _require(set(document) == _KEYS, f"keys {sorted(set(document) ^ _KEYS)} missing or unknown")
    _require(document["schema"] == 1, f"schema is {document['schema']!r}, this script reads 1")
    known = package_module("targets").KNOWN
    targets = tuple(document["targets"])
    _require(targets and set(targets) <= set(known), f"targets must be some of {', '.join(known)}")
    for arch, entry in document["architectures"].items():
        _require(set(entry) == {"runner", "image"}, f"{arch} needs runner and image")
        _require(
            re.search(rf"/{document['platform']}_{arch}@sha256:[0-9a-f]{{64}}$", entry["image"]),
            f"the image of {arch} must be {document['platform']}_{arch}, pinned by its sha256",
        )
    torches = tuple(document["torches"])
    _require(
        list(torches) == sorted(set(torches), key=Version), "torches must be ascending, each once"
    )
    legs = tuple(_leg(entry, targets, torches) for entry in document["legs"])
    names = [leg.name for leg in legs]
    _require(len(set(names)) == len(names), "two legs with the same toolkit and architecture")
    wanted = {
        (release, arch) for release in toolkit.REQUIREMENTS for arch in document["architectures"]
    }
    _require(
        {(leg.toolkit, leg.arch) for leg in legs} == wanted,
        f"legs must be exactly {', '.join(f'{r} {a}' for r, a in sorted(wanted))}",
    )
    _require(document["default_toolkit"] in {leg.toolkit for leg in legs}, "no default toolkit")
    return Matrix(
        targets=targets,
        default_toolkit=document["default_toolkit"],
        glibc=document["glibc"],
        platform=document["platform"],
        size_limit_bytes=int(document["size_limit_bytes"]),
        build_python=document["build_python"],
        architectures=document["architectures"],
        torches=torches,
        legs=legs,
    )


def _leg(entry: dict[str, Any], targets: tuple[str, ...], torches: tuple[str, ...]) -> Leg:
    _require(
        set(entry) == {"toolkit", "arch", "cells", "absent"},
        "a leg has toolkit, arch, cells and absent",
    )
    name = f"leg {entry['toolkit']} {entry['arch']}"
    cells = []
    for cell in entry["cells"]:
        _require(set(cell) <= _CELL_KEYS, f"{name}: unknown keys {sorted(set(cell) - _CELL_KEYS)}")
        _require(cell["torch"] in torches, f"{name}: torch {cell['torch']} is not among torches")
        _require(re.fullmatch(r"\d+\.\d+", cell["torch_cuda"]), f"{name}: torch_cuda is like 12.8")
        _require(re.fullmatch(r"3\.\d+", cell["python"]), f"{name}: python is like 3.12")
        limited = tuple(cell.get("targets", ()))
        _require(set(limited) <= set(targets), f"{name}: cell with targets that are not built")
        _require(not limited or cell.get("note"), f"{name}: fewer targets need a note saying why")
        cells.append(Cell(**{**cell, "targets": limited}))
    absent: dict[str, str] = {}
    for gap in entry["absent"]:
        _require(gap.get("reason"), f"{name}: an absent cell without a reason")
        for torch in gap["torch"]:
            _require(torch in torches, f"{name}: absent torch {torch} is not among torches")
            _require(torch not in absent, f"{name}: torch {torch} is absent twice")
            absent[torch] = gap["reason"]
    tested = [cell.torch for cell in cells]
    for torch in torches:
        count = tested.count(torch) + (torch in absent)
        _require(
            count == 1,
            f"{name}: torch {torch} needs one cell or one absent entry with a reason, has {count}",
        )
    return Leg(entry["toolkit"], entry["arch"], tuple(cells), absent)


def github(matrix: Matrix, what: str) -> list[dict[str, Any]]:
    """The ``include`` list of a GitHub matrix."""
    architectures = matrix.architectures
    if what == "toolkits":
        return [{"toolkit": release} for release in matrix.toolkits]
    if what == "architectures":
        return [{"arch": arch, **entry} for arch, entry in architectures.items()]
    legs = [
        {"leg": leg.name, "toolkit": leg.toolkit, "arch": leg.arch, **architectures[leg.arch]}
        for leg in matrix.legs
    ]
    if what == "legs":
        return legs
    return [
        {
            "leg": leg.name,
            "runner": architectures[leg.arch]["runner"],
            "torch": cell.torch,
            "torch_cuda": cell.torch_cuda,
            "python": cell.python,
            "experimental": cell.experimental,
        }
        for leg in matrix.legs
        for cell in leg.cells
    ]


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("matrix", __doc__)
    choices = ("check", "legs", "cells", "toolkits", "architectures")
    parser.add_argument("what", choices=choices)
    parser.add_argument("--github", action="store_true", help="append to $GITHUB_OUTPUT as well")
    parser.add_argument("--file", type=Path, default=FILE, help="another matrix.json")
    arguments = parser.parse_args(argv)
    matrix = load(arguments.file)
    if arguments.what == "check":
        cells = sum(len(leg.cells) for leg in matrix.legs)
        print(f"{arguments.file.name}: {len(matrix.legs)} wheels, {cells} test cells, no mistakes")
        return
    text = json.dumps({"include": github(matrix, arguments.what)})
    print(text)
    if arguments.github:
        output = os.environ.get("GITHUB_OUTPUT")
        if not output:
            raise BuildError("--github needs GITHUB_OUTPUT, which GitHub's runners set")
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(f"matrix={text}\n")


if __name__ == "__main__":
    sys.exit(cli.main(work))
