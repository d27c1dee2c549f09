"""``flash_kda`` behind the operator that vLLM calls, ``torch.ops._flashkda_C.fwd``.

vLLM ships that operator compiled into itself and looks for no package. ``route()`` puts the
functions of this module in the operator's place, in the process that calls it::

    from flash_kda.integrations import vllm as adapter
    adapter.route()

Nothing here imports vLLM. The argument order is the one of vLLM's Python callers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..ops import fwd as _fwd
from ..ops import workspace_size

NAMESPACE = "_flashkda_C"
_WORKSPACE_ALIGNMENT = 256


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """``flash_kda.fwd`` in the argument order of vLLM's operator.

    Arguments not listed here are those of ``flash_kda.fwd``; beta holds logits.

    Args:
        workspace: uint8 scratch memory. One that is too small or misaligned for these kernels, as
            one sized for vLLM's own may be, is left alone; torch's allocator then provides it.
        checkpoint_state: fp32 or bf16 [N, H, V, K], receives a state inside of each sequence.
        checkpoint_offsets: int32 or int64 [N]: the tokens of sequence n before its checkpoint, a
            multiple of 16 or the sequence's length. Sequences with an offset of 0 or less, or
            beyond their end, have none: their row of checkpoint_state then holds nothing of use.

    Raises:
        ValueError: one of the two checkpoint arguments without the other; and what
            ``flash_kda.fwd`` raises.
    """
    if (checkpoint_state is None) != (checkpoint_offsets is None):
        raise ValueError(
            "flash_kda.integrations.vllm.fwd: checkpoint_state and checkpoint_offsets: got one of "
            "them; needs both or neither"
        )
    positions = None
    if checkpoint_offsets is not None:
        positions = _positions(checkpoint_offsets, q, cu_seqlens)
    _fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        workspace=workspace if _fits(workspace, q, cu_seqlens) else None,
        checkpoint_offsets=positions,
        checkpoint_states=checkpoint_state,
    )


def get_workspace_size(t_total: int, heads: int, sequences: int) -> int:
    """Bytes of workspace for at most this many tokens, heads and sequences, on any GPU.

    That of one shape on one GPU, ``flash_kda.workspace_size``, may be less than that of a smaller
    shape, which may take another path.
    """
    return abi.workspace_size(t_total, heads, sequences)


def route() -> None:
    """Let ``torch.ops._flashkda_C.fwd`` and ``.get_workspace_size`` lead here in this process.

    vLLM looks both up at each call, so this may happen before or after it has loaded its own.
    vLLM still imports its extension ``vllm._flashkda_C`` and still decides by itself for which
    models and GPUs it calls the operator.
    """
    operators: Any = getattr(torch.ops, NAMESPACE)
    operators.fwd = fwd
    operators.get_workspace_size = get_workspace_size


def _positions(offsets: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Offsets within sequences as the ascending positions that ``flash_kda.fwd`` takes.

    Without reading values on the host. A sequence without a checkpoint gets its own end.
    """
    if cu_seqlens is None:
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int64, device=q.device)
        bounds = rows * q.shape[1]
    else:
        bounds = cu_seqlens
    starts, ends = bounds[:-1], bounds[1:]
    inside = (offsets > 0) & (offsets <= ends - starts)
    return torch.where(inside, starts + offsets, ends)


def _fits(workspace: Tensor | None, q: Tensor, cu_seqlens: Tensor | None) -> bool:
    if workspace is None or not q.is_cuda or abi.launcher_or_none() is None:
        return False
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    needed = workspace_size(q.shape[0] * q.shape[1], q.shape[2], sequences, q.device)
    return workspace.numel() >= needed and workspace.data_ptr() % _WORKSPACE_ALIGNMENT == 0
