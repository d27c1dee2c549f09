"""Accuracy of ``flash_kda.fwd`` against the float64 recurrence: shapes, states, gates, scales."""

from __future__ import annotations

import itertools
import math
from typing import Any

import cases
import pytest
import torch
from cases import KINDS, assert_accurate, forward, make_case, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu

STATES = [None, torch.float32, torch.bfloat16]
# Without an initial state the first token's output is v times one number, q . k, whose relative
# error is large where it happens to be small: enough heads keep such tokens from deciding a test.
MANY_HEADS = 32


def check(case: cases.Case, **bounds: float) -> None:
    assert_accurate(case, *forward(case), **bounds)


@pytest.mark.parametrize("initial", [None, torch.float32])
def test_every_length_up_to_300(rng: cases.Random, initial: torch.dtype | None) -> None:
    lengths = [n + 1 for n in torch.randperm(300).tolist()]
    check(make_case(rng, lengths=lengths, heads=1, initial_state=initial))


@pytest.mark.parametrize(
    "tokens",
    [*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 100, 127, 128, 129, 200, 256, 257, 300],
)
def test_single_sequence(rng: cases.Random, tokens: int) -> None:
    check(make_case(rng, tokens=tokens, heads=3))
    check(make_case(rng, tokens=tokens, heads=MANY_HEADS, initial_state=None))


@pytest.mark.parametrize(
    "lengths",
    [
        (0,),
        (0, 0, 0),
        (1,),
        (1, 1, 1, 1),
        (0, 5, 0, 0, 64, 16, 0),
        (130, 54, 204, 96, 27, 306),
        (16,) * 12,
        (300, 1),
        (1, 300),
        (15, 17, 15, 17, 31, 33),
    ],
    ids=str,
)
@pytest.mark.parametrize("edges", [(0, 0), (5, 11)], ids=["whole", "with_edges"])
def test_packed_sequences(
    rng: cases.Random, lengths: tuple[int, ...], edges: tuple[int, int]
) -> None:
    shape: dict[str, Any] = {"lengths": lengths, "before": edges[0], "after": edges[1]}
    check(make_case(rng, heads=4, **shape))
    check(make_case(rng, heads=MANY_HEADS, initial_state=None, **shape))


@pytest.mark.parametrize(
    ("batch", "tokens", "heads"),
    [(2, 1, 1), (5, 16, 2), (3, 50, 4), (2, 77, 12), (40, 20, 3), (1, 70, 96), (150, 18, 2)],
)
def test_batches_and_heads(rng: cases.Random, batch: int, tokens: int, heads: int) -> None:
    check(make_case(rng, batch=batch, tokens=tokens, heads=heads))


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 3), (1, 0, 1)])
def test_nothing_to_do_keeps_states(rng: cases.Random, shape: tuple[int, int, int]) -> None:
    batch, tokens, heads = shape
    case = make_case(rng, batch=batch, tokens=tokens, heads=heads)
    assert same_bits(forward(case)[1], case.initial_state)
    state = forward(case.but(initial_state=None))[1]
    assert torch.count_nonzero(state) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(rng: cases.Random, kind: str) -> None:
    bounds = KINDS[kind].bounds
    check(make_case(rng, kind, tokens=520), **bounds)
    check(make_case(rng, kind, batch=2, tokens=90, initial_state=None), **bounds)
    check(make_case(rng, kind, lengths=(70, 0, 1, 33, 200)), **bounds)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("initial", "final"), list(itertools.product(STATES, STATES)))
def test_state_types(
    rng: cases.Random, initial: torch.dtype | None, final: torch.dtype | None, packed: bool
) -> None:
    shape: dict[str, Any] = {"lengths": (35, 0, 16, 100)} if packed else {"batch": 3, "tokens": 50}
    case = make_case(rng, initial_state=initial, **shape)
    out, state = forward(case, final_state=final)
    assert (state is None) == (final is None)
    assert_accurate(case, out, state)
    if state is not None and packed:
        kept = torch.zeros_like(state[1]) if initial is None else case.initial_state[1]
        assert same_bits(state[1], kept.to(final))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_initial_state_may_be_the_final_state(
    rng: cases.Random, dtype: torch.dtype, packed: bool
) -> None:
    shape: dict[str, Any] = {"lengths": (9, 0, 140, 33)} if packed else {"batch": 3, "tokens": 85}
    case = make_case(rng, initial_state=dtype, heads=5, **shape)
    expected = cases.reference(case)
    separate = forward(case, final_state=dtype)
    out, state = forward(case, final_state=case.initial_state)
    assert_accurate(case, out, state, expected=expected)
    assert same_bits(out, separate[0]) and same_bits(state, separate[1])


def test_state_carries_a_sequence_on(rng: cases.Random) -> None:
    case = make_case(rng, tokens=260)
    expected = cases.reference(case)
    state, outs = case.initial_state, []
    for rows in (slice(0, 100), slice(100, 101), slice(101, 160), slice(160, 260)):
        piece = {x: getattr(case, x)[:, rows] for x in ("q", "k", "v", "g", "beta")}
        out, state = forward(case.but(**piece, initial_state=state))
        outs.append(out)
    assert_accurate(case, torch.cat(outs, 1), state, expected=expected)


@pytest.mark.parametrize("scale", [1.0, -2.5, 1e-20, 1e4])
def test_scales(rng: cases.Random, scale: float) -> None:
    check(make_case(rng, lengths=(50, 131)).but(scale=scale))


