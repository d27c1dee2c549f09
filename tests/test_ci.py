"""The commands of ci/: the matrix, ready parts, the index, releases, and how they fail."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import build_support
import pytest
import wheel_support
from build_support import ROOT
from wheel_support import good

pytest.importorskip("packaging")
pytest.importorskip("elftools")

from build_tools import cache, prebuilt
from build_tools.common import CSRC, BuildError
from ci import cibuildwheel, cli, derive, index, matrix, release, smoke, stage

MATRIX = matrix.load()
DOCUMENT = json.loads(matrix.FILE.read_text())
LOCALS = ["cu129torch2.8", "cu130torch2.11"]


def ci(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env=build_support.environment(**environ),
        capture_output=True,
        text=True,
        check=False,
    )


# --- the matrix ---------------------------------------------------------------------------------


def test_matrix() -> None:
    assert [leg.name for leg in MATRIX.legs] == [
        "cu129-x86_64",
        "cu129-aarch64",
        "cu130-x86_64",
        "cu130-aarch64",
    ]
    assert MATRIX.base_local("12.9") is None
    assert MATRIX.base_local("13.0") == "cu130"
    cells = {
        local: {leg.arch for leg, _ in found} for local, found in MATRIX.combinations().items()
    }
    assert cells["cu129torch2.8"] == {"x86_64", "aarch64"}
    assert cells["cu129torch2.4"] == {"x86_64"}
    assert "cu130torch2.8" not in cells
    newest = MATRIX.torches[-1].rpartition(".")[0]
    assert f"cu130torch{newest}" not in cells  # tried as an experiment, published later
    for what in ("toolkits", "architectures", "legs", "cells"):
        assert matrix.github(MATRIX, what)
    assert all(
        cell.targets == ("90a",)
        for leg in MATRIX.legs
        for cell in leg.cells
        if cell.torch < "2.7" and cell.torch.startswith("2.") and len(cell.torch) == 5
    )


def edit(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (edit("schema", to=2), "schema is 2"),
        (edit("extra", to=1), "extra"),
        (edit("targets", to=["90"]), "targets must be some of"),
        (edit("torches", to=["2.8.0", "2.4.1"]), "ascending"),
        (edit("default_toolkit", to="11.0"), "no default toolkit"),
        (edit("architectures", "x86_64", "image", to="manylinux_2_28_x86_64:latest"), "pinned"),
        (edit("architectures", "x86_64", to={"runner": "x"}), "needs runner and image"),
        (edit("legs", 0, "toolkit", to="13.0"), "same toolkit and architecture"),
        (edit("legs", 0, "arch", to="riscv64"), "legs must be exactly"),
        (edit("legs", 0, "cells", 0, "torch", to="2.3.0"), "not among torches"),
        (edit("legs", 0, "cells", 0, "torch", to="2.6.0"), "has 0"),
        (edit("legs", 0, "cells", 0, "note", to=""), "need a note"),
        (edit("legs", 0, "cells", 0, "targets", to=["75a"]), "not built"),
        (edit("legs", 0, "cells", 0, "python", to="3"), "python is like"),
        (edit("legs", 0, "cells", 0, "torch_cuda", to="cu129"), "torch_cuda is like"),
        (edit("legs", 0, "cells", 0, "colour", to="red"), "unknown keys"),
        (edit("legs", 0, "absent", 0, "reason", to=""), "without a reason"),
        (edit("legs", 0, "absent", 0, "torch", to=[]), "one absent entry with a reason, has 0"),
        (edit("legs", 0, "absent", 0, "torch", to=["2.4.1"]), "has 2"),
        (edit("legs", 0, "absent", to=None), "malformed"),
    ],
)
def test_mistakes_in_the_matrix(tmp_path: Path, change: Callable[[Any], None], part: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    file = tmp_path / "matrix.json"
    file.write_text(json.dumps(document))
    with pytest.raises(BuildError, match=re.escape(part)):
        matrix.load(file)
    done = ci("ci.matrix", "check", "--file", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_cibuildwheel_agrees_with_the_matrix() -> None:
    pytest.importorskip("cibuildwheel")
    assert cibuildwheel.identifiers() == sorted(MATRIX.build_identifiers())
    settings = cibuildwheel.environment(MATRIX.legs[1], MATRIX, ROOT / "build" / "parts")
    assert settings["CIBW_BUILD"] in MATRIX.build_identifiers()
    assert settings["CIBW_MANYLINUX_AARCH64_IMAGE"].startswith(
        "quay.io/pypa/manylinux_2_28_aarch64@"
    )
    assert "FLASH_KDA_PREBUILT=/project/build/parts " in settings["CIBW_ENVIRONMENT"]
    with pytest.raises(BuildError, match="inside"):
        cibuildwheel.environment(MATRIX.legs[0], MATRIX, Path("/elsewhere"))


# --- ready parts --------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Cubins for 90a and a launcher, as other commands would have left them."""
    from build_tools.compile import Cubin
    from build_tools.cutlass import Cutlass
    from build_tools.ptxas_log import KernelResources
    from build_tools.toolkit import Toolkit

    tools = Toolkit("12.9", "12.9.86", Path("libnvrtc.so"), None, ())
    root = tmp_path / "parts"
    kernel = KernelResources("flash_kda_prepare", 128, *[0] * (len(fields(KernelResources)) - 2))
    cubin = Cubin("90a", wheel_support.CUBIN, [kernel], "", False)
    prebuilt.write_cubins(root, tools, Cutlass(Path("include"), "4.2.0"), [cubin])
    prebuilt.write_launcher(root, prebuilt.machine(), wheel_support.library())
    return root


