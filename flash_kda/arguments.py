"""Checks of the arguments of fwd: each misuse gets one error, before anything is written.

Metadata are checked once per combination (layout.py) and remembered; each call checks what may
differ under equal metadata: addresses, gradients, scalars and, on the CPU, the values of indices.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import cpu, guards, overlap
from .layout import (
    A_LOG,
    DT_BIAS,
    FINAL,
    INITIAL,
    NAMES,
    OUT,
    WORKSPACE,
    G,
    K,
    Layout,
    Q,
    Tensors,
    V,
    build,
    refuse,
    refuse_without_memory,
    shown,
)

_FP32_MAX = 3.4028234663852886e38
_LOWEST_BOUND = -5.0
_VECTOR_BYTES = 16
_WORKSPACE_ALIGNMENT = 256
_OWN_MEMORY = "memory that no other argument uses"
_LOW_ADDRESS = 1 << 40  # a view of a storage without memory has its offset for an address
_ALIGNED_16 = (Q, K, V, G, OUT)

# Few combinations recur in a process; these bound the memory where that does not hold.
_LAYOUT_LIMIT = 256
_PROVEN_LIMIT = 64
_layouts: dict[Any, Layout] = {}

# Finding a layout by its metadata takes longer than the rest of a call, so the first question is
# whether it is one of these. Few, since each that it is not takes time, too.
_GUARD_LIMIT = 4
_LOOKUPS_A_GUARD = 4
_recent: tuple[tuple[guards.Guard, Layout], ...] = ()

(
    _NO_A_LOG,
    _NO_DT_BIAS,
    _NO_INITIAL,
    _NO_FINAL,
    _SAME_STATE,
    _NO_CU_SEQLENS,
    _NO_STATE_INDICES,
    _NO_OFFSETS,
    _NO_CHECKPOINTS,
    _NO_WORKSPACE,
) = map(guards.absent, range(10))


CheckedCall = tuple[Layout, tuple[int, ...], float, float, tuple[Tensor, ...]]
"""A call whose arguments are all as they must be: the layout; addresses in the order of
layout.NAMES, 0 if absent or empty; scale; lower_bound; and contiguous copies that some addresses
refer to, to be kept until the launch."""


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    workspace: Tensor | None = None,
) -> CheckedCall:
    """Check all arguments of fwd but the size of the workspace, which the launcher knows.

    Raises:
        TypeError: a wrong Python type or dtype.
        ValueError: any other misuse. Both name the argument, what it got and what it needs.
    """
    # Written out, not looped: this part decides what a call costs on the host.
    tensors = (
        q,
        k,
        v,
        g,
        beta,
        out,
        A_log,
        dt_bias,
        initial_state,
        final_state,
        cu_seqlens,
        state_indices,
        checkpoint_offsets,
        checkpoint_states,
        workspace,
    )
    final = _NO_FINAL if final_state is None else final_state
    guarded = (
        q,
        k,
        v,
        g,
        beta,
        out,
        _NO_A_LOG if A_log is None else A_log,
        _NO_DT_BIAS if dt_bias is None else dt_bias,
        _NO_INITIAL if initial_state is None else initial_state,
        final if final_state is not initial_state else _SAME_STATE,
        _NO_CU_SEQLENS if cu_seqlens is None else cu_seqlens,
        _NO_STATE_INDICES if state_indices is None else state_indices,
        _NO_OFFSETS if checkpoint_offsets is None else checkpoint_offsets,
        _NO_CHECKPOINTS if checkpoint_states is None else checkpoint_states,
        _NO_WORKSPACE if workspace is None else workspace,
    )
    layout = None
    pointers: tuple[int, ...] | None = None
    try:
        pointers = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            g.data_ptr(),
            beta.data_ptr(),
            out.data_ptr(),
            0 if A_log is None else A_log.data_ptr(),
            0 if dt_bias is None else dt_bias.data_ptr(),
            0 if initial_state is None else initial_state.data_ptr(),
            0 if final_state is None else final_state.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            0 if state_indices is None else state_indices.data_ptr(),
            0 if checkpoint_offsets is None else checkpoint_offsets.data_ptr(),
            0 if checkpoint_states is None else checkpoint_states.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
        )
        # At a tensor without sizes or strides a guard would end the process. Those have no address,
        # or are nested. (What torch's private constructors make beside them is not looked for.)
        nested = (
            q.is_nested
            or k.is_nested
            or v.is_nested
            or g.is_nested
            or beta.is_nested
            or out.is_nested
            or (A_log is not None and A_log.is_nested)
            or (dt_bias is not None and dt_bias.is_nested)
            or (initial_state is not None and initial_state.is_nested)
            or (final_state is not None and final_state.is_nested)
            or (cu_seqlens is not None and cu_seqlens.is_nested)
            or (state_indices is not None and state_indices.is_nested)
            or (checkpoint_offsets is not None and checkpoint_offsets.is_nested)
            or (checkpoint_states is not None and checkpoint_states.is_nested)
            or (workspace is not None and workspace.is_nested)
        )
        if not nested:
            for matches, known in _recent:
                if matches(*guarded):
                    layout = known
                    break
    except Exception:
        pass  # not a tensor, whatever it raises, or one without memory: build names it
    if layout is None:
        layout = _layout_of(tensors, guarded)
    if type(scale) is not float or not -_FP32_MAX <= scale <= _FP32_MAX:
        scale = _scale(scale)
    if type(lower_bound) is not float or not _LOWEST_BOUND <= lower_bound <= 0.0:
        lower_bound = _lower_bound(lower_bound)
    if torch.is_grad_enabled():
        _check_gradients(zip(NAMES, tensors, strict=True))
    if forward_ad._current_level >= 0:
        _check_tangents(zip(NAMES, tensors, strict=True))

    if pointers is None:
        _refuse_without_memory(tensors, layout)
        pointers = tuple(0 if x is None else x.data_ptr() for x in tensors)
    # What follows from metadata and addresses together is remembered like the layout. Where a
    # storage ends does not: one made smaller may lie at a proven address. On a GPU that is looked
    # at again for what is written; for all tensors it would take a tenth of the call's time.
    if pointers not in layout.proven:
        _check_addresses(tensors, pointers, layout)
        if len(layout.proven) >= _PROVEN_LIMIT:
            layout.proven.clear()
        layout.proven.add(pointers)
    else:
        again = layout.written if layout.on_cuda else layout.present
        _check_ends(tensors, pointers, layout, again)
    if not layout.on_cuda:
        _refuse_jit_trace()
        cpu.check_values(layout, tensors)
    if layout.copies != (False, False):
        return _with_copies(layout, pointers, scale, lower_bound, A_log, dt_bias)
    return layout, pointers, scale, lower_bound, ()


def scalars(scale: object, lower_bound: object, beta_is_logits: object) -> tuple[float, float]:
    """The two numbers as floats, for the operator, which would take a bool for one.

    Raises:
        TypeError: one of the three of a wrong type.
        ValueError: no lower_bound. Whether numbers lie in their ranges is seen when it runs.
    """
    if beta_is_logits is not True and beta_is_logits is not False:
        raise not_a_flag(beta_is_logits)
    if lower_bound is None:
        lower_bound = _lower_bound(lower_bound)
    return _number("scale", scale), _number("lower_bound", lower_bound)


def not_a_flag(beta_is_logits: object) -> TypeError:
    return TypeError(refuse("beta_is_logits", shown(beta_is_logits), "True or False"))


def check_workspace_size(workspace: Tensor, needed: int, layout: Layout) -> None:
    """Refuse a workspace of fewer than ``needed`` bytes."""
    if workspace.numel() < needed:
        sizes = f"{layout.t_total}, {layout.heads}, {layout.sequences}"
        raise ValueError(
            refuse(
                "workspace",
                f"{workspace.numel()} bytes",
                f"at least {needed}, which is flash_kda.workspace_size({sizes})",
            )
        )


def _layout_of(tensors: Tensors, guarded: tuple[Tensor, ...]) -> Layout:
    """The layout of these metadata: remembered, or built. One that recurs gets a guard."""
    global _recent
    _refuse_jit_trace()  # on a GPU it is looked for here only, as far as time allows
    key: Any = None
    try:
        # A tensor can be lazily negated (the imaginary part of a conjugate is); dtypes rule out
        # lazily conjugated ones.
        key = tuple(
            x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
            for x in tensors
        )
        layout = _layouts.get(key)
    except Exception:
        key = layout = None  # not a tensor, or one of a kind without strides: build names it
    if not all(x is None or isinstance(x, Tensor) for x in tensors):
        key = layout = None  # it has all that a tensor is asked for, but is none
    if layout is None:
        layout = build(tensors)
        if key is None:
            return layout
        if len(_layouts) >= _LAYOUT_LIMIT:
            _layouts.clear()
        _layouts[key] = layout
    layout.looked_up += 1
    if layout.looked_up % _LOOKUPS_A_GUARD == 0:
        matches = guards.guard(guarded)
        if matches is not None:
            _recent = ((matches, layout), *_recent[: _GUARD_LIMIT - 1])
    return layout


def _scale(value: object) -> float:
    number = _number("scale", value)
    if not -_FP32_MAX <= number <= _FP32_MAX:
        raise ValueError(refuse("scale", shown(value), "a finite number within the range of fp32"))
    return number


def _lower_bound(value: object) -> float:
    if value is None:
        raise ValueError(
            refuse(
                "lower_bound",
                "None",
                "a float in [-5, 0]; softplus-gated models (lower_bound=None) are not supported "
                "yet",
            )
        )
    number = _number("lower_bound", value)
    if not _LOWEST_BOUND <= number <= 0.0:
        raise ValueError(refuse("lower_bound", shown(value), "a float in [-5, 0]"))
    return number


def _number(name: str, value: Any) -> float:
    """A Python, numpy or 0-dimensional CPU tensor number as a float; bools are refused."""
    needs = "a real number (float)"
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            got = f"a tensor on {value.device}"
            raise TypeError(refuse(name, got, f"{needs}; reading it would wait for the device"))
        if value.is_nested:  # has no sizes to show
            raise TypeError(refuse(name, "a nested tensor", needs))
        if value.dim() or value.dtype == torch.bool or value.is_complex() or value.is_quantized:
            got = f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
            raise TypeError(refuse(name, got, f"{needs} or a 0-dimensional real CPU tensor"))
        check_derivatives([(name, value)])
        try:
            return float(value.item())
        except Exception as error:
            got = f"a {type(value).__name__} without a value (fake, traced or transformed)"
            raise TypeError(refuse(name, got, needs)) from error
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        if torch.compiler.is_compiling() and getattr(value, "ndim", None) == 0:
            item: Any = value  # a number of numpy, which the compiler shows as an array
            return _number(name, item.item())
        got = "None" if value is None else f"{shown(value)} of type {type(value).__name__}"
        raise TypeError(refuse(name, got, needs))
    try:
        return float(value)
    except OverflowError:
        return math.inf  # beyond every limit, whatever its sign
    except Exception as error:
        got = f"a value of type {type(value).__name__} that float() cannot convert"
        raise TypeError(refuse(name, got, needs)) from error


def check_derivatives(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse tensors of which gradients or tangents are wanted."""
    if torch.is_grad_enabled():
        _check_gradients(named)
    if forward_ad._current_level >= 0:
        _check_tangents(named)


