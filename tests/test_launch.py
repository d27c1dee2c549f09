"""The built launcher over a driver that refuses: each failure is an error of its call, and no more.

The library is a copy of the installed one that opens another driver, compiled for the test.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import native
import pytest
import torch

from flash_kda import abi, arguments, errors, loader, ops

REAL_DRIVER = b"libcuda.so.1\0"
IMAGE = bytes(4096)
H200 = abi.Gpu(90, 132)
NOT_SUPPORTED, LAUNCH_FAILED, UNKNOWN = 801, 719, 1234
STREAM = 0x4240

# What a packed call of 4000 tokens in one sequence launches on each path.
LAUNCHES = {
    **{
        f"portable_{rows}": ("schedule", "prepare", f"recurrence_{rows}")
        for rows in ("v128", "v64", "v32")
    },
    "fused": ("schedule", "fused"),
    "segments": ("schedule", "prepare_pairs", "affine", "combine", "walk"),
}
EACH_LAUNCH = [(path, at) for path, kernels in LAUNCHES.items() for at in range(len(kernels))]
MAPPED = ("q", "k", "g")  # the tensors whose rows the copy engine finds by a map
MAPS_BYTES = 3 * 128
MAP = struct.Struct("<8Q16I")  # as the stand-in leaves what it was asked for

KERNELS = sorted({f"flash_kda_{name}" for names in LAUNCHES.values() for name in names})


class FailingDriver:
    """The launcher, and the driver that it opens; each with a name and copy of its own."""

    _numbers = count()

    def __init__(self, folder: Path, *options: str) -> None:
        installed = Path(abi.__file__).parent / "lib" / "libflash_kda.so"
        if not installed.exists():
            pytest.skip("needs the built launcher")
        # As long as the real name, and found because it is open already.
        name = f"libf{next(self._numbers):03}.so.1"
        path = native.build(native.LAUNCHING_DRIVER, folder / name, f"-Wl,-soname,{name}", *options)
        self.driver = ctypes.CDLL(str(path))
        self.driver.stand_in_kernel.restype = ctypes.c_char_p
        self.driver.stand_in_stream.restype = ctypes.c_uint64
        self.driver.stand_in_maps.restype = ctypes.c_void_p
        library = installed.read_bytes()
        assert library.count(REAL_DRIVER) == 1 and len(name) + 1 == len(REAL_DRIVER)
        copy = folder / f"{name}.launcher.so"
        copy.write_bytes(library.replace(REAL_DRIVER, name.encode() + b"\0"))
        self.launcher = abi.Launcher(copy)
        self.driver_name = name

    def fail(self, function: str, at: int = 1, code: int = NOT_SUPPORTED) -> None:
        """Let a function of the driver, or the search for a kernel, fail once, at that call."""
        self.driver.stand_in_fail(function.encode(), at, code)

    def launches(self) -> list[str]:
        names = map(self.driver.stand_in_kernel, range(self.driver.stand_in_launches()))
        return [name.decode().removeprefix("flash_kda_") for name in names]

    def streams(self) -> list[int]:
        return [self.driver.stand_in_stream(n) for n in range(self.driver.stand_in_launches())]

    def encoded(self) -> int:
        """The maps that it was asked for."""
        return self.driver.stand_in_encoded()

    def maps(self) -> dict[str, tuple[int, ...]]:
        """Those that the last launch of ``fused`` was given."""
        given = ctypes.string_at(self.driver.stand_in_maps(), MAPS_BYTES)
        return dict(zip(MAPPED, MAP.iter_unpack(given), strict=True))

    def held(self) -> tuple[int, int]:
        """How many libraries are loaded and how many contexts retained."""
        return self.driver.stand_in_loaded(), self.driver.stand_in_retained()

    def settled(self) -> bool:
        """Whether this thread has the context and the capture mode that it had before."""
        return not self.driver.stand_in_contexts() and self.driver.stand_in_capture_mode() == 7


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> FailingDriver:
    return FailingDriver(tmp_path_factory.mktemp("failing"))


@pytest.fixture(autouse=True)
def _reset(failing: FailingDriver) -> None:
    failing.driver.stand_in_reset()


@pytest.fixture(scope="module")
def module(failing: FailingDriver) -> int:
    return failing.launcher.open_module(IMAGE, 0, True)


@dataclass(frozen=True)
class Rows:
    """Addresses of q, k and g, their strides in elements and sizes."""

    bases: tuple[int, int, int] = (4096, 4096, 4096)
    strides: tuple[tuple[int, int, int], ...] = 3 * ((1 << 20, 128, 128),)  # batch, token, head
    batch: int = 1
    tokens: int = 4000
    heads: int = 1

    def maps(self) -> dict[str, tuple[int, ...]]:
        """What the driver has to be told of each."""
        found = {}
        sizes = (128, self.heads, self.tokens, self.batch)
        for name, base, strides in zip(MAPPED, self.bases, self.strides, strict=True):
            inward = zip(sizes[1:], reversed(strides), strict=True)
            in_bytes = [256 if size == 1 else 2 * stride for size, stride in inward]
            # A tile; every element of it; bf16, 4 dimensions, not interleaved, a swizzle of 128
            # bytes, no promotion in L2, zeros outside.
            found[name] = (
                base,
                *sizes,
                *in_bytes,
                64,
                1,
                16,
                1,
                1,
                1,
                1,
                1,
                9,
                4,
                0,
                3,
                0,
                0,
                0,
                0,
            )
        return found


def fresh_rows() -> Rows:
    """Of tensors that no call has had."""
    first, second, third = (4096 * n for n in islice(_fresh, 3))
    return Rows((first, second, third))


_fresh = count(1 << 20)


def launch(
    failing: FailingDriver, module: int, path: str, stream: int = STREAM, rows: Rows | None = None
) -> None:
    """A packed call of one sequence and head, or one of such rows; nothing looks at addresses."""
    packed = rows is None
    rows = rows or Rows()
    sequences, other = rows.batch, (1 << 20, 128, 128)
    q, k, g = rows.strides
    geometry = [rows.batch, rows.tokens, rows.heads, sequences, sequences, sequences, 0]
    geometry += [*q, *k, *other, *g, *other]
    geometry += [4000, 1, 1, *(3 * (16384, 16384)), 1, 0, 0]
    failing.launcher.forward(
        module,
        # q, k, v, g, beta and out; two that are absent; the states and cu_seqlens.
        (
            *(*rows.bases[:2], 4096, rows.bases[2], 4096, 4096),
            *(0, 0, 4096, 4096, 4096 if packed else 0, 0, 0, 0, 4096),
        ),
        stream,
        1 << 40,
        tuple(geometry),
        1.0,
        -1.0,
        (1, 0, 0, 1, 1, 5, 0, 0, 0),
        True,
        failing.launcher.path_id(path),
    )


def in_another_thread(work: Callable[[], None]) -> None:
    """Do it there; a mutex that is still held stops that thread and not the test."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()), daemon=True)
    thread.start()
    thread.join(30)
    assert done.is_set()


