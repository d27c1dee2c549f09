"""The definition against a plain loop, and the chunkwise form against the definition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import make_case, relative_error, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_kda.reference import chunkwise_kda, recurrent_kda

Form = Callable[..., tuple[Tensor, Tensor]]

EXACT = 1e-10
FLOAT32_BOUND = 1e-5


def both(case: cases.Case, **options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Results of the two forms in float64."""
    arguments = vars(case)
    return recurrent_kda(**arguments), chunkwise_kda(**arguments, dtype=torch.float64, **options)


def assert_agree(case: cases.Case, **options: Any) -> None:
    (out, state), (chunk_out, chunk_state) = both(case, **options)
    assert relative_error(chunk_out, out) <= EXACT
    assert relative_error(chunk_state, state) <= EXACT


def plain_loop(case: cases.Case) -> tuple[list, list]:
    """The definition in Python floats: lists out ``[B][T][H][V]``, states ``[N][H][V][K]``."""
    q, k, v, g, beta = (x.double().tolist() for x in (case.q, case.k, case.v, case.g, case.beta))
    batch, tokens, heads, width = case.q.shape
    values = case.v.shape[-1]
    slope = [math.exp(a) for a in case.A_log.tolist()] if case.A_log is not None else [1.0] * heads
    shift = torch.zeros(heads, width) if case.dt_bias is None else case.dt_bias
    bias = shift.double().reshape(heads, width).tolist()
    out = [[[[0.0] * values for _ in range(heads)] for _ in range(tokens)] for _ in range(batch)]
    start = torch.zeros(case.state_shape, dtype=torch.float64)
    if case.initial_state is not None:
        start += case.initial_state
    states = start.tolist()

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def unit(x: list[float]) -> list[float]:
        return [y / math.sqrt(sum(z * z for z in x) + 1e-6) for y in x]

    for n, (b, first, stop) in enumerate(case.spans):
        for h in range(heads):
            s = states[n][h]
            for t in range(first, stop):
                query, key = unit(q[b][t][h]), unit(k[b][t][h])
                for j in range(width):
                    gate = sigmoid(slope[h] * (g[b][t][h][j] + bias[h][j]))
                    for i in range(values):
                        s[i][j] *= math.exp(case.lower_bound * gate)
                for i in range(values):
                    error = v[b][t][h][i] - sum(s[i][j] * key[j] for j in range(width))
                    for j in range(width):
                        s[i][j] += sigmoid(beta[b][t][h]) * error * key[j]
                    out[b][t][h][i] = case.scale * sum(s[i][j] * query[j] for j in range(width))
    return out, states


@pytest.mark.parametrize("gates", ["both", "no_A_log", "no_dt_bias", "neither"])
@pytest.mark.parametrize("packed", [False, True])
def test_definition_matches_plain_loop(rng: cases.Random, gates: str, packed: bool) -> None:
    shape: dict[str, Any] = {"lengths": (3, 0, 5, 1)} if packed else {"batch": 2, "tokens": 4}
    case = make_case(rng, heads=2, width=3, before=1, after=2, **shape)
    if gates in ("no_A_log", "neither"):
        case.A_log = None
    if gates in ("no_dt_bias", "neither"):
        case.dt_bias = None
    out, state = recurrent_kda(**vars(case))
    plain_out, plain_state = plain_loop(case)
    assert relative_error(out, torch.tensor(plain_out, dtype=torch.float64)) <= 1e-13
    assert relative_error(state, torch.tensor(plain_state, dtype=torch.float64)) <= 1e-13


@pytest.mark.parametrize("kind", cases.KINDS)
def test_chunkwise_agrees_on_every_kind_of_input(rng: cases.Random, kind: str) -> None:
    assert_agree(make_case(rng, kind, batch=2, tokens=83))
    assert_agree(make_case(rng, kind, lengths=(20, 0, 16, 47), initial_state=None))


@pytest.mark.parametrize("tokens", [*range(0, 35), 48, 63, 64, 65])
def test_chunkwise_agrees_on_tails(rng: cases.Random, tokens: int) -> None:
    assert_agree(make_case(rng, tokens=tokens, heads=1, width=16))


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 64])
def test_chunkwise_agrees_for_every_chunk_size(rng: cases.Random, chunk_size: int) -> None:
    case = make_case(rng, "wide_gate", lengths=(70, 33, 1), width=16)
    assert_agree(case, chunk_size=chunk_size)