def rewrite(root: Path, **changes: object) -> None:
    record = root / "cubins-12.9" / "cubins.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


def change_entry(root: Path, **changes: object) -> None:
    record = root / "cubins-12.9" / "cubins.json"
    (entry,) = json.loads(record.read_text())["cubins"]
    rewrite(root, cubins=[{**entry, **changes}])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_parts_are_taken_as_they_are(parts: Path, tmp_path: Path) -> None:
    sources = build_support.copy_sources(tmp_path / "sources")
    settings = {"FLASH_KDA_PREBUILT": str(parts), "FLASH_KDA_CUDA_ARCHS": "90a", "PYTHONPATH": ""}
    asked = build_support.backend("get_requires_for_build_wheel", sources, **settings)
    assert asked.stdout.splitlines()[-1] == "[]", asked.stderr
    done = build_support.backend("build_wheel", sources, str(tmp_path), **settings, CXX="/no/c++")
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(tmp_path / done.stdout.splitlines()[-1], tmp_path / "made", "zip")
    package = tmp_path / "made" / "flash_kda"
    assert (package / "cubin" / "flash_kda.sm_90a.cubin").read_bytes() == wheel_support.CUBIN
    assert (package / "lib" / "libflash_kda.so").read_bytes() == wheel_support.library()
    document = json.loads((package / "manifest.json").read_text())
    assert document["compiler"] == {"name": "nvrtc", "version": "12.9.86", "cuda": "12.9"}


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda root: (root / "cubins-12.9" / "cubins.json").unlink(), "cannot read"),
        (lambda root: (root / "cubins-12.9" / "flash_kda.sm_90a.cubin").unlink(), "cannot read"),
        (
            lambda root: (root / "cubins-12.9" / "flash_kda.sm_90a.cubin").write_bytes(b""),
            "is damaged",
        ),
        (
            lambda root: (root / "cubins-12.9" / "cubins.json").write_text('{"csrc_sha256": "0"}'),
            "from another csrc",
        ),
        (
            lambda root: shutil.rmtree(root / f"launcher-{prebuilt.machine()}"),
            "the step that makes it did not finish",
        ),
        (
            lambda root: (root / "cubins-12.9" / "cubins.json").write_text("[" * 200_000),
            "cannot read .* recursion",
        ),
        (lambda root: (root / "cubins-12.9" / "cubins.json").write_bytes(b"\xff"), "cannot read"),
        (lambda root: (root / "cubins-12.9" / "cubins.json").write_text("[]"), "lacks what it"),
        (lambda root: rewrite(root, cubins={}), "lacks what it must record"),
        (lambda root: rewrite(root, cubins=[5]), "lacks what it must record"),
        (lambda root: rewrite(root, cubins=[{"target": "90a"}]), "lacks what it must record"),
        (lambda root: rewrite(root, compiler={"name": 5}), "lacks what it must record"),
        (
            lambda root: rewrite(root, compiler={"name": "nvrtc", "version": "1", "cuda": "13.0"}),
            "holds cubins of CUDA 13.0",
        ),
        (lambda root: change_entry(root, kernels=[]), "records no kernels for 90a"),
        (lambda root: rewrite(root, cutlass_version=None), "lacks what it must record"),
        (
            lambda root: change_entry(root, kernels=[{"name": "a"}]),
            "lacks what it must record",
        ),
        (lambda root: change_entry(root, file="../../../etc/passwd"), "cannot read"),
        (lambda root: change_entry(root, file=""), "not a regular file"),
        (lambda root: fifo(root / "cubins-12.9" / "cubins.json"), "not a regular file"),
        (lambda root: fifo(root / "cubins-12.9" / "flash_kda.sm_90a.cubin"), "not a regular file"),
        (
            lambda root: fifo(root / f"launcher-{prebuilt.machine()}" / "libflash_kda.so"),
            "not a regular file",
        ),
    ],
)
def test_spoiled_parts(parts: Path, spoil: Callable[[Path], object], part: str) -> None:
    spoil(parts)
    with pytest.raises(BuildError, match=part):
        prebuilt.read(parts, ["90a"], environ={})


