"""setuptools commands: build_py adds what NVRTC and the C++ compiler make, bdist_wheel names the
wheel after the platform alone, sdist carries the CUTLASS headers."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

from . import assemble, cutlass
from .common import PACKAGE, BuildError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a BuildError into its one line on standard error and exit status 1: what went wrong
    is the user's to read, and a traceback through pip, setuptools and this file only hides it."""
    try:
        yield
    except BuildError as error:
        print(f"flash-kda: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


class PlatformDistribution(Distribution):
    """Belongs into platlib, though it has no Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithCubins(build_py):
    """Copies the Python files and builds cubins, launcher and manifest beside them: into the
    build folder, or into the source tree for an editable install."""

    def run(self) -> None:
        with one_line_errors():
            targets = assemble.requested_targets()
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
