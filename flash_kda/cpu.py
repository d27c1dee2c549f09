"""The CPU path of fwd, around reference.chunkwise_spans, and checks of values only it can read."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import (
    A_LOG,
    BETA,
    CHECKPOINT_OFFSETS,
    CHECKPOINT_STATES,
    CU_SEQLENS,
    DT_BIAS,
    FINAL,
    INITIAL,
    OUT,
    STATE_INDICES,
    G,
    K,
    Layout,
    Q,
    Tensors,
    V,
    refuse,
)
from .reference import chunkwise_spans

CHECKPOINT_STEP = 16
"""Checkpoints lie at multiples of this from their sequence's start, or at its end."""


def check_values(layout: Layout, tensors: Tensors) -> None:
    """Refuse indices and offsets that name nothing.

    Reads their values: ``cu_seqlens``, ``state_indices`` and ``checkpoint_offsets`` are CPU tensors
    or copies there. The others' memory is not touched.
    """
    if not torch.compiler.is_compiling() and _makes_others():
        needs = "a call outside of FakeTensorMode and other modes that replace tensors"
        raise ValueError(refuse("q", "a real tensor where torch makes others", needs))
    cu_seqlens = tensors[CU_SEQLENS]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, layout.tokens)
    if tensors[STATE_INDICES] is not None:
        _check_state_indices(tensors)
    if tensors[CHECKPOINT_OFFSETS] is not None:
        _check_offsets(layout, tensors)


def _makes_others() -> bool:
    """Whether torch makes other tensors here than real ones on the CPU."""
    return type(torch.empty(0, dtype=torch.uint8, device="cpu")) is not Tensor


class _Call(NamedTuple):
    """A checked call on CPU tensors."""

    tensors: Tensors
    scale: float
    lower_bound: float
    beta_is_logits: bool

    def run(self, spans: list[_Span], initial: Tensor | None, final: Tensor | None) -> None:
        """Compute the rows of some sequences, and their final states if those are wanted."""
        q, k, v, g, beta, out = (
            x for x in (self.tensors[at] for at in (Q, K, V, G, BETA, OUT)) if x is not None
        )
        a_log, dt_bias = self.tensors[A_LOG], self.tensors[DT_BIAS]
        chunkwise_spans(
            *(q, k, v, g, beta, self.scale, a_log, dt_bias, self.lower_bound),
            *(spans, initial, out, final),
            beta_is_logits=self.beta_is_logits,
        )


_Span = tuple[int, int]
"""First token and end of a sequence among the tokens of all batch rows."""


def forward(
    layout: Layout, tensors: Tensors, scale: float, lower_bound: float, beta_is_logits: bool
) -> None:
    """Compute the call and write its results."""
    if layout.writes_nothing:
        return
    call = _Call(tensors, scale, lower_bound, beta_is_logits)
    spans = _spans(layout, tensors)
    initial, final, slots = tensors[INITIAL], tensors[FINAL], tensors[STATE_INDICES]
    if initial is not None and slots is not None:
        initial = _gather(initial, slots)
    result = final
    if slots is not None and final is not None:
        result = final.new_empty((len(spans), *final.shape[1:]), dtype=torch.float32)
    if tensors[CHECKPOINT_OFFSETS] is None:
        call.run(spans, initial, result)
    else:
        _run_in_pieces(call, spans, initial, result)
    if slots is not None and final is not None and result is not None:
        _scatter(final, result, slots)


def _run_in_pieces(
    call: _Call, spans: list[_Span], initial: Tensor | None, final: Tensor | None
) -> None:
    """Each sequence cut at its checkpoints, with the state carried from piece to piece."""
    into = call.tensors[CHECKPOINT_STATES]
    assert into is not None
    states = into.new_zeros((len(spans), *into.shape[1:]), dtype=torch.float32)
    if initial is not None:
        states.copy_(initial)
    checkpoints = _checkpoints(spans, call.tensors)
    pieces = [
        list(pairwise(sorted({begin, end, *checkpoints.get(sequence, {})})))
        for sequence, (begin, end) in enumerate(spans)
    ]
    for turn in range(max(map(len, pieces))):
        which = [sequence for sequence, cuts in enumerate(pieces) if turn < len(cuts)]
        index = torch.tensor(which, dtype=torch.int64, device=into.device)
        state = states[index]
        call.run([pieces[sequence][turn] for sequence in which], state, state)
        states[index] = state
        for row, sequence in enumerate(which):
            for checkpoint in checkpoints.get(sequence, {}).get(pieces[sequence][turn][1], ()):
                into[checkpoint] = state[row].to(into.dtype)
    if final is not None:
        final.copy_(states)


