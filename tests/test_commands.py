"""``python -m flash_kda doctor`` and ``demo``, on any machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_kda
from flash_kda import __main__, abi, console, demo, doctor, driver, loader, manifest, ops

PACKAGE = Path(flash_kda.__file__).parent
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
H200 = driver.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 150 << 30, "GPU-1")
B300 = driver.DeviceInfo(1, "NVIDIA B300", (10, 3), 148, 280 << 30, "GPU-2")
A100 = driver.DeviceInfo(0, "NVIDIA A100", (8, 0), 108, 80 << 30, "GPU-3")


class FakeLauncher:
    """Answers like the launcher library, for machines where it is not built."""

    abi_version = abi.ABI_VERSION
    path_names = ("portable_v128", "portable_v64", "fused")

    def path_id(self, name: str) -> int:
        if name not in self.path_names:
            raise ValueError(f"FLASH_KDA_PATH: got {name!r}")
        return self.path_names.index(name)

    def plan(
        self,
        t_total: int,
        heads: int,
        sequences: int,
        gpu: abi.Gpu,
        forced: int,
        packed: bool,
    ) -> abi.Plan:
        if forced == self.path_names.index("fused") and gpu.capability != 90:
            raise ValueError("path fused needs a GPU of compute capability 9.0")
        few_heads = int(2 * heads * sequences <= gpu.sm_count)
        return abi.Plan(few_heads if forced == abi.AUTOMATIC_PATH else forced, 256)


class Machine:
    """A made-up machine: change its attributes, then call doctor."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda: tuple[int, int] | None = (12, 9)
        self.devices: list[driver.DeviceInfo] = []
        self.directory = directory
        self.targets = ("90a", "100a")
        monkeypatch.setattr(abi, "launcher", FakeLauncher)
        monkeypatch.setattr(manifest, "read", lambda: self._manifest())
        monkeypatch.setattr(driver, "driver_version", self._driver_version)
        monkeypatch.setattr(driver, "devices", self._devices)
        for name in doctor.VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def cubin(self, target: str) -> Path:
        return self.directory / f"flash_kda.sm_{target}.cubin"

    def _manifest(self) -> manifest.Manifest:
        records = {}
        for target in self.targets:
            content = f"kernels for {target}".encode()
            if not self.cubin(target).exists():
                self.cubin(target).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            records[target] = manifest.FileRecord(self.cubin(target), digest, len(content))
        compiler = {"name": "nvrtc", "version": "12.9.86", "cuda": "12.9"}
        return manifest.Manifest(
            path=self.directory / "manifest.json",
            package_version=flash_kda.__version__,
            abi_version=abi.ABI_VERSION,
            compiler_name="nvrtc",
            compiler_version="12.9.86",
            compiler_cuda=(12, 9),
            launcher=manifest.FileRecord(self.directory / "lib.so", "0", 0),
            cubins=records,
            raw={"compiler": compiler},
        )

    def _driver_version(self) -> tuple[int, int]:
        if self.cuda is None:
            raise driver.DriverUnavailable("no NVIDIA driver: libcuda.so.1: cannot open")
        return self.cuda

    def _devices(self) -> list[driver.DeviceInfo]:
        self._driver_version()
        return self.devices


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def run_doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = __main__.main(["doctor", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_intact_without_gpu(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.cuda = None
    status, report = run_doctor(capsys)
    assert (status, report["status"], report["problems"]) == (0, "ok", [])
    assert report["driver"]["cuda"] is None
    assert "CPU tensors" in report["driver"]["error"]
    assert report["driver"]["error"].count("no NVIDIA driver") == 1
    assert report["gpus"] == []
    assert [cubin["target"] for cubin in report["install"]["cubins"]] == ["90a", "100a"]
    assert all(cubin["ok"] for cubin in report["install"]["cubins"])

    status, report = run_doctor(capsys, "--require-gpu")
    assert (status, report["status"]) == (1, "broken")
    assert "--require-gpu" in report["problems"][0]


def test_names_make_no_lines_of_their_own(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest, a GPU or a variable could else say that all is well, or clear the screen."""
    evil = "x\n\nResult: ok\x1b[2J\u2028"
    installed = manifest.read()
    raw = {"compiler": dict.fromkeys(("name", "version", "cuda"), evil)}
    monkeypatch.setattr(manifest, "read", lambda: installed._replace(raw=raw))
    machine.devices = [H200._replace(name=evil)]
    monkeypatch.setenv("FLA_FLASH_KDA", evil)
    machine.cubin("90a").write_text("spoiled")
    assert __main__.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert [x for x in text.splitlines() if x.startswith("Result:")] == ["Result: broken"]
    assert text.count("x\\n\\nResult: ok\\x1b[2J\\u2028") >= 5
    assert "\x1b" not in text


def test_gpu_gets_cubin_and_paths(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.devices = [H200]
    status, report = run_doctor(capsys, "--require-gpu")
    assert status == 0
    (gpu,) = report["gpus"]
    assert (gpu["target"], gpu["cubin"]) == ("90a", str(machine.cubin("90a")))
    assert (gpu["capability"], gpu["sm_count"], gpu["error"]) == ("9.0", 132, None)
    paths = {row["heads"]: row["path"] for row in gpu["paths"]}
    assert paths == {96: "portable_v128", 12: "portable_v64"}

    assert __main__.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "sm_90a" in text and "1 x 8192 tokens, H = 12: portable_v64" in text


@pytest.mark.parametrize(
    ("device", "words"),
    [(B300, ("NVIDIA B300", "10.3", "90a, 100a", "103a")), (A100, ("NVIDIA A100", "8.0"))],
)
def test_gpu_without_cubin_is_a_problem(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    device: driver.DeviceInfo,
    words: tuple[str, ...],
) -> None:
    machine.devices = [H200, device]
    status, report = run_doctor(capsys)
    assert status == 1
    assert report["gpus"][0]["error"] is None
    assert report["gpus"][1]["target"] is None
    (problem,) = report["problems"]
    assert problem == report["gpus"][1]["error"]
    assert all(word in problem for word in words)


def test_old_driver_is_a_problem(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.devices = [H200]
    machine.cuda = (12, 4)
    status, report = run_doctor(capsys)
    assert status == 1
    assert report["driver"]["cuda"] == "12.4"
    assert "575" in report["gpus"][0]["error"]


def test_damaged_cubin(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.cubin("100a").write_bytes(b"other")
    status, report = run_doctor(capsys)
    assert status == 1
    states = {cubin["target"]: cubin["ok"] for cubin in report["install"]["cubins"]}
    assert states == {"90a": True, "100a": False}
    (problem,) = report["problems"]
    assert str(machine.cubin("100a")) in problem and "pip install" in problem


def test_no_cubins(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.targets = ()
    status, report = run_doctor(capsys)
    assert status == 1
    assert "cubin" in report["problems"][0]


def test_forced_path(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.devices = [H200]
    monkeypatch.setenv("FLASH_KDA_PATH", "portable_v64")
    status, report = run_doctor(capsys)
    assert status == 0
    assert report["environment"] == {"FLASH_KDA_PATH": "portable_v64"}
    assert {row["path"] for row in report["gpus"][0]["paths"]} == {"portable_v64"}
    machine.devices = [H200, B300._replace(capability=(10, 0))]
    monkeypatch.setenv("FLASH_KDA_PATH", "fused")
    status, report = run_doctor(capsys)
    assert status == 1
    hopper, blackwell = report["gpus"]
    assert {row["path"] for row in hopper["paths"]} == {"fused"} and hopper["error"] is None
    assert "compute capability 9.0" in blackwell["error"]
    machine.devices = [H200]
    monkeypatch.setenv("FLASH_KDA_PATH", "nonsense")
    status, report = run_doctor(capsys)
    assert status == 1
    assert "nonsense" in report["gpus"][0]["error"]
    assert len(report["problems"]) == 1


def test_overrides_are_checked_without_gpu(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.cuda = None
    monkeypatch.setenv("FLASH_KDA_PATH", "nonsense")
    monkeypatch.setenv("FLASH_KDA_CUBIN", str(tmp_path / "none.cubin"))
    status, report = run_doctor(capsys)
    assert (status, report["status"]) == (1, "broken")
    path, cubin = report["problems"]
    assert "FLASH_KDA_PATH: got 'nonsense'" in path
    assert "none.cubin" in cubin and "No such file" in cubin
    (tmp_path / "none.cubin").write_bytes(b"text")
    assert "not a CUDA cubin" in run_doctor(capsys)[1]["problems"][1]
    monkeypatch.setattr(loader, "read_selected", lambda selection: b"")
    monkeypatch.setenv("FLASH_KDA_PATH", "portable_v64")
    assert run_doctor(capsys)[1]["problems"] == []


@pytest.mark.parametrize(("value", "on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_checking_is_shown(
    value: str,
    on: bool,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on for the values for which ``fwd`` checks, and costs every call a wait."""
    assert ops.CHECK_VARIABLE == "FLASH_KDA_CHECK"
    monkeypatch.setenv("FLASH_KDA_CHECK", value)
    status, report = run_doctor(capsys)
    assert (status, report["problems"]) == (0, [])
    assert report["environment"] == {"FLASH_KDA_CHECK": value}
    assert len(report["warnings"]) == on
    assert __main__.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"  FLASH_KDA_CHECK={value}\n" in text
    assert ("waits for the device" in text) == on


# The same in a process of its own, over a copy of the package that is then damaged.


def copy_package(tmp_path: Path) -> Path:
    copy = tmp_path / "site" / "flash_kda"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def doctor_process(package: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "flash_kda", "doctor", "--json", *options],
        cwd=package.parent,
        env={**os.environ, **NO_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["directory"] == str(package), done.stderr
    return done.returncode, report


def test_package_that_was_never_built(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "manifest.json").unlink(missing_ok=True)
    status, report = doctor_process(package)
    assert status == 1
    assert report["install"] is None
    assert str(package / "manifest.json") in report["problems"][0]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    if not (PACKAGE / "manifest.json").exists():
        pytest.skip(f"the package in {PACKAGE} is not built")
    return copy_package(tmp_path)


def test_built_package_is_intact(built: Path) -> None:
    status, report = doctor_process(built)
    assert (status, report["problems"], report["status"]) == (0, [], "ok")
    assert report["install"]["launcher"]["ok"] and report["install"]["launcher"]["paths"]
    assert doctor_process(built, "--require-gpu")[0] == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_text_that_the_terminal_cannot_show(tmp_path: Path, options: list[str]) -> None:
    package = copy_package(tmp_path / "Größe")
    variables: dict[bytes, bytes] = {
        b"FLASH_KDA_CUBIN": os.fsencode(tmp_path) + b"/\xff.cubin",
        b"FLA_FLASH_KDA": b"\xfe",
        b"PYTHONIOENCODING": b"ascii",
    }
    done = subprocess.run(
        [sys.executable, "-m", "flash_kda", "doctor", *options],
        cwd=package.parent,
        env={**os.environb, **{os.fsencode(k): os.fsencode(v) for k, v in NO_GPU.items()}}
        | variables,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    text = done.stdout.decode("ascii")
    if options:
        environment = json.loads(text)["environment"]
        assert environment["FLA_FLASH_KDA"] == "\\xfe"
        assert environment["FLASH_KDA_CUBIN"].endswith("/\\xff.cubin")
    else:
        assert "FLA_FLASH_KDA=\\xfe" in text
        assert "Gr\\xf6\\xdfe" in text


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        (["doctor"], ""),
        (["doctor", "--json"], ""),
        (["doctor", "--json"], "1"),
        (["demo", "--device", "cpu"], "1"),
        (["--help"], ""),
    ],
)
def test_output_that_nobody_reads(argv: list[str], unbuffered: str) -> None:
    """As with ``| head -c 10``; it fails at the last flush, or at the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flash_kda", *argv],
            cwd=PACKAGE.parent,
            env={**os.environ, **NO_GPU, "PYTHONUNBUFFERED": unbuffered},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (console.BROKEN_PIPE, "")


def test_no_output_at_all() -> None:
    """Closed by ``>&-``, where Python has no stdout."""
    command = f"exec {shlex.quote(sys.executable)} -m flash_kda doctor >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_truncated_cubin(built: Path) -> None:
    cubin = next((built / "cubin").iterdir())
    cubin.write_bytes(cubin.read_bytes()[:-100])
    status, report = doctor_process(built)
    assert status == 1
    assert str(cubin) in report["problems"][0]


def test_missing_launcher(built: Path) -> None:
    launcher = built / "lib" / "libflash_kda.so"
    launcher.unlink()
    status, report = doctor_process(built)
    assert status == 1
    assert not report["install"]["launcher"]["ok"]
    assert str(launcher) in report["problems"][0]


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("schema", 99, "newer"),
        ("abi_version", 99, "ABI"),
        ("launcher", {"file": "../x.so", "sha256": "0", "size": 1}, "inside"),
    ],
)
def test_altered_manifest(built: Path, key: str, value: object, word: str) -> None:
    path = built / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    status, report = doctor_process(built)
    assert status == 1
    assert word in report["problems"][0]


def test_demo_on_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["demo", "--device", "cpu", "--heads", "2"]) == 0
    text = capsys.readouterr().out
    assert "agrees with the float64 recurrence" in text
    assert "error of out" in text and "error of final state" in text


def test_demo_reports_wrong_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = demo.ops.fwd

    def wrong(**arguments: Any) -> None:
        right(**arguments)
        arguments["out"][0, -1] += 1

    monkeypatch.setattr(demo.ops, "fwd", wrong)
    assert __main__.main(["demo", "--device", "cpu", "--heads", "1"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_demo_reports_loader_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise flash_kda.NoCubinError("no kernels for it")

    monkeypatch.setattr(demo.ops, "fwd", fail)
    assert __main__.main(["demo", "--device", "cpu"]) == 1
    assert "NoCubinError: no kernels for it" in capsys.readouterr().out


def test_demo_refuses_unknown_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise ValueError("FLASH_KDA_PATH: got 'nonsense'\nmore")

    monkeypatch.setattr(demo.ops, "fwd", fail)
    assert __main__.main(["demo", "--device", "cpu"]) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "ValueError: FLASH_KDA_PATH: got 'nonsense'"


def test_demo_reports_too_little_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(demo, "_inputs", fail)
    assert __main__.main(["demo", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("CUDA out of memory.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "tpu"], ("'tpu'", "cuda:<index>")),
        (["--device", "cuda:-1"], ("'cuda:-1'", "cuda:<index>")),
        (["--device", "cuda:9999"], ("'cuda:9999'",)),
        (["--device", ""], ("''",)),
        (["--heads", "0"], ("--heads", "'0'")),
        (["--heads", "-3"], ("--heads", "'-3'")),
        (["--heads", "2.5"], ("--heads", "'2.5'")),
        (["--heads", "99999999999"], ("--heads", "1024")),
        (["--seed", "-1"], ("--seed", "'-1'")),
        (["--seed", str(2**64)], ("--seed",)),
    ],
)
def test_demo_checks_its_options(
    options: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["demo", *options])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words)


def test_devices_that_a_command_line_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for text in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert demo.device_argument(text) == torch.device(text)
    with pytest.raises(argparse.ArgumentTypeError, match="cuda:0 to cuda:1"):
        demo.device_argument("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text in ("cuda", "cuda:0"):
        with pytest.raises(argparse.ArgumentTypeError, match="torch"):
            demo.device_argument(text)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_command_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        __main__.main(argv)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err
