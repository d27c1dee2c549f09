"""``flash_kda.chunk_kda`` on CPU tensors: the definition, FLA's names, and what is refused."""

from __future__ import annotations

import inspect
import re
from typing import Any

import cases
import pytest
import torch
from cases import assert_accurate, make_case, relative_error, same_bits

import flash_kda

# Float32 arithmetic: what is left is the rounding of out to bfloat16.
BOUND = 2.5e-3


def arguments(case: cases.Case, **changes: Any) -> dict[str, Any]:
    """A call that the kernels serve, with FLA's names."""
    return {
        **vars(case),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "state_v_first": True,
        **changes,
    }


@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16])
def test_dense(rng: cases.Random, initial: torch.dtype | None) -> None:
    case = make_case(rng, batch=2, tokens=45, initial_state=initial)
    out, state = flash_kda.chunk_kda(**arguments(case))
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    assert state is not None and state.dtype == torch.float32
    assert_accurate(case, out, state, BOUND)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed(rng: cases.Random, integers: torch.dtype) -> None:
    case = make_case(rng, lengths=(0, 30, 1, 17))
    case.cu_seqlens = case.cu_seqlens.to(integers)
    assert_accurate(case, *flash_kda.chunk_kda(**arguments(case)), BOUND)


def test_is_fwd(rng: cases.Random) -> None:
    case = make_case(rng, tokens=40)
    out, state = flash_kda.chunk_kda(**arguments(case))
    expected = cases.forward(case)
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


def test_scale_defaults_to_the_root_of_the_width(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20).but(scale=None)
    out, _ = flash_kda.chunk_kda(**arguments(case))
    assert_accurate(case.but(scale=128**-0.5), out, None, BOUND)


def test_beta_may_be_a_probability(rng: cases.Random) -> None:
    case = make_case(rng, tokens=40)
    expected = cases.reference(case)
    case.beta = case.beta.float().sigmoid()
    out, state = flash_kda.chunk_kda(**arguments(case, use_beta_sigmoid_in_kernel=False))
    assert relative_error(out, expected[0]) < BOUND
    assert relative_error(state, expected[1]) < BOUND


def test_states_in_their_layout_do_not_matter_without_states(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20, initial_state=None)
    changes = {"state_v_first": False, "output_final_state": False}
    out, state = flash_kda.chunk_kda(**arguments(case, **changes))
    assert state is None
    assert_accurate(case, out, None, BOUND)


def test_positional_order_is_flas(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    tensors = (case.q, case.k, case.v, case.g, case.beta)
    flags = (True, True, True, True, False, True, case.lower_bound, False, False, True)
    out, state = flash_kda.chunk_kda(
        *tensors, case.scale, case.initial_state, *flags, A_log=case.A_log, dt_bias=case.dt_bias
    )
    assert_accurate(case, out, state, BOUND)


def test_signature_is_flas() -> None:
    """The names and defaults of flash-linear-attention 0.6.0, in its order."""
    parameters = inspect.signature(flash_kda.chunk_kda).parameters
    assert list(parameters) == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"),
        *("allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute"),
        *("return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu"),
        *("cp_context", "use_graph", "max_num_seqs", "A_log", "dt_bias"),
        "transpose_state_layout",
    ]
    for parameter in list(parameters.values())[5:]:
        assert parameter.default in (None, False), parameter


def test_without_effect(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(20, 9))
    expected, _ = flash_kda.chunk_kda(**arguments(case))
    changes = {"disable_recompute": True, "cu_seqlens_cpu": case.cu_seqlens, "safe_gate": False}
    out, _ = flash_kda.chunk_kda(**arguments(case, **changes, use_graph=True, max_num_seqs=2))
    assert same_bits(out, expected)


