"""Long sequences, on every kernel path; the CPU path gets shorter ones.

The float64 results, which take longest, serve all paths of a test.
"""

from __future__ import annotations

from collections.abc import Iterator

import cases
import paths
import pytest
import torch
from cases import KINDS, assert_accurate, forward, make_case

pytestmark = pytest.mark.gpu


def each_path(device: torch.device) -> Iterator[None]:
    """Once for every path, which calls then take; first for the automatic choice."""
    for name in (None, *paths.kernel_paths(device)):
        print(f"path: {name or 'automatic'}")  # shown with a failure
        with paths.forced(name):
            yield


def check(case: cases.Case, **bounds: float) -> None:
    expected = cases.reference(case)
    for _ in each_path(case.device):
        assert_accurate(case, *forward(case), expected=expected, **bounds)


def test_a_long_sequence_may_be_cut_at_tile_edges(rng: cases.Random) -> None:
    tokens = 4096 if rng.device.type == "cuda" else 640
    case = make_case(rng, tokens=tokens)
    expected = cases.reference(case)
    for _ in each_path(rng.device):
        for cut in (16, 64, 128, 512, tokens - 128, tokens - 16):
            for at in (cut - 1, cut, cut + 1):
                first, middle = forward(case.part(0, 0, at))
                second, last = forward(case.part(0, at, tokens, initial_state=middle))
                assert_accurate(case, torch.cat((first, second), 1), last, expected=expected)


@pytest.mark.parametrize("kind", ["repeated_keys", "repeated_keys_weak_decay"])
def test_one_token_repeated(rng: cases.Random, kind: str) -> None:
    """The hardest systems of every chunk, one after the other, do not add their errors up."""
    tokens = 16384 if rng.device.type == "cuda" else 700
    check(make_case(rng, kind, tokens=tokens), **KINDS[kind].bounds)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.01, 0.0])
def test_saturated_gates_over_many_tokens(rng: cases.Random, lower_bound: float) -> None:
    """Three sequences: nothing fades, everything does, each channel of each token does or not."""
    tokens = 65536 if rng.device.type == "cuda" else 600
    case = make_case(rng, batch=3, tokens=tokens, heads=1).but(lower_bound=lower_bound)
    case.g = case.g.sign()
    case.g[0], case.g[1] = -1, 1
    case.g = 30 * case.g
    check(case)


def test_long_sequences_of_several_heads(rng: cases.Random) -> None:
    tokens = 12000 if rng.device.type == "cuda" else 300
    check(make_case(rng, lengths=(tokens, tokens // 3, 1, 0, tokens // 2), heads=5, before=3))
