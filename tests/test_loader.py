"""Which GPU code is loaded, and what is said when none can be: on made-up drivers and devices."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import native
import pytest
import torch
from interrupts import handler, held_by_another_thread

from flash_kda import abi, driver, errors, loader, manifest

CUBIN = b"\x7fELF\x02" + bytes(13) + (190).to_bytes(2, "little") + b"code for "


def elf(
    code: bytes = b"code",
    *,
    section: tuple[int, int, int] | None = None,
    segment: tuple[int, int] | None = None,
    **header: int,
) -> bytes:
    """A small complete cubin: header, code, one segment, two sections; parts may be altered."""
    ends = 64 + len(code)
    fields = {
        "segments_at": ends,
        "sections_at": ends + 56,
        "segment_size": 56,
        "segments": 1,
        "section_size": 64,
        "sections": 2,
        "names": 1,
        **header,
    }
    kind, offset, size = section or (1, 64, len(code))
    return (
        b"\x7fELF\x02\x01"
        + bytes(10)
        + struct.pack(
            "<HHIQQQIHHHHHH",
            *(2, 190, 1, 0, fields["segments_at"], fields["sections_at"], 0, 64),
            *(fields["segment_size"], fields["segments"], fields["section_size"]),
            *(fields["sections"], fields["names"]),
        )
        + code
        + struct.pack(
            "<IIQQQQQQ",
            1,
            5,
            *(segment or (64, len(code)))[:1],
            0,
            0,
            (segment or (64, len(code)))[1],
            0,
            8,
        )
        + struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, 0, 0, 1, 0)
        + struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, 1, 0, 0, 1, 0)
    )


class Machine:
    """An installed package in a folder, a driver and GPUs; records what is opened where."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.version: tuple[int, int] | Exception = (12, 9)
        self.gpus: list[driver.DeviceInfo] = []
        self.opened: list[tuple[bytes, int]] = []
        self.refusal: Exception | None = None
        self.add_gpu("NVIDIA H200", (9, 0), 132)
        for name in ("FLASH_KDA_CUBIN", "FLASH_KDA_ALLOW_OLD_DRIVER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(manifest, "PACKAGE_DIR", folder)
        monkeypatch.setattr(driver, "driver_version", self.driver_version)
        monkeypatch.setattr(driver, "device", self.device)
        monkeypatch.setattr(driver, "devices", lambda: list(self.gpus))
        monkeypatch.setattr(abi, "open_module", self.open_module)
        monkeypatch.setattr(loader, "_modules", {})
        self.install("90a", "100a")

    def add_gpu(self, name: str, capability: tuple[int, int], sm_count: int = 100) -> None:
        info = driver.DeviceInfo(len(self.gpus), name, capability, sm_count, 1 << 30, "GPU-0")
        self.gpus.append(info)

    def replace_gpu(self, name: str, capability: tuple[int, int]) -> None:
        self.gpus.clear()
        self.add_gpu(name, capability)

    def install(self, *targets: str, cuda: str = "12.9") -> None:
        self.document: dict[str, Any] = {
            "schema": 1,
            "package_version": "0.1.0",
            "abi_version": abi.ABI_VERSION,
            "compiler": {"name": "nvrtc", "version": f"{cuda}.86", "cuda": cuda},
            "launcher": self.record("lib/libflash_kda.so", b"library"),
            "cubins": [
                {"target": target, **self.record(f"cubin/{target}.cubin", self.code(target))}
                for target in targets
            ],
        }
        self.write()

    def record(self, file: str, contents: bytes) -> dict[str, Any]:
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents)
        sha256 = hashlib.sha256(contents).hexdigest()
        return {"file": file, "sha256": sha256, "size": len(contents)}

    def write(self) -> None:
        (self.folder / "manifest.json").write_text(json.dumps(self.document))

    @staticmethod
    def code(target: str) -> bytes:
        return CUBIN + target.encode()

    def driver_version(self) -> tuple[int, int]:
        if isinstance(self.version, Exception):
            raise self.version
        return self.version

    def device(self, index: int) -> driver.DeviceInfo:
        if index >= len(self.gpus):
            raise driver.DriverCallFailed("cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE")
        return self.gpus[index]

    def open_module(self, image: bytes, device: int, vouched_for: bool) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append((image, device))
        assert vouched_for == ("FLASH_KDA_CUBIN" not in os.environ)
        return 1000 + device

    def load(self, index: int = 0) -> loader.Module:
        return loader.module_for(torch.device("cuda", index))

    def error(self, kind: type[errors.LoaderError], *parts: str) -> errors.LoaderError:
        """Loading fails with this class and one paragraph with these parts; explain says so."""
        with pytest.raises(errors.LoaderError) as info:
            self.load()
        assert type(info.value) is kind
        text = str(info.value)
        for part in parts:
            assert part in text
        assert "\n" not in text
        assert not loader._modules
        if self.refusal is None:
            explanation = loader.explain(self.gpus[0])
            assert type(explanation.error) is kind
            assert str(explanation.error) == text
            assert (explanation.target, explanation.cubin) == (None, None)
        return info.value


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_loads_the_exact_target(machine: Machine) -> None:
    path = str(machine.folder / "cubin" / "90a.cubin")
    assert machine.load() == loader.Module(1000, "90a", path, abi.Gpu(90, 132))
    assert machine.opened == [(machine.code("90a"), 0)]
    assert loader.explain(machine.gpus[0])[1:] == ("90a", path, None)