def _check_gradients(named: Iterable[tuple[str, Tensor | None]]) -> None:
    for name, tensor in named:
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                refuse(
                    name,
                    "a tensor that requires grad, with grad mode on",
                    "torch.no_grad() or torch.inference_mode() around the call, or a detached "
                    "tensor: flash_kda is forward only",
                )
            )


def _check_tangents(named: Iterable[tuple[str, Tensor | None]]) -> None:
    for name, tensor in named:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                refuse(
                    name,
                    "a dual tensor of forward-mode differentiation",
                    "its primal (torch.autograd.forward_ad.unpack_dual): flash_kda computes no "
                    "tangents",
                )
            )


def _refuse_jit_trace() -> None:
    """Its tensors are real: a call would be made, and not be a part of what it has recorded."""
    if torch.jit.is_tracing():
        needs = "torch.ops.flash_kda.fwd in the place of flash_kda.fwd, which it can record"
        raise ValueError(refuse("q", "a tensor that torch.jit.trace follows", needs))


def _refuse_without_memory(tensors: Tensors, layout: Layout) -> None:
    for name, tensor, extent in zip(NAMES, tensors, layout.extents, strict=True):
        if tensor is None or not extent:
            continue
        try:
            missing = tensor.data_ptr() == tensor.storage_offset() * tensor.element_size()
        except RuntimeError:
            missing = True
        if missing:
            raise ValueError(refuse_without_memory(name, tensor))