def test_missing_parts(parts: Path) -> None:
    with pytest.raises(BuildError, match="no cubin for 100a"):
        prebuilt.read(parts, ["90a", "100a"], environ={})
    record = parts / "cubins-12.9" / "cubins.json"
    record.write_text(record.read_text().replace('"target": "90a"', '"target": "100a"'))
    with pytest.raises(BuildError, match=r"flash_kda\.sm_90a\.cubin is no cubin for 100a"):
        prebuilt.read(parts, ["100a"], environ={})
    with pytest.raises(BuildError, match=r"cubins-13.0"):
        prebuilt.read(parts, ["90a"], environ={"FLASH_KDA_CUDA": "13.0"})
    assert prebuilt.directory({"FLASH_KDA_PREBUILT": " "}) is None


# --- the index ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete set for LOCALS, as it would be published."""
    source = tmp_path_factory.mktemp("repaired")
    out = tmp_path_factory.mktemp("staged")
    for leg in MATRIX.legs:
        good(source, MATRIX.base_local(leg.toolkit), leg.arch)
    (source / "flash_kda-0.1.0.tar.gz").write_bytes(b"sdist")
    chosen = [word for local in LOCALS for word in ("--local", local)]
    stage.work(["--from", str(source), "--out", str(out), *chosen])
    return out


@pytest.fixture
def wheels(staged: Path, tmp_path: Path) -> Path:
    """A copy of the set, to spoil."""
    return Path(shutil.copytree(staged, tmp_path / "dist"))


