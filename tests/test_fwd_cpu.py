"""``flash_kda.fwd`` on CPU tensors, against float64."""

from __future__ import annotations

import math
import time
from typing import Any

import cases
import pytest
import torch
from cases import (
    assert_accurate,
    forward,
    make_case,
    poisoned,
    relative_error,
    same_bits,
)

import flash_kda

# Float32 arithmetic: what is left is the rounding of out to bfloat16.
BOUND = 2.5e-3

STATES = [None, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", cases.KINDS)
def test_out_and_state(rng: cases.Random, kind: str) -> None:
    case = make_case(rng, kind, batch=2, tokens=75)
    assert_accurate(case, *forward(case), BOUND)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_lengths(rng: cases.Random, tokens: int) -> None:
    case = make_case(rng, tokens=tokens)
    assert_accurate(case, *forward(case), BOUND)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_and_rows_outside_them(rng: cases.Random, integers: torch.dtype) -> None:
    case = make_case(rng, lengths=(0, 30, 1, 0, 16, 55, 0), before=3, after=4)
    for x in (case.q, case.k, case.v, case.g, case.beta):
        x[:, :3] = math.nan
        x[:, -4:] = math.inf
    case.cu_seqlens = case.cu_seqlens.to(integers)
    out, state = forward(case)
    assert_accurate(case, out, state, BOUND)
    untouched = poisoned(1, 4, 2, 128, dtype=torch.bfloat16, device="cpu")
    assert same_bits(out[:, :3], untouched[:, :3])
    assert same_bits(out[:, -4:], untouched)


@pytest.mark.parametrize("initial", STATES)
@pytest.mark.parametrize("final", STATES)
def test_state_types(
    rng: cases.Random, initial: torch.dtype | None, final: torch.dtype | None
) -> None:
    case = make_case(rng, batch=2, tokens=20, initial_state=initial)
    out, state = forward(case, final_state=final)
    assert (state is None) == (final is None)
    assert_accurate(case, out, state, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_initial_state_may_be_the_final_state(
    rng: cases.Random, dtype: torch.dtype, packed: bool
) -> None:
    shape: dict[str, Any] = {"lengths": (9, 0, 40)} if packed else {"batch": 3, "tokens": 21}
    case = make_case(rng, initial_state=dtype, **shape)
    expected = cases.reference(case)
    out, state = forward(case, final_state=case.initial_state)
    assert state is case.initial_state
    assert_accurate(case, out, state, BOUND, expected)


def test_views_of_one_packed_tensor(rng: cases.Random) -> None:
    case = make_case(rng, batch=2, tokens=40, heads=3)
    packed = torch.cat((case.q, case.k, case.v, case.g), -1)
    views = dict(zip("qkvg", packed.split(128, -1), strict=True))
    buffer = poisoned(2, 3, 40, 128, dtype=torch.bfloat16, device="cpu")
    strided = case.but(**views, beta=torch.stack((case.beta, case.beta), -1)[..., 0])
    out, state = forward(strided, out=buffer.transpose(1, 2))
    assert_accurate(case, out, state, BOUND)
    assert same_bits(out, forward(case)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gate_parameters_of_any_float_type(rng: cases.Random, dtype: torch.dtype) -> None:
    case = make_case(rng, tokens=30)
    case.A_log = case.A_log.to(dtype).reshape(1, 1, 2, 1)
    case.dt_bias = case.dt_bias.to(dtype).reshape(-1)
    assert_accurate(case, *forward(case), BOUND)


@pytest.mark.parametrize("a_log", [-800.0, -100.0, 0.0, 90.0])
def test_gate_parameters_beyond_fp32(rng: cases.Random, a_log: float) -> None:
    case = make_case(rng, tokens=30)
    A_log = torch.full_like(case.A_log, a_log, dtype=torch.float64)
    dt_bias = 1e300 * rng.normal(*case.dt_bias.shape).double()
    for changed in (
        case.but(A_log=A_log, dt_bias=dt_bias),
        case.but(A_log=A_log, dt_bias=None, g=torch.zeros_like(case.g)),
    ):
        assert_accurate(changed, *forward(changed), BOUND)


@pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_gate_parameters_may_be_missing(rng: cases.Random, missing: tuple[str, ...]) -> None:
    case = make_case(rng, tokens=30).but(**dict.fromkeys(missing))
    assert_accurate(case, *forward(case), BOUND)


@pytest.mark.parametrize("scale", [0.0, -2.5, 1e-20, 1e4])
def test_scales(rng: cases.Random, scale: float) -> None:
    case = make_case(rng, tokens=50).but(scale=scale)
    assert_accurate(case, *forward(case), BOUND)


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 3), (1, 0, 1)])
def test_nothing_to_do_keeps_states(rng: cases.Random, shape: tuple[int, int, int]) -> None:
    batch, tokens, heads = shape
    case = make_case(rng, batch=batch, tokens=tokens, heads=heads)
    _, state = forward(case)
    assert same_bits(state, case.initial_state)
    _, state = forward(case.but(initial_state=None))
    assert torch.count_nonzero(state) == 0


