"""scripts/gpu_smoke.py as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_smoke.py"


def load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_smoke", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smoke = load()


@pytest.mark.parametrize("case", smoke.CASES[:2])
def test_results_are_compared_with_the_reference(case: tuple[Any, ...]) -> None:
    assert smoke.compute(*case, device="cpu") <= smoke.TOLERANCE


def report(**changes: Any) -> dict[str, Any]:
    gpu = {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "target": "90a",
        "cubin": "/site/flash_kda/cubin/flash_kda.sm_90a.cubin",
    }
    return {"status": "ok", "problems": [], "gpus": [{**gpu, **changes}]}


def test_doctor_is_read() -> None:
    package = Path("/site/flash_kda")
    assert smoke.check_doctor(report(), package)["target"] == "90a"
    b300 = {"capability": "10.3", "target": "103a"}
    b300["cubin"] = "/site/flash_kda/cubin/flash_kda.sm_103a.cubin"
    assert smoke.check_doctor(report(**b300), package)["target"] == "103a"
    for wrong, part in (
        (report(target="100f"), "expected 90a"),
        (report(capability="10.0"), "expected 100a"),
        (report(cubin="/elsewhere/flash_kda.sm_90a.cubin"), "not a file of the installed"),
        ({**report(), "status": "broken", "problems": ["no cubin"]}, "no cubin"),
    ):
        with pytest.raises(smoke.SmokeError, match=part):
            smoke.check_doctor(wrong, package)


def test_watch_sees_builds_and_downloads(tmp_path: Path) -> None:
    """In a process of its own: an audit hook stays for good."""
    (tmp_path / "x.cubin").touch()
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gpu_smoke", {str(SCRIPT)!r})
smoke = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smoke)
import pathlib, socket, subprocess
watch = smoke.Watch()
sys.addaudithook(watch.audit)
assert pathlib.Path("x.cubin").read_bytes() == b""
assert (watch.opened, watch.forbidden) == (["x.cubin"], [])
pathlib.Path("new").write_text("")
assert watch.forbidden.pop() == "writes new"
subprocess.run(["true"])
assert "subprocess.Popen" in watch.forbidden[0]
watch.forbidden.clear()
socket.socket().close()
assert "socket" in watch.forbidden[0]
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_without_a_gpu_it_fails_in_one_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, SCRIPT, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    assert "holds 0 wheels for this machine" in run("--wheel", str(tmp_path))
    assert "torch finds no CUDA device" in run()
    for process in ("first", "second"):
        assert run("--process", process) == "gpu_smoke: torch finds no CUDA device\n"
