"""``flash_kda`` behind the operator that vLLM calls, ``torch.ops._flashkda_C.fwd``.

vLLM ships that operator compiled into itself and looks for no package. ``route()`` puts the
functions of this module in the operator's place, in the process that calls it::

    from flash_kda.integrations import vllm as adapter
    adapter.route()

Nothing here imports vLLM. The argument order is the one of vLLM's Python callers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..cpu import CHECKPOINT_STEP
from ..layout import HEAD_DIM, TOKEN_LIMIT
from ..ops import check_sizes, values_are_checked, values_can_be_read, workspace_size
from ..ops import fwd as _fwd

NAMESPACE = "_flashkda_C"
_MODULE = "integrations.vllm"
_INTEGERS = (torch.int32, torch.int64)
_STATES = (torch.float32, torch.bfloat16)
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
            (On the CPU a compiled call needs a sequence that has tokens.)

    Raises:
        TypeError, ValueError: one of the two checkpoint arguments without the other; and as
            ``flash_kda.fwd`` does. Both texts name the argument as it is named here.
        FlashKDAError: as ``flash_kda.fwd`` does.
    """
    sequences = _sequences(q, cu_seqlens)
    states, positions = checkpoint_state, checkpoint_offsets
    if checkpoint_state is not None or checkpoint_offsets is not None:
        _check_given("checkpoint_state", checkpoint_state, "checkpoint_offsets")
        _check_given("checkpoint_offsets", checkpoint_offsets, "checkpoint_state")
        if sequences is not None:
            _check_checkpoints(checkpoint_state, checkpoint_offsets, q, sequences)
            positions = _positions(checkpoint_offsets, q, cu_seqlens)
            if positions is None:
                states = None
    try:
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
            workspace=_usable(workspace, q, sequences),
            checkpoint_offsets=positions,
            checkpoint_states=states,
        )
    except (TypeError, ValueError) as error:
        text = str(error).replace("flash_kda.fwd: ", f"flash_kda.{_MODULE}.fwd: ")
        text = text.replace("checkpoint_states", "checkpoint_state")
        raise type(error)(text) from error.__cause__


def get_workspace_size(t_total: int, heads: int, sequences: int) -> int:
    """Bytes of workspace for at most this many tokens, heads and sequences, on any GPU.

    That of one shape on one GPU, ``flash_kda.workspace_size``, may be less than that of a smaller
    shape, which may take another path.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
        BrokenInstallError: the launcher library is missing or damaged.
    """
    return abi.workspace_size(
        *check_sizes(f"{_MODULE}.get_workspace_size", t_total, heads, sequences)
    )


def route() -> None:
    """Let ``torch.ops._flashkda_C.fwd`` and ``.get_workspace_size`` lead here in this process.

    vLLM looks both up at each call, so this may happen before or after it has loaded its own.
    vLLM still imports its extension ``vllm._flashkda_C`` and still decides by itself for which
    models and GPUs it calls the operator.
    """
    operators: Any = getattr(torch.ops, NAMESPACE)
    operators.fwd = fwd
    operators.get_workspace_size = get_workspace_size


def _refuse(name: str, got: str, needs: str) -> str:
    return f"flash_kda.{_MODULE}.fwd: {name}: got {got}; needs {needs}"


def _sequences(q: Any, cu_seqlens: Any) -> int | None:
    """Their number, or None for arguments that ``flash_kda.fwd`` refuses."""
    if not isinstance(q, Tensor) or not _is_strided(q) or q.dim() != 4 or not q.shape[2]:
        return None
    compiling = torch.compiler.is_compiling()  # which may not know the sizes
    if not compiling and max(q.shape[0], q.shape[0] * q.shape[1]) > TOKEN_LIMIT:
        return None
    if cu_seqlens is None:
        return q.shape[0]
    if not isinstance(cu_seqlens, Tensor) or not _is_strided(cu_seqlens) or cu_seqlens.dim() != 1:
        return None
    if cu_seqlens.dtype not in _INTEGERS or cu_seqlens.device != q.device:
        return None
    count = cu_seqlens.shape[0]
    return count - 1 if compiling or 0 < count <= TOKEN_LIMIT + 1 else None


