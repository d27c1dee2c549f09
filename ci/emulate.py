"""Opens the launcher of a wheel in a program of the wheel's architecture, under qemu if need be.

It has to answer the interface version of csrc/ and, as no NVIDIA driver is there, to say just that.
Debian: apt-get install qemu-user libc6-arm64-cross.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_tools import launcher
from build_tools.common import CSRC, package_module

from . import cli, gates, matrix
from .cli import ROOT, BuildError
from .wheelfile import Wheel, only_wheel

SYSROOTS = {"aarch64": Path("/usr/aarch64-linux-gnu"), "x86_64": Path("/usr/x86_64-linux-gnu")}
_NO_DRIVER = "open=2"


def emulator(arch: str) -> list[str]:
    """What to put before a program of ``arch``; nothing where it runs by itself.

    Raises:
        BuildError: there is no emulator or no C library for it.
    """
    if os.uname().machine == arch:
        return []
    program = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
    if program is None or not SYSROOTS[arch].is_dir():
        raise BuildError(
            f"running {arch} programs needs qemu-{arch} and {SYSROOTS[arch]} (Debian: apt-get "
            "install qemu-user libc6-arm64-cross)"
        )
    return [program, "-L", str(SYSROOTS[arch])]


def ask(library: bytes, arch: str, described: matrix.Matrix) -> str:
    """Run ci/open_launcher.c on a launcher; returns what it printed."""
    command = emulator(arch)
    with tempfile.TemporaryDirectory() as scratch:
        program, file = Path(scratch) / "open_launcher", Path(scratch) / launcher.FILE_NAME
        file.write_bytes(library)
        cli.call(
            *(sys.executable, "-m", "ziglang", "cc", "-O1", f"-I{CSRC}"),
            *("-target", f"{arch}-linux-gnu.{described.glibc}"),
            *(ROOT / "ci" / "open_launcher.c", "-ldl", "-o", program),
            quiet=True,
        )
        return cli.call(*command, program, file, quiet=True)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("emulate", __doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="a wheel, or the folder of one")
    arguments = parser.parse_args(argv)
    if cli.dry_run(f"open the launcher of {arguments.wheel}"):
        return
    wheel = Wheel(only_wheel(arguments.wheel))
    with cli.step(f"open the launcher for {wheel.arch}"):
        answer = ask(wheel.files[gates.LAUNCHER], wheel.arch, matrix.load())
    lines = answer.splitlines()
    wanted = launcher.abi_version()
    if f"abi_version={wanted}" not in lines:
        raise BuildError(f"the launcher for {wheel.arch} does not answer version {wanted}: {lines}")
    # A machine with a driver refuses the empty image instead.
    if _NO_DRIVER not in lines and not _has_driver():
        raise BuildError(f"the launcher for {wheel.arch} does not say that there is no driver")
    cli.say("    " + "; ".join(lines))


def _has_driver() -> bool:
    driver = package_module("driver")
    try:
        return bool(driver.driver_version())
    except driver.DriverUnavailable:
        return False


if __name__ == "__main__":
    sys.exit(cli.main(work))
