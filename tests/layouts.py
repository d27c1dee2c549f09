"""Views in which tensors may be handed to ``flash_kda.fwd``, each in a buffer of NaN.

A read beside a view shows as NaN in the results, a write beside it in the buffer's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cases
import torch
from cases import poisoned
from torch import Tensor

D = cases.WIDTH
MARGIN = 1024
"""Elements before and after every buffer."""


def _offset(b: int, t: int, h: int, new: Callable[..., Tensor]) -> Tensor:
    return new(b * t * h * D + 24)[8:-16].view(b, t, h, D)


# Each makes a [B, T, H, 128] view of a new buffer.
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda b, t, h, new: new(b, t, h, D),
    "one_tensor_per_head": lambda b, t, h, new: new(b, t, h, 3 * D)[..., D : 2 * D],
    "one_tensor_per_token": lambda b, t, h, new: new(b, t, 3, h, D)[:, :, 1],
    "one_projection": lambda b, t, h, new: new(b, t, 3 * h * D)[..., h * D : 2 * h * D].unflatten(
        -1, (h, D)
    ),
    "some_rows_and_tokens": lambda b, t, h, new: new(2 * b, 3 * t, h, D)[1::2, 1::3],
    "heads_before_tokens": lambda b, t, h, new: new(b, h, t, D).transpose(1, 2),
    "tokens_before_batch": lambda b, t, h, new: new(t, b, h, D).transpose(0, 1),
    "padded_rows": lambda b, t, h, new: new(b, t, h, D + 8)[..., :D],
    "offset": _offset,
}


# Each makes an [N, H, 128, 128] view of a new buffer.
STATE_LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda n, h, new: new(n, h, D, D),
    "heads_first": lambda n, h, new: new(h, n, D, D).transpose(0, 1),
    "sliced": lambda n, h, new: new(2 * n, h + 2, D, D)[1::2, 1:-1],
}


def in_nan(x: Tensor) -> Callable[..., Tensor]:
    """Makes buffers of NaN of x's dtype, each with NaN before and after it."""

    def new(*shape: int) -> Tensor:
        size = math.prod(shape)
        whole = poisoned(size + 2 * MARGIN, dtype=x.dtype, device=x.device)
        return whole[MARGIN : MARGIN + size].view(shape)

    return new


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A copy of x [B, T, H, 128] as a view of a buffer of NaN."""
    return LAYOUTS[layout](*x.shape[:3], in_nan(x)).copy_(x)


def lay_out_state(x: Tensor, layout: str) -> Tensor:
    """A copy of x [N, H, 128, 128] as a view of a buffer of NaN."""
    return STATE_LAYOUTS[layout](*x.shape[:2], in_nan(x)).copy_(x)


def assert_only_view_written(view: Tensor) -> None:
    """The buffer of a poisoned view is still poisoned outside the view."""
    values = view.clone()
    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    view.copy_(poisoned(*view.shape, dtype=view.dtype, device=view.device))
    assert bool((cases.bits(whole) == -1).all()), "elements beside the view were written"
    view.copy_(values)


# Each makes a [B, T, H] view of a new buffer.
BETAS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every_other": lambda x: torch.stack((torch.full_like(x, torch.nan), x), -1)[..., 1],
    "odd_offset": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    "head_slice": lambda x: torch.cat((torch.full_like(x, torch.nan), x), -1)[..., x.shape[-1] :],
}
