"""driver.py against a small library that answers as libcuda does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import native
import pytest

from flash_kda import driver


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> driver.Driver:
    folder = tmp_path_factory.mktemp("driver")
    return driver.Driver((str(native.build(native.DRIVER, folder / "libcuda_fake.so")),))


def test_no_driver() -> None:
    absent = driver.Driver(("libno_such_cuda.so.1", "/nowhere/libcuda.so.1"))
    for question in (absent.driver_version, absent.devices):
        with pytest.raises(driver.DriverUnavailable, match=r"libno_such_cuda.*/nowhere/libcuda"):
            question()


@pytest.mark.parametrize(("value", "version"), [("12090", (12, 9)), ("13010", (13, 1))])
def test_version(
    fake: driver.Driver, monkeypatch: pytest.MonkeyPatch, value: str, version: tuple[int, int]
) -> None:
    monkeypatch.setenv("FAKE_VERSION", value)
    assert fake.driver_version() == version


def test_devices(fake: driver.Driver) -> None:
    first, second = fake.devices()
    assert first == driver.DeviceInfo(
        index=0,
        name="Fake GPU 40",
        capability=(9, 0),
        sm_count=132,
        memory_bytes=40 << 30,
        uuid="GPU-28282828-2828-2828-2828-282828282828",  # by the older of the two functions
    )
    assert second == fake.device(1)
    assert second.capability == (10, 3)


def test_no_devices(fake: driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_INIT", "100")
    assert fake.devices() == []


def test_failures_are_named(fake: driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(driver.DriverCallFailed, match=r"cuDeviceGet failed.*fake trouble.*101"):
        fake.device(2)
    monkeypatch.setenv("FAKE_INIT", "3")
    with pytest.raises(driver.DriverCallFailed, match="cuInit failed: CUDA_ERROR_FAKE") as info:
        fake.devices()
    assert info.value.code == 3


def test_a_library_that_is_not_libcuda(tmp_path: Path) -> None:
    library = native.build("extern int unrelated; int unrelated;", tmp_path / "other.so")
    with pytest.raises(driver.DriverCallFailed, match="cuDriverGetVersion"):
        driver.Driver((str(library),)).driver_version()


def test_a_driver_that_names_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = native.DRIVER.replace("cuGetErrorName", "unrelated")
    monkeypatch.setenv("FAKE_INIT", "3")
    library = native.build(nameless, tmp_path / "nameless.so")
    with pytest.raises(driver.DriverCallFailed, match=r"failed: fake trouble \(CUresult 3\)"):
        driver.Driver((str(library),)).devices()
    library = native.build(nameless.replace("cuGetErrorString", "other"), tmp_path / "mute.so")
    with pytest.raises(driver.DriverCallFailed, match=r"failed: unknown error \(CUresult 3\)"):
        driver.Driver((str(library),)).devices()


def test_loads_by_path_without_torch_or_the_package() -> None:
    program = (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = None\n"
        f"spec = importlib.util.spec_from_file_location('facts', {driver.__file__!r})\n"
        "facts = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(facts)\n"
        "assert not any(name.startswith('flash_kda') for name in sys.modules)\n"
        "try:\n    facts.Driver(('libnone.so',)).devices()\n"
        "except facts.DriverUnavailable:\n    print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fine\n"