@pytest.mark.parametrize("path", LAUNCHES)
def test_launches_of_a_call(failing: FailingDriver, module: int, path: str) -> None:
    launch(failing, module, path)
    assert failing.launches() == list(LAUNCHES[path])
    assert set(failing.streams()) == {STREAM}
    assert failing.settled()


@pytest.mark.parametrize(("path", "at"), EACH_LAUNCH)
def test_a_launch_that_fails(failing: FailingDriver, module: int, path: str, at: int) -> None:
    kernels = LAUNCHES[path]
    failing.fail("cuLaunchKernelEx", at + 1)
    with pytest.raises(errors.LaunchError) as info:
        launch(failing, module, path)
    kernel = kernels[at].partition("_v")[0]
    expected = f"launching flash_kda_{kernel} failed: CUDA_ERROR_FAKE (fake trouble)"
    assert str(info.value) == f"flash_kda: {expected}"
    assert failing.launches() == list(kernels[:at])  # and none behind it
    assert failing.settled()
    in_another_thread(lambda: launch(failing, module, path))
    assert failing.launches() == [*kernels[:at], *kernels]


@pytest.mark.parametrize("function", ["cuCtxGetCurrent", "cuCtxPushCurrent"])
def test_a_context_that_fails(failing: FailingDriver, module: int, function: str) -> None:
    failing.fail(function)
    with pytest.raises(errors.LaunchError, match=rf"{function} failed: CUDA_ERROR_FAKE \(fake"):
        launch(failing, module, "fused")
    assert failing.launches() == [] and failing.settled()
    in_another_thread(lambda: launch(failing, module, "fused"))