def write_index(wheels: Path, out: Path, *arguments: str) -> None:
    chosen = [word for local in LOCALS for word in ("--local", local)]
    folders = [w for name in ("pypi", "wheels") for w in ("--wheels", str(wheels / name))]
    index.work([*folders, "--out", str(out), *chosen, *arguments])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_stage(wheels: Path) -> None:
    assert len(list((wheels / "wheels").iterdir())) == 2 + 4
    assert {p.suffix for p in (wheels / "pypi").iterdir()} == {".whl", ".gz"}
    assert not any("+" in p.name for p in (wheels / "pypi").iterdir())
    with pytest.raises(BuildError, match="0 sdists"):
        stage.work(["--from", str(wheels / "wheels"), "--out", str(wheels / "again")])


def test_index(wheels: Path, tmp_path: Path) -> None:
    out = tmp_path / "whl"
    write_index(wheels, out)
    first = tree(out)
    write_index(wheels, out)
    assert tree(out) == first
    assert {name for name in first if name.endswith("flash-kda/index.html")} == {
        "flash-kda/index.html",
        "cu130/flash-kda/index.html",
        "cu129/torch2.8/flash-kda/index.html",
        "cu130/torch2.11/flash-kda/index.html",
    }
    assert "+" not in first["flash-kda/index.html"].decode().replace("%2B", "+")
    page = first["cu129/torch2.8/flash-kda/index.html"].decode()
    assert page.count("%2Bcu129torch2.8-py3-none-") == 2
    for url, digest in re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', page):
        file = (out / "cu129" / "torch2.8" / "flash-kda" / url.replace("%2B", "+")).resolve()
        assert cache.hash_bytes(file.read_bytes()) == digest


def test_index_keeps_earlier_releases(wheels: Path, tmp_path: Path) -> None:
    found = index.collect([wheels / "pypi", wheels / "wheels"], MATRIX, LOCALS)
    index.write(found, tmp_path / "one", "https://host/v0/")
    page = tmp_path / "one" / "flash-kda" / "index.html"
    older = '<a href="https://host/v0/flash_kda-0.0.1-x.whl#sha256=1">flash_kda-0.0.1-x.whl</a><br>'
    page.write_text(page.read_text().replace("</body>", f"{older}\n</body>"))
    index.write(found, tmp_path / "two", "https://host/v1/", tmp_path / "one")
    text = (tmp_path / "two" / "flash-kda" / "index.html").read_text()
    assert older in text
    assert text.count("https://host/v1/flash_kda-0.1.0-") == 2
    assert "v0/flash_kda-0.1.0" not in text
    assert not (tmp_path / "two" / "files").exists()


def test_incomplete_and_mixed_sets(wheels: Path, tmp_path: Path) -> None:
    def refused(part: str, locals_: list[str] | None = LOCALS) -> None:
        with pytest.raises(BuildError, match=part):
            index.collect([wheels / "pypi", wheels / "wheels"], MATRIX, locals_)

    refused(r"incomplete: .*cu129torch2\.4 x86_64", None)
    refused("--local", ["cu129torch9.9"])
    refused("not in the matrix: wheels for cu130torch2.11", ["cu129torch2.8"])
    victim = next((wheels / "wheels").glob("*cu129torch2.8*aarch64*"))
    kept = victim.read_bytes()
    victim.unlink()
    refused("incomplete: no wheel for cu129torch2.8 aarch64")
    contents = wheel_support.files("cu129torch2.8", arch="aarch64", requirement="torch==2.8.*")
    wheel_support.write(victim, {**contents, "flash_kda/__init__.py": b"# other"})
    refused("was not derived from its base")
    victim.write_bytes(kept)
    shutil.copy(victim, victim.with_name(victim.name.replace("_2_17_", "_2_20_")))
    refused("fails|two wheels")


# --- installing from it -------------------------------------------------------------------------


def fake_torch(folder: Path, version: str) -> Path:
    """A wheel that only claims to be torch."""
    info = f"torch-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    contents = {
        "torch.py": b"",
        f"{info}/METADATA": text.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return wheel_support.write(folder / f"torch-{version}-py3-none-any.whl", contents)


