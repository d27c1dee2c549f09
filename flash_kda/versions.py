"""Tells autograd of writes that it cannot see, by the version counters of what was written.

Where a tensor that it saved for a backward pass is written, that pass then refuses to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import graph


def _find() -> Callable[[Sequence[Tensor]], None]:
    increment: Any = graph.increment_version
    try:
        increment(())
    except Exception:
        return _one_by_one  # torch 2.4 takes no sequence
    return increment


def _one_by_one(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        # Those of inference mode have no version; newer releases pass over them by themselves.
        if not tensor.is_inference():
            graph.increment_version(tensor)


wrote = _find()
"""Takes the tensors that were written."""
