"""Agreement with flash-linear-attention's Triton ``chunk_kda``, where that package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import forward, make_case, relative_error
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]

# One number of heads and one chunk shape for all, so that Triton tunes its kernels once.
HEADS = 4


@pytest.fixture
def chunk_kda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """FLA's function, with its own kernels and not ours behind it."""
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        pytest.skip(f"flash-linear-attention cannot be imported: {error}")
    return chunk_kda


def run_fla(chunk_kda: Callable[..., Any], case: cases.Case) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return chunk_kda(
            q=case.q,
            k=case.k,
            v=case.v,
            g=case.g,
            beta=case.beta,
            scale=case.scale,
            initial_state=case.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=case.lower_bound,
            state_v_first=True,
            cu_seqlens=case.cu_seqlens,
            A_log=case.A_log,
            dt_bias=case.dt_bias.flatten(),
        )


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"batch": 2, "tokens": 500}, "ordinary"),
        ({"batch": 2, "tokens": 500}, "wide_gate"),
        ({"lengths": (300, 17, 1, 64, 210)}, "ordinary"),
    ],
    ids=["dense", "dense_wide_gate", "packed"],
)
def test_agrees_with_fla(
    rng: cases.Random, chunk_kda: Callable[..., Any], shape: dict, kind: str
) -> None:
    case = make_case(rng, kind, heads=HEADS, **shape)
    expected = cases.reference(case)
    theirs = run_fla(chunk_kda, case)
    ours = forward(case)
    for name, x, y, truth in zip(("out", "final_state"), ours, theirs, expected, strict=True):
        assert x is not None
        error, fla_error = relative_error(x, truth), relative_error(y, truth)
        print(f"{name}: relative error {error:.2e}, FLA {fla_error:.2e}")
        assert fla_error < 3e-2, f"{name}: FLA computed something else ({fla_error:.2e})"
        assert error <= 1.1 * fla_error + 5e-4
        assert relative_error(x, y.double()) <= error + fla_error + 1e-6
