"""setuptools commands: build_py adds what NVRTC and the C++ compiler make, bdist_wheel names the
wheel after the platform alone, sdist carries the CUTLASS headers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import setuptools
from setuptools import Distribution
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

from . import assemble, cutlass
from .common import PACKAGE, ROOT, BuildError, require_file

SETUPTOOLS = "setuptools>=77.0.3"
"""As in pyproject.toml: older ones know neither bdist_wheel nor the licence fields there."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a BuildError into its one line on standard error and exit status 1: what went wrong
    is the user's to read, and a traceback through pip, setuptools and this file only hides it."""
    try:
        yield
    except BuildError as error:
        line = " ".join(str(error).splitlines())  # whatever the names in it hold
        print(f"flash-kda: {line}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def check_setuptools(version: str) -> None:
    """Refuse a setuptools below SETUPTOOLS.

    Raises:
        BuildError: naming the version that is needed.
    """
    numbers = [tuple(map(int, re.findall(r"[0-9]+", v)[:3])) for v in (version, SETUPTOOLS)]
    if numbers[0] < numbers[1]:
        raise BuildError(
            f"setuptools {version} is too old: pip install '{SETUPTOOLS}' (pip does so by itself "
            "without --no-build-isolation)"
        )


with one_line_errors():
    check_setuptools(setuptools.__version__)
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:
        raise BuildError(
            f"setuptools {setuptools.__version__} has no bdist_wheel: pip install '{SETUPTOOLS}'"
        ) from None

_lock: TextIO | None = None


def lock_checkout() -> None:
    """Wait until no other process builds in this checkout, and keep others out from then on.

    setuptools assembles wheels in fixed folders under build/. The lock lasts until this process
    ends, since what it guards goes on until the wheel is written.

    Raises:
        BuildError: build/ cannot be written.
    """
    global _lock
    if _lock is not None:
        return
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        file = (ROOT / "build" / ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _progress("waiting for another build in this checkout")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return  # a file system without locks
        raise BuildError(
            f"cannot write {ROOT / 'build'} ({error.strerror}): make the checkout writable"
        ) from None
    _lock = file


def prepare() -> None:
    """What comes before setuptools is let loose on the checkout.

    Raises:
        BuildError: the version's file is missing, or see ``lock_checkout``.
    """
    require_file(PACKAGE / "_version.py")
    lock_checkout()


class PlatformDistribution(Distribution):
    """Belongs into platlib, though it has no Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithCubins(build_py):
    """Copies the Python files and builds cubins, launcher and manifest beside them: into the
    build folder, or into the source tree for an editable install."""

    targets: tuple[str, ...] = ()

    def run(self) -> None:
        with one_line_errors():
            prepare()
            self.targets = targets = assemble.requested_targets()
            destination = PACKAGE if self.editable_mode else Path(self.build_lib) / PACKAGE.name
            if not self.editable_mode:
                # An earlier build may have left files there that would end up in the wheel.
                shutil.rmtree(destination, ignore_errors=True)
            super().run()
            destination.mkdir(parents=True, exist_ok=True)
            assemble.build(destination, targets, report=_progress)
            if not self.editable_mode:
                # Python started in the checkout imports this folder, not the installed package.
                assemble.copy_generated(destination, PACKAGE)


class PlatformWheel(bdist_wheel):
    """Tag py3-none-<platform>: any Python 3 runs it through ctypes."""

    def run(self) -> None:
        super().run()
        targets = self.get_finalized_command("build_py").targets
        wheel = Path(self.distribution.dist_files[-1][2])
        with one_line_errors():
            try:
                if targets:  # none with --skip-build
                    assemble.check_wheel(wheel, targets)
            except BuildError:
                wheel.unlink()
                raise

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class SdistWithCutlass(sdist):
    """Adds CUTLASS's headers and licence as ``cutlass/``, so that the tarball builds by itself."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        with one_line_errors():
            include = cutlass.locate().include
        for folder in cutlass.HEADER_FOLDERS:
            shutil.copytree(
                include / folder,
                Path(base_dir) / "cutlass" / "include" / folder,
                ignore=shutil.ignore_patterns("__pycache__", "*.py", ".*"),
                dirs_exist_ok=True,
            )


COMMANDS = {"build_py": BuildWithCubins, "bdist_wheel": PlatformWheel, "sdist": SdistWithCutlass}


def _progress(text: str) -> None:
    print(f"flash-kda: {text}", flush=True)
