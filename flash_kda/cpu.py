"""The CPU path of fwd, around reference.chunkwise_kda, and checks of values only it can read."""

from __future__ import annotations

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
    HEAD_DIM,
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
from .reference import chunkwise_kda

CHECKPOINT_STEP = 16
"""Checkpoints lie at multiples of this from their sequence's start, or at its end."""


def check_values(layout: Layout, tensors: Tensors) -> None:
    """Refuse indices and offsets that name nothing; reads their values, so CPU tensors only."""
    cu_seqlens = tensors[CU_SEQLENS]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, layout.tokens)
    if tensors[STATE_INDICES] is not None:
        _check_state_indices(tensors)
    if tensors[CHECKPOINT_OFFSETS] is not None:
        _check_offsets(layout, tensors)


class _Call(NamedTuple):
    """A checked call on CPU tensors."""

    layout: Layout
    tensors: Tensors
    scale: float
    lower_bound: float
    beta_is_logits: bool

    def run(
        self, rows: slice, tokens: slice, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """out and final states, in fp32, of a part of the batch."""
        q, k, v, g, beta = (
            x[rows, tokens]
            for x in (self.tensors[at] for at in (Q, K, V, G, BETA))
            if x is not None
        )
        return chunkwise_kda(
            q,
            k,
            v,
            g,
            beta,
            self.scale,
            self.tensors[A_LOG],
            self.tensors[DT_BIAS],
            self.lower_bound,
            state,
            cu_seqlens,
            beta_is_logits=self.beta_is_logits,
        )


def forward(
    layout: Layout, tensors: Tensors, scale: float, lower_bound: float, beta_is_logits: bool
) -> None:
    """Compute the call and write its results."""
    if not layout.sequences:
        return
    call = _Call(layout, tensors, scale, lower_bound, beta_is_logits)
    initial, final, slots = tensors[INITIAL], tensors[FINAL], tensors[STATE_INDICES]
    state = None if initial is None else _gather(initial, slots)
    if tensors[CHECKPOINT_OFFSETS] is None:
        state = _run_whole(call, state)
    else:
        state = _run_in_pieces(call, state)
    if final is not None:
        _scatter(final, state, slots)


def _run_whole(call: _Call, state: Tensor | None) -> Tensor:
    cu_seqlens, out = call.tensors[CU_SEQLENS], call.tensors[OUT]
    assert out is not None
    result, state = call.run(slice(None), slice(None), state, cu_seqlens)
    covered = slice(None)
    if cu_seqlens is not None:
        covered = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
    out[:, covered] = result[:, covered].to(out.dtype)
    return state


def _run_in_pieces(call: _Call, state: Tensor | None) -> Tensor:
    """Each sequence cut at its checkpoints, with the state carried from piece to piece."""
    layout, out, into = call.layout, call.tensors[OUT], call.tensors[CHECKPOINT_STATES]
    assert out is not None and into is not None
    if state is None:
        state = torch.zeros((layout.sequences, layout.heads, HEAD_DIM, HEAD_DIM))
    state = state.float().clone()
    checkpoints = _checkpoints(layout, call.tensors)
    for sequence, (row, begin, end) in enumerate(_spans(layout, call.tensors)):
        stops = checkpoints.get(sequence, {})
        for first, last in pairwise(sorted({begin, end, *stops})):
            rows, tokens = slice(row, row + 1), slice(first, last)
            result, after = call.run(rows, tokens, state[sequence : sequence + 1], None)
            out[rows, tokens] = result.to(out.dtype)
            state[sequence] = after[0]
            for checkpoint in stops.get(last, ()):
                into[checkpoint] = after[0].to(into.dtype)
    return state


def _spans(layout: Layout, tensors: Tensors) -> list[tuple[int, int, int]]:
    """Batch row, first token and end of each sequence."""
    cu_seqlens = tensors[CU_SEQLENS]
    if cu_seqlens is None:
        return [(row, 0, layout.tokens) for row in range(layout.sequences)]
    return [(0, begin, end) for begin, end in pairwise(cu_seqlens.tolist())]


def _checkpoints(layout: Layout, tensors: Tensors) -> dict[int, dict[int, list[int]]]:
    """Sequence -> token of its batch row -> checkpoints there."""
    offsets = tensors[CHECKPOINT_OFFSETS]
    if offsets is None:
        return {}
    found: dict[int, dict[int, list[int]]] = {}
    spans = _spans(layout, tensors)
    for checkpoint, offset in enumerate(offsets.tolist()):
        sequence = next(
            n
            for n, (row, begin, end) in enumerate(spans)
            if row * layout.tokens + begin < offset <= row * layout.tokens + end
        )
        at = offset - spans[sequence][0] * layout.tokens
        found.setdefault(sequence, {}).setdefault(at, []).append(checkpoint)
    return found


def _gather(states: Tensor, slots: Tensor | None) -> Tensor:
    if slots is None:
        return states
    index = slots.long()
    found = states.new_zeros((index.numel(), *states.shape[1:]))
    used = index >= 0
    found[used] = states[index[used]]
    return found


def _scatter(states: Tensor, values: Tensor, slots: Tensor | None) -> None:
    if slots is None:
        states.copy_(values)
        return
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
    after = f", the value before it, {floor}" if index else " 0"
    raise ValueError(
        refuse(
            "cu_seqlens",
            f"cu_seqlens[{index}] = {value}",
            f"at least{after} and at most T = {tokens}",
        )
    )


def _check_state_indices(tensors: Tensors) -> None:
    slots = tensors[STATE_INDICES]
    assert slots is not None
    seen: set[int] = set()
    pools = [x.shape[0] for x in (tensors[INITIAL], tensors[FINAL]) if x is not None]
    for index, slot in enumerate(slots.tolist()):
        if not -1 <= slot < min(pools):
            needs = f"-1 (no state) or a slot of the pools, 0 to {min(pools) - 1}"
            raise ValueError(refuse("state_indices", f"state_indices[{index}] = {slot}", needs))
        if slot >= 0 and slot in seen and tensors[FINAL] is not None:
            needs = "a slot of its own for every sequence whose final state is written"
            got = f"state_indices[{index}] = {slot} for the second time"
            raise ValueError(refuse("state_indices", got, needs))
        seen.add(slot)


def _check_offsets(layout: Layout, tensors: Tensors) -> None:
    offsets = tensors[CHECKPOINT_OFFSETS]
    assert offsets is not None
    spans = [
        (row * layout.tokens + begin, row * layout.tokens + end)
        for row, begin, end in _spans(layout, tensors)
    ]
    before = 0
    for index, offset in enumerate(offsets.tolist()):
        got = f"checkpoint_offsets[{index}] = {offset}"
        if offset < before:
            raise ValueError(refuse("checkpoint_offsets", got, f"ascending offsets, {before} here"))
        before = offset
        inside = [(begin, end) for begin, end in spans if begin < offset <= end]
        if not inside:
            raise ValueError(
                refuse("checkpoint_offsets", got, "an offset behind a token of some sequence")
            )
        begin, end = inside[0]
        if (offset - begin) % CHECKPOINT_STEP and offset != end:
            needs = (
                f"a multiple of {CHECKPOINT_STEP} tokens from its sequence's start at {begin}, or "
                f"its end at {end}"
            )
            raise ValueError(refuse("checkpoint_offsets", got, needs))
