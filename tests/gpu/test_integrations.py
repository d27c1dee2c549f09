"""``chunk_kda``, the registered operator and the vLLM adapter on a GPU, or on the CPU path."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from cases import assert_accurate, make_case, poisoned, relative_error, same_bits
from torch import Tensor

import flash_kda
from flash_kda.integrations import vllm as adapter

pytestmark = pytest.mark.gpu

FLAGS = {
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


def chunk(case: cases.Case, **changes: Any) -> tuple[Tensor, Tensor]:
    return flash_kda.chunk_kda(**{**vars(case), **FLAGS, **changes})


@pytest.mark.parametrize("shape", [{"batch": 2, "tokens": 90}, {"lengths": (40, 0, 1, 77)}])
def test_chunk_kda(rng: cases.Random, shape: dict[str, Any]) -> None:
    case = make_case(rng, heads=3, **shape)
    out, state = chunk(case)
    assert_accurate(case, out, state)
    expected = cases.forward(case)
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


def test_chunk_kda_with_probabilities(rng: cases.Random) -> None:
    case = make_case(rng, tokens=90)
    expected = cases.reference(case)
    case.beta = case.beta.float().sigmoid()
    out, _ = chunk(case, use_beta_sigmoid_in_kernel=False)
    assert relative_error(out, expected[0]) <= cases.ORDINARY_BOUND


def test_opcheck(rng: cases.Random) -> None:
    case = make_case(rng, batch=2, tokens=40)
    positional = (
        *(case.q, case.k, case.v, case.g, case.beta, case.scale, torch.zeros_like(case.v)),
        *(case.A_log, case.dt_bias, case.lower_bound, case.initial_state),
        torch.zeros(case.state_shape, device=case.device),
    )
    torch.library.opcheck(torch.ops.flash_kda.fwd.default, positional)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(rng: cases.Random, mode: str) -> None:
    """Also as CUDA graphs, replayed with other inputs and a state carried from call to call."""
    heads = 4
    weight = rng.normal(64, 4 * heads * 128, dtype=torch.bfloat16)
    case = make_case(rng, batch=2, tokens=70, heads=heads)
    gate = {"A_log": case.A_log, "dt_bias": case.dt_bias, "lower_bound": case.lower_bound}

    def layer(x: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g = (x @ weight).unflatten(-1, (4, heads, 128)).unbind(2)
        out, final = flash_kda.chunk_kda(q, k, v, g, beta, initial_state=state, **gate, **FLAGS)
        return out.flatten(2) * 2, final

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    state = expected_state = case.initial_state
    with torch.inference_mode():
        for _ in range(5):
            x = rng.normal(2, 70, 64, dtype=torch.bfloat16)
            beta = rng.normal(2, 70, heads, dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            out, state = (y.clone() for y in compiled(x, beta, state))
            expected, expected_state = layer(x, beta, expected_state)
            assert relative_error(out, expected.double()) < 1e-2
            assert relative_error(state, expected_state.double()) < 1e-2


@pytest.mark.cuda
def test_compiled_pool_is_updated_in_place(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(40, 50), initial_state=None)
    slots = torch.tensor([3, 1], dtype=torch.int32, device=case.device)
    pool = rng.normal(5, *case.state_shape[1:])
    expected_pool = pool.clone()
    out = torch.empty_like(case.v)
    arguments = {name: x for name, x in vars(case).items() if name != "initial_state"}

    def step(pool: Tensor, out: Tensor) -> None:
        flash_kda.fwd(
            **arguments, out=out, initial_state=pool, final_state=pool, state_indices=slots
        )

    step(expected_pool, out)
    expected_out = out.clone()
    torch._dynamo.reset()
    torch.compile(step, fullgraph=True)(pool, out.zero_())
    assert same_bits(pool, expected_pool) and same_bits(out, expected_out)


def test_vllm_adapter(rng: cases.Random) -> None:
    """With a workspace of vLLM's size and one of ours, and one checkpoint a sequence."""
    case = make_case(rng, lengths=(64, 1, 33), heads=3)
    cu_seqlens = case.cu_seqlens.int()
    offsets = torch.tensor([32, 0, 16], dtype=torch.int32, device=case.device)
    try:
        size = adapter.get_workspace_size(98, 3, 3)
    except flash_kda.BrokenInstallError:
        size = 256
    for bytes_given in (size, 256):
        workspace = cases.aligned_bytes(bytes_given, case.device)
        out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
        final = poisoned(*case.state_shape, dtype=torch.float32, device=case.device)
        states = poisoned(*case.state_shape, dtype=torch.float32, device=case.device)
        adapter.fwd(
            *(case.q, case.k, case.v, case.g, case.beta, case.scale, out, workspace),
            *(case.A_log, case.dt_bias, case.lower_bound, case.initial_state, final),
            *(cu_seqlens, states, offsets),
        )
        assert_accurate(case, out, final)
        for sequence in (0, 2):
            truth = cases.state_after(case, sequence, int(offsets[sequence]))
            assert relative_error(states[sequence], truth) <= 2 * cases.ORDINARY_BOUND


@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize(
    ("bounds", "offsets"),
    [([0, 0, 20, 64], [0, 16, 32]), ([5, 5, 5, 64], [0, 8, 48]), ([5, 5], [0]), ([0, 0], [16])],
)
def test_vllm_adapter_with_empty_sequences(
    rng: cases.Random,
    bounds: list[int],
    offsets: list[int],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those without a token before them have no checkpoint, also where values are checked."""
    monkeypatch.setenv("FLASH_KDA_CHECK", check)
    case = make_case(rng, lengths=(64,), heads=3)
    case.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=case.device)
    case.initial_state = rng.normal(len(offsets), *case.state_shape[1:])
    final, states = torch.zeros_like(case.initial_state), torch.zeros_like(case.initial_state)
    adapter.fwd(
        *(case.q, case.k, case.v, case.g, case.beta, case.scale, torch.zeros_like(case.v), None),
        *(case.A_log, case.dt_bias, case.lower_bound, case.initial_state, final),
        *(case.cu_seqlens, states, torch.tensor(offsets, device=case.device)),
    )
    assert relative_error(final, cases.reference(case)[1]) <= 2 * cases.ORDINARY_BOUND
    kept = [n for n, x in enumerate(offsets) if 0 < x <= bounds[n + 1] - bounds[n]]
    for n in kept:
        truth = cases.state_after(case, n, offsets[n])
        assert relative_error(states[n], truth) <= 2 * cases.ORDINARY_BOUND


@pytest.mark.parametrize("check", ["", "1"])
def test_vllm_adapter_names_an_offset_as_it_was_given(
    rng: cases.Random, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_CHECK", check)
    case = make_case(rng, lengths=(20, 44), heads=3)
    states = torch.zeros(case.state_shape, device=case.device)

    def call() -> None:
        adapter.fwd(
            *(case.q, case.k, case.v, case.g, case.beta, case.scale, torch.zeros_like(case.v)),
            *(None, case.A_log, case.dt_bias, case.lower_bound, None, None, case.cu_seqlens),
            *(states, torch.tensor([16, 8], device=case.device)),
        )

    if case.device.type == "cuda" and not check:
        call()
        return
    with pytest.raises(
        ValueError, match=r"got checkpoint_offsets\[1\] = 8; needs a multiple of 16"
    ):
        call()
