"""One question whether tensors have the metadata that others had, instead of five for each.

torch guards compiled graphs by a class in C++ that compares type, device, dtype, kind, sizes and
strides of many tensors at once, in a fifth of the time that reading them from Python takes. It is
not part of torch's public interface: where it is missing or overlooks something, there are no
guards, and arguments.py reads the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Guard = Callable[..., bool]


class Absent(Tensor):
    """Stands for an absent tensor: no argument is of this type, whatever its other metadata."""


_GUARDED_TYPES = (Tensor, torch.nn.Parameter, Absent)


def absent(size: int) -> Tensor:
    """What guards see in the place of an absent tensor. Those of different sizes are told apart."""
    return (
        torch.empty(size, dtype=torch.float32, device="meta") if _guards is None else _absent(size)
    )


def _absent(size: int) -> Tensor:
    # Under a FakeTensorMode at import it would be a FakeTensor, which gets no guard.
    with torch._C._DisableTorchDispatch():
        return Tensor._make_subclass(Absent, torch.empty(size, dtype=torch.float32, device="meta"))


def guard(tensors: Sequence[Tensor]) -> Guard | None:
    """What says of as many tensors whether their metadata are those of ``tensors``.

    It says no where one is given twice, and says it at the first difference. None: there is no such
    guard.
    """
    if _guards is None or len({id(x) for x in tensors}) < len(tensors):
        return None
    if not all(type(x) in _GUARDED_TYPES for x in tensors):
        return None
    return _made_by(_guards, tensors)


def _made_by(guards: Any, tensors: Sequence[Tensor]) -> Guard:
    check: Guard = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _find() -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards if _tells_apart(TensorGuards) else None
    except Exception:  # of another torch: whatever its reason
        return None


def _tells_apart(guards: Any) -> bool:
    """Whether such guards notice each difference that matters."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    plain, imaginary = empty(2, 3), empty(2, 3, dtype=torch.complex64).imag
    others = (
        empty(2, 3, dtype=torch.bfloat16),
        empty(2, 3, device="meta"),
        empty(4, 3),
        empty(2, 4),
        empty(2, 3, 1),
        empty(6),
        empty(3, 2).T,
        empty(1, 3).expand(2, 3),
        imaginary,
        _absent(2),
        None,
    )
    of_plain, of_imaginary = _made_by(guards, (plain,)), _made_by(guards, (imaginary,))
    negated = empty(2, 3, dtype=torch.complex64).conj().imag
    return (
        of_plain(plain) is True
        and of_plain(empty(2, 3)) is True
        and of_imaginary(imaginary) is True
        and not any(of_plain(x) for x in others)
        and not of_imaginary(negated)
        and _made_by(guards, (_absent(1),))(_absent(1))
        and not _made_by(guards, (_absent(1),))(empty(1, device="meta"))
    )


_guards = _find()