def test_nan_stays_in_its_sequence(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(20, 30, 40))
    out, state = forward(case)
    for x in (case.q, case.k, case.v, case.g, case.beta):
        x[:, 20:50] = math.nan
    spoilt, spoilt_state = forward(case)
    assert same_bits(spoilt[:, :20], out[:, :20])
    assert same_bits(spoilt[:, 50:], out[:, 50:])
    assert same_bits(spoilt_state[::2], state[::2])
    assert torch.isnan(spoilt[:, 20:50]).all()


def test_inputs_are_left_alone(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(20, 0, 13), before=1)
    before = {name: x.clone() for name, x in case.tensors().items()}
    forward(case)
    for name, x in case.tensors().items():
        assert same_bits(x, before[name]), name


def test_a_refused_call_writes_nothing(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(20, 13))
    case.cu_seqlens = torch.tensor([0, 21, 20])
    out = poisoned(1, 33, 2, 128, dtype=torch.bfloat16, device="cpu")
    state = poisoned(*case.state_shape, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="cu_seqlens"):
        forward(case, out=out, final_state=state)
    assert bool((cases.bits(out) == -1).all()) and bool((cases.bits(state) == -1).all())


def test_positional_and_keyword_calls_agree(rng: cases.Random) -> None:
    case = make_case(rng, tokens=18)
    expected, _ = forward(case, final_state=None)
    out = torch.empty_like(expected)
    flash_kda.fwd(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        case.scale,
        out,
        case.A_log,
        case.dt_bias,
        case.lower_bound,
        case.initial_state,
    )
    assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(rng: cases.Random, dtype: torch.dtype) -> None:
    case = make_case(rng, lengths=(20, 33))
    plain = forward(case)
    with torch.autocast("cpu", dtype=dtype):
        inside = forward(case)
        assert torch.is_autocast_enabled("cpu")
    for x, y in zip(inside, plain, strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile(rng: cases.Random, backend: str) -> None:
    case = make_case(rng, tokens=20)
    plain = forward(case)
    compiled = torch.compile(lambda: forward(case), backend=backend)
    for x, y in zip(compiled(), plain, strict=True):
        assert relative_error(x, y.double()) < 1e-3
    assert not torch.is_inference_mode_enabled()
    assert same_bits(forward(case)[0], plain[0])  # the thread still works


def test_ten_thousand_short_sequences(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(1,) * 10_000, heads=1, initial_state=None)
    out = poisoned(1, 10_000, 1, 128, dtype=torch.bfloat16, device="cpu")
    start = time.perf_counter()
    forward(case, out=out, final_state=None)
    # About 1.3 s on two idle cores; one by one they took minutes.
    assert time.perf_counter() - start < 20
    last = case.but(cu_seqlens=torch.tensor([9_999, 10_000]))
    assert same_bits(forward(last, final_state=None)[0][:, -1], out[:, -1])


def test_sequences_without_tokens_need_no_memory(rng: cases.Random) -> None:
    case = make_case(rng, tokens=4, initial_state=None)
    bounds = torch.zeros(1_000_001, dtype=torch.int32)  # their states would take 131 GB
    bounds[-1] = 4
    case = case.but(cu_seqlens=bounds)
    alone = case.but(cu_seqlens=bounds[-2:])
    assert same_bits(forward(case, final_state=None)[0], forward(alone, final_state=None)[0])


def test_checkpoints_of_many_sequences(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(40, 0, 16, 33, 1), before=2)
    offsets = torch.tensor([18, 34, 42, 58, 74, 90, 91, 92])
    states = torch.zeros(len(offsets), *case.state_shape[1:])
    out, final = forward(case)
    again, final_again = torch.zeros_like(out), torch.zeros_like(final)
    flash_kda.fwd(
        **vars(case),
        out=again,
        final_state=final_again,
        checkpoint_offsets=offsets,
        checkpoint_states=states,
    )
    assert relative_error(again[:, 2:], out[:, 2:].double()) < 1e-3
    assert relative_error(final_again, final.double()) < 1e-5
    for row, sequence in ((2, 0), (3, 2), (6, 3), (7, 4)):  # those at an end
        assert same_bits(states[row], final_again[sequence])
    for row, (sequence, end) in enumerate([(0, 18), (0, 34)]):
        part = case.but(
            cu_seqlens=torch.tensor([2, end]), initial_state=case.initial_state[sequence][None]
        )
        assert relative_error(states[row], forward(part)[1][0].double()) < 1e-5


def test_calls_repeat_bit_for_bit(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(20, 33))
    first = forward(case)
    for _ in range(3):
        again = forward(case)
        assert same_bits(again[0], first[0]) and same_bits(again[1], first[1])
