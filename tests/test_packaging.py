"""The sdist, and the wheels that are built from it: what is inside, tags, metadata."""

from __future__ import annotations

import email.message
import email.parser
import fcntl
import json
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_support
import pytest
from build_support import ROOT, backend, copy_sources

from build_tools import assemble, cutlass
from build_tools.common import BuildError, package_module

VERSION = package_module("_version").__version__
TAG = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
DIST_INFO = f"flash_kda-{VERSION}.dist-info"
CUBINS = {f"flash_kda/cubin/flash_kda.sm_{target}.cubin" for target in ("90a", "100a")}

_reason = build_support.why_no_build()
pytestmark = pytest.mark.skipif(_reason is not None, reason=_reason or "")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with settings under which no wheel could be: an sdist must not look at them."""
    sources = copy_sources(tmp_path_factory.mktemp("sources") / "flash-kda")
    (sources / "flash_kda" / "cubin").mkdir()
    (sources / "flash_kda" / "cubin" / "stray.cubin").touch()
    (sources / "flash_kda" / "manifest.json").touch()
    folder = tmp_path_factory.mktemp("sdist")
    settings = {"FLASH_KDA_CUDA_ARCHS": "foo", "FLASH_KDA_CUDA": "0", "PATH": "/nowhere"}
    asked = backend("get_requires_for_build_sdist", sources, **settings)
    assert asked.stdout.splitlines()[-1] == "[]", asked.stderr
    done = backend("build_sdist", sources, str(folder), **settings)
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tarball's tree, outside of any git checkout."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return folder / f"flash_kda-{VERSION}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(unpacked, tmp_path_factory.mktemp("wheel"), "90a,100a")


def build_wheel(sources: Path, folder: Path, archs: str, hook: str = "build_wheel") -> Path:
    folder.mkdir(exist_ok=True)
    done = backend(hook, sources, str(folder), FLASH_KDA_CUDA_ARCHS=archs)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if not n.endswith("/")}


def metadata(wheel: Path, name: str) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{DIST_INFO}/{name}").decode()
    return email.parser.Parser().parsestr(text)


def test_sdist_has_everything_a_build_needs(sdist: Path) -> None:
    assert sdist.name == f"flash_kda-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        present = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "build_tools", "licenses", "flash_kda"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file()]
        wanted = {
            p.relative_to(ROOT).as_posix()
            for p in files
            if p.suffix in {".cu", ".cuh", ".h", ".cpp", ".map", ".py", ".txt", ".typed"}
        }
        assert wanted
        assert wanted <= present
    assert {"LICENSE", "pyproject.toml", "setup.py", "PKG-INFO"} <= present
    assert {"cutlass/include/cute/tensor.hpp", "cutlass/include/cutlass/version.h"} <= present


def test_sdist_has_nothing_that_a_build_makes(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        stray = [
            name
            for name in archive.getnames()
            if name.endswith((".cubin", ".so", ".pyc", "manifest.json")) or "/build/" in name
        ]
    assert stray == []


def test_sdist_carries_the_same_cutlass(unpacked: Path) -> None:
    here = cutlass.locate()
    there = cutlass.locate({}, unpacked)
    assert there.include == (unpacked / "cutlass" / "include").resolve()
    assert (there.version, there.tree_hash()) == (here.version, here.tree_hash())


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "flash_kda").rglob("*.py")}
    built = {"flash_kda/manifest.json", "flash_kda/lib/libflash_kda.so", *CUBINS}
    licences = {"LICENSE", "licenses/CUTLASS-BSD-3-Clause.txt"}
    info = {"METADATA", "RECORD", "WHEEL", "top_level.txt", *(f"licenses/{n}" for n in licences)}
    expected = modules | {"flash_kda/py.typed"} | built | {f"{DIST_INFO}/{n}" for n in info}
    assert names(wheel) == expected


def test_wheel_serves_every_python_on_this_platform(wheel: Path) -> None:
    assert wheel.name == f"flash_kda-{VERSION}-{TAG}.whl"
    description = metadata(wheel, "WHEEL")
    assert description.get_all("Tag") == [TAG]
    assert description["Root-Is-Purelib"] == "false"


def test_wheel_metadata(wheel: Path) -> None:
    read = metadata(wheel, "METADATA")
    assert (read["Name"], read["Version"]) == ("flash-kda", VERSION)
    assert read["License-Expression"] == "MIT"
    assert read["Requires-Python"] == ">=3.10"
    assert read.get_all("Requires-Dist") == ["torch>=2.4"]
    assert set(read.get_all("License-File", [])) == {
        "LICENSE",
        "licenses/CUTLASS-BSD-3-Clause.txt",
    }


def test_an_earlier_build_leaves_nothing_in_the_next_wheel(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    again = build_wheel(unpacked, tmp_path, "90a")
    assert names(wheel) - names(again) == {"flash_kda/cubin/flash_kda.sm_100a.cubin"}
    with zipfile.ZipFile(again) as archive:
        manifest = json.loads(archive.read("flash_kda/manifest.json"))
    assert [cubin["target"] for cubin in manifest["cubins"]] == ["90a"]


def test_two_builds_at_once_in_one_checkout(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "flash-kda")
    archs = ("90a", "100a")
    with ThreadPoolExecutor(len(archs)) as pool:
        wheels = list(pool.map(lambda arch: build_wheel(sources, tmp_path / arch, arch), archs))
    for made, arch in zip(wheels, archs, strict=True):
        assert names(made) & CUBINS == {f"flash_kda/cubin/flash_kda.sm_{arch}.cubin"}
        with zipfile.ZipFile(made) as archive:
            manifest = json.loads(archive.read("flash_kda/manifest.json"))
        assert [cubin["target"] for cubin in manifest["cubins"]] == [arch]


def test_a_build_waits_for_the_lock(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "flash-kda")
    (sources / "build").mkdir()
    with (sources / "build" / ".lock").open("w") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = pool.submit(
            backend, "build_wheel", sources, str(tmp_path), FLASH_KDA_CUDA_ARCHS="90a"
        )
        time.sleep(3)
        assert not waiting.done()
        fcntl.flock(file, fcntl.LOCK_UN)
        done = waiting.result()
    assert done.returncode == 0, done.stderr
    assert "waiting for another build" in done.stdout + done.stderr


def test_a_mixed_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    assemble.check_wheel(wheel, ("90a", "100a"))
    with pytest.raises(BuildError, match="holds 90a, 100a where 90a was asked"):
        assemble.check_wheel(wheel, ("90a",))
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    cubin = "flash_kda/cubin/flash_kda.sm_90a.cubin"
    for other in ({cubin: b"altered"}, {"flash_kda/cubin/flash_kda.sm_120a.cubin": b"more"}):
        with zipfile.ZipFile(tmp_path / "mixed.whl", "w") as archive:
            for name, data in {**files, **other}.items():
                archive.writestr(name, data)
        with pytest.raises(BuildError, match="with altered files"):
            assemble.check_wheel(tmp_path / "mixed.whl", ("90a", "100a"))


@pytest.mark.parametrize("name", ["a,b", "with space", "it's", "$(x)", "p\u00e9"])
def test_checkouts_with_odd_names(tmp_path: Path, name: str) -> None:
    sources = copy_sources(tmp_path / name)
    assert names(build_wheel(sources, tmp_path, "90a")) & CUBINS


def test_source_tree_gets_the_same_kernels(wheel: Path, tmp_path: Path) -> None:
    """Python that is started in a checkout imports flash_kda from it."""
    sources = copy_sources(tmp_path / "flash-kda")
    made = build_wheel(sources, tmp_path, "90a")
    with zipfile.ZipFile(made) as archive:
        for name in ("flash_kda/manifest.json", "flash_kda/cubin/flash_kda.sm_90a.cubin"):
            assert (sources / name).read_bytes() == archive.read(name)


def test_editable_wheel_builds_into_the_source_tree(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "flash-kda")
    made = build_wheel(sources, tmp_path, "90a", "build_editable")
    assert not any(name.endswith((".cubin", ".so")) for name in names(made))
    assert (sources / "flash_kda" / "cubin" / "flash_kda.sm_90a.cubin").is_file()
    assert (sources / "flash_kda" / "lib" / "libflash_kda.so").is_file()
    assert package_module("manifest").read(sources / "flash_kda").cubins.keys() == {"90a"}


@pytest.mark.slow
@pytest.mark.skipif(not build_support.TOOLS, reason="needs a package index: run tests/test.sh")
def test_pip_in_a_clean_environment(tmp_path: Path) -> None:
    """No torch, no submodule, no CUDA toolkit: pip fetches the compiler and CUTLASS itself."""
    sources = copy_sources(tmp_path / "flash-kda")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {
        **build_support.environment(FLASH_KDA_CUDA_ARCHS="90a,100a", FLASH_KDA_CUTLASS_DIR=None),
        "PYTHONPATH": "",
    }

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [python, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    site = Path(run("-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    before = set(site.iterdir())
    run("-m", "pip", "install", "--no-deps", sources)
    assert {p.name for p in (site / "flash_kda" / "cubin").iterdir()} == {
        Path(name).name for name in CUBINS
    }
    run("-m", "pip", "uninstall", "--yes", "flash-kda")
    assert set(site.iterdir()) == before
