"""The real wheels, made by ci/build_all.sh as a release makes them; and the oldest torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_support
import pytest
from build_support import ROOT

pytest.importorskip("packaging")
pytest.importorskip("elftools")

from ci import emulate, gates, matrix, smoke, verify
from ci.wheelfile import Wheel

MATRIX = matrix.load()
LOCALS = (None, "cu130", "cu129torch2.8", "cu130torch2.11")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not build_support.TOOLS, reason="needs a package index: run tests/test.sh"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    script = [str(ROOT / "ci" / "build_all.sh"), "--out", str(out)]
    # Its own interpreter and compilers: nothing of the tests' environment may be needed.
    keep = {n: v for n, v in os.environ.items() if not n.startswith(("FLASH_KDA_", "PYTHON"))}
    begin = [line for line in ("nice",) if shutil.which(line)]
    done = subprocess.run(
        [*begin, "bash", *script], env=keep, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "index" in done.stdout.lower() and " s\n" in done.stdout  # progress and timings
    return out


def wheels(dist: Path) -> list[Path]:
    return sorted([*(dist / "pypi").glob("*.whl"), *(dist / "wheels").glob("*.whl")])


def test_the_set_is_complete(dist: Path) -> None:
    found = {(w.version.local, w.arch) for w in map(Wheel, wheels(dist))}
    assert found == {(local, arch) for local in LOCALS for arch in MATRIX.architectures}
    assert len(list((dist / "pypi").glob("*.tar.gz"))) == 1
    assert (dist / "whl" / "flash-kda" / "index.html").is_file()
    stray = [p.name for p in dist.rglob("*") if p.name.startswith(".") or "tmp" in p.name]
    assert stray == []


def test_every_wheel_passes_every_gate(dist: Path) -> None:
    for path in wheels(dist):
        verify.verify(path, MATRIX)
        assert path.stat().st_size < 10 << 20


def test_index_installs_what_was_built(dist: Path, tmp_path: Path) -> None:
    """From the index alone, torch left out: it is not in it, and its own test has it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    keep = {n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "PYTHON"))}
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for place, wanted in (("", "0.1.0"), ("cu130/torch2.11", "0.1.0+cu130torch2.11")):
        at = (dist / "whl" / place).as_uri()
        subprocess.run(
            [*command, "--no-deps", "--index-url", at, f"flash-kda=={wanted}"],
            env={**keep, "PIP_CONFIG_FILE": os.devnull},
            check=True,
        )
        show = "from importlib.metadata import version; print(version('flash-kda'))"
        got = subprocess.run([python, "-I", "-c", show], capture_output=True, text=True, check=True)
        assert got.stdout.strip() == wanted


@pytest.mark.parametrize("arch", list(MATRIX.architectures))
def test_launcher_opens(dist: Path, arch: str) -> None:
    pytest.importorskip("ziglang")
    try:
        emulate.emulator(arch)
    except verify.BuildError as error:
        pytest.skip(str(error))
    (path,) = (dist / "pypi").glob(f"*_{arch}.whl")
    answer = emulate.ask(Wheel(path).files[gates.LAUNCHER], arch, MATRIX)
    assert "abi_version=" in answer
    assert "open=2" in answer and "NVIDIA driver" in answer


def test_default_wheel_with_the_oldest_torch(dist: Path) -> None:
    """The CPU path passes its tests there; torch 2.4 has wheels up to Python 3.12."""
    names = [sys.executable] if sys.version_info < (3, 13) else []
    names += [p for v in ("3.12", "3.11", "3.10") if (p := shutil.which(f"python{v}"))]
    usable = [p for p in names if _has_venv(p)]
    if not usable:
        pytest.skip("needs Python 3.10 to 3.12 with venv")
    (path,) = (dist / "pypi").glob(f"*_{os.uname().machine}.whl")
    smoke.smoke(path, f"torch=={MATRIX.torches[0]}", usable[0], tests=True)


def _has_venv(python: str) -> bool:
    command = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
