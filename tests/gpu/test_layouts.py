"""Strides, offsets and dtypes of the arguments of ``flash_kda.fwd``.

Every view lies in a buffer whose other elements are NaN, so that a read beside it shows, and the
buffer around ``out`` must keep its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import cases
import pytest
import torch
from cases import assert_accurate, forward, make_case, poisoned, same_bits
from torch import Tensor

pytestmark = pytest.mark.gpu

INPUTS = ("q", "k", "v", "g")
D = cases.WIDTH


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


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A copy of x as a view of a buffer of NaN."""

    def new(*shape: int) -> Tensor:
        return poisoned(*shape, dtype=x.dtype, device=x.device)

    return LAYOUTS[layout](*x.shape[:3], new).copy_(x)


def lay_out_case(case: cases.Case, layouts: dict[str, str]) -> cases.Case:
    return case.but(**{name: lay_out(getattr(case, name), layouts[name]) for name in layouts})


def assert_only_view_written(view: Tensor) -> None:
    """The buffer of a poisoned view is still poisoned outside the view."""
    values = view.clone()
    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    view.copy_(poisoned(*view.shape, dtype=view.dtype, device=view.device))
    assert bool((cases.bits(whole) == -1).all()), "elements beside the view were written"
    view.copy_(values)


def check(case: cases.Case, layouts: dict[str, str], out_layout: str) -> None:
    expected = forward(case)
    assert_accurate(case, *expected)
    out = lay_out(poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device), out_layout)
    out, state = forward(lay_out_case(case, layouts), out=out)
    assert same_bits(out, expected[0])
    assert same_bits(state, expected[1])
    assert_only_view_written(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tensors_in_one_layout(rng: cases.Random, layout: str) -> None:
    case = make_case(rng, batch=3, tokens=45, heads=3)
    check(case, dict.fromkeys(INPUTS, layout), layout)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "contiguous"])
def test_packed_sequences_in_one_layout(rng: cases.Random, layout: str) -> None:
    case = make_case(rng, lengths=(30, 0, 17, 64), before=2, after=3, heads=2)
    check(case, dict.fromkeys(INPUTS, layout), layout)


@pytest.mark.parametrize("name", [*INPUTS, "out"])
def test_one_tensor_in_another_layout(rng: cases.Random, name: str) -> None:
    case = make_case(rng, batch=2, tokens=35, heads=3)
    for layout in ("some_rows_and_tokens", "heads_before_tokens", "one_tensor_per_head"):
        layouts = {x: layout if x == name else "contiguous" for x in INPUTS}
        check(case, layouts, layout if name == "out" else "contiguous")


def test_every_tensor_in_its_own_layout(rng: cases.Random) -> None:
    case = make_case(rng, batch=2, tokens=35, heads=3)
    names = list(LAYOUTS)
    for shift in range(len(names)):
        turned = names[shift:] + names[:shift]
        check(case, dict(zip(INPUTS, turned, strict=False)), turned[4])


def test_shared_rows(rng: cases.Random) -> None:
    """Expanded inputs have stride 0."""
    case = make_case(rng, batch=2, tokens=40, heads=3)
    case.g = case.g[:, :, :1].expand_as(case.g)
    case.k = case.k[:1].expand_as(case.k)
    case.beta = case.beta[:, :1].expand_as(case.beta)
    case.v = case.q
    assert_accurate(case, *forward(case))


@pytest.mark.parametrize("shape", [(1, 40, 2), (2, 1, 3), (2, 40, 1), (1, 1, 1)])
def test_strides_of_dimensions_of_size_one_do_not_matter(
    rng: cases.Random, shape: tuple[int, int, int]
) -> None:
    batch, tokens, heads = shape
    case = make_case(rng, batch=batch, tokens=tokens, heads=heads)
    expected = forward(case)

    def odd(x: Tensor) -> Tensor:
        strides = [s if n > 1 else 3 for n, s in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    names = (*INPUTS, "beta", "initial_state")
    strange = case.but(**{name: odd(getattr(case, name)) for name in names})
    out = odd(poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device))
    state = odd(poisoned(*case.state_shape, dtype=torch.float32, device=case.device))
    forward(strange, out=out, final_state=state)
    assert_accurate(case, out, state)
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


