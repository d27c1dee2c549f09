"""Command line: ``python -m flash_kda doctor`` and ``python -m flash_kda demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import console, demo, doctor
from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2 for a wrong command line)."""
    return console.run("flash_kda", lambda: _command(argv))


def _command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_kda", description="Kimi Delta Attention forward pass for NVIDIA GPUs."
    )
    parser.add_argument("--version", action="version", version=f"flash_kda {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module, text in (
        ("doctor", doctor, "check the installation, the driver and the GPUs"),
        ("demo", demo, "run a mixed packed batch; show its time and its error"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
