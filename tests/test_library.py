"""``torch.ops.flash_kda.fwd``: its schema, its fake implementation, and compiling with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import make_case, same_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flash_kda

OPERATOR = torch.ops.flash_kda.fwd.default
HEADS = 2


def call(case: cases.Case, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the operator, with fresh outputs."""
    positional = (
        *(case.q, case.k, case.v, case.g, case.beta, case.scale, torch.zeros_like(case.v)),
        *(case.A_log, case.dt_bias, case.lower_bound, case.initial_state),
        *(changes.pop("final_state", torch.zeros(case.state_shape)), case.cu_seqlens),
    )
    return positional, changes


class Layer(nn.Module):
    """What a model does around the operation: one projection, views of it, chunk_kda."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.project = nn.Linear(width, 4 * HEADS * 128, dtype=torch.bfloat16)
        self.step = nn.Linear(width, HEADS, dtype=torch.bfloat16)
        self.A_log = nn.Parameter(torch.rand(HEADS))
        self.dt_bias = nn.Parameter(torch.rand(HEADS * 128))
        self.requires_grad_(False)

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, g = self.project(x).unflatten(-1, (4, HEADS, 128)).unbind(2)
        out, final = flash_kda.chunk_kda(
            q,
            k,
            v,
            g,
            self.step(x),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        return out.flatten(2) * 2, final


def inputs(rng: cases.Random, batch: int, tokens: int) -> Tensor:
    return rng.normal(batch, tokens, 48, dtype=torch.bfloat16)


def test_schema_names_what_is_written() -> None:
    arguments = OPERATOR._schema.arguments
    written = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
    assert written == {"out", "final_state", "workspace", "checkpoint_states"}
    assert not OPERATOR._schema.returns


@pytest.mark.parametrize("kind", ["dense", "packed", "bare"])
def test_opcheck(rng: cases.Random, kind: str) -> None:
    if kind == "packed":
        case = make_case(rng, lengths=(20, 0, 13))
    else:
        case = make_case(rng, batch=2, tokens=20)
    if kind == "bare":
        case = case.but(A_log=None, dt_bias=None, initial_state=None)
        positional, keywords = call(case, final_state=None)
    else:
        positional, keywords = call(case)
    torch.library.opcheck(OPERATOR, positional, keywords)


def test_opcheck_of_pools_and_checkpoints(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(40, 20), initial_state=None)
    case.initial_state = rng.normal(4, HEADS, 128, 128)
    positional, keywords = call(
        case,
        final_state=torch.zeros(4, HEADS, 128, 128),
        beta_is_logits=True,
        state_indices=torch.tensor([3, 1], dtype=torch.int32),
        checkpoint_offsets=torch.tensor([16, 32, 56], dtype=torch.int32),
        checkpoint_states=torch.zeros(3, HEADS, 128, 128),
    )
    torch.library.opcheck(OPERATOR, positional, keywords)


def test_operator_is_fwd(rng: cases.Random) -> None:
    case = make_case(rng, tokens=30)
    positional, _ = call(case)
    OPERATOR(*positional)
    out, state = cases.forward(case)
    assert same_bits(positional[6], out) and same_bits(positional[11], state)


def test_operator_reports_misuse_as_fwd_does(rng: cases.Random) -> None:
    case = make_case(rng, tokens=30).but(lower_bound=-7.0)
    with pytest.raises(ValueError, match="lower_bound"):
        OPERATOR(*call(case)[0])


@pytest.mark.parametrize("position", [7, 8, 10])
def test_one_meta_tensor_does_not_make_a_call_imaginary(rng: cases.Random, position: int) -> None:
    """A call of meta tensors alone does nothing; with others there it is a mistake."""
    positional = list(call(make_case(rng, tokens=20))[0])
    positional[position] = torch.empty(0, device="meta")
    with pytest.raises(ValueError, match="meta"):
        OPERATOR(*positional)
    assert not positional[6].any()


def test_eager_calls_bypass_the_dispatcher(rng: cases.Random) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    case = make_case(rng, tokens=10)
    with Watch():
        cases.forward(case)
    assert seen and not any("flash_kda" in name for name in seen)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_to_one_graph(rng: cases.Random, backend: str) -> None:
    layer = Layer()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    state = rng.normal(2, HEADS, 128, 128)
    with torch.inference_mode():
        for tokens in (33, 50, 17):  # the second length makes the compiler use symbolic sizes
            x = inputs(rng, 2, tokens)
            for ours, expected in zip(compiled(x, state), layer(x, state), strict=True):
                assert cases.relative_error(ours, expected) < 1e-2


def test_compiles_packed_sequences(rng: cases.Random) -> None:
    layer = Layer()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for bounds in ([0, 20, 33], [0, 5, 5, 41]):
            x = inputs(rng, 1, bounds[-1])
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
            expected = layer(x, None, cu_seqlens)
            for ours, theirs in zip(compiled(x, None, cu_seqlens), expected, strict=True):
                assert same_bits(ours, theirs)


def test_compiled_fwd_writes_in_place(rng: cases.Random) -> None:
    """A state given as both initial and final one, and an output that is a view of a buffer."""
    case = make_case(rng, tokens=40)
    state = case.initial_state.clone()
    expected_out, expected_state = cases.forward(case)
    buffer = torch.zeros(1, 40, 2 * HEADS, 128, dtype=torch.bfloat16)

    def step(state: Tensor, buffer: Tensor) -> Tensor:
        out = buffer[:, :, HEADS:]
        flash_kda.fwd(
            *(case.q, case.k, case.v, case.g, case.beta, case.scale, out),
            *(case.A_log, case.dt_bias, case.lower_bound, state, state),
        )
        return out + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = compiled(state, buffer)
    assert same_bits(state, expected_state)
    assert same_bits(buffer[:, :, HEADS:], expected_out)
    assert torch.count_nonzero(buffer[:, :, :HEADS]) == 0
    assert same_bits(result, expected_out + 1)


def test_exports(rng: cases.Random) -> None:
    layer = Layer()
    x = inputs(rng, 2, 33)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: tokens}})
        assert any("flash_kda" in str(node.target) for node in program.graph.nodes)
        x = inputs(rng, 2, 47)
        for ours, expected in zip(program.module()(x), layer(x), strict=True):
            assert same_bits(ours, expected)


NUMBERS = [0.25, 2]
OTHER_NUMBERS = [
    *(
        torch.tensor(0.25, dtype=torch.float64),
        np.float64(0.25),
        torch.tensor(0.25),
        torch.tensor(0.25, dtype=torch.bfloat16),
        torch.tensor(2),
    ),
    *(np.float32(0.25), np.float16(0.25), np.int64(2)),
]


def kind(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}"


@pytest.mark.parametrize(
    ("value", "fullgraph"),
    [*((x, True) for x in NUMBERS), *((x, False) for x in (*NUMBERS, *OTHER_NUMBERS))],
    ids=lambda x: str(x) if isinstance(x, bool) else kind(x),
)
@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_numbers_in_compiled_calls(
    rng: cases.Random, name: str, value: Any, fullgraph: bool
) -> None:
    """Those that eager calls take; all but Python's may break the graph."""
    case = make_case(rng, tokens=20)
    out = torch.zeros_like(case.v)
    arguments = {**vars(case), "out": out}

    def step(number: Any) -> None:
        flash_kda.fwd(**{**arguments, name: number})

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")
    for number in (value, 2 * value):
        if name == "lower_bound":
            number = -number
        step(number)
        expected = out.clone()
        out.zero_()
        compiled(number)
        assert same_bits(out, expected) and out.any()


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", x) for x in (True, None, "1", 1j, torch.ones(1), torch.tensor(True))),
        *(("scale", x) for x in (np.ones(1),)),
        *(("lower_bound", x) for x in (True, None, "-1", 1j, -torch.ones(1))),
        *(("beta_is_logits", x) for x in (1, 0, None, "yes")),
        *(("scale", x) for x in (float("nan"), 1e39)),
        *(("lower_bound", x) for x in (1.0, -6.0, float("nan"))),
    ],
)
def test_wrong_scalars_in_compiled_calls(
    rng: cases.Random, name: str, value: Any, fullgraph: bool
) -> None:
    """The same error as eagerly; of a whole graph, what the compiler makes of it."""
    case = make_case(rng, tokens=20)
    arguments = {**vars(case), "out": torch.zeros_like(case.v), name: value}

    def step(x: Tensor) -> None:
        flash_kda.fwd(**{**arguments, "q": x})

    with pytest.raises((TypeError, ValueError)) as caught:
        step(case.q)
    torch._dynamo.reset()
    kinds = (type(caught.value), torch._dynamo.exc.Unsupported) if fullgraph else caught.type
    with pytest.raises(kinds) as compiled:
        torch.compile(step, fullgraph=fullgraph, backend="aot_eager")(case.q)
    if compiled.type is caught.type:
        assert str(compiled.value).startswith(str(caught.value))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward_of_what_is_written_is_refused_when_compiled(
    rng: cases.Random, backend: str
) -> None:
    """Another operation has saved the output for its backward pass, as in an eager program."""
    case = make_case(rng, tokens=20)
    out = torch.ones_like(case.v)
    weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)

    def step(weight: Tensor, out: Tensor) -> Tensor:
        product = (weight * out).sum()
        flash_kda.fwd(**vars(case), out=out)
        return product

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(step, backend=backend)(weight, out).backward()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiles_a_number_of_sequences_that_depends_on_data(rng: cases.Random) -> None:
    layer = Layer()

    def step(x: Tensor, bounds: Tensor, mask: Tensor) -> Any:
        return layer(x, None, bounds[mask.nonzero()[:, 0]])

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    bounds = torch.tensor([0, 9, 20, 33], dtype=torch.int32)
    with torch.no_grad():
        for kept in ([True, True, True, True], [True, False, True, True]):
            x, mask = inputs(rng, 1, 33), torch.tensor(kept)
            expected = step(x, bounds, mask)
            for ours, theirs in zip(compiled(x, bounds, mask), expected, strict=True):
                assert same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_an_input_as_the_output_is_refused_when_compiled(rng: cases.Random, name: str) -> None:
    """The backend hands the operator a copy of what it writes, so only the trace can tell."""
    case = make_case(rng, tokens=20)
    x = getattr(case, name)
    before = x.clone()

    def step(out: Tensor) -> None:
        flash_kda.fwd(**{**vars(case), name: out}, out=out)

    torch._dynamo.reset()
    needs = f"out: got a tensor that shares memory with {name}"
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=needs):
        torch.compile(step, backend="aot_eager")(x)
    assert same_bits(x, before)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_older_name_of_state_v_first_compiles(rng: cases.Random, fullgraph: bool) -> None:
    case = make_case(rng, tokens=20)

    def step(q: Tensor) -> Any:
        return flash_kda.chunk_kda(
            *(q, case.k, case.v, case.g, case.beta),
            initial_state=case.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=case.lower_bound,
            transpose_state_layout=True,
        )

    torch._dynamo.reset()
    ours = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")(case.q)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        expected = step(case.q)
    assert all(same_bits(x, y) for x, y in zip(ours, expected, strict=True))


