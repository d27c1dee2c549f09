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
        _, begin, _ = case.spans[sequence]
        tokens = slice(begin, begin + int(offsets[sequence]))
        names = ("q", "k", "v", "g", "beta")
        part = case.but(
            **{name: getattr(case, name)[:, tokens] for name in names},
            initial_state=case.initial_state[sequence : sequence + 1],
            cu_seqlens=None,
        )
        assert relative_error(states[sequence], cases.reference(part)[1][0]) < BOUND


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


def test_refusals(case: cases.Case, workspace: Tensor) -> None:
    with pytest.raises(ValueError, match="both or neither"):
        call(adapter.fwd, case, workspace, torch.zeros(case.state_shape), None)
    with pytest.raises(ValueError, match="multiple of 16"):
        call(adapter.fwd, case, workspace, torch.zeros(case.state_shape), torch.full((4,), 17))


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
