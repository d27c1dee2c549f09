"""Links the launcher of one architecture for old glibc into PARTS/launcher-<arch>.

The compiler is Zig's clang from PyPI (ziglang), which carries the start files and symbol versions
of every glibc: the result does not depend on the machine, and either architecture can be built on
either. $CXX, when set, is used instead; it must make code for ARCH itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from build_tools import launcher, prebuilt, toolkit

from . import cli, matrix
from .cli import BuildError


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    described = matrix.load()
    parser = cli.parser("link_launcher", __doc__)
    parser.add_argument("--arch", required=True, choices=list(described.architectures))
    parser.add_argument("--parts", type=Path, required=True, help="folder of ready parts")
    arguments = parser.parse_args(argv)
    triple = f"{arguments.arch}-linux-gnu.{described.glibc}"
    compiler = os.environ.get("CXX") or f"{sys.executable} -m ziglang c++ -target {triple}"
    if cli.dry_run(f"link the launcher with {compiler} into {arguments.parts}"):
        return
    # cuda.h only gives types; the oldest supported release describes all that is used.
    include = toolkit.locate(described.default_toolkit).include_dirs[0]
    with cli.step(f"launcher for {triple}"):
        library = launcher.build(include, environ={**os.environ, "CXX": compiler})
        if library[:4] != b"\x7fELF":
            raise BuildError(f"{compiler} made no ELF library")
        folder = prebuilt.write_launcher(arguments.parts, arguments.arch, library)
    cli.say(f"{folder / launcher.FILE_NAME}: {len(library) / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(cli.main(work))
