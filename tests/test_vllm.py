"""The adapter with the argument order of vLLM's operator, on CPU tensors.

vLLM is not installed here: the calls below are built like those of its Python code.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import cases
import pytest
import torch
from cases import assert_accurate, make_case, poisoned, relative_error, same_bits
from torch import Tensor

from flash_kda import abi
from flash_kda.integrations import vllm as adapter

BOUND = 2.5e-3


def call(
    function: Any, case: cases.Case, workspace: Tensor, *checkpoints: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Positional, dense, in the order of vLLM's callers."""
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device="cpu")
    final_state = poisoned(*case.state_shape, dtype=torch.float32, device="cpu")
    function(
        case.q.contiguous(),
        case.k.contiguous(),
        case.v.contiguous(),
        case.g.contiguous(),
        case.beta,
        case.q.shape[-1] ** -0.5,
        out,
        workspace,
        case.A_log.contiguous(),
        case.dt_bias.view(-1, case.q.shape[-1]).contiguous(),
        case.lower_bound,
        case.initial_state.contiguous(),
        final_state,
        case.cu_seqlens.contiguous(),
        *checkpoints,
    )
    return out, final_state


@pytest.fixture
def case(rng: cases.Random) -> cases.Case:
    case = make_case(rng, lengths=(40, 1, 1, 33))
    return case.but(cu_seqlens=case.cu_seqlens.int(), dt_bias=case.dt_bias.flatten())


@pytest.fixture
def workspace() -> Tensor:
    return torch.empty(256, dtype=torch.uint8)


def test_without_checkpoints(case: cases.Case, workspace: Tensor) -> None:
    assert_accurate(case, *call(adapter.fwd, case, workspace), BOUND)
    assert_accurate(case, *call(adapter.fwd, case, workspace, None, None), BOUND)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_checkpoints(case: cases.Case, workspace: Tensor, dtype: torch.dtype) -> None:
    """One offset a sequence, counted from its start; 0 where there is none."""
    offsets = torch.tensor([32, 0, 1, 16], dtype=dtype)
    states = poisoned(*case.state_shape, dtype=torch.float32, device="cpu")
    out, final_state = call(adapter.fwd, case, workspace, states, offsets)
    assert_accurate(case, out, final_state, BOUND)
    for sequence in (0, 2, 3):
        truth = cases.state_after(case, sequence, int(offsets[sequence]))
        assert relative_error(states[sequence], truth) < BOUND


def test_checkpoints_of_batch_rows(rng: cases.Random) -> None:
    case = make_case(rng, batch=2, tokens=40)
    out, states = torch.empty_like(case.v), torch.empty(case.state_shape)
    adapter.fwd(
        *(case.q, case.k, case.v, case.g, case.beta, case.scale, out, None, case.A_log),
        *(case.dt_bias, case.lower_bound, case.initial_state, None, None, states),
        torch.tensor([16, 40]),
    )
    assert relative_error(states[1], cases.reference(case)[1][1]) < BOUND


@pytest.mark.parametrize("offsets", [[0, 0, 0, 0], [-1, 5, 2, 99]])
def test_sequences_without_checkpoints(
    case: cases.Case, workspace: Tensor, offsets: list[int]
) -> None:
    states = poisoned(*case.state_shape, dtype=torch.float32, device="cpu")
    result = call(adapter.fwd, case, workspace, states, torch.tensor(offsets))
    assert_accurate(case, *result, BOUND)


# cu_seqlens, offsets within the sequences, and the sequences that have a checkpoint.
EMPTY = [
    ([0, 0, 20, 64], [0, 16, 32], (1, 2)),
    ([5, 5, 20, 64], [0, 0, 44], (2,)),
    ([5, 5, 20, 64], [0, 0, 0], ()),
    ([0, 0, 0, 0, 20, 20, 64, 64], [0, -1, 7, 16, 0, 0, 0], (3,)),
    ([64, 64, 64], [0, 16], ()),
    ([3, 3], [0], ()),
    ([0, 0], [16], ()),
    ([0, 20, 64, 64], [16, 16, 0], (0, 1)),
]


def packed(
    rng: cases.Random, bounds: list[int], offsets: list[int], dtype: torch.dtype
) -> tuple[dict[str, Any], cases.Case]:
    """The adapter's arguments for 64 tokens, and a case of them."""
    case = make_case(rng, lengths=(64,)).but(cu_seqlens=torch.tensor(bounds, dtype=dtype))
    count = len(offsets)
    case.initial_state = rng.normal(count, *case.initial_state.shape[1:])
    given = {
        **vars(case),
        "out": torch.zeros_like(case.v),
        "workspace": None,
        "final_state": torch.zeros_like(case.initial_state),
        "checkpoint_state": torch.zeros_like(case.initial_state),
        "checkpoint_offsets": torch.tensor(offsets, dtype=dtype),
    }
    return given, case


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("bounds", "offsets", "kept"), EMPTY)
def test_empty_sequences(
    rng: cases.Random,
    bounds: list[int],
    offsets: list[int],
    kept: tuple[int, ...],
    dtype: torch.dtype,
    compiled: bool,
) -> None:
    """An offset of 0 means no checkpoint, also where no token comes before."""
    if compiled and bounds[0] == bounds[-1]:
        pytest.skip("what a compiled call cannot know: that no sequence has a token")
    given, case = packed(rng, bounds, offsets, dtype)
    torch._dynamo.reset()
    function = adapter.fwd
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    function(**given)
    _, expected = cases.reference(case)
    assert relative_error(given["final_state"], expected) < BOUND
    for n in kept:
        truth = cases.state_after(case, n, offsets[n])
        assert relative_error(given["checkpoint_state"][n], truth) < BOUND


