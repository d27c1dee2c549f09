"""Lets auditwheel check a wheel against the platform's policy and name it after that, then runs
every gate of ci.verify on the result. What fails does not appear in OUT.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import cli, derive, matrix, verify
from .cli import BuildError
from .wheelfile import Wheel


def auditwheel() -> list[str]:
    """The program: of this environment, or the one that manylinux images have on PATH."""
    beside = Path(sys.executable).with_name("auditwheel")
    found = str(beside) if beside.exists() else shutil.which("auditwheel")
    if found is None:
        raise BuildError("auditwheel is not installed: pip install -r requirements/wheels.txt")
    return [found]


def repair(wheel: Path, leg: matrix.Leg, described: matrix.Matrix, out: Path) -> Path:
    """Repair, add the toolkit's local version if it has one, verify; returns the new wheel."""
    if Wheel(wheel).arch != leg.arch:
        raise BuildError(f"{wheel.name} is not a wheel for {leg.arch}")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as scratch:
        cli.call(
            # The oldest platform that the launcher runs on; the gates say which is acceptable.
            *(*auditwheel(), "repair", "--plat", "auto"),
            *("--wheel-dir", scratch, wheel.resolve()),
            environ=environ,  # auditwheel looks for patchelf on PATH
            quiet=True,
        )
        (repaired,) = Path(scratch).glob("*.whl")
        local = described.base_local(leg.toolkit)
        if local is not None:
            repaired = derive.derive(repaired, local, Path(scratch) / "local")
        verify.verify(repaired, described)
        return cli.publish(repaired, out)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    described = matrix.load()
    parser = cli.parser("repair", __doc__)
    parser.add_argument("--leg", required=True, help="such as cu129-x86_64")
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel as it was built")
    parser.add_argument("--out", type=Path, required=True, help="folder for the repaired wheel")
    arguments = parser.parse_args(argv)
    leg = described.leg(arguments.leg)
    if cli.dry_run(f"repair {arguments.wheel} for {leg.name}"):
        return
    with cli.step(f"repair and verify {leg.name}"):
        cli.say(f"    {repair(arguments.wheel, leg, described, arguments.out)}")


if __name__ == "__main__":
    sys.exit(cli.main(work))
