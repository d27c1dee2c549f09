"""Makes the sdist, which carries the CUTLASS headers and builds without git or a submodule."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import cli


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("sdist", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tarball")
    arguments = parser.parse_args(argv)
    if cli.dry_run(f"make the sdist in {arguments.out}"):
        return
    with cli.step("sdist"), tempfile.TemporaryDirectory() as scratch:
        # The environment's own setuptools: the build needs nothing else for an sdist, except the
        # CUTLASS headers, which requirements/wheels.txt brings where there is no submodule.
        code = f"from build_tools import backend; backend.build_sdist({scratch!r})"
        cli.call(sys.executable, "-c", code, quiet=True)
        (tarball,) = Path(scratch).glob("*.tar.gz")
        made = cli.publish(tarball, arguments.out)
    cli.say(str(made))


if __name__ == "__main__":
    sys.exit(cli.main(work))