class Trained(Layer):
    """A layer of which everything requires gradients, and something behind the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(HEADS * 128, 8, dtype=torch.bfloat16)
        self.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(super().forward(x)[0])


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_calls_refuse_gradients(rng: cases.Random, fullgraph: bool) -> None:
    """As eager ones do: they used to drop them."""
    layer, x = Trained(), inputs(rng, 2, 20)
    with pytest.raises(ValueError, match="forward only"):
        layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"flash_kda\.fwd: q: got a tensor that requires grad"):
        compiled(x)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert same_bits(compiled(x), layer(x))


@pytest.mark.parametrize("name", ["initial_state", "A_log", "dt_bias"])
def test_compiled_calls_refuse_gradients_of_each_argument(rng: cases.Random, name: str) -> None:
    case = make_case(rng, tokens=20)
    getattr(case, name).requires_grad_()
    positional, _ = call(case)

    def step(q: Tensor) -> None:
        flash_kda.fwd(q, *positional[1:])

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=f"{name}: got a tensor that requires grad"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(case.q)


def test_what_lies_behind_a_compiled_call_can_be_trained(rng: cases.Random) -> None:
    """Grad mode is on, and no argument of the call requires gradients."""
    layer, x = Trained().requires_grad_(False), inputs(rng, 2, 20)
    layer.last.requires_grad_()
    torch._dynamo.reset()
    gradients = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        run(x).float().sum().backward()
        gradients.append(layer.last.weight.grad)
    assert same_bits(*gradients)


def test_exported_programs_refuse_gradients(rng: cases.Random) -> None:
    layer, x = Trained(), inputs(rng, 2, 20)
    with pytest.raises(Exception, match="forward only"):
        torch.export.export(layer, (x,))
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        assert same_bits(program(x), layer(x))
    with pytest.raises(ValueError, match="forward only"):
        program(x)


def operator_on(rng: cases.Random) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The operator as a function of q alone, and a q."""
    (q, k, v, *rest), _ = call(make_case(rng, tokens=20))

    def function(q: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        OPERATOR(q, k, v, *rest[:3], out, *rest[4:])
        return out.float().sum()

    return function, q


def test_transforms_that_differentiate_are_refused(rng: cases.Random) -> None:
    """They used to return zeros."""
    function, q = operator_on(rng)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(ValueError, match=r"requires grad|dual tensor"):
            transform(function)(q)
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        torch.func.vjp(function, q)
    with pytest.raises(ValueError, match="q: got a dual tensor"):
        torch.func.jvp(function, (q,), (q,))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="q: got a tensor that requires grad"):
        torch.compile(torch.func.grad(function), fullgraph=True, backend="aot_eager")(q)


