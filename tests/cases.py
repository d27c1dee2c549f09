"""Inputs, calls and comparisons shared by the tests of ``flash_kda.fwd`` and its reference.

Inputs are random and fresh in every run. A failing test shows its seed (under "Captured stdout
setup"); ``FLASH_KDA_TEST_SEED`` set to the printed base seed repeats the run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_kda
from flash_kda.reference import recurrent_kda

WIDTH = 128
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")
BASE_SEED = int(os.environ.get("FLASH_KDA_TEST_SEED") or secrets.randbits(31))
ORDINARY_BOUND = 6e-3


class Random:
    """Random tensors of one test on one device, from a seed made of the base seed and a name."""

    def __init__(
        self, name: str, device: torch.device | str = "cpu", base_seed: int = BASE_SEED
    ) -> None:
        self.device = torch.device(device)
        self.seed = zlib.crc32(f"{base_seed} {name}".encode())
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device).to(dtype)

    def integers(self, low: int, high: int, count: int) -> list[int]:
        """``count`` integers in ``low..high - 1``."""
        drawn = torch.randint(low, high, (count,), generator=self._generator, device=self.device)
        return [int(x) for x in drawn.tolist()]


@dataclasses.dataclass
class Case:
    """The inputs of one call, with the names and meanings of ``flash_kda.fwd``'s arguments.

    ``A_log``, ``dt_bias``, ``initial_state`` and ``cu_seqlens`` hold a tensor or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    A_log: Any
    dt_bias: Any
    lower_bound: float
    initial_state: Any = None
    cu_seqlens: Any = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        batch, _, heads, width = self.q.shape
        count = batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
        return count, heads, self.v.shape[-1], width

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Batch row, first token and end of every sequence."""
        if self.cu_seqlens is None:
            return [(b, 0, self.q.shape[1]) for b in range(self.q.shape[0])]
        bounds = self.cu_seqlens.tolist()
        return [(0, start, stop) for start, stop in pairwise(bounds)]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the inputs, by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def but(self, **changes: Any) -> Case:
        """The same case with some arguments replaced."""
        return dataclasses.replace(self, **changes)

    def part(self, sequence: int, begin: int, end: int, **changes: Any) -> Case:
        """Some tokens of one sequence as a case of its own, from that sequence's initial state
        unless another is given.
        """
        row, start, _ = self.spans[sequence]
        where = (slice(row, row + 1), slice(start + begin, start + end))
        changes = {name: getattr(self, name)[where] for name in TOKEN_INPUTS} | changes
        if self.initial_state is not None:
            changes.setdefault("initial_state", self.initial_state[sequence : sequence + 1])
        return self.but(**changes, cu_seqlens=None)


class Kind(NamedTuple):
    """A family of inputs: what it changes in an ordinary case, and the errors it is allowed."""

    change: Callable[[Case, Random], dict[str, Any]]
    bound: float = ORDINARY_BOUND
    state_bound: float = ORDINARY_BOUND

    @property
    def bounds(self) -> dict[str, float]:
        """As :func:`assert_accurate` takes them."""
        return {"bound": self.bound, "state_bound": self.state_bound}


def _gate(value: float) -> Callable[[Case, Random], dict[str, Any]]:
    return lambda case, rng: {"g": torch.full_like(case.g, value)}


def _lower_bound(value: float) -> Callable[[Case, Random], dict[str, Any]]:
    return lambda case, rng: {"lower_bound": value}


def _norms(factor: float) -> Callable[[Case, Random], dict[str, Any]]:
    return lambda case, rng: {"q": case.q * factor, "k": case.k * factor}


def _repeated(gate: float, beta: float) -> Callable[[Case, Random], dict[str, Any]]:
    """One key all over, as a run of one token gives, so that the triangular systems are hardest."""

    def change(case: Case, rng: Random) -> dict[str, Any]:
        key = case.k[:, :1].expand_as(case.k).contiguous()
        return {
            "q": key.clone(),
            "k": key,
            "g": torch.full_like(case.g, gate),
            "beta": torch.full_like(case.beta, beta),
        }

    return change


KINDS: dict[str, Kind] = {
    "ordinary": Kind(lambda case, rng: {}),
    "no_decay": Kind(_gate(-30.0)),
    "full_decay": Kind(_gate(30.0)),
    "wide_gate": Kind(lambda case, rng: {"g": rng.normal(*case.g.shape).mul(8).to(case.g.dtype)}),
    "bound_zero": Kind(_lower_bound(0.0)),
    "bound_small": Kind(_lower_bound(-0.01)),
    "big_norms": Kind(_norms(1e4)),
    "huge_norms": Kind(_norms(1e20)),
    "small_norms": Kind(_norms(1e-4)),
    # Errors of one sign add up in the state: docs/accuracy.md.
    "repeated_keys": Kind(_repeated(-30.0, 8.0), 2.5e-2, 4e-2),
    "repeated_keys_weak_decay": Kind(_repeated(-6.0, 4.0), 3.5e-2, 8e-2),
}


def make_case(
    rng: Random,
    kind: str = "ordinary",
    *,
    batch: int = 1,
    tokens: int = 0,
    lengths: Sequence[int] | None = None,
    heads: int = 2,
    width: int = WIDTH,
    before: int = 0,
    after: int = 0,
    initial_state: torch.dtype | None = torch.float32,
) -> Case:
    """Random inputs. ``lengths`` packs sequences into one row, with ``before`` and ``after`` rows
    outside ``cu_seqlens``; without it there are ``batch`` rows of ``tokens``.
    """
    cu_seqlens = None
    if lengths is not None:
        bounds = torch.tensor([before, *lengths]).cumsum(0)
        batch, tokens = 1, int(bounds[-1]) + after
        cu_seqlens = bounds.to(rng.device)
    shape = (batch, tokens, heads, width)
    bf16 = torch.bfloat16
    case = Case(
        q=rng.normal(*shape, dtype=bf16),
        k=rng.normal(*shape, dtype=bf16),
        v=rng.normal(*shape, dtype=bf16),
        g=rng.normal(*shape, dtype=bf16),
        beta=rng.normal(*shape[:3], dtype=bf16),
        scale=width**-0.5,
        A_log=rng.uniform(heads),
        dt_bias=rng.uniform(heads, width),
        lower_bound=-5.0,
        cu_seqlens=cu_seqlens,
    )
    if initial_state is not None:
        case.initial_state = rng.normal(*case.state_shape, dtype=initial_state)
    return case.but(**KINDS[kind].change(case, rng))


def crowd(rng: Random) -> dict[str, Any]:
    """The shape of a packed call, as :func:`make_case` takes it, with many more chains (sequences
    times heads) than any GPU has clusters, so that `fused` shares chains out and cuts them.

    Lengths come in random order. On a CPU, where there is nothing to share, there are few.
    """
    on_gpu = rng.device.type == "cuda"
    lengths = (0, 1, 15, 16, 17, 64, 100, 300) * 5 if on_gpu else (0, 1, 15, 16, 17, 33, 50)
    places = rng.integers(0, 2**31 - 1, len(lengths))
    order = sorted(range(len(lengths)), key=places.__getitem__)
    chosen = tuple(lengths[n] for n in order)
    return {"lengths": chosen, "heads": 5 if on_gpu else 2, "before": 3, "after": 7}


def some_of(case: Case) -> list[int]:
    """Some sequences of a case, the longest, the shortest and the outer ones among them."""
    lengths = [end - begin for _, begin, end in case.spans]
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    chosen = (0, len(lengths) - 1, by_length[0], by_length[len(lengths) // 2], by_length[-1])
    return sorted(set(chosen))


def reference(case: Case) -> tuple[Tensor, Tensor]:
    """The recurrence in float64: out and final state."""
    return recurrent_kda(**vars(case))


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor whose bytes are all 0xFF: NaN in every float type."""
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)


