"""The package's folder: read by several processes at once, never written, perhaps gone one day."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_kda

PACKAGE = Path(flash_kda.__file__).resolve().parent

CALL = """
def call():
    torch.manual_seed(5)
    x = [torch.randn(1, 40, 2, 128).bfloat16() for _ in range(4)]
    out, final = torch.full_like(x[0], float("nan")), torch.full((3, 2, 128, 128), float("nan"))
    bounds = torch.tensor([0, 7, 7, 40])
    flash_kda.fwd(*x, torch.randn(1, 40, 2), 1.0, out, None, None, -5.0, None, final, bounds)
    assert out.isfinite().all() and final.isfinite().all()
    return out.double().sum().item() + final.double().sum().item()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a copy of the built package, without bytecode."""
    if not (PACKAGE / "manifest.json").exists():
        pytest.skip(f"the package in {PACKAGE} is not built")
    copy = tmp_path / "site"
    shutil.copytree(PACKAGE, copy / "flash_kda", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def start(program: list[str], site: Path, folder: Path) -> subprocess.Popen[str]:
    """Python with the package of ``site`` and nothing of this one's own, in an empty folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_KDA_")}
    for name in ("home", "temporary", "current"):
        (folder / name).mkdir(exist_ok=True)
    environment |= {
        "PYTHONPATH": str(site),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "temporary"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder / "current",
        env=environment,
    )


def run(program: list[str], site: Path, folder: Path) -> str:
    process = start(program, site, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_processes_that_begin_together(site: Path, tmp_path: Path) -> None:
    """Each compiles the bytecode, reads manifest and kernels, opens the launcher and computes."""
    program = f"""
import json, sys, torch
print("ready", flush=True)
sys.stdin.readline()
import flash_kda
from flash_kda import abi, doctor, manifest
{CALL}
installed = manifest.read()
report = doctor.collect()
print(json.dumps([
    flash_kda.__file__,
    flash_kda.workspace_size(8192, 96, 1),
    [abi.plan(*shape, abi.Gpu(90, 132)) for shape in ((8192, 96, 1), (1 << 20, 1, 1), (1, 9, 9))],
    sorted(installed.cubins),
    [len(manifest.read_file(record)) for record in installed.cubins.values()],
    [report["status"], report["install"]],
    call(),
]))
"""
    processes = [start(["-c", program], site, tmp_path) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], results
    first, *others = (json.loads(out) for out, _ in results)
    assert first[0] == str(site / "flash_kda" / "__init__.py")
    assert first[5][0] == "ok"
    assert all(other == first for other in others)


def listing(folder: Path) -> dict[str, tuple[int, ...]]:
    """What is there, and when it was last written."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        facts = path.lstat()
        times = (facts.st_mtime_ns, facts.st_ctime_ns)
        found[str(path)] = (facts.st_ino, facts.st_mode, facts.st_size, *times)
    return found


def test_nothing_is_written(site: Path, tmp_path: Path) -> None:
    """Neither into the package nor where a program may keep files of its own."""
    assert compileall.compile_dir(site, quiet=1)
    for path in (site, *site.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = listing(site)
    use = f"""
import torch, flash_kda
{CALL}
call()
flash_kda.workspace_size(1, 1, 1)
x = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
flash_kda.chunk_kda(x, x, x, x, x[..., 0], lower_bound=-5.0, use_gate_in_kernel=True,
                    use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
"""
    for program in (
        ["-c", use],
        ["-m", "flash_kda", "doctor"],
        ["-m", "flash_kda", "demo", "--device", "cpu", "--heads", "1"],
    ):
        run(program, site, tmp_path)
        assert listing(site) == before
        for name in ("home", "temporary", "current"):
            assert list((tmp_path / name).rglob("*")) == []


MADE_UP_GPU = """
from flash_kda import driver, loader
driver.driver_version = lambda: (13, 3)
driver.device = lambda i: driver.DeviceInfo(i, "NVIDIA H200", (9, 0), 132, 1 << 30, "GPU-0")
"""

REFUSED = """
def refused(work, *parts):
    try:
        work()
    except flash_kda.BrokenInstallError as error:
        text = str(error)
        assert "\\n" not in text and text.count("no such file") == 1, text
        assert all(part in text for part in ("pip install", *parts)), text
    else:
        raise AssertionError("not refused")
"""


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_folder_that_vanishes_before_the_first_use(how: str, site: Path, tmp_path: Path) -> None:
    """One error that says so where built files are needed; other calls work; no harm stays."""
    program = f"""
import contextlib, io, os, pathlib, shutil, torch, flash_kda
from flash_kda import __main__
{MADE_UP_GPU}{CALL}{REFUSED}
there, away = map(pathlib.Path, ({str(site)!r}, {str(tmp_path / "away")!r}))
assert pathlib.Path(flash_kda.__file__).parent.parent == there
if {how!r} == "deleted":
    shutil.copytree(there, away)
    shutil.rmtree(there)
else:
    there.rename(away)
call()
os.environ["FLASH_KDA_PATH"] = "portable_v64"
call()
manifest = str(there / "flash_kda" / "manifest.json")
for _ in range(2):
    refused(lambda: flash_kda.workspace_size(1, 1, 1), manifest)
    refused(lambda: loader.module_for(torch.device("cuda", 0)), manifest)
for options in ([], ["--json"]):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert __main__.main(["doctor", *options]) == 1
    assert "installation is damaged" in shown.getvalue() and manifest in shown.getvalue()
away.rename(there)
assert flash_kda.workspace_size(1, 1, 1) > 0
call()
"""
    run(["-c", program], site, tmp_path)


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_folder_that_vanishes_after_the_first_use(how: str, site: Path, tmp_path: Path) -> None:
    """What is open stays open; only GPUs that are new to the process find no kernels."""
    program = f"""
import pathlib, shutil, torch, flash_kda
from flash_kda import abi
{MADE_UP_GPU}{CALL}{REFUSED}
there = pathlib.Path({str(site)!r})
opened = []
abi.open_module = lambda image, device, vouched_for: opened.append(device) or 1000 + device
size, result = flash_kda.workspace_size(100, 3, 2), call()
module = loader.module_for(torch.device("cuda", 0))
if {how!r} == "deleted":
    shutil.rmtree(there)
else:
    there.rename(there.with_name("elsewhere"))
assert flash_kda.workspace_size(100, 3, 2) == size and call() == result
assert abi.plan(8192, 96, 1, abi.Gpu(90, 132)).workspace_bytes > 0
assert loader.module_for(torch.device("cuda", 0)) is module
refused(lambda: loader.module_for(torch.device("cuda", 1)), "manifest.json")
assert opened == [0]
try:
    flash_kda.workspace_size(2**32, 1, 1)
except ValueError as error:
    assert "t_total: got 4294967296" in str(error)
"""
    run(["-c", program], site, tmp_path)