def _check_addresses(tensors: Tensors, pointers: tuple[int, ...], layout: Layout) -> None:
    for position in layout.present:
        if pointers[position] < _LOW_ADDRESS:
            _refuse_without_memory(tensors, layout)
    _check_ends(tensors, pointers, layout, layout.present)
    bits = pointers[Q] | pointers[K] | pointers[V] | pointers[G] | pointers[OUT]
    if bits % _VECTOR_BYTES or pointers[WORKSPACE] % _WORKSPACE_ALIGNMENT:
        _refuse_misaligned(pointers)
    for written, other, written_bytes, other_bytes in layout.pairs:
        distance = pointers[other] - pointers[written]
        if -other_bytes < distance < written_bytes:
            _check_overlap(written, other, distance, layout)


def _check_ends(
    tensors: Tensors, pointers: tuple[int, ...], layout: Layout, positions: Iterable[int]
) -> None:
    """Refuse a tensor whose storage was made smaller behind its back."""
    for position in positions:
        tensor = tensors[position]
        assert tensor is not None
        storage = tensor.untyped_storage()
        end = pointers[position] + layout.extents[position] - storage.data_ptr()
        if end > storage.nbytes():
            raise ValueError(
                refuse(
                    NAMES[position],
                    f"a storage of {storage.nbytes()} bytes",
                    f"at least {end}, where the last element ends",
                )
            )