# --- the driver ---------------------------------------------------------------------------------


def test_no_driver_is_said_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.version = driver.DriverUnavailable("no NVIDIA driver: libcuda.so.1: cannot open")
    (machine.folder / "manifest.json").unlink()
    monkeypatch.setenv("FLASH_KDA_CUBIN", "/nowhere")
    machine.gpus[0] = machine.gpus[0]._replace(capability=(7, 0))
    error = machine.error(
        errors.DriverNotFoundError, "no NVIDIA driver", "libcuda.so.1", "CPU tensors still work"
    )
    assert isinstance(error.__cause__, driver.DriverUnavailable)
    assert str(error).count("no NVIDIA driver") == 1


def test_a_driver_that_does_not_answer(machine: Machine) -> None:
    machine.version = driver.DriverCallFailed("cuDriverGetVersion", 34, "CUDA_ERROR_STUB_LIBRARY")
    machine.error(errors.LoaderError, "CUDA_ERROR_STUB_LIBRARY")


@pytest.mark.parametrize(
    ("found", "compiler", "allowed"),
    [
        ((12, 9), "12.9", None),
        ((13, 0), "12.9", None),
        ((13, 0), "13.2", None),
        ((12, 8), "12.9", "1"),
        ((12, 0), "12.9", " 1 "),
    ],
)
def test_drivers_that_do(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[int, int],
    compiler: str,
    allowed: str | None,
) -> None:
    machine.version = found
    machine.install("90a", cuda=compiler)
    if allowed is not None:
        machine.error(errors.DriverTooOldError)
        monkeypatch.setenv("FLASH_KDA_ALLOW_OLD_DRIVER", allowed)
    assert machine.load().target == "90a"


@pytest.mark.parametrize(
    ("found", "compiler", "allowed", "parts"),
    [
        ((12, 8), "12.9", None, ("CUDA 12.8", "CUDA 12.9 or newer", "=1 tries")),
        ((12, 8), "12.9", "0", ("CUDA 12.8", "=1 tries")),
        ((11, 8), "12.9", "1", ("CUDA 11.8", "=1 cannot help")),
        ((12, 9), "13.0", None, ("CUDA 12.9", "CUDA 13.0 or newer", "built with CUDA 12.9 runs")),
        ((12, 9), "13.0", "1", ("=1 cannot help", "driver branch 580 or newer")),
        ((12, 4), "13.0", "1", ("CUDA 12.4", "CUDA 13.0 or newer", "=1 cannot help")),
    ],
)
def test_old_drivers(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[int, int],
    compiler: str,
    allowed: str | None,
    parts: tuple[str, ...],
) -> None:
    machine.version = found
    machine.install("90a", cuda=compiler)
    if allowed is not None:
        monkeypatch.setenv("FLASH_KDA_ALLOW_OLD_DRIVER", allowed)
    machine.error(
        errors.DriverTooOldError,
        *("575+", "580+", "FLASH_KDA_ALLOW_OLD_DRIVER", "FLA_FLASH_KDA=0", "Found: "),
        *parts,
    )


def test_the_driver_version_comes_before_a_broken_manifest(machine: Machine) -> None:
    machine.version = (12, 2)
    (machine.folder / "manifest.json").write_text("{")
    machine.error(errors.DriverTooOldError, "CUDA 12.2")


