"""Calls in processes that a fork has made before CUDA was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch

import flash_kda

pytestmark = pytest.mark.gpu

TESTS = Path(cases.__file__).resolve().parent
FORKS = """
import os, sys, traceback
import torch, cases
import flash_kda
from flash_kda import abi

device, opened = sys.argv[1:]
if opened == "opened":
    abi.launcher_or_none()
torch.set_num_threads(1)

def check(name):
    case = cases.make_case(cases.Random(name, device), lengths=(40, 0, 1, 77), heads=40)
    cases.assert_accurate(case, *cases.forward(case))

assert not torch.cuda.is_initialized()
children = []
for name in ("first", "second"):
    child = os.fork()
    if child == 0:
        try:
            check(name)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    children.append(child)
assert not torch.cuda.is_initialized()
check("parent")
status = [os.waitpid(child, 0)[1] for child in children]
assert status == [0, 0], status
print("well")
"""


@pytest.mark.parametrize("opened", ["opened", "unopened"])
def test_forked_before_first_use(device: torch.device, opened: str) -> None:
    """Both children and their parent, which starts CUDA when they exist, call at the same time."""
    places = (Path(flash_kda.__file__).resolve().parents[1], TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(device), opened],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=places[0],
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr
