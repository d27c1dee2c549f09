"""Fixtures of the tests that run on a GPU, or with FLASH_KDA_TEST_DEVICE=cpu on the CPU path."""

from __future__ import annotations

import os
from collections.abc import Iterator

import cases
import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ.get("FLASH_KDA_TEST_DEVICE") or "cuda")


@pytest.fixture
def rng(request: pytest.FixtureRequest, device: torch.device) -> Iterator[cases.Random]:
    """Fresh random inputs on the tested device; waits for the test's kernels, so that an error
    in one is reported where it belongs.
    """
    yield cases.Random(request.node.nodeid, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