@pytest.mark.parametrize(("at", "name"), list(enumerate(MAPPED, 1)))
def test_a_map_that_fails(failing: FailingDriver, module: int, at: int, name: str) -> None:
    failing.fail("cuTensorMapEncodeTiled", at)
    rows = fresh_rows()
    with pytest.raises(errors.LaunchError) as info:
        launch(failing, module, "fused", rows=rows)
    expected = f"cuTensorMapEncodeTiled for {name} failed: CUDA_ERROR_FAKE (fake trouble)"
    assert str(info.value) == f"flash_kda: {expected}"
    assert failing.launches() == [] and failing.settled()
    in_another_thread(lambda: launch(failing, module, "fused", rows=rows))
    launch(failing, module, "fused", rows=rows)
    assert failing.launches() == 2 * ["fused"]
    assert failing.maps() == rows.maps()
    # Those before it were remembered; another thread remembers nothing.
    assert failing.encoded() == 3 + 3


CHANGES = [
    *("batch", "tokens", "heads"),
    *((tensor, which) for tensor in range(3) for which in ("base", 0, 1, 2)),
]


def changed(rows: Rows, change: str | tuple[int, str | int]) -> Rows:
    """With another size, or another address or stride of one of the tensors."""
    if isinstance(change, str):
        return replace(rows, **{change: getattr(rows, change) + 1})
    tensor, which = change
    bases, strides = list(rows.bases), [list(x) for x in rows.strides]
    if isinstance(which, str):
        bases[tensor] += 1 << 40
    else:
        strides[tensor][which] += 64
    first, second, third = strides
    return replace(rows, bases=tuple(bases), strides=(tuple(first), tuple(second), tuple(third)))


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_maps_of_rows(
    failing: FailingDriver, module: int, change: str | tuple[int, str | int]
) -> None:
    """Each tensor's own, encoded again if and only if something in it has changed."""
    strides = ((1 << 20, 1024, 128), (1 << 21, 512, 256), (128, 1 << 22, 136))
    rows = replace(fresh_rows(), strides=strides, batch=3, tokens=70, heads=2)
    other = changed(rows, change)
    changes = sum(other.maps()[name] != rows.maps()[name] for name in MAPPED)
    assert changes == (3 if isinstance(change, str) else 1)
    for again in (rows, other, rows, other, other, rows):
        launch(failing, module, "fused", rows=again)
        assert failing.maps() == again.maps()
    assert failing.encoded() == 3 + changes


@pytest.mark.parametrize("one", ["batch", "tokens", "heads"])
def test_strides_that_nobody_takes(failing: FailingDriver, module: int, one: str) -> None:
    """The driver is told another, as it refuses those that are not multiples of 16 bytes."""
    sizes = {"batch": 2, "tokens": 33, "heads": 3, one: 1}
    strides = [1 << 20, 1024, 128]
    strides[("batch", "tokens", "heads").index(one)] = 3
    rows = replace(fresh_rows(), strides=tuple(3 * [tuple(strides)]), **sizes)
    launch(failing, module, "fused", rows=rows)
    assert failing.maps() == rows.maps()
    for map_ in failing.maps().values():
        assert sorted(map_[5:8]) == sorted(256 if x == 3 else 2 * x for x in strides)


def test_more_tensors_than_are_remembered(failing: FailingDriver, module: int) -> None:
    calls = [fresh_rows() for _ in range(40)]
    for _ in range(2):
        for rows in calls:
            launch(failing, module, "fused", rows=rows)
            assert failing.maps() == rows.maps()
    latest = calls[-2:]
    before = failing.encoded()
    for rows in 3 * latest:
        launch(failing, module, "fused", rows=rows)
        assert failing.maps() == rows.maps()
    assert failing.encoded() == before


def test_tensors_that_are_the_same(failing: FailingDriver, module: int) -> None:
    base = fresh_rows().bases[0]
    launch(failing, module, "fused", rows=Rows((base, base, base)))
    assert failing.maps() == Rows((base, base, base)).maps()
    assert failing.encoded() == 1


@pytest.mark.parametrize("path", [path for path in LAUNCHES if path != "fused"])
def test_paths_without_maps(failing: FailingDriver, module: int, path: str) -> None:
    launch(failing, module, path, rows=fresh_rows())
    assert failing.launches() and failing.encoded() == 0


def test_no_tokens_need_no_maps(failing: FailingDriver, module: int) -> None:
    """The driver refuses sizes of 0."""
    launch(failing, module, "fused", rows=replace(fresh_rows(), tokens=0))
    assert failing.launches() == ["fused"] and failing.encoded() == 0


def test_an_error_that_the_driver_cannot_name(failing: FailingDriver, module: int) -> None:
    failing.fail("cuLaunchKernelEx", 2, UNKNOWN)
    with pytest.raises(errors.LaunchError) as info:
        launch(failing, module, "fused")
    text = "launching flash_kda_fused failed: unknown error (no description)"
    assert str(info.value) == f"flash_kda: {text}"