def _spans(layout: Layout, tensors: Tensors) -> list[_Span]:
    cu_seqlens = tensors[CU_SEQLENS]
    if cu_seqlens is None:
        return [(row * layout.tokens, (row + 1) * layout.tokens) for row in range(layout.sequences)]
    return list(pairwise(cu_seqlens.tolist()))


def _sequence_of(offset: int, spans: list[_Span], ends: list[int]) -> int | None:
    """The sequence that holds the token before ``offset``, if one does."""
    sequence = bisect_left(ends, offset)
    return sequence if sequence < len(spans) and spans[sequence][0] < offset else None


def _checkpoints(spans: list[_Span], tensors: Tensors) -> dict[int, dict[int, list[int]]]:
    """Sequence -> offset -> checkpoints there."""
    offsets = tensors[CHECKPOINT_OFFSETS]
    assert offsets is not None
    found: dict[int, dict[int, list[int]]] = {}
    ends = [end for _, end in spans]
    for checkpoint, offset in enumerate(offsets.tolist()):
        sequence = _sequence_of(offset, spans, ends)
        assert sequence is not None
        found.setdefault(sequence, {}).setdefault(offset, []).append(checkpoint)
    return found


def _gather(states: Tensor, slots: Tensor) -> Tensor:
    index = slots.long()
    found = states.new_zeros((index.numel(), *states.shape[1:]))
    used = index >= 0
    found[used] = states[index[used]]
    return found


def _scatter(states: Tensor, values: Tensor, slots: Tensor) -> None:
    index = slots.long()
    used = index >= 0
    states[index[used]] = values[used].to(states.dtype)


def _check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    values = cu_seqlens.long()
    before = torch.cat((values.new_zeros(1), values[:-1]))
    bad = torch.nonzero((values < before) | (values > tokens))
    if not bad.numel():
        return
    index = int(bad[0])
    value, floor = int(values[index]), int(before[index])
    least = f"{floor}, the value before it," if index else "0"
    raise ValueError(
        refuse(
            "cu_seqlens",
            f"cu_seqlens[{index}] = {value}",
            f"at least {least} and at most T = {tokens}",
        )
    )


def _check_state_indices(tensors: Tensors) -> None:
    slots = tensors[STATE_INDICES]
    assert slots is not None
    seen: set[int] = set()
    size = min(x.shape[0] for x in (tensors[INITIAL], tensors[FINAL]) if x is not None)
    for index, slot in enumerate(slots.tolist()):
        if not -1 <= slot < size:
            needs = f"-1 (no state) or a slot of the pools, 0 to {size - 1}"
            if size == 0:
                needs = "-1 (no state): a pool has no slots"
            raise ValueError(refuse("state_indices", f"state_indices[{index}] = {slot}", needs))
        if slot >= 0 and slot in seen and tensors[FINAL] is not None:
            needs = "a slot of its own for every sequence whose final state is written"
            got = f"state_indices[{index}] = {slot} for the second time"
            raise ValueError(refuse("state_indices", got, needs))
        seen.add(slot)


def _check_offsets(layout: Layout, tensors: Tensors) -> None:
    offsets = tensors[CHECKPOINT_OFFSETS]
    assert offsets is not None
    spans = _spans(layout, tensors)
    ends = [end for _, end in spans]
    before = 0
    for index, offset in enumerate(offsets.tolist()):
        got = f"checkpoint_offsets[{index}] = {offset}"
        if index and offset < before:
            raise ValueError(refuse("checkpoint_offsets", got, f"ascending offsets, {before} here"))
        before = offset
        sequence = _sequence_of(offset, spans, ends)
        if sequence is None:
            raise ValueError(
                refuse("checkpoint_offsets", got, "an offset behind a token of some sequence")
            )
        begin, end = spans[sequence]
        if (offset - begin) % CHECKPOINT_STEP and offset != end:
            needs = (
                f"a multiple of {CHECKPOINT_STEP} tokens from its sequence's start at {begin}, or "
                f"its end at {end}"
            )
            raise ValueError(refuse("checkpoint_offsets", got, needs))
