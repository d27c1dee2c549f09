"""``torch.ops.flash_kda.fwd``: the operation as torch.compile, torch.export and dispatchers see it.

The schema says which arguments are written; the fake implementation has nothing to compute, since
the operation returns nothing. Registering opens no library and takes a fraction of a millisecond.
``flash_kda.fwd`` goes through here only while it is traced: an eager call does not pay for the
dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "flash_kda"
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
    "Tensor? A_log, Tensor? dt_bias, float lower_bound, Tensor? initial_state=None, "
    "Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, *, Tensor(c!)? workspace=None, "
    "bool beta_is_logits=True, Tensor? state_indices=None, Tensor? checkpoint_offsets=None, "
    "Tensor(d!)? checkpoint_states=None) -> ()"
)


_library = torch.library.Library(NAMESPACE, "DEF")
"""Kept: deleting it would undo the registration."""


def register(run: Callable[..., None]) -> torch._ops.OpOverload:
    """Define the operator, with ``run`` for CPU and CUDA tensors, and return it."""
    _library.define(SCHEMA)
    for key in ("CPU", "CUDA"):
        _library.impl("fwd", run, key)
    torch.library.register_fake(f"{NAMESPACE}::fwd", _fake, lib=_library)
    return torch.ops.flash_kda.fwd.default


def _fake(*args: Any, **kwargs: Any) -> None:
    """Shapes are checked when real tensors arrive: reading symbolic ones would fix their sizes."""
    # One real meta tensor among others would otherwise end here, and the call do nothing.
    devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    if "meta" in devices and len(devices) > 1:
        raise ValueError(
            "flash_kda.fwd: got tensors on meta and on other devices; needs all on one device"
        )
