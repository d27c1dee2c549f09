"""Strides, offsets and dtypes of the arguments of ``flash_kda.fwd``.

Every view lies in a buffer whose other elements are NaN (layouts.py), so that a read beside it
shows, and the buffer around ``out`` must keep its bytes.
"""

from __future__ import annotations

import cases
import pytest
import torch
from cases import assert_accurate, forward, make_case, poisoned, same_bits
from layouts import (
    BETAS,
    LAYOUTS,
    STATE_LAYOUTS,
    assert_only_view_written,
    lay_out,
    lay_out_state,
)
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("path")]

INPUTS = ("q", "k", "v", "g")
D = cases.WIDTH


def lay_out_case(case: cases.Case, layouts: dict[str, str]) -> cases.Case:
    return case.but(**{name: lay_out(getattr(case, name), layouts[name]) for name in layouts})


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
    case.q = case.q[:, :1].expand_as(case.q)
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
    for layout in STATE_LAYOUTS:
        view = lay_out_state(case.initial_state, layout)
        buffer = poisoned(h + 1, 2 * n, D, D, dtype=final, device=case.device)
        state = buffer.transpose(0, 1)[::2, 1:]
        out, _ = forward(case.but(initial_state=view), final_state=state)
        assert_accurate(case, out, state)
        assert same_bits(out, expected[0]) and same_bits(state, expected[1])
        assert_only_view_written(state)