def test_older_name_of_state_v_first(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    changes = {"state_v_first": False, "transpose_state_layout": True}
    with pytest.warns(DeprecationWarning, match="older name of state_v_first"):
        out, state = flash_kda.chunk_kda(**arguments(case, **changes))
    assert_accurate(case, out, state, BOUND)
    with pytest.raises(ValueError, match="transpose_state_layout: got True with state_v_first"):
        flash_kda.chunk_kda(**arguments(case, transpose_state_layout=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_qk_l2norm_in_kernel": False}, "kernels normalise q and k always"),
        ({"use_gate_in_kernel": False}, "g before its activation"),
        ({"allow_neg_eigval": True}, r"step sizes lie in \[0, 1\]"),
        ({"lower_bound": None}, "bounded gate only"),
        ({"lower_bound": -6.0}, r"a float in \[-5, 0\]"),
        ({"return_intermediate_states": True}, "checkpoint_offsets"),
        ({"cp_context": object()}, "several GPUs"),
        ({"state_v_first": False}, r"\.mT\.contiguous\(\)"),
        ({"use_graph": True, "max_num_seqs": 7}, "1, the number of sequences"),
        ({"scale": float("nan")}, "scale"),
    ],
)
def test_refused(rng: cases.Random, change: dict[str, Any], reason: str) -> None:
    name = list(change)[-1]
    with pytest.raises(ValueError, match=reason) as caught:
        flash_kda.chunk_kda(**arguments(make_case(rng, tokens=20), **change))
    assert f": {name}: got" in str(caught.value)


def test_state_layout_matters_with_an_initial_state_alone(rng: cases.Random) -> None:
    changes = {"state_v_first": False, "output_final_state": False}
    with pytest.raises(ValueError, match="state_v_first"):
        flash_kda.chunk_kda(**arguments(make_case(rng, tokens=20), **changes))


def test_grouped_value_heads_are_refused(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    case.v = torch.cat((case.v, case.v), 2)
    with pytest.raises(ValueError, match="no grouped value heads"):
        flash_kda.chunk_kda(**arguments(case))


@pytest.mark.parametrize("name", ["q", "v"])
def test_wrong_tensors(rng: cases.Random, name: str) -> None:
    case = make_case(rng, tokens=20)
    with pytest.raises(TypeError, match=f"{name}: got a value of type NoneType"):
        flash_kda.chunk_kda(**arguments(case, **{name: None}))
    with pytest.raises(ValueError, match=f"{name}: got shape"):
        flash_kda.chunk_kda(**arguments(case, **{name: getattr(case, name)[0]}))
    with pytest.raises(TypeError, match=f"{name}: got dtype"):
        flash_kda.chunk_kda(**arguments(case, **{name: getattr(case, name).float()}))


FLAGS = [
    *("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "disable_recompute"),
    *("return_intermediate_states", "state_v_first", "use_graph", "transpose_state_layout"),
]


def refusal(case: cases.Case, error: type[Exception], name: str, value: Any, **more: Any) -> str:
    """What chunk_kda says, which has to begin with the argument's name, and what it needs."""
    with pytest.raises(error) as caught:
        flash_kda.chunk_kda(**arguments(case, **{name: value}, **more))
    assert type(caught.value) is error
    found = re.fullmatch(rf"flash_kda\.\w+: {name}: got (.+); needs (.+)", str(caught.value))
    assert found, str(caught.value)
    return found[1]


def test_flags_are_all_those_of_the_signature() -> None:
    annotations = inspect.get_annotations(flash_kda.chunk_kda)
    assert {name for name, kind in annotations.items() if "bool" in kind} == set(FLAGS)


@pytest.mark.parametrize("value", [1, 0, "no", 1.0, torch.tensor(True), None])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(rng: cases.Random, name: str, value: Any) -> None:
    if name == "transpose_state_layout" and value is None:
        pytest.skip("the default")
    got = refusal(make_case(rng, tokens=20), TypeError, name, value)
    assert got == repr(value)


@pytest.mark.parametrize("output_final_state", [True, False])
@pytest.mark.parametrize(
    ("value", "error", "got"),
    [
        ([0, 20], TypeError, "a value of type list"),
        (20, TypeError, "a value of type int"),
        (torch.tensor(20), ValueError, "shape []"),
        (torch.tensor([[0, 20]]), ValueError, "shape [1, 2]"),
        (torch.tensor([], dtype=torch.int64), ValueError, "no entries"),
        (torch.tensor([0.0, 20.0]), TypeError, "dtype torch.float32"),
        (torch.tensor([0, 20], device="meta"), ValueError, "a tensor on meta"),
    ],
)
def test_cu_seqlens(
    rng: cases.Random, value: Any, error: type[Exception], got: str, output_final_state: bool
) -> None:
    case = make_case(rng, tokens=20)
    more = {"output_final_state": output_final_state}
    assert refusal(case, error, "cu_seqlens", value, **more) == got


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"])
def test_tensors_of_other_kinds(rng: cases.Random, name: str) -> None:
    case = make_case(rng, lengths=(20,))
    tensor = getattr(case, name)
    nested = torch.nested.nested_tensor([tensor[:1], tensor[:1]])
    assert refusal(case, ValueError, name, nested) == "a nested tensor"
    sparse = refusal(case, ValueError, name, tensor.to_sparse())
    assert sparse == "a tensor of layout torch.sparse_coo"
    assert refusal(case, TypeError, name, "text") == "a value of type str"


@pytest.mark.parametrize("use_graph", [True, False])
@pytest.mark.parametrize("value", ["1", 1.0, True, [1]])
def test_max_num_seqs_is_an_integer(rng: cases.Random, value: Any, use_graph: bool) -> None:
    case = make_case(rng, tokens=20)
    got = refusal(case, TypeError, "max_num_seqs", value, use_graph=use_graph)
    assert got == f"{value!r} of type {type(value).__name__}"


@pytest.mark.parametrize("name", ["k", "g", "beta"])
@pytest.mark.parametrize("value", [None, 1.0])
def test_other_tensors(rng: cases.Random, name: str, value: Any) -> None:
    refusal(make_case(rng, tokens=20), TypeError, name, value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("scale", True, TypeError),
        ("scale", "1", TypeError),
        ("lower_bound", "-5", TypeError),
        ("lower_bound", True, TypeError),
        ("A_log", 0.0, TypeError),
        ("dt_bias", [0.0], TypeError),
        ("initial_state", 0, TypeError),
    ],
)
def test_what_fwd_refuses(rng: cases.Random, name: str, value: Any, error: type[Exception]) -> None:
    refusal(make_case(rng, tokens=20), error, name, value)


def test_other_widths_are_refused_before_memory_is_asked_for(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    wide = torch.zeros(1, dtype=torch.bfloat16).expand(1, 20, 2, 1 << 40)
    assert refusal(case, ValueError, "q", wide) == f"shape [1, 20, 2, {1 << 40}]"


@pytest.mark.parametrize("name", ["v", "cu_seqlens"])
def test_other_dtypes_are_refused_before_memory_is_asked_for(rng: cases.Random, name: str) -> None:
    case = make_case(rng, tokens=20)
    shape = (1, 1 << 40, 2, 128) if name == "v" else (1 << 40,)
    value = torch.zeros(1, dtype=torch.float32).expand(shape)
    assert refusal(case, TypeError, name, value) == "dtype torch.float32"


def test_gradients_are_refused(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    case.g.requires_grad_()
    with pytest.raises(ValueError, match="forward only"):
        flash_kda.chunk_kda(**arguments(case))


def test_unknown_names_are_refused(rng: cases.Random) -> None:
    with pytest.raises(TypeError, match="chunk_size"):
        flash_kda.chunk_kda(**arguments(make_case(rng, tokens=20)), chunk_size=64)