def test_scale_zero(rng: cases.Random) -> None:
    case = make_case(rng, tokens=70).but(scale=0.0)
    out, state = forward(case)
    assert torch.count_nonzero(out) == 0
    assert_accurate(case.but(scale=1.0), forward(case.but(scale=1.0))[0], state)


@pytest.mark.parametrize("a_log", [-800.0, -100.0, -5.0, 5.0, 20.0, 88.0, 89.0, 1e30, math.inf])
@pytest.mark.parametrize("tokens", [37, 160])
def test_steep_gates(rng: cases.Random, a_log: float, tokens: int) -> None:
    """exp(A_log) beyond fp32 makes the gate a step; tokens past a chunk's end do not decay."""
    case = make_case(rng, tokens=tokens, heads=3)
    A_log = torch.full_like(case.A_log, a_log, dtype=torch.float64)
    dt_bias = 2 * rng.normal(*case.dt_bias.shape)
    check(case.but(A_log=A_log, dt_bias=dt_bias))


@pytest.mark.parametrize("a_log", [-800.0, -100.0, 0.0, 90.0])
def test_biases_beyond_fp32(rng: cases.Random, a_log: float) -> None:
    """Those of fp64: the gate is a step to either side, or flat where exp(A_log) is zero. With a
    steep one gate inputs of zero lie on the step."""
    case = make_case(rng, tokens=160, heads=3)
    A_log = torch.full_like(case.A_log, a_log, dtype=torch.float64)
    dt_bias = 1e300 * rng.normal(*case.dt_bias.shape).double()
    check(case.but(A_log=A_log, dt_bias=dt_bias))
    flat = case.but(A_log=A_log, dt_bias=torch.zeros_like(dt_bias), g=torch.zeros_like(case.g))
    check(flat)


@pytest.mark.parametrize("a_log", [83.0, 88.0, 89.0, 200.0])
def test_tiny_arguments_of_steep_gates(rng: cases.Random, a_log: float) -> None:
    """exp(A_log) is used up to the largest fp32: arguments down to 2^-120 are large or small."""
    case = make_case(rng, tokens=70, heads=2)
    g = torch.exp2(-112 - 8 * torch.rand_like(case.g.float())) * case.g.float().sign()
    A_log = torch.full_like(case.A_log, a_log)
    check(case.but(A_log=A_log, dt_bias=None, g=g.to(case.g.dtype)))


@pytest.mark.parametrize("a_log", [-800.0, 0.0])
def test_bias_that_is_none(rng: cases.Random, a_log: float) -> None:
    """A NaN shows in its head, also where exp(A_log) is zero, and in no other."""
    case = make_case(rng, tokens=70, heads=3)
    A_log = torch.full_like(case.A_log, a_log, dtype=torch.float64)
    dt_bias = case.dt_bias.clone().view(3, -1)
    dt_bias[1, 5] = math.nan
    out, state = forward(case.but(A_log=A_log, dt_bias=dt_bias.view_as(case.dt_bias)))
    assert not out[:, 1:, 1].isfinite().any() and not state[:, 1, :, 5].isfinite().any()
    assert out[:, :, ::2].isfinite().all() and state[:, ::2].isfinite().all()


@pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_gate_parameters_may_be_missing(rng: cases.Random, missing: tuple[str, ...]) -> None:
    check(make_case(rng, lengths=(70, 40)).but(**dict.fromkeys(missing)))


def test_zero_vectors(rng: cases.Random) -> None:
    case = make_case(rng, tokens=60)
    case.q[:, ::3] = 0
    case.k[:, 1::3] = 0
    case.v[:, 2::3] = 0
    out, state = forward(case)
    assert_accurate(case, out, state)
    assert torch.count_nonzero(out[:, ::3]) == 0


def test_more_sequences_than_a_grid_dimension_holds(rng: cases.Random) -> None:
    count = 66000 if rng.device.type == "cuda" else 300
    case = make_case(rng, lengths=(1,) * count, heads=1, initial_state=None)
    out, _ = forward(case, final_state=None)
    # One token from an empty state: out = scale b (q . k) v.
    q, k, v, beta = (x.double() for x in (case.q, case.k, case.v, case.beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    expected = case.scale * beta.sigmoid()[..., None] * (q * k).sum(-1, keepdim=True) * v
    assert cases.relative_error(out, expected) <= cases.ORDINARY_BOUND
    assert cases.worst_row(out, expected) <= 6 * cases.ORDINARY_BOUND


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=9),
    edges=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    heads=st.integers(1, 6),
    kind=st.sampled_from(sorted(KINDS)),
    states=st.tuples(st.sampled_from(STATES), st.sampled_from(STATES)),
)
def test_any_packing(
    device: torch.device,
    seed: int,
    lengths: list[int],
    edges: tuple[int, int],
    heads: int,
    kind: str,
    states: tuple[torch.dtype | None, torch.dtype | None],
) -> None:
    if states[0] is None:
        lengths = [*lengths, 100]
    case = make_case(
        cases.Random(f"packing {seed}", device),
        kind,
        lengths=lengths,
        before=edges[0],
        after=edges[1],
        heads=heads,
        initial_state=states[0],
    )
    out, state = forward(case, final_state=states[1])
    assert_accurate(case, out, state, **KINDS[kind].bounds)
