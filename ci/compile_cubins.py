"""Compiles the cubins of one toolkit into PARTS/cubins-<toolkit>: once, for every platform."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from build_tools import compile, cutlass, prebuilt, toolkit
from build_tools.common import package_module

from . import cli, matrix
from .cli import BuildError


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("compile_cubins", __doc__)
    parser.add_argument("--toolkit", required=True, help="CUDA release of the compiler: 12.9, 13.0")
    parser.add_argument("--parts", type=Path, required=True, help="folder of ready parts")
    parser.add_argument("--targets", help="comma list (default: all of ci/matrix.json)")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: cores and memory)")
    arguments = parser.parse_args(argv)
    try:
        names = arguments.targets or ",".join(matrix.load().targets)
        targets = package_module("targets").parse_archs(names)
    except ValueError as error:
        raise BuildError(str(error)) from None
    release = toolkit.requested_cuda({**os.environ, "FLASH_KDA_CUDA": arguments.toolkit})
    if cli.dry_run(f"compile {', '.join(targets)} with CUDA {release} into {arguments.parts}"):
        return
    tools, headers = toolkit.locate(release), cutlass.locate()
    with cli.step(f"cubins of {', '.join(targets)} with NVRTC {tools.version}"):
        cubins = compile.compile_targets(
            targets, tools=tools, headers=headers, jobs=arguments.jobs, report=cli.say
        )
        folder = prebuilt.write_cubins(arguments.parts, tools, headers, cubins)
    size = sum(len(cubin.data) for cubin in cubins)
    cli.say(f"{folder}: {len(cubins)} cubins, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    sys.exit(cli.main(work))
