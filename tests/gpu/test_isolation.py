"""What may not influence what, and what may not be written, by ``flash_kda.fwd``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cases
import pytest
import torch
from cases import Guarded, assert_accurate, forward, make_case, poisoned, same_bits

import flash_kda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("path")]

TOKENS = ("q", "k", "v", "g", "beta")
few_and_many = pytest.mark.parametrize("many", [False, True], ids=["few", "crowd"])


@few_and_many
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_stays_in_its_sequence(rng: cases.Random, bad: float, many: bool) -> None:
    few = {"lengths": (20, 30, 1, 64, 5, 33), "before": 3, "after": 7}
    case = make_case(rng, **(cases.crowd(rng) if many else few))
    expected = forward(case)
    assert_accurate(case, *expected)
    for chosen in cases.some_of(case) if many else range(6):
        spoilt = case.but(**{name: getattr(case, name).clone() for name in TOKENS})
        _, start, stop = case.spans[chosen]
        for name in TOKENS:
            x = getattr(spoilt, name)
            x[:, start:stop] = bad
            x[:, :3] = bad
            x[:, -7:] = bad
        out, state = forward(spoilt)
        cases.assert_others_kept(case, chosen, (out, state), expected)
        assert not torch.isfinite(out[:, start:stop]).any()


@pytest.mark.parametrize("name", [*TOKENS, "initial_state"])
def test_nan_stays_in_its_head_and_batch_row(rng: cases.Random, name: str) -> None:
    case = make_case(rng, batch=3, tokens=50, heads=4)
    expected = forward(case)
    x = getattr(case, name).clone()
    (x[1, 2] if name == "initial_state" else x[1, :, 2]).fill_(math.nan)
    out, state = forward(case.but(**{name: x}))
    keep = torch.ones(3, 4, dtype=torch.bool, device=case.device)
    keep[1, 2] = False
    assert same_bits(out.transpose(1, 2)[keep], expected[0].transpose(1, 2)[keep])
    assert same_bits(state[keep], expected[1][keep])
    assert not torch.isfinite(out[1, :, 2]).all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_tokens_do_not_depend_on_later_ones(rng: cases.Random, packed: bool) -> None:
    shape: dict[str, Any] = {"lengths": (200,), "before": 5} if packed else {"tokens": 205}
    case = make_case(rng, **shape)
    other = make_case(rng, "wide_gate", tokens=205)
    first = 5 if packed else 0
    out, _ = forward(case)
    for cut in (1, 7, 15, 16, 17, 40, 63, 64, 65, 100, 128, 199):
        end = first + cut
        changes = {
            name: torch.cat((getattr(case, name)[:, :end], getattr(other, name)[:, end:]), 1)
            for name in TOKENS
        }
        changed, _ = forward(case.but(**changes))
        assert same_bits(changed[:, first:end], out[:, first:end]), f"before token {cut}"
        assert not same_bits(changed[:, end:], out[:, end:])


def test_batch_rows_do_not_depend_on_each_other(rng: cases.Random) -> None:
    case = make_case(rng, batch=4, tokens=70)
    other = make_case(rng, "no_decay", batch=4, tokens=70)
    out, state = forward(case)
    for name in TOKENS:
        getattr(case, name)[2] = getattr(other, name)[2]
    changed, changed_state = forward(case)
    keep = [0, 1, 3]
    assert same_bits(changed[keep], out[keep]) and same_bits(changed_state[keep], state[keep])
    assert not same_bits(changed[2], out[2])


def test_rows_outside_cu_seqlens_are_left_alone(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(0, 21, 0, 40), before=13, after=19)
    out, _ = forward(case)
    untouched = poisoned(1, 19, *out.shape[2:], dtype=out.dtype, device=out.device)
    assert same_bits(out[:, :13], untouched[:, :13])
    assert same_bits(out[:, -19:], untouched)
    assert torch.isfinite(out[:, 13:-19]).all()


@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1},
        {"tokens": 33},
        {"batch": 3, "tokens": 65},
        {"lengths": (5, 0, 100, 17), "after": 3},
        {"lengths": (1,) * 50},
        {"lengths": (0, 0)},
        {"lengths": (31, 0, 17, 1, 40, 16) * 4},
    ],
    ids=["one_token", "one_sequence", "batch", "packed", "many_sequences", "empty", "crowd"],
)
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16])
def test_nothing_beside_the_results_is_written(
    rng: cases.Random, shape: dict, state_type: torch.dtype
) -> None:
    case = make_case(rng, heads=3, **shape)
    before = {name: x.clone() for name, x in case.tensors().items()}
    out = Guarded(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    state = Guarded(*case.state_shape, dtype=state_type, device=case.device)
    forward(case, out=out.tensor, final_state=state.tensor)
    assert_accurate(case, out.tensor, state.tensor)
    out.assert_margins_untouched()
    state.assert_margins_untouched()
    for name, x in case.tensors().items():
        assert same_bits(x, before[name]), f"{name} was changed"


HOSTILE = {
    "decreasing": (0, 60, 30, 80, 100),
    "backwards": (100, 75, 50, 25, 0),
    "negative": (-50, 10, 20, 30, 40),
    "all_negative": (-500, -400, -300, -200, -100),
    "too_far": (0, 50, 100, 150, 2000),
    "far_too_far": (0, 2**31 - 1, 5, -(2**31), 100),
    "overlapping": (0, 100, 0, 100, 0),
}


def check_hostile(case: cases.Case, bounds: Sequence[int], dtype: torch.dtype) -> None:
    """No promise about the values written, but nothing crashes and nothing else is written. The
    workspace may serve the next call.
    """
    hostile = case.but(cu_seqlens=torch.tensor(bounds, dtype=dtype, device=case.device))
    out = Guarded(*case.v.shape, dtype=torch.bfloat16, device=case.device, margin=1 << 24)
    state = Guarded(*case.state_shape, dtype=torch.float32, device=case.device, margin=1 << 24)
    size = flash_kda.workspace_size(case.q.shape[1], case.q.shape[2], case.state_shape[0])
    workspace = Guarded(size, dtype=torch.uint8, device=case.device, margin=1 << 24)
    for cu_seqlens in (hostile.cu_seqlens, case.cu_seqlens):
        again = case.but(cu_seqlens=cu_seqlens)
        forward(again, out=out.tensor, final_state=state.tensor, workspace=workspace.tensor)
        torch.cuda.synchronize()
        for guarded in (out, state, workspace):
            guarded.assert_margins_untouched()
    assert_accurate(case, out.tensor, state.tensor)


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [3, 40])
@pytest.mark.parametrize("name", [*HOSTILE, "beyond_int32"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hostile_cu_seqlens(rng: cases.Random, name: str, dtype: torch.dtype, heads: int) -> None:
    """With 40 heads `fused` shares chains out, by these values."""
    if name == "beyond_int32" and dtype == torch.int32:
        pytest.skip("does not fit in int32")
    values = HOSTILE.get(name, (0, 2**40, -(2**40), 2**62, 7))
    check_hostile(make_case(rng, lengths=(40, 10, 30, 20), heads=heads), values, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_cu_seqlens_of_a_crowd(rng: cases.Random, dtype: torch.dtype) -> None:
    """Rising and falling, inside the row and far outside."""
    case = make_case(rng, **cases.crowd(rng))
    count, tokens = case.cu_seqlens.numel(), case.q.shape[1]
    for low, high in ((0, tokens + 1), (-tokens, 2 * tokens), (-(2**31), 2**31 - 1)):
        check_hostile(case, rng.integers(low, high, count), dtype)


@pytest.mark.cuda
def test_values_are_read_on_request(rng: cases.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_CHECK", "1")
    case = make_case(rng, lengths=(40, 10, 30, 20), heads=3)
    expected = forward(case)
    assert_accurate(case, *expected)
    bounds = torch.tensor(HOSTILE["decreasing"], device=case.device)
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] = 30; needs at least 60"):
        forward(case.but(cu_seqlens=bounds), out=out)
    assert bool((cases.bits(out) == -1).all())
    state = torch.empty_like(case.initial_state)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.warns(UserWarning, match="FLASH_KDA_CHECK: .* is not checked"),
        torch.cuda.graph(graph),
    ):
        forward(case, out=out, final_state=state)
    graph.replay()
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])