@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16, torch.float64])
def test_chunkwise_agrees_for_every_state_type(
    rng: cases.Random, state: torch.dtype | None
) -> None:
    assert_agree(make_case(rng, lengths=(17, 40), width=16, initial_state=state))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 40), max_size=6),
    edges=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 4, 16]),
    kind=st.sampled_from(["ordinary", "no_decay", "full_decay", "wide_gate", "bound_zero"]),
    state=st.sampled_from([None, torch.float32]),
)
def test_chunkwise_agrees_on_any_packing(
    seed: int,
    lengths: list[int],
    edges: tuple[int, int],
    heads: int,
    width: int,
    kind: str,
    state: torch.dtype | None,
) -> None:
    assert_agree(
        make_case(
            cases.Random(f"packing {seed}"),
            kind,
            lengths=lengths,
            before=edges[0],
            after=edges[1],
            heads=heads,
            width=width,
            initial_state=state,
        )
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 3),
    tokens=st.integers(0, 40),
    heads=st.integers(0, 3),
)
def test_any_dense_shape(seed: int, batch: int, tokens: int, heads: int) -> None:
    case = make_case(
        cases.Random(f"shape {seed}"), batch=batch, tokens=tokens, heads=heads, width=8
    )
    (out, state), (chunk_out, chunk_state) = both(case)
    for x, y in ((out, chunk_out), (state, chunk_state)):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_values_may_be_wider_than_keys(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(21, 5), width=8)
    case.v = rng.normal(1, 26, 2, 12)
    case.initial_state = rng.normal(2, 2, 12, 8)
    assert_agree(case)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_float32_chunkwise_is_accurate(rng: cases.Random, kind: str) -> None:
    case = make_case(rng, kind, batch=2, tokens=530)
    out, state = recurrent_kda(**vars(case))
    chunk_out, chunk_state = chunkwise_kda(**vars(case))
    assert chunk_out.dtype == chunk_state.dtype == torch.float32
    # Repeated keys without decay amplify the rounding of float32 itself.
    bound = FLOAT32_BOUND * (10 if "repeated" in kind else 1)
    assert relative_error(chunk_out, out) <= bound
    assert relative_error(chunk_state, state) <= bound


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
def test_norms_of_extreme_vectors(rng: cases.Random, form: Form) -> None:
    case = make_case(rng, tokens=20, initial_state=None)
    largest = torch.finfo(torch.bfloat16).max
    case.q = torch.full_like(case.q, largest)
    case.k[:, ::2] = -largest
    case.k[:, 1::2] = 0
    out, state = form(**vars(case))
    assert torch.isfinite(out).all() and torch.isfinite(state).all()
    small = case.but(q=torch.ones_like(case.q), k=case.k / largest)
    small_out, small_state = form(**vars(small))
    assert relative_error(out, small_out.double()) <= 1e-5
    assert relative_error(state, small_state.double()) <= 1e-5


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_in_their_sequence_and_head(
    rng: cases.Random, form: Form, bad: float
) -> None:
    case = make_case(rng, lengths=(19, 30, 5), before=2, after=3, width=16)
    clean_out, clean_state = form(**vars(case))
    for name in ("q", "k", "v", "g", "beta"):
        spoilt = getattr(case, name).clone()
        spoilt[:, :2] = bad
        spoilt[:, 30, 1] = bad  # in the second sequence, head 1
        spoilt[:, 56:] = bad
        out, state = form(**vars(case.but(**{name: spoilt})))
        assert same_bits(out[:, :21], clean_out[:, :21])
        assert same_bits(out[:, 51:], clean_out[:, 51:])
        assert same_bits(out[:, :, 0], clean_out[:, :, 0])
        assert same_bits(state[::2], clean_state[::2])
        assert same_bits(state[:, 0], clean_state[:, 0])


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
def test_tokens_do_not_depend_on_later_ones(rng: cases.Random, form: Form) -> None:
    case = make_case(rng, tokens=90, width=32)
    other = make_case(rng, "wide_gate", tokens=90, width=32)
    out, _ = form(**vars(case))
    for cut in (0, 1, 7, 15, 16, 17, 40, 64, 89):
        changes = {
            name: torch.cat((getattr(case, name)[:, :cut], getattr(other, name)[:, cut:]), 1)
            for name in ("q", "k", "v", "g", "beta")
        }
        changed, _ = form(**vars(case.but(**changes)))
        assert same_bits(changed[:, :cut], out[:, :cut])
        assert not same_bits(changed[:, cut:], out[:, cut:])