def test_a_gpu_the_driver_does_not_have(machine: Machine) -> None:
    with pytest.raises(errors.LoaderError, match=r"GPU 5.*CUDA_ERROR_INVALID_DEVICE"):
        machine.load(5)


# --- the GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 9), (7, 0)])
def test_gpus_below_hopper(machine: Machine, capability: tuple[int, int]) -> None:
    machine.replace_gpu("NVIDIA L40S", capability)
    machine.error(
        errors.UnsupportedGPUError,
        "NVIDIA L40S",
        f"compute capability {capability[0]}.{capability[1]}",
        "90a, 100a",
        "FLASH_KDA_CUDA_ARCHS",
        "FLA_FLASH_KDA=0",
    )


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((10, 3), "FLASH_KDA_CUDA_ARCHS=103a pip install --force-reinstall --no-deps . "),
        ((12, 0), "FLASH_KDA_CUDA_ARCHS=120a pip install --force-reinstall --no-deps . "),
        ((10, 7), "FLASH_KDA_CUDA_ARCHS=100f pip install --force-reinstall --no-deps . "),
        ((14, 0), "has no target for it, whatever FLASH_KDA_CUDA_ARCHS says"),
    ],
)
def test_gpus_without_a_cubin(machine: Machine, capability: tuple[int, int], archs: str) -> None:
    machine.replace_gpu("NVIDIA B300", capability)
    machine.error(
        errors.NoCubinError,
        "NVIDIA B300",
        f"{capability[0]}.{capability[1]}",
        "Targets present: 90a, 100a",
        archs,
        "FLA_FLASH_KDA=0",
    )


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), ("90a", "100a", "103a", "120a", "121a"), "90a"),
        ((10, 0), ("90a", "100a", "103a", "120a", "121a"), "100a"),
        ((10, 3), ("90a", "100a", "103a", "120a", "121a"), "103a"),
        ((12, 0), ("90a", "100a", "103a", "120a", "121a"), "120a"),
        ((12, 1), ("90a", "100a", "103a", "120a", "121a"), "121a"),
        ((11, 0), ("90a", "100a", "103a", "120a", "121a"), None),
        ((8, 9), ("90a", "100a", "103a", "120a", "121a"), None),
        ((10, 3), ("90a", "100a"), None),
        ((10, 3), ("90a", "100f"), "100f"),
        ((10, 3), ("100f", "103a"), "103a"),
        ((10, 0), ("100f", "103a"), "100f"),
        ((11, 0), ("100f", "120f"), None),
        ((12, 0), ("120f", "121a"), "120f"),
        ((12, 1), ("120a",), None),
        ((9, 0), ("100f",), None),
    ],
)
def test_each_gpu_gets_its_target(
    machine: Machine, capability: tuple[int, int], installed: tuple[str, ...], chosen: str | None
) -> None:
    machine.install(*installed)
    machine.replace_gpu("GPU", capability)
    if chosen is not None:
        assert machine.load().target == chosen
        assert machine.opened == [(machine.code(chosen), 0)]
        return
    kind = errors.UnsupportedGPUError if capability < (9, 0) else errors.NoCubinError
    machine.error(kind, "GPU 0 (GPU)", "Targets present", ", ".join(installed))
    assert machine.opened == []


def test_family_targets(machine: Machine) -> None:
    machine.install("100f", "103a", "120f")
    machine.gpus.clear()
    for capability in ((10, 0), (10, 3), (12, 1)):
        machine.add_gpu("GPU", capability)
    assert [machine.load(index).target for index in range(3)] == ["100f", "103a", "120f"]


# --- the installation ---------------------------------------------------------------------------


REINSTALL = "pip install --force-reinstall --no-deps . in a checkout"


def broken(machine: Machine, *parts: str) -> None:
    machine.error(errors.BrokenInstallError, "File: ", "Expected: ", "Found: ", REINSTALL, *parts)


def test_no_manifest(machine: Machine) -> None:
    (machine.folder / "manifest.json").unlink()
    broken(machine, "manifest.json", "no such file")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\x80"])
