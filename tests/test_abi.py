"""The ctypes side of the C interface: argument block, statuses, and what ops hands over."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native
import pytest
import torch
from interrupts import handler, held_by_another_thread
from paths import PAIR_BYTES
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_kda import abi, arguments, cpu, driver, errors, loader, ops, versions

POINTERS = tuple(range(1, 16))
GEOMETRY = tuple(range(101, 135))
H200 = abi.Gpu(90, 132)
DTYPES = (2, 1, 3, 1, 2, 6, 5, 6, 1)


def forward(
    launcher: abi.Launcher,
    pointers: tuple[int, ...] = POINTERS,
    stream: int = 16,
    workspace_bytes: int = 14,
    geometry: tuple[int, ...] = GEOMETRY,
    scale: float = 0.5,
    dtypes: tuple[int, ...] = DTYPES,
    *,
    logits: bool = True,
    path: int = 1,
) -> None:
    sizes = (stream, workspace_bytes, geometry)
    launcher.forward(5, pointers, *sizes, scale, -2.5, dtypes, logits, path)


class StandIn:
    """A launcher that records its arguments, and the means to read them by their C names."""

    def __init__(self, folder: Path) -> None:
        self.path = native.build(native.LAUNCHER, folder / "stand_in.so")
        self.launcher = abi.Launcher(self.path)
        self.library = ctypes.CDLL(str(self.path))
        self.library.stand_in_last.restype = ctypes.c_void_p
        self.fields = _fields(folder)

    def set_status(self, status: int) -> None:
        self.library.stand_in_status(status)

    def last(self, name: str) -> Any:
        offset, kind = self.fields[name]
        raw = ctypes.string_at(self.library.stand_in_last() + offset, struct.calcsize(kind))
        values = struct.unpack(kind, raw)
        return values if len(values) > 1 else values[0]


def _fields(folder: Path) -> dict[str, tuple[int, str]]:
    """Offset and struct format of every field of flash_kda_forward_args, as the compiler has it."""
    header = (native.HEADER_DIR / "flash_kda.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    body = re.search(r"struct flash_kda_forward_args \{(.*?)\}", header, re.DOTALL)
    assert body is not None
    letters = {"uint64_t": "Q", "int64_t": "q", "float": "f", "int32_t": "i"}
    formats = {}
    for kind, names in re.findall(r"(\w+)\s+([^;]+);", body[1]):
        for name, count in re.findall(r"(\w+)(?:\[(\d)\])?", names):
            formats[name] = f"<{count}{letters[kind]}"
    lines = [f'std::printf("%zu\\n", offsetof(flash_kda_forward_args, {n}));' for n in formats]
    printed = native.run(
        '#include <cstddef>\n#include <cstdio>\n#include "flash_kda.h"\nint main() {\n'
        + "\n".join(lines)
        + '\nstd::printf("%zu\\n", sizeof(flash_kda_forward_args));\n}\n',
        folder,
    )
    *offsets, size = (int(line) for line in printed.split())
    assert size == abi.ARGS.size
    return {name: (at, fmt) for (name, fmt), at in zip(formats.items(), offsets, strict=True)}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    if not native.HEADER_DIR.is_dir():
        pytest.skip("needs the source tree")
    return StandIn(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture(autouse=True)
def _no_error(stand_in: StandIn) -> None:
    stand_in.set_status(0)


def test_header_has_this_version() -> None:
    header = (native.HEADER_DIR / "flash_kda.h").read_text()
    version = re.search(r"#define FLASH_KDA_ABI_VERSION (\d+)", header)
    assert version is not None
    assert int(version[1]) == abi.ABI_VERSION


def test_every_field_arrives_where_c_reads_it(stand_in: StandIn) -> None:
    forward(stand_in.launcher)
    names = list(stand_in.fields)
    assert tuple(stand_in.last(name) for name in names[:16]) == (*POINTERS, 16)
    assert names[15:17] == ["stream", "workspace_bytes"]
    assert stand_in.last("workspace_bytes") == 14
    geometry: list[int] = []
    for name in names[17 : names.index("scale")]:
        value = stand_in.last(name)
        geometry += value if isinstance(value, tuple) else [value]
    assert tuple(geometry) == GEOMETRY
    assert (stand_in.last("scale"), stand_in.last("lower_bound")) == (0.5, -2.5)
    assert tuple(stand_in.last(name) for name in names if name.endswith("_dtype")) == DTYPES
    assert stand_in.last("beta_is_logits") == 1
    assert (stand_in.last("path"), stand_in.last("reserved")) == (1, 0)


def test_every_field_that_changes_arrives(stand_in: StandIn) -> None:
    """Though the block is not filled anew where two calls are alike."""

    def block() -> list[Any]:
        return [stand_in.last(name) for name in stand_in.fields]

    forward(stand_in.launcher)
    usual = block()
    for count, change in (
        (16, {"pointers": tuple(range(51, 66)), "stream": 70}),
        (1, {"workspace_bytes": 9}),
        (1, {"geometry": (*GEOMETRY[:-1], 7)}),
        (1, {"scale": -0.5}),
        (9, {"dtypes": (7,) * 9}),
        (1, {"logits": False}),
        (1, {"path": -1}),
    ):
        for _ in range(2):
            forward(stand_in.launcher, **change)
            assert sum(a != b for a, b in zip(block(), usual, strict=True)) == count
        forward(stand_in.launcher, geometry=(*GEOMETRY,))
        assert block() == usual
    forward(stand_in.launcher, scale=0.0)
    forward(stand_in.launcher, scale=-0.0)
    assert math.copysign(1, stand_in.last("scale")) == -1


def test_a_block_that_cannot_be_filled_is_not_taken_for_filled(stand_in: StandIn) -> None:
    with pytest.raises(struct.error):
        forward(stand_in.launcher, geometry=(7,) * 34, dtypes=(2**31,) * 9)
    forward(stand_in.launcher)
    assert stand_in.last("batch") == GEOMETRY[0]


def test_a_call_that_interrupts_another_has_its_own_arguments(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a signal handler may, between any two lines of Python."""
    forward(stand_in.launcher)
    expected = {name: stand_in.last(name) for name in stand_in.fields}
    forward(stand_in.launcher, geometry=tuple(range(201, 235)))
    pack = abi._GEOMETRY

    class Interrupted:
        inner = False

        def pack_into(self, *arguments: Any) -> None:
            pack.pack_into(*arguments)
            if not self.inner:
                self.inner = True
                forward(stand_in.launcher, geometry=tuple(range(301, 335)))

    with monkeypatch.context() as patch:
        patch.setattr(abi, "_GEOMETRY", Interrupted())
        forward(stand_in.launcher)
    for _ in range(2):
        assert {name: stand_in.last(name) for name in stand_in.fields} == expected
        forward(stand_in.launcher)


