"""``python -m build_tools.gpus`` prints the targets of this machine's GPUs as a comma list, or
nothing (exit status 1) when it has none that flash-kda supports."""

from __future__ import annotations

import sys

from . import assemble
from .common import BuildError, package_module


def main() -> int:
    """The command; returns the exit status."""
    try:
        print(",".join(assemble.requested_targets({})))
    except BuildError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(package_module("console").run("build_tools.gpus", main))
