"""flash-linear-attention (FLA) hands ``chunk_kda`` over to this package, in every release that can.

Uses the FLA that is importable; ``scripts/test_fla_versions.sh`` runs this file with each. With
FLASH_KDA_TEST_DEVICE=cpu the hand-over is tested alone, since FLA's own kernels need a GPU.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cases import make_case, relative_error
from torch import Tensor

import flash_kda

pytestmark = pytest.mark.gpu

# One number of heads and few shapes, so that Triton tunes its kernels once.
HEADS = 4
LENGTHS = (300, 17, 64, 210)


@pytest.fixture(scope="module")
def chunk_kda() -> Callable[..., Any]:
    try:
        from fla.ops.kda import chunk_kda
    except Exception as error:  # as a release of Triton that FLA does not know raises ValueError
        if os.environ.get("FLASH_KDA_REQUIRE_FLA") == "1":
            raise
        pytest.skip(f"flash-linear-attention cannot be imported: {error}")
    return chunk_kda


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call that FLA makes of this package."""
    calls: list[dict[str, Any]] = []
    fwd = flash_kda.fwd

    def recorded(*arguments: Any, **keywords: Any) -> None:
        calls.append(keywords)
        fwd(*arguments, **keywords)

    monkeypatch.setattr(flash_kda, "fwd", recorded)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    return calls


def version() -> tuple[int, ...]:
    return tuple(int(x) for x in importlib.metadata.version("fla-core").split(".")[:3])


def flags(chunk_kda: Callable[..., Any], ours: bool) -> dict[str, Any]:
    """What this release wants: for its hand-over, or for its own kernels."""
    names = inspect.signature(chunk_kda).parameters
    v_first = "state_v_first" if "state_v_first" in names else "transpose_state_layout"
    chosen = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "safe_gate": True,
        v_first: True,
    }
    # 0.5.0 has no sigmoid of its own: the flag is for the hand-over alone.
    if ours or "use_beta_sigmoid_in_kernel" in names:
        chosen["use_beta_sigmoid_in_kernel"] = True
    return chosen


def call(chunk_kda: Callable[..., Any], case: cases.Case, ours: bool) -> tuple[Tensor, Tensor]:
    chosen = flags(chunk_kda, ours)
    beta = case.beta
    if "use_beta_sigmoid_in_kernel" not in chosen:
        beta = torch.sigmoid(beta.float())
    with torch.inference_mode():
        return chunk_kda(
            q=case.q,
            k=case.k,
            v=case.v,
            g=case.g,
            beta=beta,
            scale=case.scale,
            initial_state=case.initial_state,
            output_final_state=True,
            lower_bound=case.lower_bound,
            cu_seqlens=case.cu_seqlens,
            A_log=case.A_log,
            dt_bias=case.dt_bias,
            **chosen,
        )