def test_malformed_manifest(machine: Machine, text: str) -> None:
    (machine.folder / "manifest.json").write_bytes(text.encode("latin-1"))
    broken(machine, "manifest.json")


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (2, "the newer schema 2"),
        (0, "schema 0"),
        ("1", "schema '1'"),
        (True, "schema True"),
        (1.0, "schema 1.0"),
        (10**3000, "the newer schema 1000"),
    ],
)
def test_other_schemas(machine: Machine, schema: object, found: str) -> None:
    machine.document["schema"] = schema
    machine.write()
    broken(machine, "Expected: manifest schema 1", found)


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../other.cubin", "cubin/../../other.cubin", "", "..\\x.cubin", "a\0b", "a\nb"],
)
@pytest.mark.parametrize("which", ["cubin", "launcher"])
def test_paths_outside_the_package(machine: Machine, file: str, which: str) -> None:
    entry = machine.document["cubins"][0] if which == "cubin" else machine.document["launcher"]
    entry["file"] = file
    machine.write()
    broken(machine, "a path inside", repr(file))


@pytest.mark.parametrize(
    ("keys", "value", "part"),
    [
        (("compiler",), None, "compiler to be of type dict"),
        (("compiler", "cuda"), "twelve", "compiler.cuda"),
        (("compiler", "cuda"), 12.9, "compiler.cuda"),
        (("abi_version",), True, "abi_version to be of type int"),
        (("cubins",), {}, "cubins to be of type list"),
        (("cubins", 0), "90a", "cubins[0]"),
        (("cubins", 0, "target"), "sm_90a", "cubins[0].target"),
        (("cubins", 0, "target"), "1\u00b20a", "cubins[0].target"),
        (("cubins", 0, "target"), "\u0669\u0660a", "cubins[0].target"),
        (("cubins", 0, "target"), "9" * 5000 + "a", "cubins[0].target"),
        (("cubins", 0, "size"), 10**30, f"Expected: {10**30} bytes"),
        (("cubins", 0, "size"), -1, "Expected: -1 bytes"),
        (("compiler", "cuda"), "9" * 5000 + ".1", "compiler.cuda"),
        (("compiler", "cuda"), "1\u0662.9", "compiler.cuda"),
        (("cubins", 1, "target"), "90a", "two for 90a"),
        (("cubins", 0, "size"), "1", "cubins[0].size"),
        (("launcher", "sha256"), None, "launcher.sha256"),
        (("launcher", "sha256"), "a\nb", "launcher.sha256 of 64 hexadecimal digits"),
        (("cubins", 0, "sha256"), "0" * 5000, "cubins[0].sha256"),
    ],
)
def test_manifest_fields(
    machine: Machine, keys: tuple[str | int, ...], value: object, part: str
) -> None:
    entry: Any = machine.document
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    machine.write()
    broken(machine, part)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": "\\ud800"}',
        '{"a\\ud800": 1, "schema": 1}',
        "\ufeff{",
    ],
    ids=lambda text: text[:12],
)
def test_hostile_manifest(machine: Machine, text: str) -> None:
    (machine.folder / "manifest.json").write_bytes(text.encode())
    broken(machine, "manifest.json")


