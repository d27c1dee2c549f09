"""Which kernel paths a GPU has, and calls on one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flash_kda import abi
from flash_kda.ops import PATH_VARIABLE

STATE_BYTES = 4 * 128 * 128
# What `segments` keeps in the workspace: of a pair of chunks and head the record, and K- and the
# decay of its first chunk; of each cut a state and a map.
RECORD_BYTES, MIDDLE_BYTES = 28288, 4608
PAIR_BYTES = RECORD_BYTES + MIDDLE_BYTES
CUT_BYTES = 2 * STATE_BYTES


def kernel_paths(device: torch.device | str) -> list[str]:
    """Names of the paths that can be forced on this device; none of a CPU."""
    if torch.device(device).type != "cuda":
        return []
    launcher = abi.launcher()
    gpu = planning_facts(device)
    names = []
    for path, name in enumerate(launcher.path_names):
        try:
            launcher.plan(1, 1, 1, gpu, path)
        except ValueError:
            continue
        names.append(name)
    return names


def planning_facts(device: torch.device | str) -> abi.Gpu:
    """As torch tells them."""
    properties = torch.cuda.get_device_properties(device)
    return abi.Gpu(10 * properties.major + properties.minor, properties.multi_processor_count)


def tokens_of_step() -> int:
    """How many tokens the chain of the path that is forced takes at once, or a short call's."""
    return 32 if os.environ.get(PATH_VARIABLE) == "segments" else 16


@contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Calls inside take the path of this name; None changes nothing."""
    before = os.environ.get(PATH_VARIABLE)
    if name is not None:
        os.environ[PATH_VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(PATH_VARIABLE, None)
        if before is not None:
            os.environ[PATH_VARIABLE] = before
