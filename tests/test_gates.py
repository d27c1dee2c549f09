"""The gates of ci/gates.py: a good wheel passes all, and each has wheels that it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import wheel_support
from wheel_support import Files, files, name, write

pytest.importorskip("packaging")
pytest.importorskip("elftools")

from build_tools.common import BuildError
from ci import derive, gates, matrix, verify
from ci.wheelfile import Wheel

MATRIX = matrix.load()
INFO = "flash_kda-0.1.0.dist-info"
LAUNCHER = "flash_kda/lib/libflash_kda.so"
CUBIN = "flash_kda/cubin/flash_kda.sm_90a.cubin"
Edit = Callable[[Files], object]


def replace(file: str, old: str, new: str) -> Edit:
    def edit(contents: Files) -> None:
        assert re.search(old, contents[file].decode())
        contents[file] = re.sub(old, new, contents[file].decode()).encode()

    return edit


def put(file: str, data: bytes) -> Edit:
    return lambda contents: contents.update({file: data})


def drop(file: str) -> Edit:
    return lambda contents: contents.pop(file)


def launcher(extra: str = "", *options: str) -> Edit:
    """Another launcher; the manifest still describes the good one, which another gate tells."""
    return lambda contents: contents.update({LAUNCHER: wheel_support.library(extra, *options)})


# gate -> (what is wrong, how it is made, part of the message)
SPOILED: dict[str, list[tuple[Edit, str]]] = {
    "wheel_metadata": [
        (replace(f"{INFO}/WHEEL", "false", "true"), "Root-Is-Purelib is true"),
        (replace(f"{INFO}/WHEEL", "manylinux_2_17", "manylinux_2_28"), "not the filename's"),
    ],
    "contents": [
        (put("stray/file.py", b""), "stray/file.py lies outside"),
        (put("flash_kda.libs/libstdc++.so.6", b""), "grafted libraries"),
    ],
    "metadata": [
        (replace(f"{INFO}/METADATA", "Name: flash-kda", "Name: other"), "names other"),
        (replace(f"{INFO}/METADATA", "Version: 0.1.0", "Version: 0.1.1"), "has version 0.1.1"),
        (replace("flash_kda/manifest.json", '"0.1.0"', '"0.0.9"'), "files are of version 0.0.9"),
    ],
    "torch_requirement": [
        (replace(f"{INFO}/METADATA", "torch>=2.4", "torch==2.8.*"), "not torch>=2.4"),
        (replace(f"{INFO}/METADATA", "Requires-Dist: torch>=2.4\n", ""), "requires"),
        (
            replace(f"{INFO}/METADATA", "(Requires-Dist: torch>=2.4)", r"\1\nRequires-Dist: numpy"),
            "numpy",
        ),
    ],
    "licences": [
        (drop(f"{INFO}/licenses/LICENSE"), "licence LICENSE is missing"),
        (put(f"{INFO}/licenses/licenses/CUTLASS-BSD-3-Clause.txt", b"\n"), "CUTLASS"),
        (replace(f"{INFO}/METADATA", "License-File: LICENSE\n", ""), "does not list"),
    ],
    "size": [(put("flash_kda/big.py", None), "above the limit of 10")],  # type: ignore[arg-type]
    "manifest": [
        (drop("flash_kda/manifest.json"), "missing or not JSON"),
        (put("flash_kda/manifest.json", b"{"), "missing or not JSON"),
        (drop(CUBIN), "in the manifest but not in the wheel"),
        (put(CUBIN, wheel_support.CUBIN + b"else"), "another sha256 or size"),
        (put("flash_kda/cubin/flash_kda.sm_100f.cubin", b"x"), "not in the manifest: "),
        (replace("flash_kda/manifest.json", '"target": "121a"', '"target": "121b"'), "121b, not"),
    ],
    "cubins": [
        (put("flash_kda/kernels.ptx", b""), "kernels.ptx is PTX"),
        (put(CUBIN, b"\x7fELF\x02" + bytes(20)), "is not a cubin"),
        (put(CUBIN, wheel_support.CUBIN + b"\n.version 8.8\n.target sm_90a\n"), "holds PTX"),
        (put(CUBIN, wheel_support.CUBIN + b".nv_fatbin"), "holds PTX"),
    ],
    "launcher_dependencies": [
        (drop(LAUNCHER), "missing or no ELF library"),
        (put(LAUNCHER, b"text"), "missing or no ELF library"),
        (launcher("", "-Wl,--no-as-needed", "-lstdc++"), "links libstdc++.so.6"),
        (launcher("", "-Wl,-rpath,/opt"), "library search path"),
        (
            launcher("void* dlopen(const char*, int); void* f() { return dlopen(0, 0); }", "-ldl"),
            "newer than 2.28",
        ),
        (lambda c: c.update({LAUNCHER: files(arch="aarch64")[LAUNCHER]}), "EM_AARCH64"),
    ],
    "launcher_symbols": [
        (launcher("int stray(void) { return 0; }"), "differ from the ABI in stray"),
        (launcher("void PyErr_Print(); int g() { PyErr_Print(); return 0; }"), "uses PyErr_Print"),
        (launcher("int torch_x(); int g() { return torch_x(); }"), "uses torch_x"),
        (launcher("int cudaFree(void*); int g() { return cudaFree(0); }"), "uses cudaFree"),
    ],
}


def problems(path: Path, gate: str) -> list[str]:
    return [text for text in verify.problems(path, MATRIX) if text.startswith(f"{gate}: ")]


@pytest.mark.parametrize(
    ("local", "arch"), [(None, "x86_64"), (None, "aarch64"), ("cu130", "x86_64")]
)
def test_good_wheels_pass(tmp_path: Path, local: str | None, arch: str) -> None:
    wheel = wheel_support.good(tmp_path, local, arch)
    assert verify.problems(wheel, MATRIX) == []
    verify.verify(wheel, MATRIX)


@pytest.mark.parametrize(
    ("gate", "edit", "part"),
    [
        pytest.param(gate, edit, part, id=f"{gate}-{part}")
        for gate, entries in SPOILED.items()
        for edit, part in entries
    ],
)
def test_spoiled_wheels_fail(tmp_path: Path, gate: str, edit: Edit, part: str) -> None:
    contents = files()
    edit(contents)
    if "flash_kda/big.py" in contents:
        import random

        contents["flash_kda/big.py"] = random.Random(0).randbytes(11 << 20)
    found = problems(write(tmp_path / name(), contents), gate)
    assert any(part in text for text in found), found
    with pytest.raises(BuildError, match="fails"):
        verify.verify(tmp_path / name(), MATRIX)


@pytest.mark.parametrize(
    ("tag", "part"),
    [
        ("py3-none-linux_x86_64", "not a manylinux"),
        ("py3-none-manylinux_2_31_x86_64", "newer glibc than 2.28"),
        ("cp312-cp312-manylinux_2_17_x86_64", "not py3-none"),
        ("py3-none-any", "not a manylinux"),
    ],
)
def test_platform_tag(tmp_path: Path, tag: str, part: str) -> None:
    found = problems(write(tmp_path / f"flash_kda-0.1.0-{tag}.whl", files()), "platform_tag")
    assert any(part in text for text in found), found


@pytest.mark.parametrize(
    ("old", "new"),
    [("sha256=[^,]+", "sha256=AAAA"), (r",\d+\n", ",1\n"), (r"^.*?\n", ""), ("$", "x,y,1\n")],
)
def test_record(tmp_path: Path, old: str, new: str) -> None:
    wheel = write(tmp_path / name(), files(), seal=lambda text: re.sub(old, new, text, count=1))
    assert problems(wheel, "record")


@pytest.mark.parametrize(
    ("local", "cuda", "arch"),
    [
        ("cu129", "12.9", "x86_64"),  # the default toolkit has none
        (None, "13.0", "x86_64"),  # the others have one
        ("cu129torch2.99", "12.9", "x86_64"),
        ("cu129torch2.4", "12.9", "aarch64"),  # a combination of the other architecture
        ("cu130torch2.9", "12.9", "x86_64"),
    ],
)
def test_local_version(tmp_path: Path, local: str | None, cuda: str, arch: str) -> None:
    wheel = write(tmp_path / name(local, arch), files(local, cuda=cuda, arch=arch))
    assert problems(wheel, "local_version")


def test_every_gate_has_a_failing_wheel() -> None:
    own_test = {"platform_tag", "record", "local_version"}
    assert {gate.__name__ for gate in gates.GATES} == SPOILED.keys() | own_test


def test_what_is_derived_differs_in_the_metadata_alone(tmp_path: Path) -> None:
    base = wheel_support.good(tmp_path)
    made = derive.derive(base, "cu129torch2.8", tmp_path / "out")
    verify.verify(made, MATRIX, base)
    before, after = Wheel(base), Wheel(made)
    assert after.message("METADATA")["Version"] == "0.1.0+cu129torch2.8"
    assert after.message("METADATA").get_all("Requires-Dist") == ["torch==2.8.*"]
    assert after.message("METADATA").get_payload() == before.message("METADATA").get_payload()
    assert [p.name for p in (tmp_path / "out").iterdir()] == [made.name]
    assert derive.derive(base, "cu129torch2.8", tmp_path / "again").read_bytes()


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (put("flash_kda/__init__.py", b"# changed"), "__init__.py differs"),
        (put("flash_kda/more.py", b""), "more.py differs"),
        (
            replace(f"{INFO}/METADATA", "License-Expression: MIT", "License-Expression: BSD"),
            "METADATA differs",
        ),
    ],
)
def test_what_is_not_derived_is_told(tmp_path: Path, edit: Edit, part: str) -> None:
    contents = files()
    edit(contents)
    other = derive.derive(write(tmp_path / "other" / name(), contents), "cu129torch2.8", tmp_path)
    found = verify.problems(other, MATRIX, wheel_support.good(tmp_path))
    assert any("unchanged: " in text and part in text for text in found), found


@pytest.mark.parametrize("local", ["torch2.8", "cu12", "cu129torch", "cu129torch2.8.1", ""])
def test_mistaken_local_versions(tmp_path: Path, local: str) -> None:
    with pytest.raises(BuildError, match="--local"):
        derive.derive(wheel_support.good(tmp_path), local, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pinned_wheel_is_no_base(tmp_path: Path) -> None:
    pinned = derive.derive(wheel_support.good(tmp_path), "cu129torch2.8", tmp_path)
    with pytest.raises(BuildError, match="start from a plain wheel"):
        derive.derive(pinned, "cu129torch2.7", tmp_path)


@pytest.mark.parametrize("contents", [b"", b"no zip"])
def test_unreadable_wheels(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / name()
    path.write_bytes(contents)
    with pytest.raises(BuildError, match="not a readable wheel"):
        Wheel(path)
