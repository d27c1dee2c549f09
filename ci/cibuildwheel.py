"""Runs cibuildwheel for one leg of the matrix: pyproject.toml has what never changes, the images
and the ready parts come from here. Needs docker or podman, except with --print-identifiers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from build_tools import prebuilt

from . import cli, matrix
from .cli import ROOT, BuildError


def environment(leg: matrix.Leg, described: matrix.Matrix, parts: Path) -> dict[str, str]:
    """The variables that complete cibuildwheel's configuration.

    Raises:
        BuildError: ``parts`` is not inside the checkout, which alone the container sees.
    """
    try:
        inside = parts.resolve().relative_to(ROOT)
    except ValueError:
        raise BuildError(f"--parts {parts} has to lie inside {ROOT}") from None
    image = described.architectures[leg.arch]["image"]
    variables = {
        prebuilt.VARIABLE: f"/project/{inside}",
        "FLASH_KDA_CUDA": leg.toolkit,
        "FLASH_KDA_CUDA_ARCHS": ",".join(described.targets),
        "FLASH_KDA_LEG": leg.name,
    }
    return {
        "CIBW_BUILD": f"{described.build_python}-manylinux_{leg.arch}",
        "CIBW_ARCHS": leg.arch,
        f"CIBW_MANYLINUX_{leg.arch.upper()}_IMAGE": image,
        "CIBW_ENVIRONMENT": " ".join(f"{name}={value}" for name, value in variables.items()),
    }


def identifiers() -> list[str]:
    """What cibuildwheel would build for all architectures with pyproject.toml alone."""
    described = matrix.load()
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CIBW_")}
    printed = cli.call(
        *(sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"),
        *("--platform", "linux", "--archs", ",".join(described.architectures)),
        environ=keep,
        quiet=True,
    )
    return sorted(line for line in printed.split() if "manylinux" in line or "musllinux" in line)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("cibuildwheel", __doc__)
    parser.add_argument("--leg", help="such as cu129-x86_64")
    parser.add_argument("--parts", type=Path, help="folder of ready parts, inside the checkout")
    parser.add_argument("--out", type=Path, help="folder for the repaired wheel")
    parser.add_argument(
        "--print-identifiers", action="store_true", help="only compare them with the matrix"
    )
    arguments = parser.parse_args(argv)
    described = matrix.load()
    if arguments.print_identifiers:
        wanted, found = sorted(described.build_identifiers()), identifiers()
        print("\n".join(found))
        if found != wanted:
            raise BuildError(f"pyproject.toml builds {found}, ci/matrix.json says {wanted}")
        return
    if not (arguments.leg and arguments.parts and arguments.out):
        raise BuildError("--leg, --parts and --out are required")
    leg = described.leg(arguments.leg)
    changes = environment(leg, described, arguments.parts)
    shown = " ".join(f"{name}='{value}'" for name, value in changes.items())
    if cli.dry_run(f"{shown} cibuildwheel --output-dir {arguments.out}"):
        return
    with cli.step(f"cibuildwheel for {leg.name}"):
        cli.call(
            *(sys.executable, "-m", "cibuildwheel", "--platform", "linux"),
            *("--output-dir", arguments.out),
            environ={**os.environ, **changes},
        )


if __name__ == "__main__":
    sys.exit(cli.main(work))
