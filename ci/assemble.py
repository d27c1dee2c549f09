"""Builds a wheel from an sdist and ready parts: the PEP 517 build itself, with nothing to compile.

The platform of the wheel is ARCH's, whatever this machine is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_tools import prebuilt

from . import cli, matrix
from .cli import BuildError


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    described = matrix.load()
    parser = cli.parser("assemble", __doc__)
    parser.add_argument("--leg", required=True, help="such as cu129-x86_64")
    parser.add_argument("--sdist", type=Path, required=True, help="flash_kda-*.tar.gz")
    parser.add_argument("--parts", type=Path, required=True, help="folder of ready parts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the wheel")
    arguments = parser.parse_args(argv)
    leg = described.leg(arguments.leg)
    if cli.dry_run(f"assemble {leg.name} from {arguments.sdist} and {arguments.parts}"):
        return
    if not arguments.sdist.is_file():
        raise BuildError(f"there is no sdist {arguments.sdist}: make it with python -m ci.sdist")
    environ = {
        **os.environ,
        prebuilt.VARIABLE: str(arguments.parts.resolve()),
        "FLASH_KDA_CUDA": leg.toolkit,
        "FLASH_KDA_CUDA_ARCHS": ",".join(described.targets),
        # What sysconfig answers as the platform, as cross-building tools set it.
        "_PYTHON_HOST_PLATFORM": f"linux-{leg.arch}",
    }
    with cli.step(f"wheel for {leg.name}"), tempfile.TemporaryDirectory() as scratch:
        cli.call(
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"),
            *("--wheel-dir", scratch, arguments.sdist.resolve()),
            environ=environ,
            quiet=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        made = cli.publish(wheel, arguments.out)
    cli.say(str(made))


if __name__ == "__main__":
    sys.exit(cli.main(work))