def _refuse_misaligned(pointers: tuple[int, ...]) -> None:
    for position in (*_ALIGNED_16, WORKSPACE):
        alignment = _WORKSPACE_ALIGNMENT if position == WORKSPACE else _VECTOR_BYTES
        excess = pointers[position] % alignment
        if excess:
            raise ValueError(
                refuse(
                    NAMES[position],
                    f"a first element {excess} bytes past a multiple of {alignment}",
                    f"{alignment}-byte alignment of its first element",
                )
            )


def _check_overlap(written: int, other: int, distance: int, layout: Layout) -> None:
    """Refuse a written tensor that shares memory with another; states may be one tensor."""
    states = {written, other} == {INITIAL, FINAL}
    if states and layout.states_alike and not distance:
        return
    mine, theirs = layout.geometries[written], layout.geometries[other]
    assert mine is not None and theirs is not None
    if overlap.share_memory(mine, theirs, distance):
        needs = _OWN_MEMORY
        if states:
            needs = "memory of its own, or to be the very tensor given as initial_state"
        raise ValueError(not_alone(NAMES[written], NAMES[other], needs))


def not_alone(written: str, other: str, needs: str = _OWN_MEMORY) -> str:
    """What is said of an argument that is written and shares memory with another."""
    return refuse(written, f"a tensor that shares memory with {other}", needs)


def _with_copies(
    layout: Layout,
    pointers: tuple[int, ...],
    scale: float,
    lower_bound: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> CheckedCall:
    addresses = list(pointers)
    copies = []
    parameters = ((A_LOG, A_log), (DT_BIAS, dt_bias))
    for (position, tensor), needed in zip(parameters, layout.copies, strict=True):
        if needed and tensor is not None:
            copy = tensor.detach().contiguous()
            addresses[position] = copy.data_ptr()
            copies.append(copy)
    return layout, tuple(addresses), scale, lower_bound, tuple(copies)