def test_transforms_that_differentiate_something_else(rng: cases.Random) -> None:
    function, q = operator_on(rng)
    weight, expected = torch.tensor(2.0), function(q)

    def weighted(weight: Tensor) -> Tensor:
        return weight * function(q)

    torch.testing.assert_close(torch.func.grad(weighted)(weight), expected)
    torch.testing.assert_close(torch.func.jvp(weighted, (weight,), (weight,))[1], 2 * expected)


def forms(rng: cases.Random) -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor]:
    """The three ways to call, as functions of q, and a q."""
    case = make_case(rng, tokens=20, initial_state=None)
    rest = (case.A_log, case.dt_bias, case.lower_bound)

    def into(call: Callable[..., Any], q: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        call(q, case.k, case.v, case.g, case.beta, case.scale, out, *rest)
        return out

    def function(q: Tensor) -> Tensor:
        return flash_kda.chunk_kda(
            *(q, case.k, case.v, case.g, case.beta, case.scale),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=case.lower_bound,
            A_log=case.A_log,
            dt_bias=case.dt_bias,
        )[0]

    return {
        "fwd": lambda q: into(flash_kda.fwd, q),
        "chunk_kda": function,
        "operator": lambda q: into(OPERATOR, q),
    }, case.q


def fake(function: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(mode.from_tensor(q))


RECORDED: dict[str, Any] = {
    f"make_fx {mode}": lambda f, q, mode=mode: make_fx(
        f, tracing_mode=mode, _allow_non_fake_inputs=True
    )(q)(q)
    for mode in ("real", "fake", "symbolic")
}
RECORDED |= {
    "jit.trace": lambda f, q: torch.jit.trace(f, (q,))(q),
}
WITHOUT_MEMORY: dict[str, Any] = {
    "fake": fake,
    "vmap": lambda f, q: torch.func.vmap(f)(q[None]),
    "functionalize": lambda f, q: torch.func.functionalize(f)(q),
    **{name: RECORDED[name] for name in ("make_fx fake", "make_fx symbolic")},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_other_tracers_record_the_operator(rng: cases.Random, name: str) -> None:
    functions, q = forms(rng)
    assert same_bits(RECORDED[name](functions["operator"], q), functions["fwd"](q))


def test_operator_with_fake_tensors(rng: cases.Random) -> None:
    functions, q = forms(rng)
    out = fake(functions["operator"], q)
    assert isinstance(out, FakeTensor) and out.shape == q.shape


@pytest.mark.parametrize("form", ["fwd", "chunk_kda"])
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_eager_calls_in_other_tracers(rng: cases.Random, name: str, form: str) -> None:
    functions, q = forms(rng)
    message = r"q: got a \w+ without memory \(fake, .*; needs .*torch\.ops\.flash_kda\.fwd"
    with pytest.raises(ValueError, match=message):
        WITHOUT_MEMORY[name](functions[form], q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("form", ["fwd", "chunk_kda"])
def test_eager_calls_in_jit_trace(rng: cases.Random, form: str) -> None:
    """Its tensors have memory; the call would not be recorded."""
    functions, q = forms(rng)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"jit\.trace follows; needs torch\.ops\.flash_kda"):
            torch.jit.trace(functions[form], (q,))
        for _ in range(8):
            functions[form](q)  # metadata that recur are found in another way


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vmap", "Batching rule not implemented for flash_kda::fwd"),
        ("functionalize", "custom .* operator whose output has alias annotations: flash_kda::fwd"),
    ],
)
def test_transforms_that_the_operator_lacks(rng: cases.Random, name: str, message: str) -> None:
    """What docs/troubleshooting.md says of them."""
    functions, q = forms(rng)
    with pytest.raises(RuntimeError, match=message):
        WITHOUT_MEMORY[name](functions["operator"], q)


def test_operator_refuses_gradients_given_by_name(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)
    states = torch.zeros(1, HEADS, 128, 128, requires_grad=True)
    positional, keywords = call(
        case, checkpoint_offsets=torch.tensor([16]), checkpoint_states=states
    )
    with pytest.raises(ValueError, match="checkpoint_states: got a tensor that requires grad"):
        OPERATOR(*positional, **keywords)
    with torch.no_grad():
        OPERATOR(*positional, **keywords)
    assert states.any()


def test_refusals_reach_the_user_of_a_compiled_function(rng: cases.Random) -> None:
    case = make_case(rng, tokens=20)

    def step(q: Tensor) -> Tensor:
        return flash_kda.chunk_kda(q, case.k, case.v, case.g, case.beta, lower_bound=-5.0)[0]

    torch._dynamo.reset()
    with pytest.raises(ValueError, match="use_qk_l2norm_in_kernel"):
        torch.compile(step, backend="aot_eager")(case.q)
