"""A real build of two targets: files, manifest, cubins, launcher; the cache; one-line errors."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import build_support
import pytest
from build_support import backend, copy_sources

from build_tools import assemble, cache, compile, cutlass, launcher, prebuilt, ptxas_log, toolkit
from build_tools.common import CSRC, ROOT, BuildError, csrc_hash, hash_bytes, package_module

TARGETS = ("90a", "100a")
EM_CUDA = 190
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0"}
KERNEL = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= 2.0f; }\n'

_reason = build_support.why_no_build()
needs_compiler = pytest.mark.skipif(_reason is not None, reason=_reason or "")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    assemble.build(folder, TARGETS, environ=build_support.environment())
    return folder


@pytest.fixture(scope="module")
def manifest(package: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((package / "manifest.json").read_text())
    return document


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A csrc/ whose only kernel compiles in a moment."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "kernels.cu").write_text(KERNEL)
    return folder


# What a build makes


@needs_compiler
def test_manifest_describes_the_build(manifest: dict[str, Any]) -> None:
    assert manifest["schema"] == 1
    assert manifest["package_version"] == package_module("_version").__version__
    assert manifest["abi_version"] == launcher.abi_version()
    assert manifest["compiler"] == {
        "name": "nvrtc",
        "version": toolkit.locate("12.9").version,
        "cuda": "12.9",
    }
    assert manifest["cutlass_version"] == cutlass.locate().version
    assert manifest["csrc_sha256"] == csrc_hash()
    assert [cubin["target"] for cubin in manifest["cubins"]] == list(TARGETS)


@needs_compiler
def test_manifest_matches_the_files(package: Path, manifest: dict[str, Any]) -> None:
    entries = [manifest["launcher"], *manifest["cubins"]]
    for entry in entries:
        data = (package / entry["file"]).read_bytes()
        assert entry["size"] == len(data)
        assert entry["sha256"] == hash_bytes(data)
    present = {p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()}
    assert present == {"manifest.json", *(entry["file"] for entry in entries)}


@needs_compiler
def test_package_reads_its_own_manifest(package: Path) -> None:
    read = package_module("manifest").read(package)
    assert set(read.cubins) == set(TARGETS)


@needs_compiler
def test_kernels_are_recorded(manifest: dict[str, Any]) -> None:
    for cubin in manifest["cubins"]:
        assert cubin["kernels"], cubin["target"]
        for kernel in cubin["kernels"]:
            assert kernel["name"].startswith("flash_kda_")
            assert 0 < kernel["registers"] <= 255
            sizes = ("shared_bytes", "local_bytes", "spill_store_bytes", "spill_load_bytes")
            assert all(kernel[size] >= 0 for size in sizes)


@needs_compiler
def test_cubins_hold_machine_code_and_no_ptx(package: Path, manifest: dict[str, Any]) -> None:
    for cubin in manifest["cubins"]:
        data = (package / cubin["file"]).read_bytes()
        assert data[:4] == b"\x7fELF"
        assert int.from_bytes(data[18:20], "little") == EM_CUDA
        for kernel in cubin["kernels"]:
            assert f".text.{kernel['name']}".encode() in data
        for sign in (b".address_size", b".visible .entry", b"nv_fatbin"):
            assert sign not in data


@needs_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_launcher_exports_the_abi_and_needs_the_c_library_only(
    package: Path, manifest: dict[str, Any]
) -> None:
    file = package / manifest["launcher"]["file"]
    header = (CSRC / "host" / "flash_kda.h").read_text()
    declared = set(re.findall(r"\b(flash_kda_\w+)\s*\(", header))
    symbols = _readelf("--dyn-syms", file)
    defined = {
        fields[7].split("@")[0]
        for fields in map(str.split, symbols.splitlines())
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK") and fields[6] != "UND"
    }
    assert defined == declared
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", _readelf("--dynamic", file)))
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM_LIBRARIES


@needs_compiler
def test_launcher_opens_without_a_driver(package: Path, manifest: dict[str, Any]) -> None:
    library = ctypes.CDLL(str(package / manifest["launcher"]["file"]))
    assert library.flash_kda_abi_version() == manifest["abi_version"]


@needs_compiler
def test_building_fewer_targets_removes_the_others(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "package"
    shutil.copytree(package, copy)
    made = assemble.build(copy, ("90a",), environ=build_support.environment())
    assert [p.name for p in (copy / "cubin").iterdir()] == ["flash_kda.sm_90a.cubin"]
    assert [cubin["target"] for cubin in made["cubins"]] == ["90a"]


@needs_compiler
def test_only_cubins_are_removed_and_nothing_is_half_written(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "package"
    shutil.copytree(package, copy)
    for name in ("a_folder", "flash_kda.sm_1.cubin"):
        (copy / "cubin" / name).mkdir()
    (copy / "cubin" / "notes.txt").touch()
    assemble.build(copy, ("90a",), environ=build_support.environment())
    assert {p.name for p in (copy / "cubin").iterdir()} == {
        *("a_folder", "flash_kda.sm_1.cubin", "notes.txt", "flash_kda.sm_90a.cubin")
    }
    (copy / "cubin" / "flash_kda.sm_90a.cubin").unlink()
    (copy / "cubin" / "flash_kda.sm_90a.cubin").mkdir()
    with pytest.raises(BuildError, match=r"cannot write into .*package \(Is a directory"):
        assemble.build(copy, ("90a",), environ=build_support.environment())
    assert not (copy / "manifest.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot write into"):
        assemble.build(tmp_path / "file", ("90a",), environ=build_support.environment())


@needs_compiler
def test_copy_generated(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "flash_kda.sm_120a.cubin").write_bytes(b"old")
    assemble.copy_generated(package, tmp_path)
    for path in (p for p in package.rglob("*") if p.is_file()):
        assert (tmp_path / path.relative_to(package)).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "cubin").iterdir())) == len(TARGETS)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("cuda", toolkit.REQUIREMENTS)
def test_every_target_with_every_compiler(cuda: str) -> None:
    if reason := build_support.why_no_build(cuda):
        pytest.skip(reason)
    known = package_module("targets").KNOWN
    environ = build_support.environment()
    made = compile.compile_targets(
        known, tools=toolkit.locate(cuda), cache_dir=cache.directory(environ)
    )
    assert [cubin.target for cubin in made] == list(known)
    assert all(cubin.kernels for cubin in made)


@needs_compiler
def test_variant_for_racecheck(tmp_path: Path) -> None:
    """As docs/testing.md makes it: every kernel compiles, and those with rings differ."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("sed -i "))
    shutil.copytree(CSRC, tmp_path / "csrc")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    environ = build_support.environment()
    store = cache.directory(environ)
    made = [
        compile.compile_targets(("90a",), csrc=csrc, cache_dir=store)[0]
        for csrc in (CSRC, tmp_path / "csrc")
    ]
    names = [[kernel.name for kernel in cubin.kernels] for cubin in made]
    assert names[0] == names[1]
    assert made[0].data != made[1].data


