"""Derives a wheel with a local version from a repaired one: nothing differs but the metadata.

--local cu130           the plain wheel of a toolkit that is not the default one
--local cu129torch2.8   the same files, requiring torch 2.8
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import cli
from .cli import BuildError
from .wheelfile import Wheel, local_torch, pinned


def derive(base: Path, local: str, out: Path) -> Path:
    """Write the wheel into ``out`` and return its path.

    Raises:
        BuildError: the base has a local version that this one does not continue, or no single
            torch requirement.
    """
    if not re.fullmatch(r"cu\d{3}(torch\d+\.\d+)?", local):
        raise BuildError(f"--local {local!r}: use cu130 or cu129torch2.8, say")
    wheel = Wheel(base)
    if wheel.version.local is not None and not local.startswith(f"{wheel.version.local}torch"):
        raise BuildError(f"{base.name} cannot become +{local}: start from a plain wheel")
    if wheel.torch_requirement() is None:
        raise BuildError(f"{base.name} does not require torch exactly once")
    version = f"{wheel.version.public}+{local}"
    with tempfile.TemporaryDirectory() as scratch:
        _wheel_command("unpack", "--dest", scratch, base.resolve())
        (tree,) = Path(scratch).iterdir()
        info = tree / wheel.dist_info
        _rewrite(info / "METADATA", version, pinned(local_torch(local)))
        info.rename(tree / f"flash_kda-{version}.dist-info")
        packed = Path(scratch) / "packed"
        packed.mkdir()
        _wheel_command("pack", "--dest-dir", packed, tree)
        (made,) = packed.iterdir()
        return cli.publish(made, out)


def _rewrite(metadata: Path, version: str, requirement: str) -> None:
    """Replace the two lines, and leave every other byte as it is."""
    head, blank, body = metadata.read_text(encoding="utf-8").partition("\n\n")
    head, versions = re.subn(r"(?m)^Version: .*$", f"Version: {version}", head)
    head, torches = re.subn(
        r"(?m)^Requires-Dist: torch\b.*$", f"Requires-Dist: {requirement}", head
    )
    if (versions, torches) != (1, 1):
        raise BuildError(f"{metadata}: expected one Version and one torch requirement")
    metadata.write_text(head + blank + body, encoding="utf-8")


def _wheel_command(*arguments: str | Path) -> None:
    cli.call(sys.executable, "-m", "wheel", *arguments, quiet=True)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("derive", __doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="repaired wheel to start from")
    parser.add_argument("--local", required=True, action="append", help="may be given repeatedly")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new wheels")
    arguments = parser.parse_args(argv)
    if cli.dry_run(f"derive {', '.join(arguments.local)} from {arguments.wheel}"):
        return
    for local in arguments.local:
        with cli.step(f"+{local}"):
            cli.say(f"    {derive(arguments.wheel, local, arguments.out)}")


if __name__ == "__main__":
    sys.exit(cli.main(work))
