"""Checks of everything about a call's tensors but their addresses and values.

What passes becomes a Layout, which arguments.py keeps: calls that repeat one, as the layers of a
model do, are not examined again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from . import overlap

HEAD_DIM = 128
TOKEN_LIMIT = 2**31 - 32
"""The most tokens (B * T) or sequences: the kernels add up to two chunks to a 32-bit number."""
LIMIT_TEXT = "at most 2^31 - 32"
HEAD_LIMIT = 2**31 - 1
HEAD_LIMIT_TEXT = "below 2^31"

NAMES = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "out",
    "A_log",
    "dt_bias",
    "initial_state",
    "final_state",
    "cu_seqlens",
    "state_indices",
    "checkpoint_offsets",
    "checkpoint_states",
    "workspace",
)
"""The tensor arguments, in the order of the launcher's argument block."""

Q, K, V, G, BETA, OUT, A_LOG, DT_BIAS, INITIAL, FINAL, CU_SEQLENS = range(11)
STATE_INDICES, CHECKPOINT_OFFSETS, CHECKPOINT_STATES, WORKSPACE = range(11, len(NAMES))

WRITTEN = (OUT, FINAL, CHECKPOINT_STATES, WORKSPACE)
_REQUIRED = frozenset((Q, K, V, G, BETA, OUT))

_STATES = (INITIAL, FINAL, CHECKPOINT_STATES)
INDICES = (CU_SEQLENS, STATE_INDICES, CHECKPOINT_OFFSETS)
"""The tensors whose values name rows or slots."""
_CODED = (BETA, A_LOG, DT_BIAS, INITIAL, FINAL, *INDICES, CHECKPOINT_STATES)
"""The tensors whose dtype codes the argument block holds, in its order."""

Tensors = tuple[Tensor | None, ...]
"""One entry for each of NAMES."""