def test_packed_sequences_equal_separate_ones_bit_for_bit(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(33, 16, 0, 70, 1))
    out, state = chunkwise_kda(**vars(case))
    for n, (_, start, stop) in enumerate(case.spans):
        rows = {name: getattr(case, name)[:, start:stop] for name in ("q", "k", "v", "g", "beta")}
        alone = case.but(**rows, cu_seqlens=None, initial_state=case.initial_state[n : n + 1])
        alone_out, alone_state = chunkwise_kda(**vars(alone))
        assert same_bits(alone_out, out[:, start:stop])
        assert same_bits(alone_state[0], state[n])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neighbours_change_no_bit(rng: cases.Random, threads: int) -> None:
    """Whatever shares a product with a sequence: other lengths, more of them, other values."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lengths = [1, 16, 5, 33, 17, 40, 1, 16, 0, 700, 3] * 7
        case = make_case(rng, lengths=lengths, heads=3)
        out, state = chunkwise_kda(**vars(case))
        other = make_case(rng, "wide_gate", lengths=lengths, heads=3)
        for n in (0, 3, 5, 9, 30, 42, 76):
            _, start, stop = case.spans[n]
            rows = {x: getattr(case, x)[:, start:stop] for x in ("q", "k", "v", "g", "beta")}
            kept = case.but(**rows, cu_seqlens=None, initial_state=case.initial_state[n : n + 1])
            alone, alone_state = chunkwise_kda(**vars(kept))
            assert same_bits(alone, out[:, start:stop])
            assert same_bits(alone_state[0], state[n])
            changes = {name: getattr(other, name).clone() for name in rows}
            for name, x in changes.items():
                x[:, :start] = math.nan
                x[:, start:stop] = rows[name]
            changed, changed_state = chunkwise_kda(**vars(case.but(**changes)))
            assert same_bits(changed[:, start:stop], out[:, start:stop])
            assert same_bits(changed_state[n], state[n])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(rng: cases.Random, form: Form, dtype: torch.dtype) -> None:
    case = make_case(rng, tokens=40)
    plain = form(**vars(case), dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inside = form(**vars(case), dtype=torch.float32)
    for x, y in zip(inside, plain, strict=True):
        assert same_bits(x, y)


def test_state_carries_a_sequence_on(rng: cases.Random) -> None:
    case = make_case(rng, tokens=100, width=16)
    out, state = recurrent_kda(**vars(case))
    for form in (recurrent_kda, chunkwise_kda):
        carried, parts = case.initial_state, []
        for rows in (slice(0, 37), slice(37, 64), slice(64, 100)):
            piece = {x: getattr(case, x)[:, rows] for x in ("q", "k", "v", "g", "beta")}
            part, carried = form(
                **vars(case.but(**piece, initial_state=carried)), dtype=torch.float64
            )
            parts.append(part)
        assert relative_error(torch.cat(parts, 1), out) <= EXACT
        assert relative_error(carried, state) <= EXACT


def test_blocks_of_bounded_memory_change_nothing(
    rng: cases.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(rng, lengths=(100, 61, 0, 3), width=16)
    whole = recurrent_kda(**vars(case)), chunkwise_kda(**vars(case))
    monkeypatch.setattr("flash_kda.reference._BLOCK_ELEMENTS", 32 * 2 * 16)
    pieces = recurrent_kda(**vars(case)), chunkwise_kda(**vars(case))
    for x, y in zip(whole, pieces, strict=True):
        assert relative_error(y[0], x[0]) <= 1e-6
        assert relative_error(y[1], x[1]) <= 1e-6


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
def test_inputs_are_left_alone_and_results_are_new(rng: cases.Random, form: Form) -> None:
    case = make_case(rng, lengths=(5, 0, 20), width=16)
    before = {name: x.clone() for name, x in case.tensors().items()}
    out, state = form(**vars(case))
    for name, x in case.tensors().items():
        assert same_bits(x, before[name]), name
        assert x.untyped_storage().data_ptr() not in (
            out.untyped_storage().data_ptr(),
            state.untyped_storage().data_ptr(),
        )
    assert same_bits(state[1], case.initial_state[1].to(state.dtype))


@pytest.mark.parametrize("form", [recurrent_kda, chunkwise_kda])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"cu_seqlens": torch.tensor([0, 9, 8])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([-1, 9])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 11])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([[0, 10]])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4.5, 10])}, "cu_seqlens must hold integers"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0], dtype=torch.float64)}, "got torch.float64"),
        ({"cu_seqlens": torch.tensor([False, True])}, "got torch.bool"),
        ({"cu_seqlens": torch.tensor([0j, 10])}, "got torch.complex64"),
        ({"lower_bound": 0.5}, "lower_bound"),
        ({"lower_bound": math.nan}, "lower_bound"),
        ({"lower_bound": -math.inf}, "lower_bound"),
        ({"initial_state": torch.zeros(2, 2, 8, 8)}, "initial_state"),
        ({"k": torch.zeros(1, 10, 2, 9)}, "k "),
        ({"beta": torch.zeros(1, 10)}, "beta"),
        ({"q": torch.zeros(10, 2, 8)}, "q "),
    ],
)
def test_bad_arguments_are_named(rng: cases.Random, form: Form, change: dict, name: str) -> None:
    case = make_case(rng, tokens=10, width=8, initial_state=None)
    with pytest.raises(ValueError, match=name):
        form(**vars(case.but(**change)))


def test_bad_types_and_chunks_are_named(rng: cases.Random) -> None:
    case = make_case(rng, tokens=10, width=8)
    with pytest.raises(ValueError, match="dtype"):
        recurrent_kda(**vars(case), dtype=torch.bfloat16)
    for size in (0, 17):
        with pytest.raises(ValueError, match="chunk_size"):
            chunkwise_kda(**vars(case), chunk_size=size)
    batch = make_case(rng, batch=2, tokens=5, width=8).but(cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunkwise_kda(**vars(batch))


def test_chunkwise_is_fast(rng: cases.Random) -> None:
    case = make_case(rng, tokens=2048, heads=8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        chunkwise_kda(**vars(case))
        seconds.append(time.perf_counter() - start)
    # About 0.2 s on two idle cores; the rest is room for busy machines.
    assert min(seconds) < 5, f"{min(seconds):.1f} s for 2048 tokens of 8 heads"
