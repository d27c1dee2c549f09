"""overlap.py against listing every byte."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from flash_kda import overlap


def covered(geometry: overlap.Geometry, base: int = 0) -> list[int]:
    """Every byte of every element, with repetitions."""
    itemsize, sizes, strides = geometry
    found = []
    for index in itertools.product(*map(range, sizes)):
        first = base + itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
        found += range(first, first + itemsize)
    return found


def random_geometry(rng: random.Random) -> overlap.Geometry:
    rank, largest = rng.randint(1, 4), rng.choice((6, 20, 60))
    sizes = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(rank))
    return rng.choice((1, 2, 4)), sizes, tuple(rng.randint(0, largest) for _ in range(rank))


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_listing(seed: int) -> None:
    rng = random.Random(seed)
    answers = set()
    for _ in range(1500):
        first, second = random_geometry(rng), random_geometry(rng)
        mine = covered(first)
        assert overlap.extent_bytes(first) == max(mine, default=-1) + 1, first
        assert overlap.overlaps_itself(first) == (len(set(mine)) < len(mine)), first
        ends = overlap.extent_bytes(first), overlap.extent_bytes(second)
        distance = rng.randint(-ends[1] - 2, ends[0] + 2)
        expected = bool(set(mine) & set(covered(second, distance)))
        assert overlap.share_memory(first, second, distance) == expected, (first, second, distance)
        answers.add((expected, len(set(mine)) < len(mine)))
    assert len(answers) == 4


def test_large_tensors_are_quick() -> None:
    tokens, heads = 200_000, 96
    sizes = (1, tokens, heads, 128)
    parts = (2, sizes, (tokens * heads * 640, heads * 640, 640, 1))
    rows = (2, sizes, (tokens * heads * 640, heads * 640, 128, 1))
    skewed = (2, sizes, (tokens * heads * 648, heads * 648, 648, 1))
    begin = time.perf_counter()
    assert not overlap.share_memory(parts, parts, 128 * 2)
    assert overlap.share_memory(parts, parts, 120 * 2)
    assert not overlap.share_memory(rows, rows, heads * 128 * 2)
    assert overlap.share_memory(rows, rows, heads * 128 * 2 - 2)
    assert overlap.share_memory(parts, rows, 128 * 2)
    assert overlap.share_memory(parts, skewed, 128 * 2)
    assert not overlap.overlaps_itself(parts)
    assert overlap.overlaps_itself((2, sizes, (0, heads * 128 - 8, 128, 1)))
    assert time.perf_counter() - begin < 1.0


def test_gives_up_on_the_safe_side() -> None:
    # Coefficients without structure and many values each: nobody's tensors, but not a hang.
    sizes = (997, 991, 983, 977)
    first = (8, sizes, (10**9 + 7, 10**9 + 9, 10**9 + 21, 10**9 + 33))
    second = (8, sizes, (10**9 + 87, 10**9 + 93, 10**9 + 97, 10**9 + 103))
    begin = time.perf_counter()
    assert overlap.share_memory(first, second, 12345)
    assert time.perf_counter() - begin < 10.0
