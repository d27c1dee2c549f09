"""The largest calls: more elements than an int counts, a million tokens, as many sequences.

Slow for their memory more than their time. A small version of each runs on the CPU path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import paths
import pytest
import torch
from cases import assert_accurate, forward, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SLOW_DECAY = -0.01
"""As lower bound: half of a state lasts for a hundred tokens, 1e-9 of it or less for 4000."""


@pytest.fixture(params=["automatic", "fused", "segments", "portable_v64"])
def some_path(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """One of each kind, and whichever the plan chooses."""
    name = request.param
    if name == "automatic":
        yield
        return
    if name not in paths.kernel_paths(device):
        pytest.skip("not on this device")
    with paths.forced(name):
        yield


def large_case(
    rng: cases.Random, heads: int, lengths: tuple[int, ...], **changes: Any
) -> cases.Case:
    """As make_case does, without the fp32 tensors in between and without an initial state."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    case = make_case(rng, lengths=(2,), heads=heads, initial_state=None)
    shape = (1, int(bounds[-1]), heads, cases.WIDTH)
    generator = torch.Generator(rng.device).manual_seed(rng.seed)
    for name in cases.TOKEN_INPUTS:
        wanted = shape if name != "beta" else shape[:3]
        x = torch.empty(wanted, dtype=torch.bfloat16, device=rng.device)
        setattr(case, name, x.normal_(generator=generator))
    return case.but(cu_seqlens=bounds.to(rng.device), **changes)


def rows_of(case: cases.Case, begin: int, end: int) -> cases.Case:
    """Tokens of a packed case as a case of their own, from no state."""
    rows = {name: getattr(case, name)[:, begin:end] for name in cases.TOKEN_INPUTS}
    return case.but(**rows, cu_seqlens=None, initial_state=None)


def assert_end_accurate(
    case: cases.Case, out: torch.Tensor, begin: int, end: int, state: torch.Tensor | None = None
) -> None:
    """The last tokens before ``end``, of the sequence that starts at ``begin``.

    The reference starts from nothing so long before them that nothing would be left of a state.
    """
    before, compared = (4000, 2000) if case.device.type == "cuda" else (40, 20)
    if case.lower_bound == SLOW_DECAY:
        before += 2000 if case.device.type == "cuda" else 4000
    first = max(begin, end - before - compared)
    expected, expected_state = cases.reference(rows_of(case, first, end))
    kept = min(compared, end - begin)
    assert_accurate(
        rows_of(case, end - kept, end),
        out[:, end - kept : end],
        state,
        expected=(expected[:, -kept:], expected_state),
    )


@pytest.mark.usefixtures("some_path")
def test_tensors_of_more_than_2_to_the_31_elements(rng: cases.Random) -> None:
    """Many sequences and heads: on `fused` shares of chains, on `segments` whole sequences."""
    on_gpu = rng.device.type == "cuda"
    case = large_case(rng, 96 if on_gpu else 2, ((1000,) * 174 if on_gpu else ()) + (700, 301))
    assert case.q.numel() > 2**31 or not on_gpu
    out, state = forward(case)
    spans = case.spans
    for n in sorted({0, len(spans) // 2, len(spans) - 2, len(spans) - 1}):
        _, begin, end = spans[n]
        assert_accurate(rows_of(case, begin, end), out[:, begin:end], state[n : n + 1])


@pytest.mark.usefixtures("some_path")
def test_a_sequence_of_more_than_2_to_the_31_elements(rng: cases.Random) -> None:
    """On `segments` cut in pieces, on the others a chain from one end to the other."""
    heads, tokens = (16, 2**20 + 1000) if rng.device.type == "cuda" else (2, 500)
    case = large_case(rng, heads, (tokens,))
    assert case.q.numel() > 2**31 or rng.device.type == "cpu"
    out, state = forward(case)
    for end in (tokens // 4, tokens - tokens // 8, tokens):
        assert_end_accurate(case, out, 0, end, state if end == tokens else None)


@pytest.mark.usefixtures("some_path")
def test_a_million_tokens(rng: cases.Random) -> None:
    """Of one head, decaying slowly, which `segments` cuts into as many pieces as it can."""
    tokens = 2**20 if rng.device.type == "cuda" else 6000
    case = large_case(rng, 1, (tokens,), lower_bound=SLOW_DECAY)
    out, state = forward(case)
    for end in (tokens // 3, tokens // 2, tokens):
        assert_end_accurate(case, out, 0, end, state if end == tokens else None)


def test_many_sequences_with_states(rng: cases.Random) -> None:
    """Of a token each. States have more elements than an int counts, too: 9.2 GB in fp32, and as
    much again where they go.
    """
    dtype, count = torch.float32, 300
    if rng.device.type == "cuda":
        count = 140_000
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(rng.device)[0] < 40 << 30:
            dtype = torch.bfloat16
    print(f"states in {dtype}")  # shown with a failure
    case = make_case(rng, lengths=(1,) * count, heads=1, initial_state=None)
    generator = torch.Generator(rng.device).manual_seed(rng.seed)
    given = torch.empty(case.state_shape, dtype=dtype, device=case.device)
    case.initial_state = given.normal_(generator=generator)
    out, state = forward(case, final_state=dtype)
    # In parts: float64 states take twice the memory.
    step = max(1, count // 20)
    for n in range(0, count, step):
        part = rows_of(case, n, n + step)
        part.cu_seqlens = torch.arange(step + 1, device=case.device)
        part.initial_state = case.initial_state[n : n + step]
        results = out[0, n : n + step], state[n : n + step]
        expected = cases.reference(part)
        for x, y in zip(results, (expected[0][0], expected[1]), strict=True):
            assert cases.relative_error(x, y) <= cases.ORDINARY_BOUND, f"from sequence {n} on"
            assert cases.worst_row(x, y) <= 6 * cases.ORDINARY_BOUND, f"from sequence {n} on"
