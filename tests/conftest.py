"""Which flash_kda is tested, on which device, and which tests run.

``FLASH_KDA_TEST_DEVICE=cpu`` runs the tests of ``tests/gpu`` that do not need CUDA itself on the
CPU path; ``FLASH_KDA_REQUIRE_GPU=1`` makes a machine that cannot run them an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
_ROOT = _TESTS.parent


# `python -m pytest` puts the source tree first, where flash_kda may lack its built libraries: an
# installed package goes before it. It stays last, for build_tools and for running uninstalled.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT] + [str(_ROOT)]
sys.path.insert(0, str(_TESTS))  # for `import cases`, whatever pytest's import mode

import cases  # noqa: E402  (the paths above come first)

import flash_kda  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow, too")


def pytest_report_header() -> str:
    where = Path(flash_kda.__file__).parent
    return f"flash_kda {flash_kda.__version__} in {where}, test seed {cases.BASE_SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = _why_no_gpu()
    if missing and os.environ.get("FLASH_KDA_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"FLASH_KDA_REQUIRE_GPU is set, but {missing}")
    on_cpu = os.environ.get("FLASH_KDA_TEST_DEVICE") == "cpu"
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--runslow"):
            item.add_marker(pytest.mark.skip(reason="slow: use --runslow"))
        if not item.get_closest_marker("gpu"):
            continue
        if on_cpu and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA itself"))
        elif missing and not on_cpu:
            item.add_marker(pytest.mark.skip(reason=missing))


def _why_no_gpu() -> str | None:
    """Why the GPU tests cannot run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "the GPU is older than compute capability 9.0"
    if not (Path(flash_kda.__file__).parent / "lib" / "libflash_kda.so").exists():
        return f"{Path(flash_kda.__file__).parent} has no built launcher"
    return None


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> cases.Random:
    """Fresh random inputs on the CPU."""
    return cases.Random(request.node.nodeid)


@pytest.fixture(autouse=True)
def _show_seed() -> None:
    """pytest shows this with a failing test."""
    print(f"random inputs: repeat with FLASH_KDA_TEST_SEED={cases.BASE_SEED}")