def _is_strided(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout == torch.strided


def _check_given(name: str, value: object, other: str) -> None:
    if value is None:
        raise ValueError(_refuse(name, f"None with {other}", "both or neither"))
    if not isinstance(value, Tensor):
        got = f"a value of type {type(value).__name__}"
        raise TypeError(_refuse(name, got, "a torch.Tensor or None"))
    if not _is_strided(value):
        got = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise ValueError(_refuse(name, got, "an ordinary strided tensor"))


def _check_checkpoints(states: Any, offsets: Any, q: Tensor, sequences: int) -> None:
    """What the arithmetic on offsets needs, and what ``flash_kda.fwd`` would say in other words."""
    shape = [sequences, q.shape[2], HEAD_DIM, HEAD_DIM]
    needed = (
        ("checkpoint_offsets", offsets, _INTEGERS, shape[:1], "[N], one offset a sequence"),
        ("checkpoint_state", states, _STATES, shape, "[N, H, V, K]"),
    )
    for name, tensor, dtypes, sizes, form in needed:
        if tensor.dtype not in dtypes:
            needs = f"dtype {dtypes[0]} or {dtypes[1]}"
            raise TypeError(_refuse(name, f"dtype {tensor.dtype}", needs))
        if tensor.device != q.device:
            raise ValueError(_refuse(name, f"a tensor on {tensor.device}", f"{q.device}, as q"))
        if list(tensor.shape) != sizes:
            got = f"shape {list(tensor.shape)}"
            raise ValueError(_refuse(name, got, f"shape {sizes}, {form}"))


def _positions(offsets: Any, q: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Offsets within sequences as the ascending positions that ``flash_kda.fwd`` takes.

    Without reading values on the host, unless it reads them. A sequence without a checkpoint gets
    its own end. None: no sequence has a token, as far as the host knows.
    """
    if cu_seqlens is None:
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int64, device=q.device)
        bounds = rows * q.shape[1]
    else:
        bounds = cu_seqlens
    if not offsets.shape[0] or not q.shape[0] * q.shape[1]:
        return None
    if values_can_be_read(q.device) and not _check_values(offsets.tolist(), bounds.tolist()):
        return None
    starts, ends = bounds[:-1], bounds[1:]
    inside = (offsets > 0) & (offsets <= ends - starts)
    positions = torch.where(inside, starts + offsets, ends)
    if values_are_checked(q.device):
        # The end of an empty sequence at the front lies behind no token: as many as there are of
        # them get the first position that does.
        behind = torch.where(positions > bounds[0], positions, positions[-1])
        positions = torch.maximum(positions, behind.amin())
    return positions


def _check_values(offsets: list[int], bounds: list[int]) -> bool:
    """Refuse an offset inside of a sequence that is none; whether any sequence has a token."""
    for n, (offset, begin, end) in enumerate(zip(offsets, bounds, bounds[1:], strict=False)):
        if 0 < offset < end - begin and offset % CHECKPOINT_STEP:
            got = f"checkpoint_offsets[{n}] = {offset}"
            needs = f"a multiple of {CHECKPOINT_STEP}, or {end - begin}, the sequence's length"
            raise ValueError(_refuse("checkpoint_offsets", got, needs))
    return any(begin != end for begin, end in pairwise(bounds))


def _usable(workspace: Any, q: Any, sequences: int | None) -> Any:
    """The workspace, or None for one that does not suffice. What is none, ``fwd`` is to refuse."""
    if sequences is None or not isinstance(workspace, Tensor) or not _is_strided(workspace):
        return workspace
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        return workspace
    if workspace.device != q.device:
        return workspace
    if not q.is_cuda or abi.launcher_or_none() is None:
        return None
    needed = workspace_size(q.shape[0] * q.shape[1], q.shape[2], sequences, q.device)
    enough = workspace.numel() >= needed and workspace.data_ptr() % _WORKSPACE_ALIGNMENT == 0
    return workspace if enough else None
