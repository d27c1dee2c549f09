"""The shell scripts: what they refuse, in one line each, and what lib.sh decides for pip."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_support
import pytest

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = ("PYTHON", "CXX", "FLASH_KDA_CUDA_ARCHS", "FLASH_KDA_TEST_PYTHON", "PIP_CONSTRAINT")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def bash(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        ["bash", *arguments],
        cwd=folder,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The script stopped with one line, on stderr, that has these words."""
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts need to get as far as their first checks, in a folder with a blank."""
    folder = tmp_path / "flash kda"
    for name in ("scripts", "tests"):
        (folder / name).mkdir(parents=True)
        for script in (ROOT / name).glob("*.sh"):
            shutil.copy(script, folder / name)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


@pytest.fixture
def old_python(tmp_path: Path) -> str:
    """A program that answers to every script that it is no usable Python."""
    path = tmp_path / "old python"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return str(path)


SCRIPTS = ("scripts/demo.sh", "scripts/setup_clangd.sh", "tests/test.sh")


@pytest.mark.parametrize("script", SCRIPTS)
def test_python_that_is_set_is_never_replaced(checkout: Path, old_python: str, script: str) -> None:
    for python in (old_python, "/nowhere/python3"):
        refused(bash(checkout, script, PYTHON=python), Path(script).name, f"PYTHON is {python}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("script", SCRIPTS)
def test_read_only_checkout(checkout: Path, script: str) -> None:
    (checkout / "build").mkdir(mode=0o555)
    refused(bash(checkout, script), "cannot write to", str(checkout / "build"))
    checkout.chmod(0o555)
    try:
        refused(bash(checkout, script), "cannot write to", str(checkout))
    finally:
        checkout.chmod(0o755)


@pytest.mark.parametrize("archs", ["", "  ", ","])
def test_empty_archs(checkout: Path, archs: str) -> None:
    done = bash(checkout, "scripts/demo.sh", FLASH_KDA_CUDA_ARCHS=archs)
    refused(done, "FLASH_KDA_CUDA_ARCHS is empty", "90a")


def test_compiler_that_is_not_there(checkout: Path) -> None:
    refused(bash(checkout, "scripts/demo.sh", CXX="/nowhere/g++"), "CXX is /nowhere/g++")


def test_test_python_without_torch(checkout: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    done = bash(checkout, "tests/test.sh", FLASH_KDA_TEST_PYTHON=python)
    refused(done, f"FLASH_KDA_TEST_PYTHON is {python}", "No module named")
    done = bash(checkout, "tests/test.sh", FLASH_KDA_TEST_PYTHON="/nowhere/python")
    refused(done, "FLASH_KDA_TEST_PYTHON is /nowhere/python")


def test_constraint_file_is_one_word(checkout: Path, old_python: str) -> None:
    """pip splits PIP_CONSTRAINT at blanks, so a path with one would name two files."""
    code = 'source scripts/lib.sh; choose_torch "$0" \'\' >&2; printf %s "$PIP_CONSTRAINT"'
    constraint = bash(checkout, "-c", code, old_python).stdout
    assert " " not in constraint
    assert (checkout / constraint).is_file()
    code = 'source scripts/lib.sh; choose_torch "$0" 90a; printf %s "${PIP_CONSTRAINT-none}"'
    assert bash(checkout, "-c", code, old_python).stdout == "none"


def test_environment_is_named_with_its_own_python(checkout: Path) -> None:
    code = 'set -e; source scripts/lib.sh; make_venv "$0" .venv'
    first = bash(checkout, "-c", code, sys.executable)
    assert first.returncode == 0, first.stderr
    version = f"Python {platform.python_version()}"
    assert f"Virtual environment .venv: {version}" in first.stdout
    assert "new" in first.stdout
    again = bash(checkout, "-c", code, "/nowhere/python")
    assert again.returncode == 0, again.stderr
    assert version in again.stdout and "already there" in again.stdout


def test_clangd_in_a_copy_of_the_checkout(tmp_path: Path) -> None:
    """The folders that it names are there; nothing is downloaded."""
    from build_tools import clangd

    reason = build_support.why_no_build(clangd.CUDA)
    if reason:
        pytest.skip(f"would download headers: {reason}")
    folder = build_support.copy_sources(tmp_path / "flash kda")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    changes = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "FLASH_KDA_CUTLASS_DIR": None}
    done = subprocess.run(
        ["bash", "scripts/setup_clangd.sh"],
        cwd=folder,
        env=build_support.environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )
    if "Installing headers" in done.stdout:  # what lies in the checkout itself is not in the copy
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    text = (folder / ".clangd").read_text(encoding="utf-8")
    includes = [Path(x) for x in re.findall(r"- -I(.+)$", text, re.MULTILINE)]
    (cuda,) = re.findall(r"--cuda-path=(.+)$", text, re.MULTILINE)
    assert includes[0] == folder / "csrc"
    assert all(x.is_dir() for x in includes)
    assert any((x / "cutlass" / "cutlass.h").exists() for x in includes)
    assert (Path(cuda) / "include" / "cuda_runtime.h").exists()