def test_a_call_that_interrupts_the_opening_of_the_launcher(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other, and both use one launcher."""
    opened: list[abi.Launcher] = []
    interrupting: list[abi.Launcher] = []

    def open_installed() -> abi.Launcher:
        opened.append(abi.Launcher(stand_in.path))
        if len(opened) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return opened[-1]

    monkeypatch.setattr(abi, "_launcher", None)
    monkeypatch.setattr(abi, "_open_installed", open_installed)
    with handler(lambda: interrupting.append(abi.launcher())):
        launcher = abi.launcher()
    assert interrupting == [launcher] and abi.launcher() is launcher


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    with held_by_another_thread(abi._lock):
        child = os.fork()
        if child == 0:
            os._exit(0 if abi._lock.acquire(timeout=1) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_threads_have_their_own_arguments(stand_in: StandIn) -> None:
    failures, launcher = [], stand_in.launcher

    def work(number: int) -> None:
        try:
            for _ in range(10):
                pointers, rest = (number,) * 15, (number, number, (number,) * 34)
                launcher.forward(77, pointers, *rest, 1.0, -1.0, (0,) * 9, False, -1)
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, ValueError),
        (2, errors.DriverNotFoundError),
        (3, errors.LaunchError),
        (4, ValueError),
        (9, errors.LaunchError),
    ],
)
def test_statuses(stand_in: StandIn, status: int, error: type[Exception]) -> None:
    stand_in.set_status(status)
    with pytest.raises(error, match="the stand-in's text"):
        forward(stand_in.launcher)
    with pytest.raises(error, match="the stand-in's text"):
        stand_in.launcher.open_module(b"image", 0, True)
    with pytest.raises(error, match="the stand-in's text"):
        stand_in.launcher.plan(1, 1, 1, H200)
    with pytest.raises(ValueError, match="the stand-in's text"):
        stand_in.launcher.workspace_size(1, 1, 1)


def test_simple_functions(stand_in: StandIn) -> None:
    launcher = stand_in.launcher
    assert launcher.abi_version == abi.ABI_VERSION
    assert launcher.workspace_size(2**31, 4, 5) == 1000000 * 2**31 + 4005
    assert launcher.plan(2**31, 4, 5, H200) == abi.Plan(1, 20000 * 2**31 + 4005)
    assert launcher.plan(1, 1, 1, abi.Gpu(90, 78)).path == 0
    assert launcher.plan(1, 1, 1, abi.Gpu(100, 148)).path == 0
    assert launcher.plan(1, 4, 5, H200, forced_path=0) == abi.Plan(0, 10000 + 4005)
    assert launcher.plan(1, 4, 5, H200, packed=False) == abi.Plan(1, 0)
    for vouched_for in (False, True):
        opened = 10000 * vouched_for + 300 + 20 + ord("7") % 10
        assert launcher.open_module(b"7\0\0", 2, vouched_for) == opened
    assert launcher.path_names == ("narrow", "wide")
    assert launcher.path_id("wide") == 1
    with pytest.raises(ValueError, match=r"FLASH_KDA_PATH: got 'huge'.*narrow, wide"):
        launcher.path_id("huge")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = native.build(native.LAUNCHER, tmp_path / "other.so", "-DABI=1", "-DONLY_VERSION")
    with pytest.raises(errors.BrokenInstallError) as info:
        abi.Launcher(path)
    text = str(info.value)
    assert f"Expected: launcher ABI version {abi.ABI_VERSION}. Found: version 1." in text
    assert str(path) in text
    assert "pip install --force-reinstall" in text


def test_a_missing_function_is_refused(tmp_path: Path) -> None:
    path = native.build(native.LAUNCHER, tmp_path / "other.so", "-DONLY_VERSION")
    with pytest.raises(errors.BrokenInstallError, match="flash_kda_last_error"):
        abi.Launcher(path)


@pytest.mark.parametrize("contents", [None, b"not a library"])
def test_no_library(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "libflash_kda.so"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(errors.BrokenInstallError, match=r"libflash_kda\.so") as info:
        abi.Launcher(path)
    assert isinstance(info.value.__cause__, OSError)


@pytest.fixture
def installed() -> abi.Launcher:
    launcher = abi.launcher_or_none()
    if launcher is None:
        pytest.skip("needs the built launcher")
    return launcher


def test_installed_launcher(installed: abi.Launcher) -> None:
    assert abi.abi_version() == abi.ABI_VERSION
    names = abi.path_names()
    assert names == ("portable_v128", "portable_v64", "portable_v32", "fused", "segments")
    assert [abi.path_id(name) for name in names] == list(range(len(names)))


@pytest.mark.parametrize(
    ("tokens", "heads", "sequences"), [(8192, 96, 1), (8192, 1, 300), (16, 4, 1), (100, 3, 100)]
)
def test_installed_workspace(
    installed: abi.Launcher, tokens: int, heads: int, sequences: int
) -> None:
    """Records of pairs of chunks, and 137 bytes a padded token for what segments carry."""
    size = abi.workspace_size(tokens, heads, sequences)
    padded = min(16 * tokens, tokens + 15 * sequences)
    pairs = min(32 * tokens, tokens + 31 * sequences)
    assert 0 < size <= (PAIR_BYTES // 32 * pairs + 137 * padded) * heads + 16 * sequences + 4096
    assert abi.workspace_size(tokens + 32, heads, sequences) > size  # a pair more
    if not torch.cuda.is_available():
        assert ops.workspace_size(tokens, heads, sequences) == size


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (1, 0, 1), (1, 1, -1), (2**31, 1, 1), (2**64, 1, 1)])
def test_workspace_size_out_of_range(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"workspace_size: (t_total|heads|sequences): got"):
        ops.workspace_size(*sizes)


@pytest.mark.parametrize("value", [1.0, True, None, "3"])
def test_workspace_size_wants_integers(value: Any) -> None:
    with pytest.raises(TypeError, match="workspace_size: heads: got"):
        ops.workspace_size(1, value, 1)


class GpuCall:
    """A call that takes the GPU's way as far as the stand-in launcher, with CPU tensors."""

    def __init__(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stand_in = stand_in
        module = loader.Module(123, "90a", "file", H200)
        monkeypatch.setattr(loader, "module_for", lambda device: module)
        monkeypatch.setattr(abi, "_launcher", stand_in.launcher)
        monkeypatch.setattr(ops, "_current_stream", lambda index: 4242)
        monkeypatch.setattr(arguments, "_layouts", {})
        monkeypatch.setattr(arguments, "_recent", ())

    def __call__(self, **arguments_: Any) -> None:
        workspace = arguments_.pop("workspace", None)
        layout = arguments.check(**arguments_, workspace=workspace)[0]
        layout.on_cuda = True
        ops.fwd(**arguments_, workspace=workspace)


@pytest.fixture
def gpu_call(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> GpuCall:
    return GpuCall(stand_in, monkeypatch)


def _call(tokens: int = 20, heads: int = 3, sequences: int = 4) -> dict[str, Any]:
    packed = torch.zeros(1, tokens, heads, 5 * 128, dtype=torch.bfloat16).split(128, -1)
    names = dict(zip(("q", "k", "v", "g", "out"), packed, strict=True))
    return {
        **names,
        "beta": torch.zeros(1, heads, tokens).mT,
        "scale": 0.25,
        "A_log": torch.zeros(heads, 2, dtype=torch.float16)[:, 1],
        "dt_bias": torch.zeros(heads, 128, dtype=torch.float64),
        "lower_bound": -5,
        "initial_state": torch.zeros(heads, sequences, 128, 128).transpose(0, 1),
        "final_state": torch.zeros(sequences, heads, 128, 128, dtype=torch.bfloat16),
        "cu_seqlens": torch.zeros(sequences + 1, 2, dtype=torch.int32)[:, 0],
    }


def test_what_a_gpu_call_hands_over(gpu_call: GpuCall, stand_in: StandIn) -> None:
    call = _call()
    gpu_call(**call)
    for name in ("q", "k", "v", "g", "beta", "out", "dt_bias", "initial_state", "final_state"):
        assert stand_in.last(name) == call[name].data_ptr(), name
    assert stand_in.last("cu_seqlens") == call["cu_seqlens"].data_ptr()
    assert stand_in.last("a_log") not in (0, call["A_log"].data_ptr())  # a contiguous copy
    assert stand_in.last("workspace") != 0
    assert stand_in.last("workspace_bytes") == 20000 * 20 + 3000 + 4
    assert stand_in.last("stream") == 4242
    assert [stand_in.last(x) for x in ("batch", "tokens", "heads", "sequences")] == [1, 20, 3, 4]
    for name in ("q", "k", "v", "g", "out"):
        assert stand_in.last(f"{name}_stride") == (20 * 1920, 1920, 640)
    assert stand_in.last("beta_stride")[1:] == (1, 20)
    assert stand_in.last("initial_state_stride") == (16384, 4 * 16384)
    assert stand_in.last("final_state_stride") == (3 * 16384, 16384)
    assert stand_in.last("cu_seqlens_stride") == 2
    assert (stand_in.last("scale"), stand_in.last("lower_bound")) == (0.25, -5.0)
    kinds = [name for name in stand_in.fields if name.endswith("_dtype")]
    assert [stand_in.last(name) for name in kinds] == [1, 3, 4, 1, 2, 5, 0, 0, 0]
    assert stand_in.last("beta_is_logits") == 1
    assert stand_in.last("path") == -1


_WRITTEN = ("out", "final_state", "checkpoint_states", "workspace")


def _writing_call() -> dict[str, Any]:
    """A call that writes all that a call may write."""
    buffer = torch.zeros(500256, dtype=torch.uint8)
    return {
        **_call(),
        "out": torch.zeros(1, 20, 3, 128, dtype=torch.bfloat16),
        "cu_seqlens": torch.tensor([0, 20, 20, 20, 20]),
        "checkpoint_offsets": torch.tensor([16]),
        "checkpoint_states": torch.zeros(1, 3, 128, 128),
        "workspace": buffer[-buffer.data_ptr() % 256 :],
    }


def _versions(call: dict[str, Any]) -> dict[str, int]:
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    return {name: x._version for name, x in tensors.items() if not x.is_inference()}


@pytest.mark.parametrize("execute", [ops.fwd, torch.ops.flash_kda.fwd])
def test_writes_are_told_to_autograd(gpu_call: GpuCall, execute: Any) -> None:
    call = _writing_call()
    gpu_call(**call)
    before = _versions(call)
    execute(**call)
    after = _versions(call)
    assert {name for name in before if after[name] > before[name]} == set(_WRITTEN)
    few = {**call, **dict.fromkeys((*_WRITTEN[1:], "checkpoint_offsets"))}
    gpu_call(**few)
    assert few["out"]._version > after["out"]


def test_a_result_that_is_overwritten_before_the_backward_pass(gpu_call: GpuCall) -> None:
    """Its gradients would be those of other values."""
    call = _writing_call()
    weight = torch.ones(128, requires_grad=True)
    for name in ("out", "final_state", "checkpoint_states"):
        loss = (call[name] * weight).sum()
        gpu_call(**call)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("wrote", [versions.wrote, versions._one_by_one])
@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors_have_no_version(
    gpu_call: GpuCall, monkeypatch: pytest.MonkeyPatch, wrote: Any, inside: bool
) -> None:
    monkeypatch.setattr(versions, "wrote", wrote)
    with torch.inference_mode():
        call = _writing_call()
    call["out"] = torch.zeros(1, 20, 3, 128, dtype=torch.bfloat16)
    with torch.inference_mode(inside):
        gpu_call(**call)
    assert call["out"]._version == 1


def test_absent_tensors_are_zero(gpu_call: GpuCall, stand_in: StandIn) -> None:
    call = _call()
    absent = ("A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens")
    gpu_call(**{**call, **dict.fromkeys(absent)})
    for name in absent:
        assert stand_in.last(name.lower()) == 0
        assert stand_in.last(f"{name.lower()}_dtype") == 0
    assert stand_in.last("sequences") == 1


def test_own_workspace(gpu_call: GpuCall, stand_in: StandIn) -> None:
    call = _call(tokens=1, heads=1, sequences=1)
    needed = 20000 + 1000 + 1
    memory = torch.zeros(needed + 512, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    workspace = memory[start : start + needed + 8]
    gpu_call(**call, workspace=workspace)
    assert stand_in.last("workspace") == workspace.data_ptr()
    assert stand_in.last("workspace_bytes") == needed + 8
    with pytest.raises(ValueError, match=rf"workspace: got {needed - 1} bytes; .* {needed}"):
        gpu_call(**call, workspace=workspace[: needed - 1])


def test_no_workspace_where_none_is_needed(
    gpu_call: GpuCall, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is taken from torch then, and one that is given may have any size."""
    call = {**_call(sequences=1), "A_log": None, "cu_seqlens": None}
    gpu_call(**call)
    monkeypatch.setattr(ops, "torch", _Torch(_fails))
    memory = torch.zeros(512, dtype=torch.uint8)
    small = memory[-memory.data_ptr() % 256 :][:1]
    for workspace in (None, small[:0], small):
        gpu_call(**call, workspace=workspace)
        assert stand_in.last("cu_seqlens") == 0
        assert stand_in.last("workspace_bytes") == 0
    monkeypatch.setenv("FLASH_KDA_PATH", "narrow")  # which needs one
    with pytest.raises(MemoryError):
        gpu_call(**call)
    needed = 10000 * 20 + 3000 + 1
    with pytest.raises(ValueError, match=rf"workspace: got 1 bytes; .* {needed}"):
        gpu_call(**call, workspace=small)


def test_deterministic_mode_fills_no_workspace(
    gpu_call: GpuCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = torch.utils.deterministic
    taken: list[bool] = []

    def recording(*arguments: Any, **named: Any) -> torch.Tensor:
        taken.append(settings.fill_uninitialized_memory)
        return torch.empty(*arguments, **named)

    call = {**_call(), "A_log": None}
    gpu_call(**call)
    monkeypatch.setattr(ops, "torch", _Torch(recording))
    torch.use_deterministic_algorithms(True)
    try:
        for fills in (True, False):
            settings.fill_uninitialized_memory = fills
            gpu_call(**call)
            assert settings.fill_uninitialized_memory is fills
            monkeypatch.setattr(ops, "torch", _Torch(_fails))
            with pytest.raises(MemoryError):
                gpu_call(**call)
            assert settings.fill_uninitialized_memory is fills
            monkeypatch.setattr(ops, "torch", _Torch(recording))
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = True
    assert taken == [False, False]
    gpu_call(**call)
    assert taken[2:] == [True]  # without that mode the setting is not touched


class _Torch:
    """torch with another ``empty``, for one module: the compiler would not know a patched one."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _fails(*arguments: Any, **named: Any) -> torch.Tensor:
    raise MemoryError


def test_a_workspace_without_memory_is_refused(gpu_call: GpuCall) -> None:
    call = {**_call(), "A_log": None}
    gpu_call(**call)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"workspace: got None.*FakeTensorMode"):
        gpu_call(**call)
    gpu_call(**call)


def test_forced_path(gpu_call: GpuCall, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {**_call(), "A_log": None}
    for name, path, factor in (("wide", 1, 2), ("narrow", 0, 1), ("", -1, 2), ("narrow", 0, 1)):
        monkeypatch.setenv("FLASH_KDA_PATH", name)
        gpu_call(**call)
        assert stand_in.last("path") == path
        assert stand_in.last("workspace_bytes") == factor * 10000 * 20 + 3000 + 4
    monkeypatch.setenv("FLASH_KDA_PATH", "portable")
    with pytest.raises(ValueError, match=r"FLASH_KDA_PATH: got 'portable'.*narrow, wide"):
        gpu_call(**_call())


def test_calls_of_one_shape_are_planned_once(gpu_call: GpuCall, stand_in: StandIn) -> None:
    call = {**_call(), "A_log": None}
    before = stand_in.library.stand_in_plans()
    for _ in range(3):
        gpu_call(**call)
    assert stand_in.library.stand_in_plans() == before + 1


@pytest.mark.usefixtures("gpu_call")
@pytest.mark.parametrize(
    "device", [None, "cuda", "cuda:1", torch.device("cuda", 1), 1, torch.tensor(1)]
)
def test_workspace_size_of_a_gpu(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """What fwd takes for the path of that GPU, forced or not; of the current one by default."""
    asked = []
    modules = {0: H200, 1: abi.Gpu(100, 148)}

    def module_for(device: torch.device) -> loader.Module:
        asked.append(device)
        return loader.Module(123, "90a", "file", modules[device.index])

    monkeypatch.setattr(loader, "module_for", module_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    index = 0 if device in (None, "cuda") else 1
    assert ops.workspace_size(20, 3, 4, device) == (2 - index) * 10000 * 20 + 3004
    assert asked == [torch.device("cuda", index)]
    monkeypatch.setenv("FLASH_KDA_PATH", "narrow")
    assert ops.workspace_size(20, 3, 4, device) == 10000 * 20 + 3004


@pytest.mark.usefixtures("gpu_call")
def test_workspace_size_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader, "module_for", _fails)
    monkeypatch.setenv("FLASH_KDA_PATH", "narrow")
    assert ops.workspace_size(20, 3, 4) == 1000000 * 20 + 3004
    with pytest.raises(ValueError, match="workspace_size: device: got 'cpu'; needs a CUDA device"):
        ops.workspace_size(20, 3, 4, "cpu")


@pytest.mark.usefixtures("gpu_call")
@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *((text, ValueError) for text in ("", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:0:1")),
        *((text, ValueError) for text in ("cuda:128", "cuda:255", "cuda:256", "meta", "x" * 1000)),
        *((index, ValueError) for index in (-1, 128, 256, 2**40, 2**80, torch.tensor(-3))),
        *((torch.device(text), ValueError) for text in ("cpu", "meta", "cuda:200")),
        *((value, TypeError) for value in (True, 1.0, b"cuda", [], ("cuda", 0), object())),
    ],
)
def test_workspace_size_of_no_device(
    monkeypatch: pytest.MonkeyPatch, device: Any, kind: type[Exception]
) -> None:
    """Among them what torch takes for another device, or refuses in words of its own."""
    monkeypatch.setattr(loader, "module_for", _fails)
    with pytest.raises(kind, match=r"^flash_kda\.workspace_size: device: got") as info:
        ops.workspace_size(20, 3, 4, device)
    assert len(str(info.value)) < 400


@pytest.mark.parametrize("device", ["cuda", 0])
def test_workspace_size_of_a_missing_gpu(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    monkeypatch.setattr(abi, "_launcher", stand_in.launcher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader, "_modules", {})
    monkeypatch.setattr(driver, "driver_version", _no_driver)
    with pytest.raises(errors.DriverNotFoundError):
        ops.workspace_size(20, 3, 4, device)


def _no_driver() -> tuple[int, int]:
    raise driver.DriverUnavailable("no NVIDIA driver: libcuda.so.1: cannot open")


BAD_VALUES = {
    "cu_seqlens": ([0, 5, 4, 6, 20], r"cu_seqlens\[2\] = 4; needs at least 5"),
    "state_indices": ([0, 2, 7, 1], r"state_indices\[2\] = 7; needs -1"),
    "checkpoint_offsets": ([16, 17], r"checkpoint_offsets\[1\] = 17; needs a multiple of 16"),
}


@pytest.fixture
def indexed(gpu_call: GpuCall) -> dict[str, Any]:
    """A call with every kind of index, all good; calls of its layout go the GPU's way now."""
    call = {
        **_call(),
        "cu_seqlens": torch.tensor([0, 20, 20, 20, 20], dtype=torch.int32),
        "state_indices": torch.tensor([0, 2, -1, 1]),
        "checkpoint_offsets": torch.tensor([16, 20]),
        "checkpoint_states": torch.zeros(2, 3, 128, 128),
    }
    gpu_call(**call)
    return call


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_are_checked_on_request(
    name: str, indexed: dict[str, Any], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, text = BAD_VALUES[name]
    bad = {**indexed, name: torch.tensor(values, dtype=indexed[name].dtype)}
    monkeypatch.setattr(ops, "_capturing", lambda device: False)
    for setting in ("", "0"):
        monkeypatch.setenv("FLASH_KDA_CHECK", setting)
        ops.fwd(**bad)  # the host reads nothing
        assert stand_in.last(name) == bad[name].data_ptr()
    monkeypatch.setenv("FLASH_KDA_CHECK", "1")
    ops.fwd(**indexed)
    assert stand_in.last(name) == indexed[name].data_ptr()
    with pytest.raises(ValueError, match=f"flash_kda.fwd: {name}: got {text}"):
        ops.fwd(**bad)
    assert stand_in.last(name) == indexed[name].data_ptr()  # nothing was launched


def test_values_are_not_read_without_request(
    indexed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "check_values", _fails)
    monkeypatch.setattr(torch.Tensor, "cpu", _fails)
    ops.fwd(**indexed)
    monkeypatch.setenv("FLASH_KDA_CHECK", "1")
    monkeypatch.setattr(ops, "_capturing", lambda device: False)
    with pytest.raises(MemoryError):
        ops.fwd(**indexed)


def test_a_captured_call_warns_that_it_is_not_checked(
    indexed: dict[str, Any], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_CHECK", "1")
    monkeypatch.setattr(ops, "_capturing", lambda device: True)
    bad = {**indexed, "state_indices": torch.tensor([9, 9, 9, 9])}
    with pytest.warns(UserWarning, match="FLASH_KDA_CHECK: a call that a CUDA graph") as caught:
        ops.fwd(**bad)
    assert caught[0].filename == __file__
    assert stand_in.last("state_indices") == bad["state_indices"].data_ptr()


def test_no_tokens_still_copies_states(gpu_call: GpuCall, stand_in: StandIn) -> None:
    gpu_call(**_call())
    gpu_call(**_call(tokens=0, heads=2, sequences=3))
    assert [stand_in.last(x) for x in ("tokens", "sequences", "q")] == [0, 3, 0]
    nothing = _call(tokens=0, heads=7, sequences=0)
    gpu_call(**nothing)
    gpu_call(**{**_call(tokens=0, heads=7), "final_state": None})
    assert stand_in.last("heads") == 2  # neither of the two had anything to write


def test_sizes_of_one_get_regular_strides(gpu_call: GpuCall, stand_in: StandIn) -> None:
    call = _call(tokens=1, heads=1, sequences=1)
    call["q"] = torch.zeros(128, dtype=torch.bfloat16).as_strided((1, 1, 1, 128), (3, 5, 7, 1))
    gpu_call(**call)
    assert stand_in.last("q_stride") == (128, 128, 128)
