"""Runs every gate of ci/gates.py on wheels, and torch-abi-audit on the launcher inside.

With --base the wheels must be derived from that one: the same files, byte for byte.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import cli, gates, matrix
from .cli import BuildError
from .wheelfile import Wheel


def problems(path: Path, described: matrix.Matrix, base: Path | None = None) -> list[str]:
    """What is wrong with a wheel, one line each, led by the gate's name."""
    wheel = Wheel(path)
    found = [f"{gate.__name__}: {text}" for gate in gates.GATES for text in gate(wheel, described)]
    if base is not None:
        found += [f"unchanged: {text}" for text in gates.unchanged(wheel, Wheel(base))]
    return found


def verify(path: Path, described: matrix.Matrix, base: Path | None = None) -> None:
    """Refuse a wheel that any gate objects to.

    Raises:
        BuildError: after printing every objection.
    """
    found = problems(path, described, base)
    for text in found:
        print(f"{path.name}: {text}", file=sys.stderr)
    if found:
        raise BuildError(f"{path.name} fails {len(found)} checks, the first: {found[0]}")
    _audit(Wheel(path).files[gates.LAUNCHER])


@functools.cache
def _audit(launcher: bytes) -> None:
    """An independent look at torch's ABI, where that tool runs (Python 3.11 and newer); once for
    all wheels with the same launcher."""
    if importlib.util.find_spec("torch_abi_audit") is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "libflash_kda.so"
        library.write_bytes(launcher)
        program = Path(sys.executable).with_name("torch-abi-audit")
        cli.call(program, "--check", "torch", library, quiet=True)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("verify", __doc__)
    parser.add_argument("wheels", type=Path, nargs="+", help="wheels, or folders of wheels")
    parser.add_argument("--base", type=Path, help="the wheel that they were derived from")
    arguments = parser.parse_args(argv)
    described = matrix.load()
    if cli.dry_run(f"verify {', '.join(map(str, arguments.wheels))}"):
        return
    wheels = [
        wheel
        for path in arguments.wheels
        for wheel in (sorted(path.glob("*.whl")) if path.is_dir() else [path])
    ]
    if not wheels:
        raise BuildError(f"no wheel in {', '.join(map(str, arguments.wheels))}")
    for wheel in wheels:
        verify(wheel, described, arguments.base)
        cli.say(f"{wheel.name}: {len(gates.GATES)} gates passed")


if __name__ == "__main__":
    sys.exit(cli.main(work))
