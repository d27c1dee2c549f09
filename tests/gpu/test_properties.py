"""Properties of all results: what they may depend on, and what holds at the edges of the inputs."""

from __future__ import annotations

import math
from typing import Any

import cases
import paths
import pytest
import torch
from cases import (
    ORDINARY_BOUND,
    assert_accurate,
    forward,
    make_case,
    poisoned,
    relative_error,
    same_bits,
)
from torch import Tensor

import flash_kda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("path")]

D = cases.WIDTH
TOKENS = ("q", "k", "v", "g", "beta")
LARGEST = torch.finfo(torch.bfloat16).max
BEYOND = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf, "largest": LARGEST}
few_and_many = pytest.mark.parametrize("many", [False, True], ids=["few", "crowd"])


def spoil(case: cases.Case, name: str, where: Any, value: float | Tensor) -> cases.Case:
    x = getattr(case, name).clone()
    x[where] = value
    return case.but(**{name: x})


@pytest.mark.parametrize("initial", [None, torch.float32])
def test_a_sequence_may_be_cut_anywhere(rng: cases.Random, initial: torch.dtype | None) -> None:
    """Carried through an fp32 state, both parts equal the uncut run within rounding."""
    case = make_case(rng, tokens=50, initial_state=initial)
    out, state = forward(case)
    expected = cases.reference(case)
    for cut in range(51):
        first, middle = forward(case.part(0, 0, cut))
        second, last = forward(case.part(0, cut, 50, initial_state=middle))
        both = torch.cat((first, second), 1)
        assert relative_error(both, out.double()) <= ORDINARY_BOUND, f"cut at {cut}"
        assert relative_error(last, state.double()) <= ORDINARY_BOUND, f"cut at {cut}"
        assert relative_error(both, expected[0]) <= ORDINARY_BOUND, f"cut at {cut}"
        assert relative_error(last, expected[1]) <= ORDINARY_BOUND, f"cut at {cut}"