@pytest.fixture(params=["pip", "uv"])
def install(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Installs into a clean environment from file:// alone; returns the versions found there."""
    for version in ("2.5.0", "2.8.0", "2.15.0"):
        fake_torch(tmp_path / "torches", version)
    environment = tmp_path / "venv"
    python = environment / "bin" / "python"
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    settings["PIP_CONFIG_FILE"] = os.devnull
    if request.param == "uv":
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        if not Path(uv).exists():
            pytest.skip("uv is not installed")
        subprocess.run([uv, "venv", "--quiet", "--offline", environment], check=True, env=settings)
        command = [uv, "pip", "install", "--python", str(python), "--no-config", "--no-cache"]
    else:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]

    def run(*arguments: str) -> str:
        links = ["--find-links", str(tmp_path / "torches")]
        done = subprocess.run(
            [*command, *links, *arguments],
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        show = "from importlib.metadata import version as v; print(v('torch'), v('flash-kda'))"
        return subprocess.run(
            [python, "-I", "-c", show], capture_output=True, text=True, check=False
        ).stdout.strip()

    return run


@pytest.mark.skipif(prebuilt.machine() != "x86_64", reason="the made-up wheels are for x86_64")
def test_default_wheel_leaves_torch_alone(
    wheels: Path, tmp_path: Path, install: Callable[..., str]
) -> None:
    write_index(wheels, tmp_path / "whl")
    install("--no-index", "torch==2.5.0")
    at = (tmp_path / "whl").as_uri()
    assert install("--index-url", at, "flash-kda") == "2.5.0 0.1.0"


@pytest.mark.skipif(prebuilt.machine() != "x86_64", reason="the made-up wheels are for x86_64")
def test_pinned_wheel_brings_its_torch(
    wheels: Path, tmp_path: Path, install: Callable[..., str]
) -> None:
    write_index(wheels, tmp_path / "whl")
    at = (tmp_path / "whl" / "cu129" / "torch2.8").as_uri()
    assert install("--index-url", at, "flash-kda") == "2.8.0 0.1.0+cu129torch2.8"


# --- releases -----------------------------------------------------------------------------------


def test_release_check(tmp_path: Path) -> None:
    version = release.check(f"v{wheel_support.VERSION}")
    assert release.notes(version)
    with pytest.raises(BuildError, match=r"is not v0\.1\.0"):
        release.check("v9.9.9")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changes\n\n## 0.2.0 - soon\n\n## 0.1.0\n\n- first\n")
    assert release.notes("0.1.0", changelog) == "- first"
    for absent in ("0.2.0", "0.1", "0.3.0"):
        with pytest.raises(BuildError, match="says nothing"):
            release.notes(absent, changelog)


def test_release_publish(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for GitHub's command line tool, which notes how it was called."""
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GH_REPO", "owner/name")
    chosen = {k: v for k, v in MATRIX.combinations().items() if k in LOCALS}
    monkeypatch.setattr(matrix.Matrix, "combinations", lambda self: chosen)
    release.publish("v0.1.0", wheels, tmp_path / "site")
    listed, created = (tmp_path / "calls").read_text().splitlines()
    assert listed.startswith("release list")
    assert created.startswith("release create v0.1.0 --verify-tag --title flash-kda 0.1.0")
    assert created.count(".whl") == 8 and "index.tar.gz" in created
    page = (tmp_path / "site" / "whl" / "flash-kda" / "index.html").read_text()
    assert "https://github.com/owner/name/releases/download/v0.1.0/flash_kda-0.1.0-" in page


def test_wheel_of_a_cell() -> None:
    published = smoke.published
    assert published(MATRIX, "cu129-x86_64", "2.8.0") == (
        "wheels",
        "flash_kda-*+cu129torch2.8-py3-none-*_x86_64.whl",
    )
    newest = MATRIX.torches[-1]
    assert published(MATRIX, "cu130-x86_64", newest)[1].startswith("flash_kda-*+cu130-py3")
    with pytest.raises(BuildError, match="no cell for torch"):
        published(MATRIX, "cu130-x86_64", "2.8.0")
    with pytest.raises(BuildError, match="no leg"):
        published(MATRIX, "cu128-x86_64", "2.8.0")


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("compile_cubins", "--toolkit", "12.8", "--parts", "x"), "12.9 is the oldest"),
        (("compile_cubins", "--toolkit", "12.9", "--targets", "foo", "--parts", "x"), "'foo'"),
        (("assemble", "--leg", "cu1-x", "--sdist", "x", "--parts", "x", "--out", "x"), "no leg"),
        (
            ("assemble", "--leg", "cu129-x86_64", "--sdist", "x", "--parts", "x", "--out", "x"),
            "there is no sdist",
        ),
        (("verify", "nowhere"), "not a readable wheel"),
        (("repair", "--leg", "cu129-x86_64", "--wheel", "x.whl", "--out", "x"), "not a readable"),
        (("index", "--wheels", "nowhere", "--out", "x"), "incomplete"),
        (("index", "--wheels", "x", "--out", "x", "--base-url", "http://x"), "end in /"),
        (("smoke", "--wheel", "nowhere"), "holds 1 wheels|holds 0 wheels"),
        (("emulate", "--wheel", "nowhere"), "name the one to take"),
        (("cibuildwheel", "--leg", "cu129-x86_64"), "are required"),
        (("release", "publish", "--tag", "v1"), "needs --dist"),
        (("matrix", "legs", "--github"), "GITHUB_OUTPUT"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    environ = build_support.environment(GITHUB_OUTPUT=None, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", f"ci.{arguments[0]}", *arguments[1:]],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(part, done.stderr), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_missing_headers(tmp_path: Path) -> None:
    reason = build_support.why_no_build()
    if reason:
        pytest.skip(reason)
    done = ci(
        *("ci.compile_cubins", "--toolkit", "12.9", "--targets", "90a", "--parts", tmp_path / "x"),
        FLASH_KDA_CUTLASS_DIR=str(tmp_path),
    )
    assert done.returncode == 1
    assert "no include/cutlass/version.h" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_wheel(parts: Path, tmp_path: Path, how: int) -> None:
    """The build is stopped while it waits for parts that never come."""
    sources = build_support.copy_sources(tmp_path / "sources")
    with (sources / "build_tools" / "prebuilt.py").open("a") as file:
        file.write("\n\ndef read(*_):\n    import time\n    time.sleep(600)\n")
    out = tmp_path / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    process = subprocess.Popen(
        [*command, "--wheel-dir", out, sources],
        env=build_support.environment(FLASH_KDA_PREBUILT=str(parts), FLASH_KDA_CUDA_ARCHS="90a"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # Tests that a shell has put in the background inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (sources / "build").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not out.exists() or list(out.iterdir()) == []


def test_no_network_for_the_build_requirements(tmp_path: Path) -> None:
    sources = build_support.copy_sources(tmp_path / "sources")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path / "dist", sources],
        env={**build_support.environment(FLASH_KDA_CUDA_ARCHS="90a"), "PIP_CONFIG_FILE": os.devnull}
        | {"PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "No matching distribution found for setuptools" in done.stderr
    assert not (tmp_path / "dist").exists() or not list((tmp_path / "dist").glob("*.whl"))


def test_publishing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = good(tmp_path / "made")

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        derive.cli.publish(wheel, tmp_path / "dist")
    assert list((tmp_path / "dist").iterdir()) == []


def test_failing_programs(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BuildError, match=r"failed with status 3: the reason$"):
        cli.call("sh", "-c", "echo 'flash-kda: the reason'; exit 3", quiet=True)
    with pytest.raises(BuildError, match="cannot run"):
        cli.call("/nowhere/program")
    assert CSRC.is_dir()
