"""State pools, checkpoints and ready-made betas, on a GPU or the CPU path."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import (
    assert_accurate,
    forward,
    forward_with_checkpoints,
    make_case,
    poisoned,
    reference,
    relative_error,
    same_bits,
)

import flash_kda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("path")]

LENGTHS = (33, 0, 64, 100, 1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initial", [None, torch.float32])
def test_checkpoints_of_packed_sequences(
    rng: cases.Random, dtype: torch.dtype, initial: torch.dtype | None
) -> None:
    case = make_case(rng, lengths=LENGTHS, heads=3, before=5, after=7, initial_state=initial)
    wanted = [(0, 16), (0, 32), (0, 33), (2, 16), (2, 64), (3, 48), (3, 96), (3, 100), (5, 16)]
    offsets = [case.spans[n][1] + tokens for n, tokens in wanted]
    _, _, states = forward_with_checkpoints(case, offsets, dtype)
    for (n, tokens), state in zip(wanted, states, strict=True):
        error = relative_error(state, cases.state_after(case, n, tokens))
        assert error <= 2 * cases.ORDINARY_BOUND, f"sequence {n} after {tokens} tokens: {error:.1e}"


def test_checkpoints_of_batch_rows(rng: cases.Random) -> None:
    case = make_case(rng, batch=3, tokens=70, heads=2)
    wanted = [(0, 64), (1, 16), (1, 64), (2, 48), (2, 70)]
    offsets = [70 * row + tokens for row, tokens in wanted]
    _, _, states = forward_with_checkpoints(case, offsets)
    for (row, tokens), state in zip(wanted, states, strict=True):
        assert relative_error(state, cases.state_after(case, row, tokens)) <= cases.ORDINARY_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initial", [None, torch.float32])
def test_checkpoints_of_a_crowd(
    rng: cases.Random, dtype: torch.dtype, initial: torch.dtype | None
) -> None:
    """At all places of each third sequence that may be named: right, and nothing else changes."""
    case = make_case(rng, **cases.crowd(rng), initial_state=initial)
    expected = forward(case)
    wanted = [
        (n, tokens)
        for n, (_, begin, end) in list(enumerate(case.spans))[::3]
        for tokens in sorted({*range(16, end - begin + 1, 16), end - begin} - {0})
    ]
    spans = case.spans
    offsets = [spans[n][1] + tokens for n, tokens in wanted]
    out, final, states = forward_with_checkpoints(case, offsets, dtype)
    assert same_bits(out, expected[0]) and same_bits(final, expected[1])
    for (n, tokens), state in zip(wanted, states, strict=True):
        if tokens == spans[n][2] - spans[n][1]:
            assert same_bits(state, final[n].to(dtype)), f"sequence {n} at its end"
    # One packed call whose sequences are the beginnings.
    rows = [torch.arange(spans[n][1], spans[n][1] + tokens) for n, tokens in wanted]
    index = torch.cat(rows).to(case.device)
    begun = case.but(**{name: getattr(case, name)[:, index] for name in cases.TOKEN_INPUTS})
    begun.cu_seqlens = torch.tensor([0, *map(len, rows)]).cumsum(0).to(case.device)
    if initial is not None:
        begun.initial_state = case.initial_state[[n for n, _ in wanted]]
    bound = 2 * cases.ORDINARY_BOUND
    for at, (state, right) in enumerate(zip(states, reference(begun)[1], strict=True)):
        error = relative_error(state, right)
        assert error <= bound, "sequence {} after {} tokens: {:.1e}".format(*wanted[at], error)


def test_checkpoints_change_nothing_else(rng: cases.Random) -> None:
    case = make_case(rng, tokens=400, heads=4)
    expected = forward(case)
    offsets = torch.arange(64, 401, 64, device=case.device, dtype=torch.int32)
    out, final, states = forward_with_checkpoints(case, offsets)
    if case.device.type == "cuda":
        assert same_bits(out, expected[0])
        assert same_bits(final, expected[1])
    assert_accurate(case, out, final)
    assert torch.isfinite(states).all()


@pytest.mark.cuda
def test_offsets_that_name_nothing_are_passed_over(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(40, 50), heads=2, before=3, after=9)
    offsets = [-5, 0, 3, 3 + 7, 3 + 16, 3 + 17, 43 + 32, 43 + 40, 93, 95, 2**31 - 1]
    _, _, states = forward_with_checkpoints(case, offsets)
    named = {4: (0, 16), 6: (1, 32), 8: (1, 50)}
    for index, state in enumerate(states):
        if index in named:
            assert relative_error(state, cases.state_after(case, *named[index])) <= 6e-3
        else:
            assert torch.isnan(state).all(), f"offset {offsets[index]} was written"


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("many", [False, True], ids=["few", "crowd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool(rng: cases.Random, dtype: torch.dtype, many: bool, aligned: bool) -> None:
    """Slots are read and written in place; -1 starts from zeros; the others keep their bits."""
    shape = cases.crowd(rng) if many else {"lengths": LENGTHS, "heads": 3}
    case = make_case(rng, **shape, initial_state=None)
    pool, before, states = cases.call_with_pool(case, rng, dtype, aligned)
    for slot, state in states.items():
        error = relative_error(pool[slot], state)
        assert error <= cases.ORDINARY_BOUND, f"slot {slot}: {error:.1e}"
    untouched = [slot for slot in range(pool.shape[0]) if slot not in states]
    assert same_bits(pool[untouched], before[untouched])


def test_pools_of_different_kinds(rng: cases.Random) -> None:
    """A strided bf16 pool to read, another fp32 pool to write, int64 indices with a stride."""
    case = make_case(rng, batch=2, tokens=37, heads=2, initial_state=None)
    wide = rng.normal(4, 5, 128, 128, dtype=torch.bfloat16)
    initial, final = wide[:, 1:3], poisoned(6, 2, 128, 128, dtype=torch.float32, device=case.device)
    slots = torch.tensor([[3, 9], [0, 9]], device=case.device)[:, 0]
    arguments = {**vars(case), "initial_state": initial}
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    flash_kda.fwd(**arguments, out=out, final_state=final, state_indices=slots)
    expected = reference(case.but(initial_state=initial[slots]))
    assert_accurate(case, out, final[slots], expected=expected)
    assert torch.isnan(final[[1, 2, 4, 5]]).all()


@pytest.mark.cuda
def test_indices_outside_the_pool_act_as_none(rng: cases.Random) -> None:
    case = make_case(rng, batch=4, tokens=20, heads=2, initial_state=None)
    pool = cases.Guarded(3, 2, 128, 128, dtype=torch.float32, device=case.device)
    pool.tensor.normal_()
    before = pool.tensor.clone()
    slots = torch.tensor([3, -2, 2**31 - 1, -(2**31)], dtype=torch.int32, device=case.device)
    arguments = {**vars(case), "initial_state": pool.tensor}
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    flash_kda.fwd(**arguments, out=out, final_state=pool.tensor, state_indices=slots)
    assert_accurate(case, out, None)
    assert same_bits(pool.tensor, before)
    pool.assert_margins_untouched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beta_that_is_a_probability(rng: cases.Random, dtype: torch.dtype) -> None:
    case = make_case(rng, batch=2, tokens=50, heads=3)
    probability = torch.sigmoid(case.beta.double()).to(dtype)
    logits = torch.logit(probability.double())
    expected = reference(case.but(beta=logits))
    arguments = {**vars(case), "beta": probability}
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    final = poisoned(*case.state_shape, dtype=torch.float32, device=case.device)
    flash_kda.fwd(**arguments, out=out, final_state=final, beta_is_logits=False)
    assert_accurate(case, out, final, expected=expected)


def test_a_prompt_streamed_through_a_pool(rng: cases.Random) -> None:
    """The worked example of docs/serving.md: pieces of a prompt equal the one-shot result."""
    case = make_case(rng, tokens=300, heads=2, initial_state=None)
    pool = torch.zeros(4, 2, 128, 128, device=case.device)
    slot = torch.tensor([2], dtype=torch.int32, device=case.device)
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    for begin, end in ((0, 128), (128, 131), (131, 300)):
        piece = {name: getattr(case, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        flash_kda.fwd(
            **piece,
            scale=case.scale,
            out=out[:, begin:end],
            A_log=case.A_log,
            dt_bias=case.dt_bias,
            lower_bound=case.lower_bound,
            initial_state=pool,
            final_state=pool,
            state_indices=slot,
        )
    assert_accurate(case, out, pool[2:3])
    assert not pool[[0, 1, 3]].any()