@pytest.mark.parametrize("shape", [(1, 0), (0, 20), (3, 0)])
def test_batches_without_tokens(rng: cases.Random, shape: tuple[int, int]) -> None:
    case = make_case(rng, batch=shape[0], tokens=shape[1])
    out, states = torch.zeros_like(case.v), torch.zeros(case.state_shape)
    final_state = torch.zeros(case.state_shape)
    adapter.fwd(
        *(case.q, case.k, case.v, case.g, case.beta, case.scale, out, None, case.A_log),
        *(case.dt_bias, case.lower_bound, case.initial_state, final_state, None, states),
        torch.zeros(shape[0], dtype=torch.int64),
    )
    assert same_bits(final_state, case.initial_state.float())


SHAPE = [3, 2, 128, 128]
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("checkpoint_offsets", torch.tensor([16]), ValueError, "shape [1]"),
    ("checkpoint_offsets", torch.tensor(16), ValueError, "shape []"),
    ("checkpoint_offsets", torch.tensor([16, 16]), ValueError, "shape [2]"),
    ("checkpoint_offsets", torch.tensor([[16] * 3]), ValueError, "shape [1, 3]"),
    ("checkpoint_offsets", [16, 16, 16], TypeError, "a value of type list"),
    ("checkpoint_offsets", torch.ones(3), TypeError, "dtype torch.float32"),
    ("checkpoint_offsets", torch.ones(3, dtype=torch.bool), TypeError, "dtype torch.bool"),
    ("checkpoint_offsets", torch.zeros(3, device="meta"), TypeError, "dtype torch.float32"),
    (
        "checkpoint_offsets",
        torch.zeros(3, dtype=torch.int32, device="meta"),
        ValueError,
        "a tensor on meta",
    ),
    (
        "checkpoint_offsets",
        torch.tensor([16, 16, 16]).to_sparse(),
        ValueError,
        "a tensor of layout torch.sparse_coo",
    ),
    ("checkpoint_offsets", torch.tensor([0, 8, 0]), ValueError, "checkpoint_offsets[1] = 8"),
    ("checkpoint_offsets", torch.tensor([0, 0, 17]), ValueError, "checkpoint_offsets[2] = 17"),
    ("checkpoint_offsets", None, ValueError, "None with checkpoint_state"),
    ("checkpoint_state", None, ValueError, "None with checkpoint_offsets"),
    ("checkpoint_state", [0.0], TypeError, "a value of type list"),
    ("checkpoint_state", torch.zeros(2, *SHAPE[1:]), ValueError, "shape [2, 2, 128, 128]"),
    ("checkpoint_state", torch.zeros(3, 2, 128, 64), ValueError, "shape [3, 2, 128, 64]"),
    ("checkpoint_state", torch.zeros(3), ValueError, "shape [3]"),
    ("checkpoint_state", torch.zeros(SHAPE).half(), TypeError, "dtype torch.float16"),
    ("checkpoint_state", torch.zeros(SHAPE, device="meta"), ValueError, "a tensor on meta"),
    ("checkpoint_state", torch.zeros(SHAPE).mT, ValueError, "strides [32768, 16384, 1, 128]"),
    (
        "checkpoint_state",
        torch.zeros(SHAPE).requires_grad_(),
        ValueError,
        "a tensor that requires grad, with grad mode on",
    ),
    ("cu_seqlens", [0, 0, 20, 64], TypeError, "a value of type list"),
    ("cu_seqlens", torch.tensor(64), ValueError, "shape []"),
    ("cu_seqlens", torch.tensor([], dtype=torch.int64), ValueError, "0 entries"),
    ("cu_seqlens", torch.tensor([0.0, 0.0, 20.0, 64.0]), TypeError, "dtype torch.float32"),
    ("cu_seqlens", torch.tensor([0, 30, 20, 64]), ValueError, "cu_seqlens[2] = 20"),
    ("cu_seqlens", torch.tensor([0, 0, 20, 65]), ValueError, "cu_seqlens[3] = 65"),
    ("q", None, TypeError, "None"),
    ("q", torch.zeros(64, 2, 128), TypeError, "dtype torch.float32"),
    ("q", torch.zeros(64, 2, 128, dtype=torch.bfloat16), ValueError, "shape [64, 2, 128]"),
    ("q", torch.zeros(1, 64, 0, 128).bfloat16(), ValueError, "shape [1, 64, 0, 128]"),
    ("k", None, TypeError, "None"),
    ("workspace", [0], TypeError, "a value of type list"),
    ("workspace", torch.zeros(512), TypeError, "dtype torch.float32"),
    ("workspace", torch.zeros(2, 256, dtype=torch.uint8), ValueError, "shape [2, 256]"),
    ("workspace", torch.zeros(512, dtype=torch.uint8, device="meta"), ValueError, "on meta"),
    ("scale", "1", TypeError, "'1' of type str"),
    ("lower_bound", None, ValueError, "None"),
]