def aligned_bytes(size: int, device: torch.device | str) -> Tensor:
    """``size`` bytes at an address that ``workspace`` may have, holding whatever they held."""
    whole = torch.empty(size + 256, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 256
    return whole[start : start + size]


def forward(
    case: Case,
    *,
    out: Tensor | None = None,
    final_state: Tensor | torch.dtype | None = torch.float32,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Call ``flash_kda.fwd``, with poisoned outputs unless given some; return out and state."""
    if out is None:
        out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    if isinstance(final_state, torch.dtype):
        final_state = poisoned(*case.state_shape, dtype=final_state, device=case.device)
    flash_kda.fwd(**vars(case), out=out, final_state=final_state, workspace=workspace)
    return out, final_state


def forward_with_checkpoints(
    case: Case, offsets: list[int] | Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`forward`; return out, the final state and the states at ``offsets``."""
    if not isinstance(offsets, Tensor):
        offsets = torch.tensor(offsets, device=case.device)
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    final = poisoned(*case.state_shape, dtype=torch.float32, device=case.device)
    states = poisoned(len(offsets), *case.state_shape[1:], dtype=dtype, device=case.device)
    flash_kda.fwd(
        **vars(case),
        out=out,
        final_state=final,
        checkpoint_offsets=offsets,
        checkpoint_states=states,
    )
    return out, final, states


def state_after(case: Case, sequence: int, tokens: int) -> Tensor:
    """The float64 state [H, V, K] of one sequence after its first tokens."""
    state: Tensor = reference(case.part(sequence, 0, tokens))[1][0]
    return state


def relative_error(x: Tensor, expected: Tensor) -> float:
    """``||x - expected|| / ||expected||``; infinite when x holds a NaN or Inf."""
    x, expected = x.to(torch.float64), expected.to(torch.float64)
    assert x.shape == expected.shape, f"{tuple(x.shape)} is not {tuple(expected.shape)}"
    assert torch.isfinite(expected).all(), "the reference is not finite"
    error, norm = float((x - expected).norm()), float(expected.norm())
    if not math.isfinite(error):
        return math.inf
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm


def worst_row(x: Tensor, expected: Tensor) -> float:
    """The largest error of a row of the last dimension, relative to its norm or a typical norm.

    Sees one wrong row among thousands of right ones, which :func:`relative_error` does not.
    """
    if not x.numel():
        return 0.0
    x, expected = x.to(torch.float64), expected.to(torch.float64)
    norms = expected.norm(dim=-1)
    floor = float(norms.square().mean().sqrt()) or 1.0
    worst = float(((x - expected).norm(dim=-1) / norms.clamp(min=floor)).max())
    return worst if math.isfinite(worst) else math.inf


def assert_accurate(
    case: Case,
    out: Tensor,
    final_state: Tensor | None,
    bound: float = ORDINARY_BOUND,
    expected: tuple[Tensor, Tensor] | None = None,
    state_bound: float | None = None,
) -> None:
    """Compare a call's results with float64: each sequence's tokens, and each state.

    The whole is within ``bound`` (states within ``state_bound``, if given), every sequence (and
    every token and state row) within a few times it, so that an error in a short sequence does not
    drown in the long ones.
    """
    true_out, true_state = reference(case) if expected is None else expected
    assert_close("out", [(out[b, i:j], true_out[b, i:j]) for b, i, j in case.spans], bound)
    if final_state is not None:
        pairs = list(zip(final_state, true_state, strict=True))
        assert_close("final_state", pairs, bound if state_bound is None else state_bound)


def assert_close(name: str, pairs: Sequence[tuple[Tensor, Tensor]], bound: float) -> None:
    """The part of :func:`assert_accurate` for one result: what it is and should be, in pieces."""
    if not pairs:
        return
    x = torch.cat([x.to(torch.float64).flatten(0, -2) for x, _ in pairs])
    y = torch.cat([y.flatten(0, -2) for _, y in pairs])
    error, row = relative_error(x, y), worst_row(x, y)
    assert error <= bound, f"{name}: relative error {error:.2e}, allowed {bound:.2e}"
    assert row <= 6 * bound, f"{name}: error of one row {row:.2e}, allowed {6 * bound:.2e}"
    for n, (x, y) in enumerate(pairs):
        # In fewer numbers than this, chance alone moves the error a lot.
        error = relative_error(x, y) if x.numel() >= 64 * WIDTH else 0.0
        assert error <= 2 * bound, f"{name} of sequence {n}: relative error {error:.2e}"


def bits(x: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals itself and -0 differs from 0."""
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def same_bits(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors hold the same bits; None equals None."""
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def assert_others_kept(
    case: Case,
    chosen: int,
    results: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
) -> None:
    """All sequences but one have the bits that are expected, in out and in the final state."""
    for n, (b, i, j) in enumerate(case.spans):
        if n != chosen:
            assert same_bits(results[0][b, i:j], expected[0][b, i:j]), f"{chosen} changes {n}"
            assert same_bits(results[1][n], expected[1][n]), f"{chosen} changes the state of {n}"


def misaligned(x: Tensor, elements: int = 1) -> Tensor:
    """A copy so many elements after an aligned address: by default one that no access of more than
    one element can take.
    """
    whole = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return whole[elements:].view(x.shape).copy_(x)


def call_with_pool(
    case: Case, rng: Random, dtype: torch.dtype, aligned: bool = True
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Call with a pool that has three slots more than there are sequences; every third sequence
    has none.

    ``out`` is compared here. Returns the pool, the pool as it was before, and by slot the states
    that should be in it now.
    """
    count = case.state_shape[0]
    places = rng.integers(0, 2**31 - 1, count + 3)
    names = sorted(range(count + 3), key=places.__getitem__)[:count]
    names[2::3] = [-1] * len(names[2::3])
    slots = torch.tensor(names, dtype=torch.int32, device=case.device)
    pool = rng.normal(count + 3, *case.state_shape[1:], dtype=dtype)
    pool = pool if aligned else misaligned(pool)
    before = pool.clone()
    initial = torch.zeros(case.state_shape, device=case.device, dtype=dtype)
    used = slots >= 0
    initial[used] = before[slots[used].long()]
    expected = reference(case.but(initial_state=initial))
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    arguments = {**vars(case), "initial_state": pool}
    flash_kda.fwd(**arguments, out=out, final_state=pool, state_indices=slots)
    assert_accurate(case, out, None, expected=expected)
    states = {slot: expected[1][n] for n, slot in enumerate(names) if slot >= 0}
    return pool, before, states


def assert_repeatable(
    case: Case,
    times: int,
    expected: tuple[Tensor, Any] | None = None,
    final_state: torch.dtype | None = torch.float32,
) -> tuple[Tensor, Any]:
    """Runs of a case give the bits of ``expected``, or of a first run; returns those.

    They are compared on the device, so that they follow each other closely. ``final_state`` is the
    type of that of the first run, or None for runs without one.
    """
    if expected is None:
        expected = forward(case, final_state=final_state)
    first = [x for x in expected if x is not None]
    again = [torch.empty_like(x) for x in first]
    different = torch.zeros((), dtype=torch.int64, device=case.device)
    for _ in range(times):
        for x in again:
            bits(x).fill_(-1)
        forward(case, out=again[0], final_state=again[1] if len(again) > 1 else None)
        same = torch.ones((), dtype=torch.bool, device=case.device)
        for x, y in zip(again, first, strict=True):
            same &= (bits(x) == bits(y)).all()
        different += ~same
    assert int(different) == 0, f"{int(different)} of {times} runs differ"
    return expected


class Guarded:
    """A poisoned tensor inside a larger buffer, whose other bytes must stay as they are.

    The tensor is 256-byte aligned when the margin is a multiple of 256.
    """

    _PATTERN = 0xA5

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device | str,
        margin: int = 1 << 16,
    ) -> None:
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        self._bytes = aligned_bytes(size + 2 * margin, device).fill_(self._PATTERN)
        self._inside = slice(margin, margin + size)
        self._bytes[self._inside] = 0xFF
        self.tensor = self._bytes[self._inside].view(dtype).view(shape)

    def assert_margins_untouched(self) -> None:
        for part in (self._bytes[: self._inside.start], self._bytes[self._inside.stop :]):
            assert bool((part == self._PATTERN).all()), "bytes outside the tensor were written"
