"""Puts repaired wheels and the sdist where they are published from, and derives the wheels that
require one torch.

  OUT/pypi      the sdist and the default wheels: what PyPI gets
  OUT/wheels    every wheel with a local version

A derived wheel comes from the repaired one of the same toolkit and architecture, and is verified
against it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import cli, derive, index, matrix, verify
from .cli import BuildError
from .wheelfile import Wheel


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("stage", __doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="a folder")
    parser.add_argument("--local", action="append", help="only these, such as cu129torch2.8")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    described = matrix.load()
    combinations = described.combinations()
    index.expected(described, arguments.local)  # refuses what the matrix does not have
    chosen = arguments.local or list(combinations)
    if cli.dry_run(f"derive {', '.join(chosen)} in {arguments.out}"):
        return
    sdists = list(arguments.source.glob("*.tar.gz"))
    if len(sdists) != 1:
        raise BuildError(f"{arguments.source} has {len(sdists)} sdists, not one")
    cli.publish(sdists[0], arguments.out / "pypi")
    plain = {}
    for path in sorted(arguments.source.glob("*.whl")):
        wheel = Wheel(path)
        verify.verify(path, described)
        folder = arguments.out / ("pypi" if wheel.version.local is None else "wheels")
        plain[wheel.version.local, wheel.arch] = cli.publish(path, folder)
    for local in chosen:
        for leg, _ in combinations[local]:
            base = plain.get((described.base_local(leg.toolkit), leg.arch))
            if base is None:
                raise BuildError(f"no repaired wheel of {leg.name} to derive +{local} from")
            with cli.step(f"+{local} for {leg.arch}"):
                verify.verify(derive.derive(base, local, arguments.out / "wheels"), described, base)


if __name__ == "__main__":
    sys.exit(cli.main(work))