DTYPE_CODES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int32: 5,
    torch.int64: 6,
}
BF16 = (torch.bfloat16,)
_BF16_OR_FP32 = (torch.float32, torch.bfloat16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class Layout:
    """Sizes, strides and dtypes of a call whose metadata are all as they must be."""

    __slots__ = (
        "copies",
        "device",
        "dtypes",
        "extents",
        "geometries",
        "geometry",
        "heads",
        "index",
        "looked_up",
        "on_cuda",
        "pairs",
        "present",
        "proven",
        "sequences",
        "states_alike",
        "t_total",
        "tokens",
        "varlen",
        "workspace",
        "writes_nothing",
        "written",
    )

    device: torch.device
    on_cuda: bool
    index: int
    """Ordinal of the CUDA device; -1 on the CPU."""
    tokens: int
    t_total: int
    """Tokens of all batch rows together."""
    heads: int
    sequences: int
    varlen: bool
    """Whether cu_seqlens is given."""
    geometry: tuple[int, ...]
    """The 34 integers of the argument block from ``batch`` to the last stride."""
    dtypes: tuple[int, ...]
    """The 9 dtype codes of the argument block."""
    geometries: tuple[overlap.Geometry | None, ...]
    """For each of NAMES what overlap.py needs; None if absent."""
    extents: tuple[int, ...]
    """For each of NAMES the bytes from its first to its last element; 0 if absent or empty."""
    looked_up: int
    """How many times arguments.py has found it by its metadata."""
    present: tuple[int, ...]
    """Positions in NAMES of the tensors that are not absent or empty."""
    pairs: tuple[tuple[int, int, int, int], ...]
    """Of them, each that is written with each other, and the extents of the two."""
    states_alike: bool
    """Whether the two states have the same dtype and strides, so that they may be one tensor."""
    copies: tuple[bool, bool]
    """Whether A_log and dt_bias have gaps and must be copied for the kernels."""
    workspace: tuple[int | None, int]
    """A path, forced or automatic, and the bytes its kernels need; of the last call."""
    written: tuple[int, ...]
    """Of ``present`` those that a call writes."""
    writes_nothing: bool
    """Whether neither out nor final_state has elements that a call writes."""
    proven: set[tuple[int, ...]]
    """Addresses for which arguments.py has found everything in order."""


def refuse(name: str, got: str, needs: str) -> str:
    """The text of an argument error."""
    return f"flash_kda.fwd: {name}: got {got}; needs {needs}"


def refuse_without_memory(name: str, tensor: Tensor) -> str:
    """The same for a tensor of FakeTensorMode, make_fx, vmap or functionalize."""
    return refuse(
        name,
        f"a {type(tensor).__name__} without memory (fake, traced or transformed)",
        "a tensor that holds data; what is recorded or faked can be torch.ops.flash_kda.fwd",
    )


def shown(value: object) -> str:
    """A value as an error shows it: whatever it is, on one line of bounded length."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or a class that cannot be printed
        return f"a value of type {type(value).__name__} that cannot be printed"
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def integer(function: str, name: str, value: Any) -> int:
    """An argument of ``flash_kda.<function>`` as an int.

    Raises:
        TypeError: not an integer, or a bool.
    """
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter of tensors without memory
        raise TypeError(
            f"flash_kda.{function}: {name}: got {shown(value)} of type {type(value).__name__}; "
            "needs an integer"
        ) from None


def build(tensors: Tensors) -> Layout:
    """Check the metadata of all tensors.

    Raises:
        TypeError: not a tensor, or of a wrong dtype.
        ValueError: a wrong kind of tensor, rank, size, device or stride.
    """
    for position, tensor in enumerate(tensors):
        _check_kind(position, tensor)
    q = _of(tensors, Q)
    _check_devices(tensors, q.device)

    layout = Layout()
    batch, tokens, heads = _check_q(q)
    layout.device = q.device
    layout.on_cuda = q.is_cuda
    layout.index = q.get_device()
    layout.tokens, layout.heads, layout.t_total = tokens, heads, batch * tokens
    layout.sequences = _check_cu_seqlens(tensors[CU_SEQLENS], batch)
    layout.varlen = tensors[CU_SEQLENS] is not None
    layout.workspace = (None, 0)
    layout.looked_up = 0
    for position in (K, V, G, OUT):
        _check_shape(tensors, position, (batch, tokens, heads, HEAD_DIM), "[B, T, H, 128] as q")
        check_dtype(position, tensors[position], BF16)
    _check_shape(tensors, BETA, (batch, tokens, heads), "[B, T, H] to fit q")
    check_dtype(BETA, tensors[BETA], _BF16_OR_FP32)
    for position in (Q, K, V, G, OUT):
        _check_token_strides(position, _of(tensors, position))
    _check_parameters(tensors, heads)
    _check_state_indices(tensors, layout)
    for position in (INITIAL, FINAL):
        _check_state(tensors, position, layout)
    checkpoints = _check_checkpoints(tensors, heads)
    _check_workspace(tensors[WORKSPACE])
    for position in (OUT, FINAL, CHECKPOINT_STATES):
        _check_written_once(position, tensors[position])

    layout.geometries = tuple(None if x is None else _geometry(x) for x in tensors)
    layout.extents = tuple(0 if x is None else overlap.extent_bytes(x) for x in layout.geometries)
    layout.present = tuple(at for at, extent in enumerate(layout.extents) if extent)
    layout.written = tuple(at for at in WRITTEN if at in layout.present)
    layout.pairs = tuple(
        (written, other, layout.extents[written], layout.extents[other])
        for written in layout.written
        for other in layout.present
        if other != written
    )
    layout.writes_nothing = not layout.sequences or not (layout.t_total or layout.extents[FINAL])
    layout.proven = set()
    layout.copies = (_has_gaps(tensors[A_LOG]), _has_gaps(tensors[DT_BIAS]))
    initial, final = tensors[INITIAL], tensors[FINAL]
    layout.states_alike = (
        initial is not None
        and final is not None
        and initial.dtype == final.dtype
        and initial.shape == final.shape
        and _strides(initial, 4) == _strides(final, 4)
    )
    layout.geometry = (
        batch,
        tokens,
        heads,
        layout.sequences,
        *(0 if x is None else x.shape[0] for x in (initial, final)),
        checkpoints,
        *(stride for at in (Q, K, V, G, OUT, BETA) for stride in _strides(tensors[at], 3)),
        *(stride for at in _STATES for stride in _strides(tensors[at], 2)),
        *(0 if x is None else x.stride(0) for x in (tensors[at] for at in INDICES)),
    )
    layout.dtypes = tuple(
        0 if x is None else DTYPE_CODES[x.dtype] for x in (tensors[at] for at in _CODED)
    )
    return layout


def _of(tensors: Tensors, position: int) -> Tensor:
    tensor = tensors[position]
    assert tensor is not None
    return tensor


def _check_kind(position: int, tensor: object) -> None:
    name = NAMES[position]
    if tensor is None and position not in _REQUIRED:
        return
    if not isinstance(tensor, Tensor):
        needs = "a torch.Tensor" if position in _REQUIRED else "a torch.Tensor or None"
        got = "None" if tensor is None else f"a value of type {type(tensor).__name__}"
        raise TypeError(refuse(name, got, needs))
    needs = "an ordinary strided tensor"
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(refuse(name, f"an {type(tensor).__name__} without a shape", needs))
    if tensor.is_nested:
        raise ValueError(refuse(name, "a nested tensor", needs + " (pack it with cu_seqlens)"))
    if tensor.layout != torch.strided:
        raise ValueError(refuse(name, f"a tensor of layout {tensor.layout}", needs))
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())):
        raise ValueError(refuse_without_memory(name, tensor))
    if tensor.is_quantized:
        raise TypeError(refuse(name, f"a quantized tensor ({tensor.dtype})", needs))
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            refuse(name, "a lazily negated or conjugated view", "stored values (resolve_neg())")
        )


def _check_devices(tensors: Tensors, of_q: torch.device) -> None:
    got = f"a tensor on {of_q}"
    if of_q.type not in ("cuda", "cpu"):
        raise ValueError(refuse("q", got, "a CUDA or CPU device"))
    others = {tensor.device for tensor in tensors[Q + 1 :] if tensor is not None}
    if len(others) == 1 and of_q not in others:
        raise ValueError(refuse("q", got, f"{others.pop()}, as all other tensors"))
    for position, tensor in enumerate(tensors):
        if tensor is not None and tensor.device != of_q:
            raise ValueError(
                refuse(NAMES[position], f"a tensor on {tensor.device}", f"{of_q}, as q")
            )


def check_dtype(position: int, tensor: Tensor | None, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor of another dtype; an absent one passes."""
    if tensor is not None and tensor.dtype not in allowed:
        needs = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(refuse(NAMES[position], f"dtype {tensor.dtype}", f"dtype {needs}"))


def _check_shape(tensors: Tensors, position: int, shape: tuple[int, ...], what: str) -> None:
    tensor = tensors[position]
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(
            refuse(NAMES[position], f"shape {list(tensor.shape)}", f"shape {list(shape)}, {what}")
        )


def _check_q(q: Tensor) -> tuple[int, int, int]:
    check_dtype(Q, q, BF16)
    shape = list(q.shape)
    if len(shape) != 4:
        raise ValueError(refuse("q", f"shape {shape}", "4 dimensions, [B, T, H, 128]"))
    batch, tokens, heads, head_dim = shape
    if head_dim != HEAD_DIM:
        raise ValueError(
            refuse("q", f"shape {shape}", "a last dimension of 128, the only head size supported")
        )
    if heads < 1:
        raise ValueError(refuse("q", f"shape {shape}", "at least one head"))
    if heads > HEAD_LIMIT:
        raise ValueError(refuse("q", f"shape {shape}, H = {heads}", f"H {HEAD_LIMIT_TEXT}"))
    if batch * tokens > TOKEN_LIMIT or batch > TOKEN_LIMIT:
        raise ValueError(
            refuse("q", f"shape {shape}, B * T = {batch * tokens}", f"B and B * T {LIMIT_TEXT}")
        )
    return batch, tokens, heads


def _check_cu_seqlens(cu_seqlens: Tensor | None, batch: int) -> int:
    """The number of sequences."""
    if cu_seqlens is None:
        return batch
    check_dtype(CU_SEQLENS, cu_seqlens, INTEGERS)
    if cu_seqlens.dim() != 1:
        raise ValueError(
            refuse("cu_seqlens", f"shape {list(cu_seqlens.shape)}", "one dimension, [N + 1]")
        )
    count = cu_seqlens.shape[0]
    if not 0 <= count - 1 <= TOKEN_LIMIT:
        raise ValueError(
            refuse("cu_seqlens", f"{count} entries", f"N + 1 entries: at least 1, N {LIMIT_TEXT}")
        )
    if batch != 1:
        raise ValueError(
            refuse("q", f"B = {batch} with cu_seqlens", "B = 1: cu_seqlens packs one batch row")
        )
    return count - 1


def _check_token_strides(position: int, tensor: Tensor) -> None:
    if not tensor.numel():
        return
    name, strides = NAMES[position], tensor.stride()
    if strides[3] != 1:
        raise ValueError(
            refuse(name, f"strides {list(strides)}", "a contiguous last dimension (stride 1)")
        )
    for dim in range(3):
        if tensor.shape[dim] > 1 and strides[dim] % 8:
            raise ValueError(
                refuse(
                    name,
                    f"strides {list(strides)}",
                    f"a stride of dimension {dim} that is a multiple of 8 elements (16 bytes)",
                )
            )


def _check_parameters(tensors: Tensors, heads: int) -> None:
    a_log, dt_bias = tensors[A_LOG], tensors[DT_BIAS]
    check_dtype(A_LOG, a_log, _FLOATS)
    if a_log is not None and a_log.numel() != heads:
        raise ValueError(
            refuse("A_log", f"shape {list(a_log.shape)}", f"H = {heads} elements, one a head")
        )
    check_dtype(DT_BIAS, dt_bias, _FLOATS)
    if dt_bias is not None:
        shape = tuple(dt_bias.shape)
        if shape not in ((heads, HEAD_DIM), (heads * HEAD_DIM,)):
            needs = f"shape [{heads}, 128] or [{heads * HEAD_DIM}], that is [H, 128] or [H * 128]"
            raise ValueError(refuse("dt_bias", f"shape {list(shape)}", needs))


def _check_state(tensors: Tensors, position: int, layout: Layout) -> None:
    state = tensors[position]
    if state is None:
        return
    if tensors[STATE_INDICES] is not None:
        _check_states(tensors, position, layout.heads, "[P, H, V, K], a pool of P states")
        return
    shape = (layout.sequences, layout.heads, HEAD_DIM, HEAD_DIM)
    of = "len(cu_seqlens) - 1" if layout.varlen else "B"
    _check_shape(tensors, position, shape, f"[N, H, V, K] with N = {of}")
    _check_states(tensors, position, layout.heads, "[N, H, V, K]")


def _check_states(tensors: Tensors, position: int, heads: int, what: str) -> None:
    """A tensor of any number of states."""
    states = tensors[position]
    assert states is not None
    shape = list(states.shape)
    if len(shape) != 4 or shape[1:] != [heads, HEAD_DIM, HEAD_DIM] or shape[0] > TOKEN_LIMIT:
        needs = f"shape [*, {heads}, {HEAD_DIM}, {HEAD_DIM}], {what}"
        raise ValueError(refuse(NAMES[position], f"shape {shape}", needs))
    check_dtype(position, states, _BF16_OR_FP32)
    if states.numel() and states.stride()[2:] != (HEAD_DIM, 1):
        raise ValueError(
            refuse(
                NAMES[position],
                f"strides {list(states.stride())}",
                "contiguous inner two dimensions (strides 128 and 1)",
            )
        )


def _check_state_indices(tensors: Tensors, layout: Layout) -> None:
    indices = tensors[STATE_INDICES]
    if indices is None:
        return
    check_dtype(STATE_INDICES, indices, INTEGERS)
    _check_shape(tensors, STATE_INDICES, (layout.sequences,), "[N], one slot a sequence")
    if tensors[INITIAL] is None and tensors[FINAL] is None:
        raise ValueError(
            refuse("state_indices", "slots of no pool", "initial_state or final_state with it")
        )


def _check_checkpoints(tensors: Tensors, heads: int) -> int:
    """The number of checkpoints."""
    offsets, states = tensors[CHECKPOINT_OFFSETS], tensors[CHECKPOINT_STATES]
    if offsets is None and states is None:
        return 0
    if offsets is None or states is None:
        missing, given = ("checkpoint_offsets", "checkpoint_states")
        if states is None:
            missing, given = given, missing
        raise ValueError(refuse(missing, f"None with {given}", "both of them or neither"))
    check_dtype(CHECKPOINT_OFFSETS, tensors[CHECKPOINT_OFFSETS], INTEGERS)
    _check_states(tensors, CHECKPOINT_STATES, heads, "[C, H, V, K], one state a checkpoint")
    count = states.shape[0]
    _check_shape(tensors, CHECKPOINT_OFFSETS, (count,), "[C], one offset a checkpoint state")
    return count


def _check_workspace(workspace: Tensor | None) -> None:
    if workspace is None:
        return
    if workspace.dtype != torch.uint8:
        raise TypeError(refuse("workspace", f"dtype {workspace.dtype}", "dtype torch.uint8"))
    if workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(
            refuse(
                "workspace",
                f"shape {list(workspace.shape)} with strides {list(workspace.stride())}",
                "one contiguous dimension",
            )
        )


def _check_written_once(position: int, tensor: Tensor | None) -> None:
    if tensor is not None and overlap.overlaps_itself(_geometry(tensor)):
        raise ValueError(
            refuse(
                NAMES[position],
                f"shape {list(tensor.shape)} with strides {list(tensor.stride())}, where different "
                "indices name the same element",
                "memory of its own for every element (no expanded or overlapping dimension)",
            )
        )


def _geometry(tensor: Tensor) -> overlap.Geometry:
    return tensor.element_size(), tuple(tensor.shape), tensor.stride()


def _has_gaps(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_contiguous()


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides in elements, with those that are never used made regular; 0 if absent."""
    if tensor is None:
        return (0,) * count
    sizes, strides = tensor.shape, list(tensor.stride())
    for dim in range(len(strides) - 2, -1, -1):
        if sizes[dim] == 1:
            strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides[:count])
