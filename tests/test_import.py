"""``import flash_kda`` opens no library, starts no CUDA, needs no built files, takes no time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_kda

PACKAGE = Path(flash_kda.__file__).resolve().parent
BUILT = ("cubin", "lib", "manifest.json")


def run(program: str, path: Path = PACKAGE.parent) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def bare_package(tmp_path: Path) -> Path:
    """A folder with a copy of the package that lacks everything the build makes."""
    ignored = shutil.ignore_patterns("__pycache__", *BUILT)
    shutil.copytree(PACKAGE, tmp_path / "flash_kda", ignore=ignored)
    return tmp_path


def test_opens_no_library_and_does_not_start_cuda() -> None:
    program = """
import sys, torch
watched = []
def audit(event, arguments):
    if event == "ctypes.dlopen":
        watched.append(arguments)
    elif event == "open" and str(arguments[0]).endswith((".so", ".so.1", ".json", ".cubin")):
        watched.append(arguments)
sys.addaudithook(audit)
import flash_kda
assert not watched, watched
assert not torch.cuda.is_initialized()
maps = open("/proc/self/maps").read()
assert "libflash_kda" not in maps
"""
    run(program)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("torch", "flash_kda needs torch 2.4 or newer, which is not installed"),
        ("typing_extensions", "No module named 'typing_extensions'"),
    ],
)
def test_names_the_module_that_is_missing(tmp_path: Path, missing: str, message: str) -> None:
    error = f"raise ModuleNotFoundError({f'No module named {missing!r}'!r}, name={missing!r})"
    (tmp_path / f"{missing}.py").write_text(error)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import flash_kda
except ImportError as error:
    print(error)
"""
    assert message in run(program)


def test_works_without_built_files(bare_package: Path) -> None:
    program = f"""
import pathlib, torch, flash_kda
assert pathlib.Path(flash_kda.__file__).parent == pathlib.Path({str(bare_package)!r}) / "flash_kda"
x = [torch.randn(1, 5, 2, 128, dtype=torch.bfloat16) for _ in range(4)]
out = torch.full_like(x[0], float("nan"))
flash_kda.fwd(*x, torch.randn(1, 5, 2), 1.0, out, None, None, -5.0)
assert out.isfinite().all()
try:
    flash_kda.workspace_size(1, 1, 1)
except flash_kda.BrokenInstallError as error:
    assert "manifest.json" in str(error)
else:
    raise AssertionError
"""
    run(program, bare_package)


def test_unbuilt_package_leaves_gpu_only_settings_unchecked(bare_package: Path) -> None:
    program = """
import os, torch, flash_kda
os.environ["FLASH_KDA_PATH"] = "anything"
x = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16)
flash_kda.fwd(x, x, x, x, x[..., 0], 1.0, torch.empty_like(x), None, None, 0.0)
"""
    run(program, bare_package)


def test_forked_children_can_use_it() -> None:
    program = """
import os, torch, flash_kda
torch.set_num_threads(1)
x = torch.randn(1, 3, 1, 128, dtype=torch.bfloat16)
child = os.fork()
if child == 0:
    flash_kda.fwd(x, x, x, x, x[..., 0], 1.0, torch.empty_like(x), None, None, -1.0)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run(program)


def test_is_quick_after_torch() -> None:
    program = """
import time, torch
begin = time.perf_counter()
import flash_kda
print(time.perf_counter() - begin)
"""
    run(program)  # may compile the bytecode
    # Takes 4 ms, and 40 without cached bytecode; repeated because this machine may be busy.
    assert any(float(run(program)) < 0.05 for _ in range(5))


def test_public_names() -> None:
    for name in flash_kda.__all__:
        assert getattr(flash_kda, name) is not None
    names = [name for name in flash_kda.__all__ if name.endswith("Error")]
    assert len(names) == 9
    for name in names:
        assert issubclass(getattr(flash_kda, name), flash_kda.FlashKDAError)
    assert issubclass(flash_kda.FlashKDAError, RuntimeError)
    loading = set(names) - {"FlashKDAError", "LaunchError"}
    assert all(issubclass(getattr(flash_kda, name), flash_kda.LoaderError) for name in loading)