def test_errors_are_told_to_their_own_threads(failing: FailingDriver, module: int) -> None:
    def fails(function: str) -> None:
        failing.fail(function)
        with pytest.raises(errors.LaunchError):
            launch(failing, module, "fused")

    fails("cuLaunchKernelEx")
    in_another_thread(lambda: fails("cuCtxPushCurrent"))
    assert failing.launcher._error_text().startswith("launching flash_kda_schedule failed")


def test_threads_with_failing_launches(failing: FailingDriver, module: int) -> None:
    """Calls on a stream never mix, whatever fails."""
    outcomes: list[str] = []

    def work(path: str) -> None:
        own = {f"flash_kda_{kernel.partition('_v')[0]} " for kernel in LAUNCHES[path]}
        for _ in range(200):
            try:
                launch(failing, module, path)
                outcomes.append("launched")
            except errors.LaunchError as error:
                right = any(kernel in str(error) for kernel in own)
                outcomes.append("failed" if right else str(error))

    failing.driver.stand_in_fail_every(7)
    threads = [threading.Thread(target=work, args=(path,)) for path in LAUNCHES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) == {"launched", "failed"}
    launches = failing.launches()
    calls = " ".join(launches).replace("schedule", "\nschedule").split("\n")
    # A call whose first launch fails leaves nothing; any other the beginning of its launches.
    whole = [" ".join(kernels) for kernels in LAUNCHES.values()]
    assert all(any(x.startswith(call.strip()) for x in whole) for call in calls)
    assert sum(call.strip() in whole for call in calls) == outcomes.count("launched")


class Call:
    """fwd on CPU tensors that goes the GPU's way, with outputs that show what is written."""

    def __init__(self) -> None:
        wide = (1, 40, 2, 128)
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        self.arguments: dict[str, Any] = {
            **{name: torch.zeros(wide, dtype=torch.bfloat16) for name in ("q", "k", "v", "g")},
            "beta": torch.zeros(1, 40, 2),
            "scale": 1.0,
            "out": torch.full(wide, 7.0, dtype=torch.bfloat16),
            "A_log": None,
            "dt_bias": None,
            "lower_bound": -1.0,
            "final_state": torch.full((2, 2, 128, 128), 7.0),
            "cu_seqlens": torch.tensor([0, 20, 40]),
            "workspace": memory[-memory.data_ptr() % 256 :],
        }
        layout = arguments.check(**{"initial_state": None, **self.arguments})[0]
        layout.on_cuda = True

    def __call__(self) -> None:
        ops.fwd(**self.arguments)

    def untouched(self) -> bool:
        return all(bool((self.arguments[name] == 7).all()) for name in ("out", "final_state"))


@pytest.fixture
def call(failing: FailingDriver, module: int, monkeypatch: pytest.MonkeyPatch) -> Call:
    loaded = loader.Module(module, "90a", "file", H200)
    monkeypatch.setattr(loader, "module_for", lambda device: loaded)
    monkeypatch.setattr(abi, "_launcher", failing.launcher)
    monkeypatch.setattr(ops, "_current_stream", lambda index: STREAM)
    monkeypatch.setattr(arguments, "_layouts", {})
    monkeypatch.setattr(arguments, "_recent", ())
    for name in ("FLASH_KDA_PATH", "FLASH_KDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    return Call()


@pytest.mark.parametrize("path", ["", *LAUNCHES])
def test_fwd_raises_at_the_call(
    path: str, call: Call, failing: FailingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_PATH", path)
    call()
    whole = failing.launches()
    for at in range(len(whole)):
        failing.driver.stand_in_reset()
        failing.fail("cuLaunchKernelEx", at + 1, LAUNCH_FAILED)
        with pytest.raises(errors.LaunchError) as info:
            call()
        kernel = whole[at].partition("_v")[0]
        assert f"flash_kda_{kernel} failed: CUDA_ERROR_LAUNCH_FAILED (fake tr" in str(info.value)
        assert failing.launches() == whole[:at]
        call()
        assert failing.launches() == whole[:at] + whole
    assert call.untouched()


# --- opening ------------------------------------------------------------------------------------


def refused(failing: FailingDriver, kind: type[Exception], text: str) -> None:
    """A module is refused in these words, nothing is left behind, and the next one opens."""
    held = failing.held()
    with pytest.raises(kind) as info:
        failing.launcher.open_module(IMAGE, 0, True)
    assert type(info.value) is kind
    assert text in str(info.value)
    assert failing.held() == held
    assert failing.settled()
    module = failing.launcher.open_module(IMAGE, 0, True)
    launch(failing, module, "segments")
    assert failing.launches() == list(LAUNCHES["segments"])
    assert failing.settled()


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        "cuLibraryLoadData",
        "cuKernelGetFunction",
    ],
)
def test_a_module_that_is_refused(failing: FailingDriver, function: str) -> None:
    failing.fail(function)
    refused(failing, errors.LaunchError, f"{function} failed: CUDA_ERROR_FAKE (fake trouble)")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_module_without_a_kernel(failing: FailingDriver, kernel: str) -> None:
    failing.fail(kernel)
    refused(failing, errors.LaunchError, f"cuLibraryGetKernel({kernel}) failed: CUDA_ERROR_FAKE")