# Which targets


def test_auto_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = package_module("driver")
    gpus = [
        driver.DeviceInfo(index, "GPU", capability, 132, 1 << 37, "")
        for index, capability in enumerate([(12, 1), (9, 0), (9, 0)])
    ]
    monkeypatch.setattr(driver, "devices", lambda: gpus)
    assert assemble.requested_targets({}) == ("90a", "121a")
    assert assemble.requested_targets({"FLASH_KDA_CUDA_ARCHS": "100a"}) == ("100a",)


def test_auto_without_an_answer_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = package_module("driver")

    def absent() -> None:
        raise driver.DriverUnavailable("no libcuda")

    def broken() -> None:
        raise driver.DriverCallFailed("cuInit", 999, "unknown error")

    monkeypatch.setattr(driver, "devices", absent)
    with pytest.raises(BuildError, match="auto but no NVIDIA GPU was found"):
        assemble.requested_targets({})
    monkeypatch.setattr(driver, "devices", broken)
    with pytest.raises(BuildError, match=r"cuInit failed: unknown error.*set FLASH_KDA_CUDA_ARCHS"):
        assemble.requested_targets({})


# The cache


@needs_compiler
def test_cache_hits_and_misses(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "cache"

    def cached(*extra: str) -> bool:
        made = compile.compile_targets(("90a",), csrc=tiny, cache_dir=store, extra_options=extra)
        assert [kernel.name for kernel in made[0].kernels] == ["tiny"]
        return made[0].from_cache

    assert not cached()
    assert cached()
    assert not cached("-DOTHER")  # options count
    (tiny / "host").mkdir()
    (tiny / "host" / "launch.cpp").write_text("// the launcher's sources do not")
    assert cached()
    (tiny / "kernels.cu").write_text(KERNEL.replace("2.0f", "3.0f"))
    assert not cached()
    (tiny / "common.cuh").write_text("// a header counts, included or not")
    assert not cached()


@needs_compiler
def test_damaged_cache_entries_are_compiled_again(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "cache"
    first = compile.compile_targets(("90a",), csrc=tiny, cache_dir=store)[0]
    (entry,) = store.iterdir()
    good = json.loads(entry.read_bytes())

    def hashed(data: bytes, log: Any) -> bytes:
        """An entry of which the hash is right."""
        both = hash_bytes(data).encode() + (log or "").encode()
        text = base64.b85encode(data).decode()
        values = {"key": entry.stem, "cubin": text, "log": log, "sha256": hash_bytes(both)}
        return json.dumps(values).encode()

    assert json.loads(hashed(first.data, good["log"])) == good
    for damage in (
        entry.read_bytes()[:-50],
        b"",
        b"null",
        b"[" * 200_000,
        b'{"cubin": "", "log": "", "sha256": ""}',
        json.dumps({**good, "log": None}).encode(),
        json.dumps({**good, "log": ""}).encode(),
        json.dumps({**good, "log": good["log"].replace("registers", "r")}).encode(),
        json.dumps({**good, "cubin": 5}).encode(),
        json.dumps({**good, "key": "0" * 64}).encode(),
        json.dumps({name: x for name, x in good.items() if name != "key"}).encode(),
        hashed(b"", good["log"]),
        hashed(b"not ELF", good["log"]),
        hashed(first.data, ""),
        hashed(first.data, None),
        os.mkfifo,
        Path.mkdir,
    ):
        entry.unlink()
        if isinstance(damage, bytes):
            entry.write_bytes(damage)
        else:
            damage(entry)
        if entry.is_dir():
            (entry / "something").touch()
        again = compile.compile_targets(("90a",), csrc=tiny, cache_dir=store)[0]
        assert not again.from_cache
        assert again.data == first.data
        assert compile.compile_targets(("90a",), csrc=tiny, cache_dir=store)[0].from_cache


@needs_compiler
def test_a_cache_entry_of_another_target_is_not_taken(tiny: Path, tmp_path: Path) -> None:
    """As one that was copied to this one's name, even with this one's key inside."""
    first, second = tmp_path / "first", tmp_path / "second"
    compile.compile_targets(("90a",), csrc=tiny, cache_dir=first)
    wanted = compile.compile_targets(("120a",), csrc=tiny, cache_dir=second)[0]
    (other,), (entry,) = first.iterdir(), second.iterdir()
    copied = json.loads(other.read_text())
    for wrong in (copied, {**copied, "key": entry.stem}):
        entry.write_text(json.dumps(wrong))
        made = compile.compile_targets(("120a",), csrc=tiny, cache_dir=second)[0]
        assert not made.from_cache and made.data == wanted.data
        assert compile.compile_targets(("120a",), csrc=tiny, cache_dir=second)[0].from_cache


@needs_compiler
def test_the_architecture_in_a_cubin(tiny: Path, tmp_path: Path) -> None:
    known = package_module("targets").KNOWN
    for made in compile.compile_targets(known, csrc=tiny, cache_dir=tmp_path / "cache"):
        found = [target for target in known if compile.is_for(target, made.data)]
        assert found == [target for target in known if target[:-1] == made.target[:-1]]
    for data in (b"", b"\x7fELF", bytes(100)):
        assert not compile.is_for("90a", data)


@needs_compiler
def test_another_cutlass_is_another_entry(tiny: Path, tmp_path: Path) -> None:
    include = tmp_path / "include"
    for folder, header in (("cutlass", "version.h"), ("cute", "tensor.hpp")):
        (include / folder).mkdir(parents=True)
        shutil.copy(cutlass.locate().include / folder / header, include / folder / header)
    store = tmp_path / "cache"
    for name, text in (("tensor.hpp", "// 1"), ("tensor.hpp", "// 2"), ("x.inl", ""), ("y.h", "")):
        (include / "cute" / name).write_text(text)
        made = compile.compile_targets(
            ("90a",),
            csrc=tiny,
            cache_dir=store,
            headers=cutlass.locate({"FLASH_KDA_CUTLASS_DIR": str(tmp_path)}),
        )
        assert not made[0].from_cache


def test_cache_directory(tmp_path: Path) -> None:
    assert cache.directory({}) == build_support.ROOT / "build" / "cubin-cache"
    assert cache.directory({"FLASH_KDA_CUBIN_CACHE": str(tmp_path)}) == tmp_path


# What the compiler says

LOG = """\
kernels.cu(14): warning #177-D: variable "sa" was declared but never referenced
ptxas info    : 6269 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     88 bytes stack frame, 84 bytes spill stores, 148 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 88 bytes cumulative stack size, 640 bytes smem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 29 registers, used 0 barriers
"""


def test_resources_are_read_from_the_log() -> None:
    assert ptxas_log.resources(LOG) == [
        ptxas_log.KernelResources("first", 29, 0, 0, 0, 0),
        ptxas_log.KernelResources("second", 168, 640, 88, 84, 148),
    ]
    assert len(ptxas_log.warnings(LOG)) == 1
    assert ptxas_log.slow_code(LOG) == []


@needs_compiler
def test_serialised_wgmma_fails_the_build(tiny: Path, tmp_path: Path) -> None:
    # The wait for the product is reached by some threads only.
    (tiny / "kernels.cu").write_text(
        """extern "C" __global__ void slow(float* x, unsigned long long a) {
  float d = x[0], e = x[1], f = x[2], g = x[3];
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d), "+f"(e), "+f"(f), "+f"(g) : "l"(a), "l"(a));
  if (threadIdx.x > 3) {
    asm volatile("wgmma.commit_group.sync.aligned;");
    d += 1;
  }
  x[threadIdx.x] = d + e + f + g;
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
}
"""
    )
    with pytest.raises(BuildError, match="slow code") as caught:
        compile.compile_targets(("90a",), csrc=tiny, cache_dir=tmp_path / "cache")
    assert "serialized" in str(caught.value)
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_compile_errors_are_shown(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tiny / "kernels.cu").write_text(KERNEL.replace("2.0f", "undefined_name"))
    with pytest.raises(BuildError, match=r"sm_90a: NVRTC 12\.9\.\d+ could not compile"):
        compile.compile_targets(("90a",), csrc=tiny, cache_dir=tmp_path / "cache")
    assert "undefined_name" in capfd.readouterr().err


# One-line errors


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources") / "flash-kda")


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FLASH_KDA_CUDA_ARCHS": "foo"}, ["'foo'", "90a,100a"]),
        ({"FLASH_KDA_CUDA_ARCHS": "9.0"}, ["'9.0'", "90a?"]),
        ({"FLASH_KDA_CUDA_ARCHS": ""}, ["empty", "auto"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["no NVIDIA GPU", "FLASH_KDA_CUDA_ARCHS to all"]),
        ({"FLASH_KDA_CUDA": "12.4"}, ["'12.4'", "12.9 or 13.0"]),
        ({"FLASH_KDA_CUDA_HOME": "/nowhere"}, ["/nowhere", "libnvrtc", "unset"]),
        ({"FLASH_KDA_CUTLASS_DIR": "/nowhere"}, ["/nowhere", "cutlass/version.h", "unset"]),
        ({"PATH": "/nowhere", "CXX": None}, ["no C++ compiler", "g++", "CXX"]),
        ({"CXX": "no-such-compiler -O1"}, ["no-such-compiler", "PATH"]),
        ({"CXX": "g++ 'x"}, ["CXX", "No closing quotation", "quotes"]),
        ({"CXXFLAGS": '-DX="'}, ["CXXFLAGS", "No closing quotation", "quotes"]),
        ({"FLASH_KDA_CUTLASS_DIR": "~nouser/x"}, ["FLASH_KDA_CUTLASS_DIR is ~nouser/x", "home"]),
        ({"FLASH_KDA_CUDA_HOME": "~nouser"}, ["FLASH_KDA_CUDA_HOME is ~nouser", "home"]),
        ({"FLASH_KDA_PREBUILT": "~nouser/x"}, ["FLASH_KDA_PREBUILT is ~nouser/x", "home"]),
        ({"FLASH_KDA_CUDA_HOME": "/x" * 3000}, ["FLASH_KDA_CUDA_HOME: ", "File name too long"]),
        ({"FLASH_KDA_CUTLASS_DIR": "y" * 300}, ["FLASH_KDA_CUTLASS_DIR: ", "File name too long"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_mistaken_settings_stop_before_anything_is_fetched(
    sources: Path, changes: dict[str, str | None], words: list[str]
) -> None:
    asked = {"FLASH_KDA_CUDA_ARCHS": "90a"} if "CUDA_VISIBLE_DEVICES" not in changes else {}
    done = backend("get_requires_for_build_wheel", sources, **{**asked, **changes})
    _assert_one_line(done, words)


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FLASH_KDA_CUBIN_CACHE": "~nouser/x"}, ["FLASH_KDA_CUBIN_CACHE is ~nouser/x", "home"]),
        ({"FLASH_KDA_CUBIN_CACHE": "z" * 300}, ["z" * 300, "File name too long"]),
        ({"FLASH_KDA_PREBUILT": "z" * 300}, ["z" * 300, "File name too long"]),
        ({"CXX": "true"}, ["true made no library", "CXX"]),
        ({"CXX": "{folder}/broken"}, ["cannot run", "Exec format error", "CXX"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_that_show_while_building(
    sources: Path, tmp_path: Path, changes: dict[str, str], words: list[str]
) -> None:
    (tmp_path / "broken").write_bytes(b"\0\1\2")
    (tmp_path / "broken").chmod(0o755)
    changes = {name: value.format(folder=tmp_path) for name, value in changes.items()}
    done = backend("build_wheel", sources, str(tmp_path), FLASH_KDA_CUDA_ARCHS="90a", **changes)
    _assert_one_line(done, words)


@needs_compiler
@pytest.mark.parametrize("missing", ["targets.py", "driver.py", "manifest.py", "_version.py"])
@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "build_wheel"])
def test_missing_modules(tmp_path: Path, missing: str, hook: str) -> None:
    sources = copy_sources(tmp_path / "flash-kda")
    (sources / "flash_kda" / missing).unlink()
    arguments = [str(tmp_path)] if hook == "build_wheel" else []
    archs = {"FLASH_KDA_CUDA_ARCHS": None if missing == "driver.py" else "90a"}
    done = backend(hook, sources, *arguments, **archs)
    if (hook, missing) == ("get_requires_for_build_wheel", "manifest.py"):
        assert done.returncode == 0  # the build needs it later
    else:
        _assert_one_line(done, [missing, "missing"])


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        ("sys.version_info = (3, 9, 18, 'final', 0)", ["needs Python 3.10", "this is Python 3.9"]),
        ("import setuptools; setuptools.__version__ = '70.1.0'", ["70.1.0", "setuptools>=77.0.3"]),
        ("sys.modules['setuptools.command.bdist_wheel'] = None", ["setuptools>=77.0.3"]),
    ],
)
@pytest.mark.parametrize("module", ["backend", "commands"])
def test_what_is_too_old_says_so(trick: str, words: list[str], module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {trick}; import build_tools.{module}"],
        cwd=build_support.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    _assert_one_line(done, words)


@needs_compiler
@pytest.mark.parametrize("missing", ["kernels.cu", "host/exports.map", "host/flash_kda.h"])
def test_missing_sources(tmp_path: Path, missing: str) -> None:
    sources = copy_sources(tmp_path / "flash-kda")
    (sources / "csrc" / missing).unlink()
    done = backend("build_wheel", sources, str(tmp_path), FLASH_KDA_CUDA_ARCHS="90a")
    _assert_one_line(done, [missing, "missing"])


def test_old_compilers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12.4.127").touch()
    (tmp_path / "lib64" / "libnvrtc.so").symlink_to("libnvrtc.so.12.4.127")
    with pytest.raises(BuildError, match=r"12\.4\.127, which is too old.* 12\.9 or newer"):
        toolkit.locate("12.9", {"FLASH_KDA_CUDA_HOME": str(tmp_path)})


def test_a_compiler_of_another_release_is_refused() -> None:
    with pytest.raises(BuildError, match=r"found CUDA compiler 13\.1\.3 in here, but 13\.0 is ask"):
        toolkit.check_release("13.1.3", "13.0", "here", "install it")


@needs_compiler
def test_named_toolkit(tiny: Path, tmp_path: Path) -> None:
    found = toolkit.locate("12.9")
    library = tmp_path / "lib64" / f"libnvrtc.so.{found.version}"
    library.parent.mkdir()
    shutil.copyfile(found.library, library)  # its resolved name gives the version
    (library.parent / "libnvrtc.so").symlink_to(library.name)
    (library.parent / f"libnvrtc-builtins.so.{found.version}").symlink_to(found.builtins or "")
    (tmp_path / "include").mkdir()
    for folder in found.include_dirs:
        for item in folder.iterdir():
            if not (tmp_path / "include" / item.name).exists():
                (tmp_path / "include" / item.name).symlink_to(item)
    named = toolkit.locate("12.9", {"FLASH_KDA_CUDA_HOME": str(tmp_path)})
    assert named.version == found.version
    assert named.library == library
    assert named.include_dirs == (tmp_path / "include",)
    kernels = compile.compile_targets(
        ("90a",), tools=named, csrc=tiny, cache_dir=tmp_path / "cache"
    )
    assert kernels[0].data.startswith(b"\x7fELF")


@needs_compiler
def test_relative_paths(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC runs in a folder of its own, where they would name nothing."""
    found = toolkit.locate("12.9")
    home = tmp_path / "home"
    (home / "lib64").mkdir(parents=True)
    (home / "include").mkdir()
    library = f"libnvrtc.so.{found.version}"
    shutil.copyfile(found.library, home / "lib64" / library)
    (home / "lib64" / "libnvrtc.so").symlink_to(library)
    (home / "lib64" / f"libnvrtc-builtins.so.{found.version}").symlink_to(found.builtins or "")
    for folder in found.include_dirs:
        for item in folder.iterdir():
            if not (home / "include" / item.name).exists():
                (home / "include" / item.name).symlink_to(item)
    (tmp_path / "cutlass").symlink_to(cutlass.locate().include.parent)
    (tiny / "kernels.cu").write_text(
        "#include <cuda_bf16.h>\n#include <cute/tensor.hpp>\n" + KERNEL
    )
    monkeypatch.chdir(tmp_path)
    environ = {
        "FLASH_KDA_CUDA_HOME": "home",
        "FLASH_KDA_CUTLASS_DIR": "./cutlass",
        "FLASH_KDA_CUBIN_CACHE": "cache",
        "FLASH_KDA_PREBUILT": "parts",
    }
    made = compile.compile_targets(
        ("90a",),
        tools=toolkit.locate("12.9", environ),
        headers=cutlass.locate(environ),
        csrc=tiny,
        cache_dir=cache.directory(environ),
    )
    assert [kernel.name for kernel in made[0].kernels] == ["tiny"]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert prebuilt.directory(environ) == tmp_path / "parts"


def test_cutlass_with_a_version_in_another_encoding(tmp_path: Path) -> None:
    for folder in ("cutlass", "cute"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cute" / "tensor.hpp").touch()
    header = tmp_path / "cutlass" / "version.h"
    environ = {"FLASH_KDA_CUTLASS_DIR": str(tmp_path)}
    numbers = b"#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    header.write_bytes(b"// \xa9 \xff\n" + numbers)
    assert cutlass.locate(environ).version == "4.2.0"
    header.write_bytes(b"\xff" * 100)
    with pytest.raises(BuildError, match="not a complete CUTLASS include folder"):
        cutlass.locate(environ)


def test_what_is_no_library_is_no_toolkit(tmp_path: Path) -> None:
    """Opening a FIFO would wait for ever."""
    (tmp_path / "lib64").mkdir()
    os.mkfifo(tmp_path / "lib64" / "libnvrtc.so")
    with pytest.raises(BuildError, match=r"no lib64/libnvrtc\.so"):
        toolkit.locate("12.9", {"FLASH_KDA_CUDA_HOME": str(tmp_path)})


@needs_compiler
def test_a_compiler_may_print_anything(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nprintf 'caf\\351 \\377\\n' >&2\nexec g++ \"$@\"\n")
    script.chmod(0o755)
    include = toolkit.locate().include_dirs[0]
    environ = {"CXX": str(script), "PATH": os.environ["PATH"]}
    assert launcher.build(include, environ=environ).startswith(b"\x7fELF")


def test_requirements_name_only_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: [])
    monkeypatch.setattr("importlib.metadata.version", _not_installed)
    monkeypatch.setattr("importlib.metadata.distribution", _not_installed)
    assert toolkit.missing_requirements("12.9", {}) == list(toolkit.REQUIREMENTS["12.9"])
    assert toolkit.missing_requirements("13.0", {}) == list(toolkit.REQUIREMENTS["13.0"])
    assert cutlass.missing_requirements({}, tmp_path) == [cutlass.REQUIREMENT]
    with pytest.raises(BuildError, match="nvidia-cuda-nvrtc-cu12 is not installed: pip install"):
        toolkit.locate("12.9", {})
    with pytest.raises(BuildError, match=r"CUTLASS headers are missing: run `git submodule"):
        cutlass.locate({}, tmp_path)


@needs_compiler
def test_nothing_is_required_that_is_there() -> None:
    assert toolkit.missing_requirements("12.9", {}) == []
    assert cutlass.missing_requirements({}) == []


def _not_installed(name: str) -> None:
    raise toolkit.metadata.PackageNotFoundError(name)


def _readelf(option: str, file: Path) -> str:
    command = ["readelf", "--wide", option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _assert_one_line(done: subprocess.CompletedProcess[str], words: list[str]) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("flash-kda: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]