@pytest.mark.parametrize("name", ["manifest.json", "cubin/90a.cubin"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file(machine: Machine, name: str, kind: str) -> None:
    strange(machine.folder / name, kind)
    broken(machine, name, "not a regular file")


def test_no_more_is_read_than_was_built(machine: Machine) -> None:
    with (machine.folder / "cubin" / "90a.cubin").open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    broken(machine, "90a.cubin", "Found: more")


def test_no_cubins(machine: Machine) -> None:
    machine.install()
    broken(machine, "manifest.json", "an empty list of cubins")


def test_missing_cubin(machine: Machine) -> None:
    (machine.folder / "cubin" / "90a.cubin").unlink()
    broken(machine, "90a.cubin", "no such file")


def test_truncated_cubin(machine: Machine) -> None:
    path = machine.folder / "cubin" / "90a.cubin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    broken(machine, str(path), f"{len(whole)} bytes", f"{len(whole) - 1} bytes")


def test_changed_cubin(machine: Machine) -> None:
    path = machine.folder / "cubin" / "90a.cubin"
    changed = path.read_bytes()[:-1] + b"b"
    path.write_bytes(changed)
    broken(machine, str(path), f"Found: sha256 {hashlib.sha256(changed).hexdigest()}")


def test_only_the_chosen_cubin_is_read(machine: Machine) -> None:
    (machine.folder / "cubin" / "100a.cubin").unlink()
    assert machine.load().target == "90a"


def test_a_cubin_the_driver_refuses(machine: Machine) -> None:
    machine.refusal = errors.LaunchError("cuLibraryLoadData: CUDA_ERROR_OUT_OF_MEMORY")
    error = machine.error(errors.LoaderError, "90a.cubin", "NVIDIA H200", "OUT_OF_MEMORY")
    assert error.__cause__ is machine.refusal


class TestLauncher:
    """abi.launcher() and the manifest."""

    @pytest.fixture(autouse=True)
    def _nothing_open(self, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
        monkeypatch.setattr(abi, "_launcher", None)

    def fails(self, *parts: str) -> None:
        with pytest.raises(errors.BrokenInstallError) as info:
            abi.workspace_size(1, 1, 1)
        for part in ("libflash_kda.so", "pip install", *parts):
            assert part in str(info.value)
        assert abi.launcher_or_none() is None

    def test_missing(self, machine: Machine) -> None:
        (machine.folder / "lib" / "libflash_kda.so").unlink()
        self.fails("no such file")

    def test_truncated(self, machine: Machine) -> None:
        (machine.folder / "lib" / "libflash_kda.so").write_bytes(b"libra")
        self.fails("Expected: 7 bytes", "Found: 5 bytes")

    def test_changed(self, machine: Machine) -> None:
        (machine.folder / "lib" / "libflash_kda.so").write_bytes(b"librarY")
        self.fails("Expected: sha256")

    def test_not_a_library(self) -> None:
        self.fails("the launcher library")

    def test_other_version(self, machine: Machine) -> None:
        machine.document["abi_version"] = 1
        machine.write()
        expected = rf"Expected: .*version {abi.ABI_VERSION}\. Found: 1"
        with pytest.raises(errors.BrokenInstallError, match=expected):
            abi.launcher()

    def test_library_of_another_version(self, machine: Machine) -> None:
        """The manifest is right, the library itself is not."""
        library = native.build(native.LAUNCHER, machine.folder / "built.so", "-DABI=7")
        machine.document["launcher"] = machine.record("lib/libflash_kda.so", library.read_bytes())
        machine.write()
        self.fails("7")

    def test_is_opened_once(self, machine: Machine) -> None:
        library = native.build(native.LAUNCHER, machine.folder / "built.so").read_bytes()
        machine.document["launcher"] = machine.record("lib/libflash_kda.so", library)
        machine.write()
        assert abi.launcher() is abi.launcher()
        assert abi.path_names() == ("narrow", "wide")


# --- FLASH_KDA_CUBIN ----------------------------------------------------------------------------


def test_override(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = machine.folder / "mine.cubin"
    path.write_bytes(elf(b"mine"))
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    machine.replace_gpu("NVIDIA B300", (10, 3))  # whatever the installed ones are for
    assert machine.load() == loader.Module(1000, "override", str(path), abi.Gpu(103, 100))
    assert machine.opened == [(elf(b"mine"), 0)]
    assert loader.explain(machine.gpus[0]).cubin == str(path)


def test_missing_override(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_CUBIN", "/nowhere/my.cubin")
    machine.error(errors.CubinOverrideError, "FLASH_KDA_CUBIN=/nowhere/my.cubin", "No such file")
    monkeypatch.setenv("FLASH_KDA_CUBIN", "/nowhere/a\nb")
    machine.error(errors.CubinOverrideError, "FLASH_KDA_CUBIN=/nowhere/a\\nb: cannot read")


@pytest.mark.parametrize(
    "contents", [b"", b"text", CUBIN[:18], b"\x7fELF\x02" + bytes(13) + b"\x3e\0 host code"]
)
def test_foreign_override(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, contents: bytes
) -> None:
    path = machine.folder / "mine.cubin"
    path.write_bytes(contents)
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    machine.error(errors.CubinOverrideError, f"FLASH_KDA_CUBIN={path}", "not a CUDA cubin")


@pytest.mark.parametrize(
    "contents",
    [
        CUBIN,
        elf()[:-1],
        elf()[:64],
        elf(sections_at=1 << 40),
        elf(sections=3),
        elf(sections=0),
        elf(section_size=8),
        elf(names=2),
        elf(segments_at=1 << 63),
        elf(segments=100),
        elf(segment_size=1),
        elf(section=(1, 64, 4000)),
        elf(section=(1, (1 << 64) - 1, 8)),
        elf(segment=(64, 4000)),
    ],
)
def test_damaged_override(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, contents: bytes
) -> None:
    path = machine.folder / "mine.cubin"
    path.write_bytes(contents)
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    machine.error(errors.CubinOverrideError, f"FLASH_KDA_CUBIN={path}", "this cubin is damaged")
    assert machine.opened == []


def test_override_with_a_section_that_takes_no_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine.folder / "mine.cubin"
    path.write_bytes(elf(section=(8, 64, 1 << 20), segments=0, segment_size=0))
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    assert machine.load().target == "override"


def test_the_installed_cubins_are_complete() -> None:
    cubins = list((Path(manifest.__file__).parent / "cubin").glob("*.cubin"))
    for path in cubins:
        assert loader._is_complete(path.read_bytes())
        assert not loader._is_complete(path.read_bytes()[:-1])
    if not cubins:
        pytest.skip("needs the built package")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_override_that_is_no_file(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = strange(machine.folder / "mine.cubin", kind)
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    machine.error(errors.CubinOverrideError, f"FLASH_KDA_CUBIN={path}", "not a regular file")


def strange(path: Path, kind: str) -> Path:
    """Something that is not a regular file, in place of what is there."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_override_the_driver_refuses(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = machine.folder / "mine.cubin"
    path.write_bytes(elf())
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(path))
    machine.refusal = errors.LaunchError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    error = machine.error(errors.CubinOverrideError, str(path), "NO_BINARY_FOR_GPU", "NVIDIA H200")
    assert error.__cause__ is machine.refusal


# --- caching ------------------------------------------------------------------------------------


def test_mixed_gpus_each_get_their_own_once(machine: Machine) -> None:
    machine.add_gpu("NVIDIA B200", (10, 0), 148)
    for _ in range(3):
        assert machine.load(0).target == "90a"
        assert machine.load(1).target == "100a"
    assert machine.load(1) is machine.load(1)
    assert machine.load(0).gpu == abi.Gpu(90, 132)
    assert machine.load(1).gpu == abi.Gpu(100, 148)
    assert machine.opened == [(machine.code("90a"), 0), (machine.code("100a"), 1)]


def test_a_failure_is_not_remembered(machine: Machine) -> None:
    machine.version = (12, 4)
    machine.error(errors.DriverTooOldError)
    machine.version = (12, 9)
    assert machine.load().target == "90a"


def test_threads_load_once(machine: Machine) -> None:
    barrier = threading.Barrier(16)
    modules = []

    def work() -> None:
        barrier.wait()
        modules.append(machine.load())

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 16
    assert len({id(module) for module in modules}) == 1
    assert len(machine.opened) == 1


def test_a_call_that_interrupts_loading(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a signal handler may: neither waits for the other, and both use one module."""
    interrupting: list[loader.Module] = []

    def open_module(image: bytes, device: int, vouched_for: bool) -> int:
        if not machine.opened:
            machine.open_module(image, device, vouched_for)
            signal.raise_signal(signal.SIGUSR1)
            return 1
        return machine.open_module(image, device, vouched_for) + 1

    monkeypatch.setattr(abi, "open_module", open_module)
    with handler(lambda: interrupting.append(machine.load())):
        module = machine.load()
    assert interrupting[0] is module and machine.load() is module
    assert len(machine.opened) == 2


@pytest.mark.parametrize(
    "value", ["GPU-nonsense,7,-1", "MIG-2f3b4c5d-0000-1111-2222-333344445555", "", "1"]
)
def test_cuda_visible_devices_is_left_to_the_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Whatever it hides, the driver has already hidden; what it still shows is loaded for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert machine.load().target == "90a"


def test_all_gpus_hidden(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.gpus.clear()
    with pytest.raises(errors.LoaderError, match=r"GPU 0.*CUDA_ERROR_INVALID_DEVICE"):
        machine.load()
    assert not loader._modules


@pytest.mark.parametrize("count", [0, 1])
def test_a_process_forked_after_import_loads_for_itself(machine: Machine, count: int) -> None:
    """Importing, and failing to load, leave nothing behind that a child could stumble over."""
    for _ in range(count):
        with pytest.raises(errors.LoaderError):
            machine.load(7)
    child = os.fork()
    if child == 0:
        os._exit(0 if machine.load().target == "90a" and len(machine.opened) == 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert machine.opened == [] and not loader._modules


def test_a_forked_child_starts_empty(machine: Machine) -> None:
    machine.load()
    with held_by_another_thread(loader._lock):  # as if it were loading
        child = os.fork()
        if child == 0:
            os._exit(0 if not loader._modules and loader._lock.acquire(timeout=1) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert loader._modules