@pytest.mark.parametrize("name", TOKENS)
def test_no_finite_value_reaches_earlier_tokens(rng: cases.Random, name: str) -> None:
    """Bit for bit, with the largest values at every token of a sequence and around its tiles."""
    case = make_case(rng, tokens=140)
    out, _ = forward(case)
    for cut in (*range(1, 36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 139):
        for value in (LARGEST, -LARGEST):
            changed, _ = forward(spoil(case, name, (0, slice(cut, None)), value))
            assert same_bits(changed[:, :cut], out[:, :cut]), f"{name} from {cut} on is {value:g}"


@pytest.mark.parametrize("name", TOKENS)
def test_no_finite_value_of_a_crowd_reaches_other_tokens(rng: cases.Random, name: str) -> None:
    """Bit for bit: neither earlier ones of its sequence nor those of other sequences, whichever
    cluster has them.
    """
    case = make_case(rng, **cases.crowd(rng))
    expected = forward(case)
    chosen, (_, begin, end) = max(enumerate(case.spans), key=lambda x: x[1][2] - x[1][1])
    length = end - begin
    other = rng.normal(*getattr(case, name)[:, begin:end].shape, dtype=torch.bfloat16)
    for cut in (1, 16, 17, length // 2, length - 1):
        for value in (LARGEST, -LARGEST, other[:, cut:]):
            changed = spoil(case, name, (slice(None), slice(begin + cut, end)), value)
            results = forward(changed)
            before, after = slice(begin, begin + cut), slice(begin + cut, end)
            assert same_bits(results[0][:, before], expected[0][:, before])
            cases.assert_others_kept(case, chosen, results, expected)
        assert not same_bits(results[0][:, after], expected[0][:, after])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", TOKENS)
def test_nan_reaches_no_earlier_step(rng: cases.Random, name: str, value: float) -> None:
    """As README says: at most the earlier tokens of its own step of a chain."""
    step = paths.tokens_of_step()
    case = make_case(rng, lengths=(140,), before=3)
    out, _ = forward(case)
    for at in (0, 15, 16, 31, 40, 64, 100, 127, 139):
        changed, _ = forward(spoil(case, name, (0, 3 + at), value))
        kept = slice(3, 3 + at // step * step)
        assert same_bits(changed[:, kept], out[:, kept]), f"{name} of token {at}"


@few_and_many
@pytest.mark.parametrize("value", BEYOND.values(), ids=list(BEYOND))
@pytest.mark.parametrize("name", [*TOKENS, "initial_state"])
def test_one_input_of_a_sequence_reaches_no_other(
    rng: cases.Random, name: str, value: float, many: bool
) -> None:
    few = {"lengths": (20, 0, 16, 1, 33), "before": 2, "after": 3, "heads": 3}
    case = make_case(rng, **(cases.crowd(rng) if many else few))
    expected = forward(case)
    spans = case.spans
    for chosen in cases.some_of(case) if many else range(len(spans)):
        _, begin, end = spans[chosen]
        where = chosen if name == "initial_state" else (0, slice(begin, end))
        results = forward(spoil(case, name, where, value))
        cases.assert_others_kept(case, chosen, results, expected)


@pytest.mark.parametrize("initial", [None, torch.float32])
def test_packing_changes_no_bit(
    rng: cases.Random, initial: torch.dtype | None, path: str | None
) -> None:
    """Each sequence of a crowd alone, as a batch row or packed: docs/accuracy.md."""
    if rng.device.type == "cuda" and path in (None, "segments"):
        pytest.skip("sizes of the call choose the path, or the cuts")
    case = make_case(rng, **cases.crowd(rng), initial_state=initial)
    out, state = forward(case)
    for n, (_, begin, end) in enumerate(case.spans):
        alone = case.part(n, 0, end - begin)
        bounds = torch.tensor([0, end - begin], device=case.device)
        for again in (alone, alone.but(cu_seqlens=bounds)):
            results = forward(again)
            assert same_bits(results[0], out[:, begin:end]), f"sequence {n}"
            assert same_bits(results[1], state[n : n + 1]), f"state of sequence {n}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_of_the_states_of_a_crowd_change_no_bit(
    rng: cases.Random, dtype: torch.dtype
) -> None:
    """In place or not, aligned for bulk copies, for four elements at a time or for one: `fused`
    loads and stores them in different ways.
    """
    case = make_case(rng, **cases.crowd(rng), initial_state=dtype)
    expected = forward(case, final_state=dtype)
    assert_accurate(case, *expected)
    for initial in [cases.misaligned(case.initial_state, n) for n in (0, 4, 1)]:
        for final in (*(cases.misaligned(initial, n) for n in (0, 4, 1)), initial):
            if final is not initial:
                cases.bits(final).fill_(-1)
            given = case.but(initial_state=initial)
            out, state = forward(given, final_state=final)
            assert same_bits(out, expected[0]) and same_bits(state, expected[1])


@pytest.mark.parametrize("value", BEYOND.values(), ids=list(BEYOND))
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_gate_parameters_of_a_head_reach_no_other(
    rng: cases.Random, name: str, value: float
) -> None:
    case = make_case(rng, lengths=(20, 33), heads=4)
    out, state = forward(case)
    changed, changed_state = forward(spoil(case, name, 2, value))
    keep = [0, 1, 3]
    assert same_bits(changed[:, :, keep], out[:, :, keep])
    assert same_bits(changed_state[:, keep], state[:, keep])


@pytest.mark.parametrize("final", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"lengths": (0, 0, 0)},
        {"lengths": (0, 0, 0), "before": 4, "after": 3},
        {"lengths": (), "before": 5},
        {"lengths": ()},
    ],
    ids=["no_tokens", "tokens_of_nobody", "no_sequences", "nothing"],
)
def test_empty_sequences_hand_their_state_on(
    rng: cases.Random, shape: dict, initial: torch.dtype | None, final: torch.dtype
) -> None:
    case = make_case(rng, heads=3, initial_state=initial, **shape)
    out, state = forward(case, final_state=final)
    assert bool((cases.bits(out) == -1).all()), "rows of no sequence were written"
    start = torch.zeros(case.state_shape, device=case.device) if initial is None else None
    expected = case.initial_state if start is None else start
    assert same_bits(state, expected.to(final))


def test_empty_sequences_and_their_slots(rng: cases.Random) -> None:
    """From slot to slot of one pool nothing changes; of two pools the state is copied."""
    case = make_case(rng, lengths=(0, 17, 0, 0), initial_state=None)
    slots = torch.tensor([3, 0, -1, 1], device=case.device)
    pool = rng.normal(5, *case.state_shape[1:])
    other = poisoned(5, *case.state_shape[1:], dtype=torch.bfloat16, device=case.device)
    before = pool.clone()
    arguments = {**vars(case), "initial_state": pool, "state_indices": slots}
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    flash_kda.fwd(**arguments, out=out, final_state=other)
    assert same_bits(other[[1, 3]], pool[[1, 3]].bfloat16())
    assert bool((cases.bits(other[[2, 4]]) == -1).all())
    flash_kda.fwd(**arguments, out=out, final_state=pool)
    assert same_bits(pool[1:], before[1:])
    start = torch.zeros(case.state_shape, device=case.device)
    start[1] = before[0]
    assert_accurate(case.but(initial_state=start), out, None)


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_checkpoints_are_none(rng: cases.Random, tokens: int) -> None:
    case = make_case(rng, tokens=tokens)
    expected = forward(case)
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    state = torch.empty_like(case.initial_state)
    flash_kda.fwd(
        **vars(case),
        out=out,
        final_state=state,
        checkpoint_offsets=torch.zeros(0, dtype=torch.int32, device=case.device),
        checkpoint_states=state.new_empty(0, *case.state_shape[1:]),
    )
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33])
def test_places_of_empty_sequences_do_not_matter(rng: cases.Random, count: int) -> None:
    """Bit for bit: before, between or after the others, whatever tiles those fill."""
    case = make_case(rng, lengths=(count, 33, count, 0, 0, 0, 0), heads=3)
    out, state = forward(case)
    assert_accurate(case, out, state)
    bounds = case.cu_seqlens[[0, 0, 1, 1, 1, 2, 3, 3]]
    given = case.initial_state[[3, 0, 4, 5, 1, 2, 6]]  # sequences 0, 1, 2 are 1, 4, 5 here
    again, states = forward(case.but(cu_seqlens=bounds, initial_state=given))
    assert same_bits(again, out)
    assert same_bits(states, state[[3, 0, 4, 5, 1, 2, 6]])