def triton(
    chunk_kda: Callable[..., Any], case: cases.Case, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """FLA's own kernels, with inputs in the types that they take."""
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    changes: dict[str, Any] = {"dt_bias": case.dt_bias.flatten(), "v": case.v.contiguous()}
    if case.initial_state is not None:
        changes["initial_state"] = case.initial_state.float()
    if case.cu_seqlens is not None:
        changes["cu_seqlens"] = case.cu_seqlens.long()
    return call(chunk_kda, case.but(**changes), ours=False)


def variant(rng: cases.Random, name: str) -> cases.Case:
    """Inputs of the kinds of call that models make."""
    packed = name.startswith("packed")
    shape: dict[str, Any] = {"lengths": LENGTHS} if packed else {"batch": 2, "tokens": 300}
    initial = {"bf16_state": torch.bfloat16, "no_state": None}.get(name, torch.float32)
    case = make_case(rng, heads=HEADS, initial_state=initial, **shape)
    if name == "packed_int32":
        case.cu_seqlens = case.cu_seqlens.int()
    if name == "flat_bias":
        case.dt_bias = case.dt_bias.flatten()
    if name == "bf16_parameters":
        case.A_log, case.dt_bias = case.A_log.bfloat16(), case.dt_bias.bfloat16()
    if name == "strided_v":
        case.v = torch.cat((case.q, case.v, case.k), -1)[..., 128:256]
        assert not case.v.is_contiguous()
    return case


VARIANTS = [
    *("fixed", "no_state", "bf16_state", "flat_bias", "bf16_parameters", "strided_v"),
    *("packed_int32", "packed_int64"),
]


@pytest.mark.parametrize("name", VARIANTS)
def test_hit_is_right(
    rng: cases.Random, chunk_kda: Callable[..., Any], hits: list[dict[str, Any]], name: str
) -> None:
    case = variant(rng, name)
    expected = cases.reference(case)
    out, state = call(chunk_kda, case, ours=True)
    assert len(hits) == 1, "FLA did not call flash_kda.fwd"
    assert relative_error(out, expected[0]) <= cases.ORDINARY_BOUND
    assert relative_error(state, expected[1]) <= cases.ORDINARY_BOUND


@pytest.mark.cuda
@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_triton(
    rng: cases.Random,
    chunk_kda: Callable[..., Any],
    hits: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    case = variant(rng, name)
    expected = cases.reference(case)
    ours = call(chunk_kda, case, ours=True)
    assert len(hits) == 1
    theirs = triton(chunk_kda, case, monkeypatch)
    assert len(hits) == 1, "FLA_FLASH_KDA=0 did not keep the call on FLA's kernels"
    for what, x, y, truth in zip(("out", "state"), ours, theirs, expected, strict=True):
        error, fla_error = relative_error(x, truth), relative_error(y, truth)
        print(f"{what}: relative error {error:.2e}, FLA {fla_error:.2e}")
        assert fla_error < 3e-2, f"{what}: FLA computed something else ({fla_error:.2e})"
        assert error <= 1.1 * fla_error + 5e-4
        assert relative_error(x, y.double()) <= error + fla_error + 1e-6


class Stayed(Exception):
    """The call went on to FLA's own kernels."""


@pytest.fixture
def stays(chunk_kda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's kernels replaced by an exception, so that where a call goes needs no GPU."""

    def apply(*arguments: Any) -> None:
        raise Stayed

    module = sys.modules["fla.ops.kda.chunk"]
    monkeypatch.setattr(module.ChunkKDAFunction, "apply", apply)


def route(chunk_kda: Callable[..., Any], case: cases.Case, **changes: Any) -> None:
    arguments = {
        **{name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log")},
        "dt_bias": case.dt_bias.flatten(),
        "lower_bound": case.lower_bound,
        **flags(chunk_kda, ours=True),
        **changes,
    }
    chunk_kda(**arguments)


def test_opt_out(
    rng: cases.Random,
    chunk_kda: Callable[..., Any],
    hits: list[dict[str, Any]],
    stays: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = variant(rng, "no_state")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    with torch.inference_mode(), pytest.raises(Stayed):
        route(chunk_kda, case)
    assert not hits
    monkeypatch.delenv("FLA_FLASH_KDA")  # handing over is FLA's default
    with torch.inference_mode():
        route(chunk_kda, case)
    assert len(hits) == 1


@pytest.mark.parametrize(
    "flag",
    [
        *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"),
        *("safe_gate", "state layout", "float16", "width", "gradients"),
    ],
)
def test_other_calls_stay_with_fla(
    rng: cases.Random,
    chunk_kda: Callable[..., Any],
    hits: list[dict[str, Any]],
    stays: None,
    flag: str,
) -> None:
    case = variant(rng, "no_state")
    changes: dict[str, Any] = {}
    names = ("q", "k", "v", "g")
    if flag == "state layout":
        name = next(x for x in flags(chunk_kda, ours=True) if x.startswith(("state", "transpose")))
        changes[name] = False
    elif flag == "float16":
        changes = {name: getattr(case, name).half() for name in names}
    elif flag == "width":
        changes = {name: getattr(case, name)[..., :64].contiguous() for name in names}
    elif flag != "gradients":
        changes[flag] = False
    with torch.set_grad_enabled(flag == "gradients"), pytest.raises(Stayed):
        route(chunk_kda, case, **changes)
    assert not hits


def test_newer_name_of_the_state_layout_in_0_5_0(
    rng: cases.Random,
    chunk_kda: Callable[..., Any],
    hits: list[dict[str, Any]],
    stays: None,
) -> None:
    """That release ignores it, as README and docs/fla.md say; later ones hand the call over."""
    case = variant(rng, "no_state")
    changes = {"state_v_first": True}
    older = version() == (0, 5, 0)
    if older:
        changes["transpose_state_layout"] = False  # the default of that release
    with torch.inference_mode(), pytest.raises(Stayed) if older else nullcontext():
        route(chunk_kda, case, **changes)
    assert len(hits) == (not older)


@pytest.mark.cuda
def test_gradients_stay_with_fla(
    rng: cases.Random, chunk_kda: Callable[..., Any], hits: list[dict[str, Any]]
) -> None:
    case = variant(rng, "no_state")
    out, _ = chunk_kda(
        **{name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log")},
        dt_bias=case.dt_bias.flatten(),
        lower_bound=case.lower_bound,
        **flags(chunk_kda, ours=False),
    )
    assert out.shape == case.v.shape and not hits


def test_log_names_the_backend(chunk_kda: Callable[..., Any], device: torch.device) -> None:
    """The line that the README says to look for, in a process of its own: FLA writes it once."""
    program = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
sys.path[:] = {sys.path!r}
import torch
from fla.ops.kda import chunk_kda
from gpu.test_fla_backend import flags
device = torch.device({str(device)!r})
q, k, v, g = (torch.randn(1, 20, 2, 128, device=device).bfloat16() for _ in range(4))
beta = torch.randn(1, 20, 2, device=device).bfloat16()
with torch.inference_mode():
    chunk_kda(q, k, v, g, beta, lower_bound=-5.0, A_log=torch.zeros(2, device=device),
              dt_bias=torch.zeros(2, 128, device=device), **flags(chunk_kda, ours=True))
"""
    environment = {**os.environ, "FLA_FLASH_KDA": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *(p for p in sys.path if p)]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    # The name before the arrow and the one after it differ between releases.
    lines = re.findall(r"\[FLA Backend\] .*chunk_kda -> flash_?kda$", done.stdout, re.MULTILINE)
    assert len(lines) == 1, done.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_layer(
    rng: cases.Random,
    chunk_kda: Callable[..., Any],
    hits: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """FLA's layer after ``model.bfloat16()``, which makes A_log and dt_bias bf16, too."""
    if rng.device.type != "cuda":
        pytest.skip("the layer's convolutions and norms are Triton kernels")
    if version() < (0, 5, 1):
        pytest.skip("this release's layer takes the sigmoid of beta itself: no hand-over")
    try:
        from fla.layers.kda import KimiDeltaAttention
    except ImportError as error:
        pytest.skip(f"FLA's layers cannot be imported: {error}")
    torch.manual_seed(rng.seed)
    layer = KimiDeltaAttention(
        hidden_size=256, num_heads=HEADS, safe_gate=True, lower_bound=-5.0, layer_idx=0
    )
    layer = layer.to(rng.device).to(dtype).eval()
    assert layer.A_log.dtype == dtype
    x = rng.normal(2, 300, 256, dtype=dtype)
    with torch.inference_mode():
        ours = layer(x)[0]
        assert len(hits) == 1
        monkeypatch.setenv("FLA_FLASH_KDA", "0")
        theirs = layer(x)[0]
    assert len(hits) == 1
    assert relative_error(ours, theirs) < 2e-2
