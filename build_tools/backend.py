"""The in-tree PEP 517 / PEP 660 backend: setuptools, plus build requirements that depend on what
is asked for and on what is already there.

* Wheels ask for the CUDA compiler and headers, and for CUTLASS, only when they are missing.
* The targets are settled first, so that a mistaken ``FLASH_KDA_CUDA_ARCHS``, or ``auto`` without a
  GPU, is told before anything is downloaded.
* An sdist needs neither a GPU nor a compiler; it only carries CUTLASS's headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setuptools import build_meta

from . import assemble, cutlass, launcher, prebuilt, toolkit
from .commands import one_line_errors, prepare

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What setuptools needs, and of compiler, headers and CUTLASS what is missing."""
    missing = _missing()
    return [*build_meta.get_requires_for_build_wheel(config_settings), *missing]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same as for a wheel: an editable install builds too."""
    missing = _missing()
    return [*build_meta.get_requires_for_build_editable(config_settings), *missing]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """What setuptools needs, and CUTLASS (headers only) when the checkout has no submodule."""
    with one_line_errors():
        prepare()
        headers = cutlass.missing_requirements()
    return [*build_meta.get_requires_for_build_sdist(config_settings), *headers]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """setuptools' hook; one build at a time in a checkout."""
    with one_line_errors():
        prepare()
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """setuptools' hook; one build at a time in a checkout."""
    with one_line_errors():
        prepare()
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """setuptools' hook; one build at a time in a checkout."""
    with one_line_errors():
        prepare()
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    return name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """setuptools' hook; one build at a time in a checkout."""
    with one_line_errors():
        prepare()
    name: str = build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return name


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Any = None
) -> str:
    """setuptools' hook; one build at a time in a checkout."""
    with one_line_errors():
        prepare()
    name: str = build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)
    return name


def _missing() -> list[str]:
    with one_line_errors():
        prepare()
        assemble.requested_targets()
        if prebuilt.directory() is not None:
            return []
        launcher.find_compiler()
        cuda = toolkit.requested_cuda()
        return toolkit.missing_requirements(cuda) + cutlass.missing_requirements()