@pytest.mark.parametrize("at", range(1, 9))
def test_a_kernel_that_gets_no_shared_memory(failing: FailingDriver, at: int) -> None:
    failing.fail("cuFuncSetAttribute", at)
    refused(failing, errors.LaunchError, ", dynamic shared memory) failed: CUDA_ERROR_FAKE (fake")


def test_an_image_that_is_too_small(failing: FailingDriver) -> None:
    with pytest.raises(ValueError, match="the cubin has 63 bytes, too few to be one"):
        failing.launcher.open_module(bytes(63), 0, True)


def test_a_cubin_of_another_revision(tmp_path: Path) -> None:
    def refuses(text: str, *options: str) -> re.Match[str]:
        """Twice, and gives back what it has."""
        failing = FailingDriver(tmp_path, *options)
        for _ in range(2):
            with pytest.raises(ValueError, match="the cubin is of another revision: ") as info:
                failing.launcher.open_module(IMAGE, 0, False)
            found = re.search(text, str(info.value))
            assert found is not None, str(info.value)
            assert failing.held() == (0, 0) and failing.settled()
        return found

    def expects(kernel: str, found: int, parameters: int, maps: int) -> int:
        text = rf"{kernel} takes {found} bytes of parameters, not (\d+)$"
        return int(refuses(text, f"-DPARAMETERS={parameters}", f"-DMAPS={maps}")[1])

    size = expects("flash_kda_schedule", 8, 8, MAPS_BYTES)
    for other in (0, 128, MAPS_BYTES + 8):
        assert expects("flash_kda_fused", other, size, other) == MAPS_BYTES
    options = (f"-DPARAMETERS={size}", f"-DMAPS={MAPS_BYTES}")
    refuses("flash_kda_schedule takes 8 bytes of parameters more$", *options, "-DMORE=2")
    failing = FailingDriver(tmp_path, *options)
    failing.fail("cuFuncGetParamInfo")
    with pytest.raises(errors.LaunchError, match="cuFuncGetParamInfo failed: CUDA_ERROR_FAKE"):
        failing.launcher.open_module(IMAGE, 0, False)
    # Nothing is asked of a cubin that is known to be the right one: a call of the driver that fails
    # would be an error to compute-sanitizer.
    for vouched_for, asked in ((False, len(KERNELS)), (True, 0)):
        failing = FailingDriver(tmp_path, *options)
        module = failing.launcher.open_module(IMAGE, 0, vouched_for)
        launch(failing, module, "fused", rows=fresh_rows())
        assert failing.launches() == ["fused"]
        assert failing.driver.stand_in_asked_beyond() == asked


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    failing = FailingDriver(tmp_path, "-DOLD")
    for _ in range(2):
        with pytest.raises(errors.DriverNotFoundError) as info:
            failing.launcher.open_module(IMAGE, 0, True)
        assert "has no cuLibraryLoadData: the NVIDIA driver is too old" in str(info.value)


def test_a_driver_that_does_not_start_at_first(tmp_path: Path) -> None:
    failing = FailingDriver(tmp_path)
    failing.fail("cuInit", code=100)
    refused(failing, errors.DriverNotFoundError, "cuInit failed: the NVIDIA driver finds no usable")


def test_a_driver_that_is_missing(failing: FailingDriver, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    name = failing.driver_name.encode()
    copy.write_bytes(failing.launcher.path.read_bytes().replace(name, b"libnone.so.1"))
    launcher = abi.Launcher(copy)
    for _ in range(2):
        with pytest.raises(errors.DriverNotFoundError, match=r"cannot open libcuda\.so\.1 \(the"):
            launcher.open_module(IMAGE, 0, True)