BETAS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every_other": lambda x: torch.stack((torch.full_like(x, torch.nan), x), -1)[..., 1],
    "odd_offset": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    "head_slice": lambda x: torch.cat((torch.full_like(x, torch.nan), x), -1)[..., x.shape[-1] :],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", BETAS)
def test_beta(rng: cases.Random, dtype: torch.dtype, layout: str) -> None:
    case = make_case(rng, batch=2, tokens=37, heads=3)
    case.beta = BETAS[layout](rng.normal(2, 37, 3, dtype=dtype))
    assert_accurate(case, *forward(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_types_of_gate_parameters(rng: cases.Random, dtype: torch.dtype, name: str) -> None:
    case = make_case(rng, tokens=50, heads=3)
    setattr(case, name, getattr(case, name).to(dtype))
    assert_accurate(case, *forward(case))


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1, 3, 1)])
def test_shapes_of_a_log(rng: cases.Random, shape: tuple[int, ...]) -> None:
    case = make_case(rng, tokens=50, heads=3)
    expected = forward(case)
    every_other = torch.stack((case.A_log, torch.full_like(case.A_log, torch.nan)), -1)[:, 0]
    for x in (case.A_log, every_other):
        out, state = forward(case.but(A_log=x.reshape(shape) if x.is_contiguous() else x))
        assert same_bits(out, expected[0]) and same_bits(state, expected[1])


def test_shapes_of_dt_bias(rng: cases.Random) -> None:
    case = make_case(rng, tokens=50, heads=3)
    assert case.dt_bias is not None
    expected = forward(case)
    transposed = case.dt_bias.t().contiguous().t()
    sliced = torch.cat((case.dt_bias, torch.full_like(case.dt_bias, torch.nan)), 1)[:, :D]
    for x in (case.dt_bias.flatten(), transposed, sliced):
        out, state = forward(case.but(dt_bias=x))
        assert same_bits(out, expected[0]) and same_bits(state, expected[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("strided", [False, True])
def test_cu_seqlens(rng: cases.Random, dtype: torch.dtype, strided: bool) -> None:
    case = make_case(rng, lengths=(30, 0, 17, 64), before=1)
    assert case.cu_seqlens is not None
    expected = forward(case)
    bounds = case.cu_seqlens.to(dtype)
    if strided:
        bounds = torch.stack((bounds, torch.full_like(bounds, -7)), -1)[:, 0]
    out, state = forward(case.but(cu_seqlens=bounds))
    assert_accurate(case, out, state)
    assert same_bits(state, expected[1])


@pytest.mark.parametrize("initial", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("final", [torch.float32, torch.bfloat16])
def test_strided_states(rng: cases.Random, initial: torch.dtype, final: torch.dtype) -> None:
    case = make_case(rng, lengths=(30, 17, 0, 50), heads=3, initial_state=initial)
    assert case.initial_state is not None
    n, h = case.state_shape[:2]
    expected = forward(case, final_state=final)
    heads_first = poisoned(h, n, D, D, dtype=initial, device=case.device).transpose(0, 1)
    sliced = poisoned(2 * n, h + 2, D, D, dtype=initial, device=case.device)[1::2, 1:-1]
    for view in (heads_first, sliced):
        view.copy_(case.initial_state)
        buffer = poisoned(h + 1, 2 * n, D, D, dtype=final, device=case.device)
        state = buffer.transpose(0, 1)[::2, 1:]
        out, _ = forward(case.but(initial_state=view), final_state=state)
        assert_accurate(case, out, state)
        assert same_bits(out, expected[0]) and same_bits(state, expected[1])
        assert_only_view_written(state)