def test_a_bound_of_zero_takes_the_gate_away(rng: cases.Random) -> None:
    """Bit for bit: nothing decays, whatever the gate's inputs."""
    case = make_case(rng, lengths=(50, 33)).but(lower_bound=0.0)
    out, state = forward(case)
    other = make_case(rng, lengths=(50, 33))
    for changes in (
        {"g": other.g},
        {"g": torch.full_like(case.g, LARGEST)},
        {"A_log": None},
        {"dt_bias": None},
        {"A_log": torch.full_like(case.A_log, 20.0), "dt_bias": -100 * other.dt_bias},
    ):
        changed, changed_state = forward(case.but(**changes))
        assert same_bits(changed, out) and same_bits(changed_state, state)


def test_norms_of_all_sizes_side_by_side(rng: cases.Random) -> None:
    """From token to token; q and k of nothing but zeros among them."""
    case = make_case(rng, tokens=160, heads=4)
    sizes = torch.tensor([0.0, 1e-20, 1e-4, 1.0, 1e4, 1e20], device=case.device)
    for name in ("q", "k"):
        drawn = sizes[torch.tensor(rng.integers(0, 6, 160 * 4), device=case.device)]
        x = getattr(case, name).double() * drawn.view(1, 160, 4, 1)
        setattr(case, name, x.bfloat16())
    assert_accurate(case, *forward(case))


def test_sizes_of_queries_and_keys_do_not_matter(rng: cases.Random) -> None:
    """As long as their squares are far above the norm's 1e-6."""
    case = make_case(rng, lengths=(50, 33))
    out, state = forward(case)
    changed, changed_state = forward(case.but(q=case.q * 2.0**30, k=case.k * 2.0**15))
    assert relative_error(changed, out.double()) <= 1e-3
    assert relative_error(changed_state, state.double()) <= 1e-3


@pytest.mark.parametrize("factor", [2.0**-30, 2.0**30, -1.0])
def test_results_are_linear_in_values_and_states(rng: cases.Random, factor: float) -> None:
    case = make_case(rng, lengths=(50, 33))
    out, state = forward(case)
    scaled = case.but(v=case.v * factor, initial_state=case.initial_state * factor)
    scaled_out, scaled_state = forward(scaled)
    assert relative_error(scaled_out, out.double() * factor) <= 1e-3
    assert relative_error(scaled_state, state.double() * factor) <= 1e-3


def test_everything_in_one_buffer(rng: cases.Random) -> None:
    """out between the inputs of a projection, the final states between the initial ones."""
    case = make_case(rng, lengths=(20, 0, 33), after=2, heads=3)
    expected = forward(case)
    inputs = [getattr(case, name) for name in ("q", "k", "v", "g")]
    buffer = torch.cat((*inputs[:2], poisoned(*case.v.shape, **_like(case.v)), *inputs[2:]), -1)
    q, k, out, v, g = buffer.split(D, -1)
    states = torch.stack((case.initial_state, torch.zeros_like(case.initial_state)), 1)
    before, before_states = buffer.clone(), states.clone()
    mixed = case.but(q=q, k=k, v=v, g=g, initial_state=states[:, 0])
    forward(mixed, out=out, final_state=states[:, 1])
    assert same_bits(out[:, :-2], expected[0][:, :-2])
    assert same_bits(states[:, 1], expected[1])
    before[:, :-2, :, 2 * D : 3 * D] = expected[0][:, :-2]
    before_states[:, 1] = expected[1]
    assert same_bits(buffer, before) and same_bits(states, before_states)


def _like(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


@pytest.mark.parametrize("shift", [1, 5, 64])
def test_a_state_that_half_overlaps_the_other_is_refused(rng: cases.Random, shift: int) -> None:
    """Nothing is written then."""
    case = make_case(rng, lengths=(20, 33), heads=1)
    both = torch.zeros(2 * D * D + shift * D, **_like(case.initial_state))
    initial = both[: 2 * D * D].view(2, 1, D, D).copy_(case.initial_state)
    final = both[shift * D :].view(2, 1, D, D)
    before = both.clone()
    out = poisoned(*case.v.shape, **_like(case.v))
    with pytest.raises(ValueError, match="final_state: got a tensor that shares memory with"):
        forward(case.but(initial_state=initial), out=out, final_state=final)
    with pytest.raises(ValueError, match="out: got a tensor that shares memory with q"):
        forward(case, out=case.q)
    assert same_bits(both, before) and bool((cases.bits(out) == -1).all())
