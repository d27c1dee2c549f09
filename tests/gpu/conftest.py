"""Fixtures of the tests that run on a GPU, or with FLASH_KDA_TEST_DEVICE=cpu on the CPU path."""

from __future__ import annotations

import os
from collections.abc import Iterator

import cases
import paths
import pytest
import torch

DEVICE = os.environ.get("FLASH_KDA_TEST_DEVICE") or "cuda"


def _paths() -> list[str | None]:
    """None, which forces no path, and every path of the tested device.

    Without a GPU or a launcher the tests are skipped, with the reason that tests/conftest.py finds.
    """
    try:
        return [None, *paths.kernel_paths(DEVICE)]
    except Exception:
        return [None]


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(params=_paths(), ids=lambda name: name or "automatic")
def path(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The kernel path that the test's calls take; None is whichever the plan chooses."""
    with paths.forced(request.param):
        yield request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest, device: torch.device) -> Iterator[cases.Random]:
    """Fresh random inputs on the tested device; waits for the test's kernels, so that an error
    in one is reported where it belongs.
    """
    yield cases.Random(request.node.nodeid, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
