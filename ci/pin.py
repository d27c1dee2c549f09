"""Derives every wheel that requires one torch, for the combinations of ci/matrix.json.

The base of each is the repaired wheel of the same toolkit and architecture, found in --wheels; what
is derived is verified against it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import cli, derive, index, matrix, verify
from .cli import BuildError
from .wheelfile import Wheel, local_torch


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("pin", __doc__)
    parser.add_argument("--wheels", type=Path, required=True, action="append", help="a folder")
    parser.add_argument("--local", action="append", help="only these, such as cu129torch2.8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new wheels")
    arguments = parser.parse_args(argv)
    described = matrix.load()
    combinations = described.combinations()
    index.expected(described, arguments.local)  # refuses what the matrix does not have
    if cli.dry_run(f"derive {', '.join(arguments.local or combinations)} in {arguments.out}"):
        return
    plain = {}
    for path in (file for folder in arguments.wheels for file in folder.glob("*.whl")):
        wheel = Wheel(path)
        if local_torch(wheel.version.local) is None:
            plain[wheel.version.local, wheel.arch] = path
    for local in arguments.local or combinations:
        for leg, _ in combinations[local]:
            base = plain.get((described.base_local(leg.toolkit), leg.arch))
            if base is None:
                raise BuildError(f"no repaired wheel of {leg.name} to derive +{local} from")
            with cli.step(f"+{local} for {leg.arch}"):
                made = derive.derive(base, local, arguments.out)
                verify.verify(made, described, base)


if __name__ == "__main__":
    sys.exit(cli.main(work))
