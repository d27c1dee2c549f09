"""Kimi Delta Attention (arXiv 2510.26692) in plain PyTorch: the definition, and ``fwd`` for CPUs.

For every sequence and head, with a state ``S`` of shape ``[K, V]`` that starts at
``initial_state`` (or zero), token by token::

    q, k   <- x / sqrt(sum(x^2) + 1e-6)                            L2 norm over the channels
    log a   = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))    one decay per key channel
    b       = sigmoid(beta)
    S      <- diag(a) S
    S      <- S + (b k) outer (v - k^T S)
    out     = scale * q^T S

:func:`recurrent_kda` is that loop and decides what is right; the tests run it in float64.
:func:`chunkwise_kda` evaluates the same function sixteen tokens at a time and serves CPU tensors.
Both take tensors of any float dtype on any device, any number of heads, and any key and value
width (the CUDA kernels are for 128), and neither records gradients.

States are exchanged "v first", as ``[sequence, head, V, K]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

_NORM_EPSILON = 1e-6
# Elements of one intermediate tensor held at a time: bounds the memory that long inputs take.
_BLOCK_ELEMENTS = 1 << 23
# exp() of a chunk's summed log decays, and of their negative, must be normal numbers of the type.
_LARGEST_CHUNK_DECAY = {torch.float32: 83.0, torch.float64: 600.0}


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_written(function: _Function) -> _Function:
    """Run ``function(q, ...)`` without gradients and without autocast.

    Autocast on q's device would do the matrix products in bfloat16 or float16.
    """

    @functools.wraps(function)
    def guarded(q: Tensor, *arguments: Any, **named: Any) -> Any:
        kind = q.device.type
        known = torch.amp.is_autocast_available(kind)
        with torch.no_grad(), torch.autocast(kind, enabled=False) if known else nullcontext():
            return function(q, *arguments, **named)

    return guarded  # type: ignore[return-value]


@_as_written
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    beta_is_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute KDA by its definition, one token after the other.

    All sequences and heads advance together, so the loop takes as many steps as the longest
    sequence has tokens. No value crosses from one sequence or head to another, nor backwards in
    time, be it NaN or Inf.

    Args:
        q, k: ``[B, T, H, K]``, before normalisation.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, gate before its activation.
        beta: ``[B, T, H]``, logits of the step size.
        scale: factor on the output.
        A_log: anything that reshapes to ``[H]``, or None for no factor ``exp(A_log)``.
        dt_bias: ``[H, K]`` or ``[H * K]``, or None for no bias.
        lower_bound: lowest log decay of one token, finite and not positive.
        initial_state: ``[N, H, V, K]``, or None for zeros; N is B or the packed sequences' number.
        cu_seqlens: ``[N + 1]`` integers, not decreasing, within 0..T: sequence n is tokens
            ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1`` of the only batch row. None means that
            each batch row is a sequence.
        beta_is_logits: False if ``beta`` has been through its sigmoid already.
        dtype: float32 or float64; the arithmetic and both results use it. Norms are computed in
            float64 always, so that bfloat16 values of any finite size have one.

    Returns:
        ``out`` ``[B, T, H, V]``, zero in rows outside ``cu_seqlens``, and the state after each
        sequence's last token ``[N, H, V, K]`` (that of an empty sequence is its initial state).
        Both are new contiguous tensors of ``dtype``.

    Raises:
        ValueError: shapes that do not fit, a bad ``cu_seqlens``, ``lower_bound`` or ``dtype``.
    """
    spans = _sequences(q, k, v, g, beta, lower_bound, initial_state, cu_seqlens, dtype)
    batch, tokens, heads, _ = q.shape
    out = v.new_zeros((batch * tokens, heads, v.shape[-1]), dtype=dtype)
    state = _start_state(initial_state, len(spans), q, v, dtype)

    # Longest first: the sequences that have a token at step t are then a prefix of the states.
    order = sorted(range(len(spans)), key=lambda n: spans[n][0] - spans[n][1])
    state = state[order]
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    bias = None if dt_bias is None else dt_bias.reshape(heads, q.shape[-1])
    slope = None if A_log is None else A_log.reshape(heads, 1)
    row_elements = heads * max(q.shape[-1], v.shape[-1])
    for rows, active in _step_blocks([spans[n] for n in order], row_elements):
        index = torch.tensor(rows, dtype=torch.int64, device=q.device)
        q_, k_, v_, g_, beta_ = (x.index_select(0, index) for x in flat)
        queries, keys, values = _normalise(q_, dtype), _normalise(k_, dtype), v_.to(dtype)
        decay = torch.exp(_log_decay(g_, slope, bias, lower_bound, dtype))
        step = _step_size(beta_, dtype, beta_is_logits)
        results = torch.empty_like(values)
        first = 0
        for count in active:
            now = slice(first, first + count)
            s = state[:count]  # [sequences, H, V, K], a view
            s *= decay[now, :, None, :]
            change = values[now] - _apply(s, keys[now])
            s += (step[now, :, None] * change)[..., None] * keys[now, :, None, :]
            results[now] = _apply(s, queries[now])
            first += count
        out[index] = results * scale
    final_state = torch.empty_like(state)
    final_state[order] = state
    return out.unflatten(0, (batch, tokens)), final_state


