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

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

_NORM_EPSILON = 1e-6
# Elements of one intermediate tensor held at a time: bounds the memory that long inputs take.
_BLOCK_ELEMENTS = 1 << 23
# exp() of a chunk's summed log decays, and of their negative, must be normal numbers of the type.
_LARGEST_CHUNK_DECAY = {torch.float32: 83.0, torch.float64: 600.0}


@torch.no_grad()
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
    row_elements = heads * max(q.shape[-1], v.shape[-1])
    for rows, active in _step_blocks([spans[n] for n in order], row_elements):
        index = torch.tensor(rows, device=q.device)
        q_, k_, v_, g_, beta_ = (x.index_select(0, index) for x in flat)
        queries, keys, values = _normalise(q_, dtype), _normalise(k_, dtype), v_.to(dtype)
        decay = torch.exp(_log_decay(g_, A_log, dt_bias, lower_bound, dtype))
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


@torch.no_grad()
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

    The sequences of a packed batch are computed one after the other, each from its own copy of
    its rows: an output does not depend on neighbouring sequences in any bit, and a NaN or Inf
    stays in its sequence and head. Tokens do not depend in any bit on later finite ones of their
    sequence; a NaN may reach the earlier tokens of its own chunk.

    Args:
        chunk_size: tokens of a chunk. ``chunk_size * -lower_bound`` is at most 83 in float32 and
            600 in float64.

    The other arguments, the results and the errors are those of :func:`recurrent_kda`.
    """
    spans = _sequences(q, k, v, g, beta, lower_bound, initial_state, cu_seqlens, dtype)
    _check_chunk(chunk_size, lower_bound, dtype)
    batch, tokens, heads, _ = q.shape
    out = v.new_zeros((batch, tokens, heads, v.shape[-1]), dtype=dtype)
    state = _start_state(initial_state, len(spans), q, v, dtype)
    if not out.numel():
        return out, state
    if cu_seqlens is None:
        # One "sequence" as wide as the batch.
        groups = [(slice(None), slice(0, tokens))]
    else:
        groups = [(slice(n, n + 1), slice(*span)) for n, span in enumerate(spans)]

    span_tokens = _BLOCK_ELEMENTS // max(1, batch * heads * max(q.shape[-1], v.shape[-1]))
    span_tokens = max(1, span_tokens // chunk_size) * chunk_size
    for which, where in groups:
        s = state[which].mT.flatten(0, 1).contiguous()  # [sequences * H, K, V]
        for start in range(where.start, where.stop, span_tokens):
            rows = slice(start, min(start + span_tokens, where.stop))
            q_, k_, v_, g_, beta_ = (x[:, rows] for x in (q, k, v, g, beta))
            log_decay = _log_decay(g_, A_log, dt_bias, lower_bound, dtype)
            step = _step_size(beta_, dtype, beta_is_logits)[..., None]
            parts = (_normalise(q_, dtype), _normalise(k_, dtype), v_.to(dtype), log_decay, step)
            chunks = [_to_chunks(x, chunk_size) for x in parts]
            results, s = _scan_chunks(chunks, s, lower_bound)
            out[:, rows] = _from_chunks(results * scale, out[:, rows].shape)
        state[which] = s.unflatten(0, (-1, heads)).mT
    return out, state


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


def _to_chunks(x: Tensor, chunk: int) -> Tensor:
    """``[B, T, H, D]`` to a contiguous ``[chunks, B * H, chunk, D]``, zeros past the last token."""
    batch, tokens, heads, width = x.shape
    count = -(-tokens // chunk)
    padded = x.new_zeros((count, batch, heads, chunk, width))
    by_token = padded.permute(1, 0, 3, 2, 4)  # [B, chunks, chunk, H, D]
    whole = tokens // chunk
    by_token[:, :whole] = x[:, : whole * chunk].unflatten(1, (whole, chunk))
    if whole < count:
        by_token[:, whole, : tokens - whole * chunk] = x[:, whole * chunk :]
    return padded.flatten(1, 2)


def _from_chunks(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`_to_chunks` for a tensor of the given ``[B, T, H, D]`` shape."""
    batch, tokens, heads, width = shape
    by_token = x.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    return by_token.reshape(batch, -1, heads, width)[:, :tokens]


def _normalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """L2 norm over the last dimension, in float64 since large bfloat16 values square to it."""
    wide = x.to(torch.float64).contiguous()
    square = (wide * wide).sum(-1, keepdim=True)
    return (wide / torch.sqrt(square + _NORM_EPSILON)).to(dtype)


def _log_decay(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, dtype: torch.dtype
) -> Tensor:
    """Natural logarithm of the decays ``[..., H, K]``, in ``[lower_bound, 0]``."""
    heads, channels = g.shape[-2:]
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(heads, channels)
    if A_log is not None:
        x = x * torch.exp(A_log.to(dtype)).reshape(heads, 1)
    return lower_bound * torch.sigmoid(x)


def _step_size(beta: Tensor, dtype: torch.dtype, beta_is_logits: bool) -> Tensor:
    """b of the definition."""
    beta = beta.to(dtype)
    return torch.sigmoid(beta) if beta_is_logits else beta


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
        bounds = [int(x) for x in cu_seqlens.tolist()]
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
