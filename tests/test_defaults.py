"""torch's default dtype and default device are the caller's: nothing here may depend on them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cases import make_case, same_bits
from torch import Tensor

import flash_kda
from flash_kda import __main__, reference
from flash_kda.integrations import vllm as adapter

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(flash_kda.__file__).resolve().parent
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("tensor", "zeros"),
}
SETTINGS = ["float16", "bfloat16", "float64", "meta", "meta mode"]


@contextmanager
def defaults(setting: str) -> Iterator[None]:
    if setting == "meta mode":
        with torch.device("meta"):
            yield
    elif setting == "meta":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, setting))
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def pool_call(case: cases.Case) -> Callable[[], tuple[Tensor, ...]]:
    """A call with each argument that there is, and states of every sequence in between."""
    pool = torch.cat((case.initial_state, case.initial_state[:1]))
    out = torch.zeros_like(case.v)
    states = torch.zeros(3, *case.state_shape[1:])
    arguments = {
        **{**vars(case), "initial_state": pool, "final_state": pool, "out": out},
        "state_indices": torch.tensor([3, -1, 0]),
        "checkpoint_offsets": torch.tensor([16, 40, 57]),
        "checkpoint_states": states,
    }

    def run() -> tuple[Tensor, ...]:
        flash_kda.fwd(**arguments)
        return out, pool, states

    return run


def operator_call(case: cases.Case) -> Callable[[], tuple[Tensor, ...]]:
    out, state = torch.zeros_like(case.v), torch.zeros(case.state_shape)

    def run() -> tuple[Tensor, ...]:
        torch.ops.flash_kda.fwd(
            *(case.q, case.k, case.v, case.g, case.beta, case.scale, out, case.A_log),
            *(case.dt_bias, case.lower_bound, case.initial_state, state, case.cu_seqlens),
        )
        return out, state

    return run


def function_call(case: cases.Case) -> Callable[[], tuple[Any, ...]]:
    def run() -> tuple[Any, ...]:
        return flash_kda.chunk_kda(
            **{**vars(case), "scale": None},
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )

    return run


def adapter_call(case: cases.Case, packed: bool) -> Callable[[], tuple[Tensor, ...]]:
    out, states = torch.zeros_like(case.v), torch.zeros(case.state_shape)
    offsets = torch.tensor([16, 0, 17] if packed else [16, 57])

    def run() -> tuple[Tensor, ...]:
        adapter.fwd(
            *(case.q, case.k, case.v, case.g, case.beta, case.scale, out, None, case.A_log),
            *(case.dt_bias, case.lower_bound, case.initial_state, None, case.cu_seqlens),
            *(states, offsets),
        )
        return out, states

    return run


def definition(case: cases.Case) -> Callable[[], tuple[Tensor, ...]]:
    arguments = {**vars(case)}

    def run() -> tuple[Tensor, ...]:
        return reference.recurrent_kda(**arguments)

    return run


def calls(rng: cases.Random) -> dict[str, Callable[[], tuple[Any, ...]]]:
    packed, batch = make_case(rng, lengths=(40, 0, 17)), make_case(rng, batch=2, tokens=57)
    return {
        "pool": pool_call(packed),
        "operator": operator_call(packed),
        "chunk_kda": function_call(packed),
        "chunk_kda of a batch": function_call(batch),
        "adapter": adapter_call(packed, True),
        "adapter of a batch": adapter_call(batch, False),
        "definition": definition(packed),
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_do_not_depend_on_defaults(setting: str) -> None:
    expected = {name: run() for name, run in calls(cases.Random("defaults")).items()}
    for name, run in calls(cases.Random("defaults")).items():
        with defaults(setting):
            results = run()
        for ours, theirs in zip(results, expected[name], strict=True):
            assert ours.device.type == "cpu", name
            assert same_bits(ours, theirs), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_demo_does_not_depend_on_defaults(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with defaults(setting):
        assert __main__.main(["demo", "--device", "cpu", "--heads", "1"]) == 0
    assert "agrees" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "scripts"], ids=lambda path: path.name)
def test_new_tensors_have_an_explicit_dtype_and_device(folder: Path) -> None:
    found = 0
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            module = node.func.value
            if (
                isinstance(module, ast.Name)
                and module.id == "torch"
                and node.func.attr in FACTORIES
            ):
                found += 1
                missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
                assert not missing, f"{file.name}:{node.lineno}: {missing}"
    assert found