def chunkwise_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    chunk_size: int = 16,
    beta_is_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute KDA in chunks: what is local to a chunk for many at once, then a loop over chunks.

    With ``c_i`` the sum of the log decays of a chunk's tokens up to token i, and
    ``u_i = b_i (v_i - k_i^T S)`` the value that token i writes (S being the decayed state just
    before), the definition unrolls to one unit lower triangular system per chunk, whose right
    side holds the state S0 before the chunk::

        u_i + b_i sum_{j<i} (k_i . e^(c_i - c_j) k_j) u_j  =  b_i (v_i - (k_i e^(c_i))^T S0)
        out_i = scale ((q_i e^(c_i))^T S0 + sum_{j<=i} (q_i . e^(c_i - c_j) k_j) u_j)
        S1    = diag(e^(c_C)) S0 + sum_j (k_j e^(c_C - c_j)) outer u_j

    The sums over j are matrix products of rows times ``e^(c_i)`` with columns times ``e^(-c_j)``.
    A constant power of two moves both to the middle of the number range, so that nothing
    overflows or becomes subnormal, and a token's rounding does not depend on later tokens.

    Sequences of equally many chunks are computed together, as separate matrices of one product:
    no value of one enters another, so that a NaN or Inf stays in its sequence and head, and in
    float32 an output does not depend on neighbouring sequences in any bit. Tokens do not depend
    in any bit on later finite ones of their sequence; a NaN may reach the earlier tokens of its
    own chunk.

    Args:
        chunk_size: tokens of a chunk. ``chunk_size * -lower_bound`` is at most 83 in float32 and
            600 in float64.

    The other arguments, the results and the errors are those of :func:`recurrent_kda`.
    """
    spans = _sequences(q, k, v, g, beta, lower_bound, initial_state, cu_seqlens, dtype)
    batch, tokens, heads, _ = q.shape
    out = v.new_zeros((batch, tokens, heads, v.shape[-1]), dtype=dtype)
    state = _start_state(initial_state, len(spans), q, v, dtype)
    chunkwise_spans(
        *(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, spans, state, out, state),
        dtype=dtype,
        chunk_size=chunk_size,
        beta_is_logits=beta_is_logits,
    )
    return out, state


@_as_written
def chunkwise_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    spans: Sequence[tuple[int, int]],
    initial_state: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    *,
    dtype: torch.dtype = torch.float32,
    chunk_size: int = 16,
    beta_is_logits: bool = True,
) -> None:
    """:func:`chunkwise_kda` into given tensors, for sequences anywhere in the batch.

    Args:
        spans: where each of the N sequences starts and ends among the B * T tokens of all batch
            rows; no two of them share a token.
        initial_state: ``[N, H, V, K]`` of any float dtype, or None for zeros.
        out: ``[B, T, H, V]`` of any float dtype; only rows of the spans are written.
        final_state: ``[N, H, V, K]`` of any float dtype, which may be ``initial_state`` itself,
            or None if the states are not wanted. Then memory does not grow with N.

    The other arguments are those of :func:`chunkwise_kda`; shapes are not checked.
    """
    _check_chunk(chunk_size, lower_bound, dtype)
    heads, channels, width = q.shape[2], q.shape[3], v.shape[-1]
    if not heads or not width:
        return
    chunks_of = [-(-(end - begin) // chunk_size) for begin, end in spans]
    by_chunks = sorted(range(len(spans)), key=chunks_of.__getitem__)
    bias = None if dt_bias is None else dt_bias.reshape(heads, 1, channels)
    slope = None if A_log is None else A_log.reshape(heads, 1, 1)
    row_elements = heads * chunk_size * max(1, channels, width)
    most = max(1, _BLOCK_ELEMENTS // max(row_elements, heads * channels * width))
    for count, group in groupby(by_chunks, chunks_of.__getitem__):
        members = list(group)
        if not count and final_state is None:
            continue
        for first in range(0, len(members), most):
            which = members[first : first + most]
            bounds = [spans[n] for n in which]
            begin, end = torch.tensor(bounds, dtype=torch.int64, device=q.device).unbind(1)
            index = torch.tensor(which, dtype=torch.int64, device=q.device)
            if initial_state is None:
                s = q.new_zeros((len(which) * heads, channels, width), dtype=dtype)
            else:
                s = initial_state[index].to(dtype).mT.flatten(0, 1).contiguous()
            step = max(1, _BLOCK_ELEMENTS // (len(which) * row_elements))
            for chunk in range(0, count, step):
                block = _Block(begin, end, chunk, min(chunk + step, count), chunk_size)
                q_, k_, v_, g_, beta_ = (block.take(x) for x in (q, k, v, g, beta[..., None]))
                parts = (
                    _normalise(q_, dtype),
                    _normalise(k_, dtype),
                    v_.to(dtype),
                    _log_decay(g_, slope, bias, lower_bound, dtype),
                    _step_size(beta_, dtype, beta_is_logits),
                )
                chunks = [block.clear_padding(x).flatten(1, 2) for x in parts]
                results, s = _scan_chunks(chunks, s, lower_bound)
                block.put(out, results.mul_(scale).unflatten(1, (len(which), heads)))
            if final_state is not None:
                final_state[index] = s.unflatten(0, (-1, heads)).mT.to(final_state.dtype)


class _Block:
    """Some consecutive chunks of sequences with equally many: where their tokens are.

    Chunks are laid out as ``[n, S, H, C, D]`` for S sequences; only the last one has padding.
    """

    def __init__(self, begin: Tensor, end: Tensor, first: int, last: int, chunk: int) -> None:
        offset = torch.arange(first * chunk, last * chunk, dtype=torch.int64, device=begin.device)
        at = begin[:, None] + offset.view(-1, 1, chunk)  # [n, S, C]
        self._inside = at < end[:, None]
        self._padded = not bool(self._inside[-1].all())
        # A token that is there stands in for padding until that is cleared.
        self._at = torch.where(self._inside, at, begin[:, None])

    def take(self, x: Tensor) -> Tensor:
        """The chunks of a ``[B, T, H, D]`` tensor, with anything in their padding."""
        rows = x[self._at // x.shape[1], self._at % x.shape[1]]
        return rows.transpose(2, 3).contiguous()

    def clear_padding(self, x: Tensor) -> Tensor:
        """Zeros in place of padding, be it NaN."""
        if self._padded:
            x[-1].masked_fill_(~self._inside[-1, :, None, :, None], 0)
        return x

    def put(self, out: Tensor, x: Tensor) -> None:
        """Write chunks, without their padding, to a ``[B, T, H, D]`` tensor."""
        rows, at = x.transpose(2, 3), self._at
        if self._padded:
            rows, at = rows[self._inside], at[self._inside]
        out[at // out.shape[1], at % out.shape[1]] = rows.to(out.dtype)


def _scan_chunks(chunks: list[Tensor], state: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """Run n consecutive chunks of X = sequences x heads recurrences.

    ``chunks`` holds q and k ``[n, X, C, K]`` (normalised), v ``[n, X, C, V]``, log decays
    ``[n, X, C, K]`` and b ``[n, X, C, 1]``, all zero in padding; ``state`` is ``[X, K, V]``.
    Returns out / scale ``[n, X, C, V]`` and the state after the chunks.
    """
    q, k, v, log_decay, step = chunks
    n, width, chunk, _ = k.shape
    total = log_decay.cumsum(2)
    decay = total.exp()
    end = total[:, :, -1:]
    tail_keys = (k * (end - total).exp()).mT.contiguous()
    carry = end.exp().mT  # [n, X, K, 1]

    # The constant is half of the largest decay that a chunk can have: see chunkwise_kda.
    centred = decay * 2.0 ** round(-lower_bound * chunk / 2 / math.log(2))
    columns = (k / centred).mT.flatten(0, 1)
    rows = torch.cat((k * centred, q * centred), 2).flatten(0, 1)
    products = torch.bmm(rows, columns).unflatten(0, (n, width))  # [n, X, 2C, C]
    # tril() puts zeros where the product of a later column could be anything.
    coupling = products[:, :, :chunk].tril(-1) * step
    attention = products[:, :, chunk:].tril()
    solve = torch.linalg.solve_triangular(
        coupling, torch.diag_embed(step[..., 0]), upper=False, unitriangular=True
    )

    from_state = torch.cat((k * decay, q * decay), 2)
    updates = torch.empty_like(v)
    results = torch.empty_like(v)
    for i in range(n):
        # What the keys, and below them the queries, read from the state.
        seen = torch.bmm(from_state[i], state)
        updates[i] = torch.bmm(solve[i], v[i] - seen[:, :chunk])
        results[i] = seen[:, chunk:]
        state = torch.baddbmm(state * carry[i], tail_keys[i], updates[i])
    inside = torch.bmm(attention.flatten(0, 1), updates.flatten(0, 1))
    return results + inside.unflatten(0, (n, width)), state


def _normalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """L2 norm over the last dimension, in float64 since large bfloat16 values square to it."""
    wide = x.to(torch.float64).contiguous()
    square = (wide * wide).sum(-1, keepdim=True)
    return (wide / torch.sqrt(square + _NORM_EPSILON)).to(dtype)


def _log_decay(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, dtype: torch.dtype
) -> Tensor:
    """Natural logarithm of the decays, in ``[lower_bound, 0]``; A_log and dt_bias broadcast.

    Where exp(A_log) leaves the range of ``dtype``, nothing becomes infinity times zero.
    """
    x = g.to(dtype)
    bias = None if dt_bias is None else dt_bias.to(dtype)
    slope = None
    if A_log is not None:
        slope = torch.exp(A_log.to(dtype)).clamp_(max=torch.finfo(dtype).max)
        if bias is not None:
            bias = bias.masked_fill((slope == 0) & ~bias.isnan(), 0)
    if bias is not None:
        x = x + bias
    if slope is not None:
        x = x * slope
    return lower_bound * _sigmoid(x)


def _sigmoid(x: Tensor) -> Tensor:
    """In steps that round alike at every place of a tensor, as torch.sigmoid does not."""
    return torch.exp(-x).add_(1).reciprocal_()


def _step_size(beta: Tensor, dtype: torch.dtype, beta_is_logits: bool) -> Tensor:
    """b of the definition."""
    beta = beta.to(dtype)
    return _sigmoid(beta) if beta_is_logits else beta.clone()


def _apply(state: Tensor, x: Tensor) -> Tensor:
    """``[n, H, V, K]`` times ``[n, H, K]``, giving ``[n, H, V]``."""
    return torch.matmul(state, x[..., None])[..., 0]


def _start_state(
    initial_state: Tensor | None, sequences: int, q: Tensor, v: Tensor, dtype: torch.dtype
) -> Tensor:
    """A fresh ``[N, H, V, K]`` tensor with the initial state, or zeros."""
    state = q.new_zeros((sequences, q.shape[2], v.shape[-1], q.shape[-1]), dtype=dtype)
    return state if initial_state is None else state.copy_(initial_state)


def _step_blocks(
    spans: list[tuple[int, int]], row_elements: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Split the token loop over sequences (longest first) in blocks of bounded size.

    Yields the flat token indices of the block's steps, step after step, and each step's number of
    sequences.
    """
    rows: list[int] = []
    active: list[int] = []
    count = len(spans)
    for t in range(spans[0][1] - spans[0][0] if spans else 0):
        while spans[count - 1][1] - spans[count - 1][0] <= t:
            count -= 1
        if active and (len(rows) + count) * row_elements > _BLOCK_ELEMENTS:
            yield rows, active
            rows, active = [], []
        rows.extend(start + t for start, _ in spans[:count])
        active.append(count)
    if active:
        yield rows, active


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lower_bound: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> list[tuple[int, int]]:
    """Check the arguments; return where each sequence starts and ends in the flat [B * T]."""
    if dtype not in _LARGEST_CHUNK_DECAY:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if not -math.inf < lower_bound <= 0:
        raise ValueError(f"lower_bound must be finite and at most 0, got {lower_bound}")
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], got {list(q.shape)}")
    batch, tokens, heads, channels = q.shape
    for name, x, shape in (
        ("k", k, q.shape),
        ("g", g, q.shape),
        ("v", v, (batch, tokens, heads, v.shape[-1])),
        ("beta", beta, (batch, tokens, heads)),
    ):
        if x.shape != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)} to fit q, got {list(x.shape)}")
    spans = [(b * tokens, (b + 1) * tokens) for b in range(batch)]
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs a batch size of 1, got {batch}")
        if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
            raise ValueError(f"cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}")
        kind = cu_seqlens.dtype
        if kind == torch.bool or kind.is_floating_point or kind.is_complex:
            raise ValueError(f"cu_seqlens must hold integers, got {kind}")
        bounds: list[int] = cu_seqlens.tolist()
        if any(a > b for a, b in pairwise([0, *bounds, tokens])):
            raise ValueError(
                f"cu_seqlens must not decrease and must stay within 0..{tokens}, got {bounds}"
            )
        spans = list(pairwise(bounds))
    states = (len(spans), heads, v.shape[-1], channels)
    if initial_state is not None and tuple(initial_state.shape) != states:
        raise ValueError(
            f"initial_state must have shape {list(states)}, got {list(initial_state.shape)}"
        )
    return spans


def _check_chunk(chunk_size: int, lower_bound: float, dtype: torch.dtype) -> None:
    """Refuse chunks whose decay the working type cannot hold."""
    largest = _LARGEST_CHUNK_DECAY[dtype]
    if chunk_size < 1 or -lower_bound * chunk_size > largest:
        raise ValueError(
            f"chunk_size must be positive, and chunk_size * -lower_bound at most {largest} in "
            f"{dtype}; got chunk_size {chunk_size} and lower_bound {lower_bound}"
        )