@pytest.mark.parametrize("workspace", [None, torch.zeros(512, dtype=torch.uint8)[:256]])
@pytest.mark.parametrize(("name", "value", "error", "got"), WRONG)
def test_refusals(
    rng: cases.Random,
    name: str,
    value: Any,
    error: type[Exception],
    got: str,
    workspace: Tensor | None,
) -> None:
    given, _ = packed(rng, [0, 0, 20, 64], [0, 16, 32], torch.int32)
    given = {**given, "workspace": workspace, name: value}
    with pytest.raises(error) as caught:
        adapter.fwd(**given)
    assert type(caught.value) is error
    start = f"flash_kda.integrations.vllm.fwd: {name}: got "
    text = str(caught.value)
    assert text.startswith(start) and "; needs " in text, text
    assert got in text
    assert "checkpoint_states" not in text
    assert not given["out"].any()


def test_shared_memory_is_named(rng: cases.Random) -> None:
    given, _ = packed(rng, [0, 0, 20, 64], [0, 16, 32], torch.int32)
    given["final_state"] = given["checkpoint_state"]
    with pytest.raises(ValueError, match="shares memory with checkpoint_state;"):
        adapter.fwd(**given)


@pytest.mark.parametrize(
    ("sizes", "error", "name"),
    [
        (("a", 3, 2), TypeError, "t_total"),
        ((1.0, 3, 2), TypeError, "t_total"),
        ((1, None, 2), TypeError, "heads"),
        ((1, 3, True), TypeError, "sequences"),
        ((-1, 3, 2), ValueError, "t_total"),
        ((1, 0, 2), ValueError, "heads"),
        ((1, 3, 2**31), ValueError, "sequences"),
        ((2**70, 3, 2), ValueError, "t_total"),
    ],
)
def test_workspace_size_of_bad_sizes(sizes: Any, error: type[Exception], name: str) -> None:
    start = f"flash_kda.integrations.vllm.get_workspace_size: {name}: got .*; needs "
    with pytest.raises(error, match=start) as caught:
        adapter.get_workspace_size(*sizes)
    assert type(caught.value) is error


def test_workspace_size_suffices_for_smaller_calls_on_any_gpu() -> None:
    launcher = abi.launcher_or_none()
    if launcher is None:
        pytest.skip("the package is not built")
    size = adapter.get_workspace_size(8192, 12, 8)
    for gpu in (abi.Gpu(90, 132), abi.Gpu(100, 148)):
        for shape in itertools.product((0, 1, 100, 5000, 8192), (1, 5, 12), (0, 1, 8)):
            assert launcher.plan(*shape, gpu).workspace_bytes <= size


def test_route(case: cases.Case, workspace: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of that name, as vLLM's extension registers one, is passed by."""
    library = torch.library.Library(adapter.NAMESPACE, "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
        "Tensor workspace, Tensor A_log, Tensor dt_bias, float lower_bound, Tensor? initial_state, "
        "Tensor(b!)? final_state, Tensor? cu_seqlens) -> ()"
    )
    library.impl("fwd", lambda *arguments: None, "CPU")
    operators = getattr(torch.ops, adapter.NAMESPACE)
    theirs = operators.fwd
    try:
        out, _ = call(operators.fwd, case, workspace)
        assert out.isnan().all()
        adapter.route()
        assert_accurate(case, *call(torch.ops._flashkda_C.fwd, case, workspace), BOUND)
        assert torch.ops._flashkda_C.get_workspace_size is adapter.get_workspace_size
    finally:
        operators.fwd = theirs
        del operators.get_workspace_size
        library._destroy()


def test_route_before_vllm_is_loaded(tmp_path: Any) -> None:
    program = """
import torch
from flash_kda.integrations import vllm as adapter
adapter.route()
assert torch.ops._flashkda_C.fwd is adapter.fwd
# As a C++ extension registers one, without torch's Python code noticing.
library = torch._C._dispatch_library("DEF", "_flashkda_C", "")
library.define("fwd(Tensor q) -> ()")
assert torch._C._jit_get_operation("_flashkda_C::fwd")[0] is not None
assert torch.ops._flashkda_C.fwd is adapter.fwd
"""
    path = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_states_are_written_in_place(case: cases.Case, workspace: Tensor) -> None:
    first = call(adapter.fwd, case, workspace)
    again = call(adapter.fwd, case, workspace)
    assert all(same_bits(x, y) for x, y in zip(first, again, strict=True))
