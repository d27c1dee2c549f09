"""``torch.ops.flash_kda.fwd``: the operation as torch.compile, torch.export and dispatchers see it.

The schema says which arguments are written; the fake implementation has nothing to compute, since
the operation returns nothing. Registering opens no library and takes a fraction of a millisecond.
``flash_kda.fwd`` goes through here only while it is traced: an eager call does not pay for the
dispatcher. Called by itself the operator takes what its schema can convert, such as True for a
float or 1 for a bool, which ``flash_kda.fwd`` refuses. Without a kernel for autograd, gradients
would be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import versions
from .arguments import check_derivatives

NAMESPACE = "flash_kda"
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
    "Tensor? A_log, Tensor? dt_bias, float lower_bound, Tensor? initial_state=None, "
    "Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, *, Tensor(c!)? workspace=None, "
    "bool beta_is_logits=True, Tensor? state_indices=None, Tensor? checkpoint_offsets=None, "
    "Tensor(d!)? checkpoint_states=None) -> ()"
)
_PARSED = torch._C.parse_schema(SCHEMA).arguments
_ARGUMENTS = tuple(argument.name for argument in _PARSED)
_WRITTEN = tuple(x.name for x in _PARSED if x.alias_info is not None and x.alias_info.is_write)

_library = torch.library.Library(NAMESPACE, "DEF")
"""Kept: deleting it would undo the registration."""


def register(run: Callable[..., None]) -> torch._ops.OpOverload:
    """Define the operator, with ``run`` for CPU and CUDA tensors, and return it."""
    _library.define(SCHEMA)
    for key in ("CPU", "CUDA"):
        _library.impl("fwd", run, key)
    _library.impl("fwd", _forward_only, "Autograd", with_keyset=True)
    _library.impl("fwd", _in_place, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::fwd", _fake, lib=_library)
    return torch.ops.flash_kda.fwd.default


def _forward_only(keyset: Any, *args: Any, **kwargs: Any) -> None:
    """The operator for autograd: refuse tensors of which derivatives are wanted, else go on below.

    ``run`` refuses them, too, but does not see them all: torch.compile differentiates a graph
    without running it, and torch.func takes its wrappers off on the way down.
    """
    check_derivatives(_tensors(args, kwargs))
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        torch.ops.flash_kda.fwd.default.redispatch(below, *args, **kwargs)


def _in_place(keyset: Any, *args: Any, **kwargs: Any) -> None:
    """The operator for version counters: go on below, then say what has been written.

    ``run`` says so, too, but is no part of what torch.compile differentiates.
    """
    below = keyset & torch._C._after_ADInplaceOrView_keyset
    torch.ops.flash_kda.fwd.default.redispatch(below, *args, **kwargs)
    versions.wrote([x for name, x in _tensors(args, kwargs) if name in _WRITTEN])


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    named = (*zip(_ARGUMENTS, args), *kwargs.items())  # noqa: B905  (those with defaults may lack)
    return [(name, x) for name, x in named if isinstance(x, Tensor)]


def _fake(*args: Any, **kwargs: Any) -> None:
    """Shapes are checked when real tensors arrive: reading symbolic ones would fix their sizes."""
    # One real meta tensor among others would otherwise end here, and the call do nothing.
    devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    if "meta" in devices and len(devices) > 1:
        raise ValueError(
            "flash_kda.fwd: got tensors on meta and on other devices; needs all on one device"
        )
