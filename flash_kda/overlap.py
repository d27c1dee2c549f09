"""Exact tests of whether strided tensors share memory. Pure integer arithmetic; no torch.

Two views of one buffer may interleave without sharing an element, as the parts of a packed
projection do, so comparing address ranges is not enough to refuse a call. The question "do two
elements coincide" is a bounded linear equation in the index variables; for the strides of real
tensors it collapses to one or two variables, which are solved in closed form.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Bytes per element, sizes, strides in elements (none negative)."""

_Term = tuple[int, int, int]
"""A coefficient (positive) and the least and greatest value of its integer variable."""

# Only strides built to be awkward come near this many steps. They are then treated as sharing:
# refusing a call is safe, overwriting an input is not.
_STEP_LIMIT = 20_000


class _TooIrregular(Exception):
    """The search passed its step limit."""


def extent_bytes(geometry: Geometry) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 if it has no elements."""
    itemsize, sizes, strides = geometry
    last = 0
    for size, stride in zip(sizes, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return (last + 1) * itemsize


@lru_cache(maxsize=1024)
def overlaps_itself(geometry: Geometry) -> bool:
    """Whether two different indices of a tensor name the same element."""
    _, sizes, strides = geometry
    if 0 in sizes:
        return False
    dims = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1)
    reach = 0
    nested = True
    for stride, size in dims:
        nested = nested and stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    if dims[0][0] == 0:
        return True
    # Some non-zero difference of indices must cancel; take its first non-zero entry as positive.
    for first, (stride, size) in enumerate(dims):
        terms = [(stride, 1, size - 1)]
        terms += [(other, 1 - count, count - 1) for other, count in dims[first + 1 :]]
        if _exists(terms, 0, 0):
            return True
    return False


@lru_cache(maxsize=1024)
def share_memory(first: Geometry, second: Geometry, distance: int) -> bool:
    """Whether any element of one tensor shares a byte with any element of another.

    Args:
        first, second: their geometries.
        distance: address of the second's first element minus that of the first's, in bytes.
    """
    if 0 in first[1] or 0 in second[1]:
        return False
    run_a, dims_a = _lattice(first)
    run_b, dims_b = _lattice(second)
    terms = [(stride, 1 - size, 0) for stride, size in dims_a]
    terms += [(stride, 0, size - 1) for stride, size in dims_b]
    return _exists(terms, 1 - run_b - distance, run_a - 1 - distance)


def _lattice(geometry: Geometry) -> tuple[int, list[tuple[int, int]]]:
    """The same set of bytes as runs of a length, repeated with (stride, count) in bytes."""
    itemsize, sizes, strides = geometry
    run = itemsize
    dims: list[tuple[int, int]] = []
    pairs = zip(strides, sizes, strict=True)
    for stride, size in sorted((s * itemsize, n) for s, n in pairs if n > 1 and s):
        if not dims and stride <= run:
            run += stride * (size - 1)
        else:
            dims.append((stride, size))
    return run, dims


def _exists(terms: list[_Term], low: int, high: int) -> bool:
    """Whether a sum of coefficient times variable lands in [low, high]; assumes so when stuck."""
    try:
        return _search(_merge(terms), low, high, [_STEP_LIMIT])
    except _TooIrregular:
        return True


def _merge(terms: list[_Term]) -> list[_Term]:
    """Fewer terms with the same set of sums, smallest coefficient first."""
    merged: list[_Term] = []
    for coefficient, least, greatest in sorted(terms):
        if merged:
            small, low, high = merged[-1]
            factor, rest = divmod(coefficient, small)
            # Steps of factor leave no gap when the finer variable spans at least that many values.
            if rest == 0 and factor <= high - low + 1:
                merged[-1] = (small, low + factor * least, high + factor * greatest)
                continue
        merged.append((coefficient, least, greatest))
    return merged


def _search(terms: list[_Term], low: int, high: int, steps: list[int]) -> bool:
    steps[0] -= 1
    if steps[0] < 0:
        raise _TooIrregular
    least = sum(c * lo for c, lo, _ in terms)
    greatest = sum(c * hi for c, _, hi in terms)
    if low > high or greatest < low or least > high:
        return False
    if not terms:
        return True
    step = gcd(*(c for c, _, _ in terms))
    if high // step * step < low:
        return False
    narrowed = []
    for c, lo, hi in terms:
        lo_needed = -((greatest - c * hi - low) // c)
        hi_needed = (high - least + c * lo) // c
        narrowed.append((c, max(lo, lo_needed), min(hi, hi_needed)))
    if any(lo > hi for _, lo, hi in narrowed):
        return False
    if len(terms) == 1:
        return True
    if len(terms) == 2:
        return _two(narrowed[0], narrowed[1], low, high)
    # Try every value of the variable with the fewest, usually one or two.
    narrowed.sort(key=lambda term: term[2] - term[1])
    c, lo, hi = narrowed[0]
    return any(
        _search(narrowed[1:], low - c * value, high - c * value, steps)
        for value in range(lo, hi + 1)
    )


def _two(one: _Term, other: _Term, low: int, high: int) -> bool:
    """Whether a x + b y lands in [low, high], without trying values."""
    (a, x_lo, x_hi), (b, y_lo, y_hi) = sorted((one, other))
    width = high - low
    if width >= b - 1:
        # Neighbouring values of y leave no gap, so only x has to be placed.
        return max(x_lo, -((b * y_hi - low) // a)) <= min(x_hi, (high - b * y_lo) // a)
    # At most one y fits an x: the largest with b y <= high - a x. Bound x so that it is allowed.
    x_lo = max(x_lo, (high - b * (y_hi + 1)) // a + 1)
    x_hi = min(x_hi, (high - b * y_lo) // a)
    if x_lo > x_hi:
        return False
    # Count the x for which (high - a x) mod b <= width, running x downwards from x_hi.
    count = x_hi - x_lo + 1
    offset = high - a * x_hi
    hits = _floor_sum(count, b, a, offset) - _floor_sum(count, b, a, offset - width - 1)
    return hits > 0


def _floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """Sum of floor((factor i + offset) / modulus) for i in [0, count), in logarithmic time."""
    total = 0
    while True:
        total += (factor // modulus) * (count * (count - 1) // 2) + (offset // modulus) * count
        factor %= modulus
        offset %= modulus
        top = factor * count + offset
        if top < modulus:
            return total
        count, offset = divmod(top, modulus)
        factor, modulus = modulus, factor
