"""Every misuse of fwd gets one error that names the argument, what it got and what it needs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flash_kda
from flash_kda import abi, arguments, guards, layout

B, T, H, N = 2, 6, 3, 3
BF16 = torch.bfloat16
TOKEN_TENSORS = ("q", "k", "v", "g", "out")
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OPTIONAL = ("A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens", "workspace")


@pytest.fixture(autouse=True)
def _guard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that have passed once are those that the next call is compared with first."""
    monkeypatch.setattr(arguments, "_LOOKUPS_A_GUARD", 1)
    monkeypatch.setattr(arguments, "_recent", ())


def make(batch: int = B, tokens: int = T, heads: int = H) -> dict[str, Any]:
    """A correct call of batch rows."""
    call: dict[str, Any] = {
        name: torch.randn(batch, tokens, heads, 128).to(BF16) for name in TOKEN_TENSORS
    }
    call["beta"] = torch.randn(batch, tokens, heads)
    call["scale"] = 128**-0.5
    call["A_log"] = torch.randn(heads)
    call["dt_bias"] = torch.randn(heads, 128)
    call["lower_bound"] = -5.0
    call["initial_state"] = torch.randn(batch, heads, 128, 128)
    call["final_state"] = torch.randn(batch, heads, 128, 128)
    return call


def make_packed() -> dict[str, Any]:
    """A correct call of N packed sequences."""
    call = make(batch=1)
    call["initial_state"] = torch.randn(N, H, 128, 128)
    call["final_state"] = torch.randn(N, H, 128, 128)
    call["cu_seqlens"] = torch.tensor([0, 2, 2, T])
    return call


def make_workspace(size: int, offset: int = 0) -> torch.Tensor:
    memory = torch.zeros(size + 512, dtype=torch.uint8)
    start = -memory.data_ptr() % 256 + offset
    return memory[start : start + size]


def refused(call: dict[str, Any], kind: type[Exception], *parts: str) -> None:
    """The call fails with this class and these parts of the text, and writes nothing."""
    written = [call.get(name) for name in ("out", "final_state", "checkpoint_states", "workspace")]
    kept = [x for x in written if type(x) is torch.Tensor and _is_plain(x)]
    before = [_bits(x) for x in kept]
    with pytest.raises((TypeError, ValueError)) as info:
        flash_kda.fwd(**call)
    assert type(info.value) is kind, info.value
    for part in parts:
        assert part in str(info.value)
    assert "needs" in str(info.value)
    for tensor, copy in zip(kept, before, strict=True):
        assert torch.equal(_bits(tensor), copy)


def _is_plain(tensor: torch.Tensor) -> bool:
    strange = tensor.is_nested or tensor.is_quantized or tensor.is_neg()
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not strange


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of its bytes, which compare equal even where they mean NaN."""
    return tensor.clone().contiguous().view(-1).view(torch.uint8)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    size = 1 + offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.zeros(size, dtype=BF16).as_strided(shape, strides, offset)


def test_correct_calls() -> None:
    for call in (make(), make_packed()):
        assert flash_kda.fwd(**call) is None
        assert call["out"].isfinite().all()


# --- kinds, dtypes, shapes, devices -------------------------------------------------------------


@pytest.mark.parametrize("name", (*TOKEN_TENSORS, "beta", *OPTIONAL))
@pytest.mark.parametrize("value", [1.5, "text", [1.0], "numpy"])
def test_not_a_tensor(name: str, value: Any) -> None:
    if value == "numpy":
        value = pytest.importorskip("numpy").zeros((B, T, H, 128))
    needs = "a torch.Tensor" + (" or None" if name in OPTIONAL else "")
    got = f"got a value of type {type(value).__name__}; needs {needs}"
    refused({**make(), name: value}, TypeError, f"fwd: {name}: {got}")


@pytest.mark.parametrize("name", (*TOKEN_TENSORS, "beta"))
def test_none_for_a_required_tensor(name: str) -> None:
    refused({**make(), name: None}, TypeError, f"fwd: {name}: got None; needs a torch.Tensor")


@pytest.mark.parametrize(
    ("name", "dtypes", "needs"),
    [
        *((name, (torch.float32, torch.float16), "dtype torch.bfloat16") for name in TOKEN_TENSORS),
        ("beta", (torch.float16, torch.float64), "torch.float32 or torch.bfloat16"),
        ("A_log", (torch.int32, torch.complex64, torch.bool), "torch.float32 or"),
        ("dt_bias", (torch.int64,), "torch.float32 or"),
        ("initial_state", (torch.float16, torch.float64), "torch.float32 or torch.bfloat16"),
        ("final_state", (torch.float16, torch.float64), "torch.float32 or torch.bfloat16"),
    ],
)
def test_dtypes(name: str, dtypes: tuple[torch.dtype, ...], needs: str) -> None:
    for dtype in dtypes:
        call = make()
        call[name] = call[name].to(dtype)
        refused(call, TypeError, f"fwd: {name}: got dtype {dtype}; needs dtype", needs)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
def test_cu_seqlens_dtypes(dtype: torch.dtype) -> None:
    call = make_packed()
    call["cu_seqlens"] = call["cu_seqlens"].to(dtype)
    refused(call, TypeError, f"cu_seqlens: got dtype {dtype}; needs dtype torch.int32 or")


@pytest.mark.parametrize(
    ("name", "shape", "needs"),
    [
        ("q", (T, H, 128), "4 dimensions, [B, T, H, 128]"),
        ("q", (B, T, H, 64), "last dimension of 128"),
        ("q", (B, T, H, 256), "last dimension of 128"),
        ("q", (B, T, 0, 128), "at least one head"),
        ("k", (B, T, H, 64), f"shape [{B}, {T}, {H}, 128]"),
        ("k", (B, T, H + 1, 128), f"shape [{B}, {T}, {H}, 128]"),
        ("v", (B, T, H, 256), f"shape [{B}, {T}, {H}, 128]"),
        ("v", (B, T + 1, H, 128), f"shape [{B}, {T}, {H}, 128]"),
        ("g", (B, T, H * 128), f"shape [{B}, {T}, {H}, 128]"),
        ("out", (B + 1, T, H, 128), f"shape [{B}, {T}, {H}, 128]"),
        ("beta", (B, T, H, 1), f"shape [{B}, {T}, {H}]"),
        ("beta", (B, H, T), f"shape [{B}, {T}, {H}]"),
        ("A_log", (H + 1,), f"H = {H} elements"),
        ("A_log", (), f"H = {H} elements"),
        ("dt_bias", (128, H), f"shape [{H}, 128] or [{H * 128}]"),
        ("dt_bias", (H,), f"shape [{H}, 128] or [{H * 128}]"),
        ("dt_bias", (1, H, 128), f"shape [{H}, 128] or [{H * 128}]"),
        ("initial_state", (B, H, 128), f"shape [{B}, {H}, 128, 128], [N, H, V, K] with N = B"),
        ("final_state", (B + 1, H, 128, 128), f"shape [{B}, {H}, 128, 128], [N, H, V, K]"),
        ("final_state", (B, H, 128, 64), f"shape [{B}, {H}, 128, 128], [N, H, V, K]"),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], needs: str) -> None:
    call = make()
    call[name] = torch.zeros(shape, dtype=call[name].dtype)
    refused(call, ValueError, f"fwd: {name}: got shape {list(shape)}", needs)


def test_states_follow_cu_seqlens() -> None:
    for name in ("initial_state", "final_state"):
        call = make_packed()
        call[name] = call[name][:1]
        refused(call, ValueError, f"{name}: got shape [1, ", "with N = len(cu_seqlens) - 1")


def test_cu_seqlens_shape() -> None:
    call = make_packed()
    refused({**call, "cu_seqlens": call["cu_seqlens"][None]}, ValueError, "cu_seqlens: got shape")
    empty = call["cu_seqlens"][:0]
    refused({**call, "cu_seqlens": empty}, ValueError, "cu_seqlens: got 0 entries", "N + 1")
    call = make()
    call["cu_seqlens"] = torch.tensor([0, T, T])
    refused(call, ValueError, f"q: got B = {B} with cu_seqlens; needs B = 1")


def test_too_many_tokens() -> None:
    call = make()
    for name in ("q", "k", "v", "g"):
        call[name] = call[name][:1, :1].expand(2, 2**30, H, 128)
    refused(call, ValueError, "q: got shape", f"B * T = {2**31}; needs B and B * T at most 2^31")
    for name in ("q", "k", "v", "g"):
        call[name] = call[name][:1, :1].expand(1, 2**31 - 31, H, 128)
    refused(call, ValueError, f"B * T = {2**31 - 31}; needs B and B * T at most 2^31 - 32")
    for name in ("q", "k", "v", "g"):
        call[name] = call[name][:, : 2**31 - 32]
    refused(call, ValueError, f"needs shape [1, {2**31 - 32}, {H}, 128]")  # of out


def test_calls_without_anything_to_do_take_no_time_or_memory() -> None:
    none = torch.empty(2**31 - 32, 0, 1, 128, dtype=torch.bfloat16)
    beta = torch.empty(2**31 - 32, 0, 1)
    flash_kda.fwd(none, none, none, none, beta, 1.0, torch.empty_like(none), None, None, -1.0)
    many = torch.empty(1, 0, 2**31, 128, dtype=torch.bfloat16)
    call = {**make(), **dict.fromkeys(("q", "k", "v", "g", "out"), many)}
    refused(call, ValueError, "q: got shape [1, 0, 2147483648, 128], H = 2147483648; needs H below")


@pytest.mark.parametrize("name", (*TOKEN_TENSORS, "beta", *OPTIONAL[:-1]))
@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*quantized tensor creation")
def test_kinds_of_tensors(name: str) -> None:
    call = make_packed()
    flash_kda.fwd(**call)  # the same metadata have passed before
    refused({**call, name: call[name].to_sparse()}, ValueError, f"{name}: got a tensor of layout")
    if call[name].dtype == torch.float32 and torch.backends.mkldnn.is_available():
        opaque = call[name].to_mkldnn()
        refused({**call, name: opaque}, ValueError, f"{name}: got a ")
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    refused({**call, name: nested}, ValueError, f"{name}: got a nested tensor")
    jagged = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
    refused({**call, name: jagged}, ValueError, f"{name}: got a nested tensor")
    quantized = torch.quantize_per_tensor(torch.zeros(call[name].shape), 0.1, 0, torch.quint8)
    refused({**call, name: quantized}, TypeError, f"{name}: got a quantized tensor")
    if call[name].is_floating_point():
        shapeless = torch.nn.UninitializedParameter(requires_grad=False, dtype=call[name].dtype)
        refused({**call, name: shapeless}, ValueError, f"{name}: got an UninitializedParameter")
    meta = call[name].to("meta")
    where = "a CUDA or CPU device" if name == "q" else "needs cpu, as q"
    refused({**call, name: meta}, ValueError, f"{name}: got a tensor on meta", where)
    if call[name].is_floating_point():
        refused({**call, name: torch._neg_view(call[name])}, ValueError, f"{name}: got a lazily")


def test_imaginary_parts_of_conjugates() -> None:
    call = make()
    flash_kda.fwd(**{**call, "beta": torch.view_as_real(torch.randn(B, T, H) + 0j)[..., 1]})
    imaginary = torch.randn(B, T, H, dtype=torch.complex64).conj().imag
    refused({**call, "beta": imaginary}, ValueError, "beta: got a lazily negated")
    for name in ("initial_state", "final_state"):
        imaginary = torch.zeros(B, H, 128, 128, dtype=torch.complex64).conj().imag
        dense = imaginary.as_strided(imaginary.shape, call[name].stride())
        refused({**call, name: dense}, ValueError, f"{name}: got a lazily negated")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory() -> None:
    call = make()
    flash_kda.fwd(**call)  # the same metadata have passed before
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) for n, x in call.items() if isinstance(x, torch.Tensor)}
        refused({**call, **fake}, ValueError, "q: got a FakeTensor without memory")
    outcome: list[Exception] = []

    def traced(beta: torch.Tensor) -> torch.Tensor:
        try:
            flash_kda.fwd(**{**call, "beta": beta})
        except ValueError as error:
            outcome.append(error)
        return beta

    torch.func.vmap(traced)(call["beta"][None])
    assert "beta: got a Tensor without memory" in str(outcome[0])


@pytest.mark.parametrize("packed", [False, True])
def test_real_tensors_among_fake_ones(packed: bool) -> None:
    call = make_packed() if packed else make()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="FakeTensorM"):
        flash_kda.fwd(**call)
    flash_kda.fwd(**call)


# --- strides, alignment -------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_token_strides(name: str) -> None:
    call = make()
    gaps = strided((B, T, H, 128), (T * H * 256, H * 256, 256, 2))
    refused({**call, name: gaps}, ValueError, f"{name}: got strides", "contiguous last dimension")
    for dim, odd in enumerate(((8001, 1024, 256, 1), (8192, 1028, 256, 1), (8192, 1024, 252, 1))):
        needs = f"a stride of dimension {dim} that is a multiple of 8 elements"
        refused({**call, name: strided((B, T, H, 128), odd)}, ValueError, f"{name}: got", needs)
    flash_kda.fwd(**{**call, name: strided((B, T, H, 128), (8192, 136, 1024, 1), offset=8)})


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_alignment(name: str) -> None:
    call = make()
    memory = torch.zeros(B * T * H * 128 + 8, dtype=BF16)
    moved = memory[4:-4].view(B, T, H, 128)
    excess = moved.data_ptr() % 16
    refused({**call, name: moved}, ValueError, f"{name}: got a first element {excess} bytes past")


def test_strides_of_single_dimensions_do_not_matter() -> None:
    call = make(batch=1, tokens=1, heads=1)
    for name in TOKEN_TENSORS:
        call[name] = strided((1, 1, 1, 128), (3, 5, 7, 1))
    call["initial_state"] = torch.zeros(1, 1, 128, 128).as_strided((1, 1, 128, 128), (3, 5, 128, 1))
    flash_kda.fwd(**call)


def test_expanded_inputs() -> None:
    call = make()
    for name in ("q", "k", "v", "g"):
        call[name] = torch.randn(128).to(BF16).expand(B, T, H, 128)
    call["beta"] = torch.randn(1).expand(B, T, H)
    call["initial_state"] = torch.randn(128, 128).expand(B, H, 128, 128)
    call["A_log"] = torch.randn(1).expand(H)
    call["dt_bias"] = torch.randn(128).expand(H, 128)
    flash_kda.fwd(**call)
    same = {**call, "out": torch.zeros_like(make()["out"])}
    for name, tensor in call.items():
        if name in INPUTS:
            same[name] = tensor.contiguous()
    flash_kda.fwd(**same)
    assert torch.equal(same["out"], call["out"])


@pytest.mark.parametrize(
    "strides", [(0, 384, 128, 1), (2304, 0, 128, 1), (2304, 384, 0, 1), (2304, 384, 120, 1)]
)
def test_out_that_overlaps_itself(strides: tuple[int, ...]) -> None:
    out = torch.zeros(B * T * H * 128, dtype=BF16).as_strided((B, T, H, 128), strides)
    refused({**make(), "out": out}, ValueError, "out: got shape", "of its own for every element")


def test_states_strides() -> None:
    call = make()
    memory = torch.zeros(B, H, 256, 256)
    for name in ("initial_state", "final_state"):
        for bad in (memory[..., :128, :128], memory[..., ::2, :128], call[name].mT):
            refused({**call, name: bad}, ValueError, f"{name}: got strides", "contiguous inner two")
    single = torch.zeros(128, 128)
    expanded = single.expand(B, H, 128, 128)
    refused({**call, "final_state": expanded}, ValueError, "final_state: got shape", "of its own")
    odd = torch.zeros(B * H * 16385 + 1)[1:].as_strided(
        (B, H, 128, 128), (H * 16385, 16385, 128, 1)
    )
    flash_kda.fwd(**{**call, "initial_state": odd})
    flash_kda.fwd(**{**call, "final_state": odd})


# --- tensors that share memory ------------------------------------------------------------------


@pytest.mark.parametrize("name", ("q", "k", "v", "g"))
def test_out_is_an_input(name: str) -> None:
    call = make()
    needs = f"out: got a tensor that shares memory with {name}; needs memory"
    refused({**call, "out": call[name]}, ValueError, needs)
    memory = torch.randn(B * T * H * 128 + 1000).to(BF16)
    shape = (B, T, H, 128)
    call[name] = memory[: B * T * H * 128].view(shape)
    call["out"] = memory[1000:].view(shape)
    refused(call, ValueError, needs)


@pytest.mark.parametrize("written", ("out", "final_state"))
@pytest.mark.parametrize("name", INPUTS)
def test_written_tensors_over_inputs(written: str, name: str) -> None:
    if (written, name) == ("final_state", "initial_state"):
        return  # has its own test
    call = make_packed()
    memory = torch.zeros(1 << 20, dtype=torch.float64)
    for argument in (written, name):
        old = call[argument]
        call[argument] = memory.view(old.dtype)[: old.numel()].view(old.shape).copy_(old)
    if name == "cu_seqlens":
        memory.view(torch.int64)[: N + 1] = torch.tensor([0, 2, 2, T])
    refused(call, ValueError, f"{written}: got a tensor that shares memory with {name}")


def test_out_over_final_state() -> None:
    call = make()
    call["final_state"] = torch.zeros(B, H, 128, 128)
    call["out"] = call["final_state"].view(BF16).view(-1)[: B * T * H * 128].view(B, T, H, 128)
    refused(call, ValueError, "out: got a tensor that shares memory with final_state")


def parts(shape: tuple[int, ...]) -> list[Callable[[], list[torch.Tensor]]]:
    """Ways to cut five [B, T, H, 128] tensors out of one buffer so that they interleave."""
    batch, tokens, heads, _ = shape

    def by_channel() -> list[torch.Tensor]:
        return list(torch.randn(batch, tokens, heads, 5 * 128).to(BF16).split(128, -1))

    def by_projection() -> list[torch.Tensor]:
        packed = torch.randn(batch, tokens, 5 * heads * 128).to(BF16)
        return [part.unflatten(-1, (heads, 128)) for part in packed.chunk(5, -1)]

    def by_token() -> list[torch.Tensor]:
        packed = torch.randn(batch, 5 * tokens, heads, 128).to(BF16)
        return [packed[:, i::5] for i in range(5)]

    def by_batch() -> list[torch.Tensor]:
        packed = torch.randn(batch, 5, heads, tokens, 128).to(BF16)
        return [packed[:, i].transpose(1, 2) for i in range(5)]

    return [by_channel, by_projection, by_token, by_batch]


@pytest.mark.parametrize("cut", parts((B, T, H, 128)), ids=lambda cut: cut.__name__)
def test_interleaved_views(cut: Callable[[], list[torch.Tensor]]) -> None:
    views = dict(zip(TOKEN_TENSORS, cut(), strict=True))
    call = {**make(), **views}
    apart = {**call, **{name: view.contiguous() for name, view in views.items()}}
    flash_kda.fwd(**call)
    flash_kda.fwd(**apart)
    for name in TOKEN_TENSORS:
        assert torch.equal(call[name], apart[name]), name
    refused({**call, "out": views["k"]}, ValueError, "out: got a tensor that shares memory with k")


def test_views_that_share_one_row() -> None:
    buffer = torch.randn(B, T + 1, H, 5 * 128).to(BF16)
    call = make()
    call["q"], call["out"] = buffer[:, :-1, :, :128], buffer[:, 1:, :, 128:256]
    flash_kda.fwd(**call)
    call["out"] = buffer[:, 1:, :, 120:248]
    refused(call, ValueError, "out: got a tensor that shares memory with q")


def test_the_same_tensor_for_both_states() -> None:
    call, apart = make(), make()
    apart.update({name: call[name] for name in call if name not in ("out", "final_state")})
    call["final_state"] = call["initial_state"]
    apart["initial_state"] = call["initial_state"].clone()
    flash_kda.fwd(**apart)
    flash_kda.fwd(**call)
    assert torch.equal(call["final_state"], apart["final_state"])
    assert torch.equal(call["out"], apart["out"])


def test_states_that_overlap_in_part() -> None:
    call = make()
    memory = torch.zeros(B + 1, H, 128, 128)
    text = "final_state: got a tensor that shares memory with initial_state"
    states = {"initial_state": memory[:-1], "final_state": memory[1:]}
    refused({**call, **states}, ValueError, text, "the very tensor given as initial_state")
    states = {"initial_state": memory[:-1], "final_state": memory.view(BF16).view(-1)}
    states["final_state"] = states["final_state"][: B * H * 16384].view(B, H, 128, 128)
    refused({**call, **states}, ValueError, text)
    states = {"initial_state": memory[:-1], "final_state": memory[:-1].flip(0)}
    flash_kda.fwd(**{**call, **states})  # flip copies
    square = torch.zeros(B, B, 128, 128)
    transposed = {**make(heads=B), "initial_state": square, "final_state": square.transpose(0, 1)}
    refused(transposed, ValueError, text)
    both = torch.zeros(B, 2, H, 128, 128)
    flash_kda.fwd(**{**call, "initial_state": both[:, 0], "final_state": both[:, 1]})


def test_inputs_may_share() -> None:
    call = make()
    call["k"] = call["v"] = call["g"] = call["q"]
    flash_kda.fwd(**call)


def test_a_remembered_layout_does_not_hide_overlap() -> None:
    buffer = torch.zeros(4 * B * T * H * 128, dtype=BF16)
    size, shape = B * T * H * 128, (B, T, H, 128)
    call = make()
    call["q"], call["out"] = buffer[:size].view(shape), buffer[size : 2 * size].view(shape)
    flash_kda.fwd(**call)
    flash_kda.fwd(**call)
    call["out"] = buffer[size - 8 : 2 * size - 8].view(shape)
    refused(call, ValueError, "out: got a tensor that shares memory with q")
    call["out"] = buffer[size + 4 : 2 * size + 4].view(shape)
    refused(call, ValueError, "out: got a first element")


def test_memory_of_remembered_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: dict[Any, Any] = {}
    monkeypatch.setattr(arguments, "_layouts", layouts)
    monkeypatch.setattr(arguments, "_LAYOUT_LIMIT", 3)
    monkeypatch.setattr(arguments, "_PROVEN_LIMIT", 2)
    keep = []
    for tokens in (0, 1, 2, 3, 4, 4, 4, 4, 4):
        keep.append(make(tokens=tokens, heads=1))
        flash_kda.fwd(**keep[-1])
        assert len(layouts) <= 3
        assert all(len(layout.proven) <= 2 for layout in layouts.values())


@pytest.fixture
def no_lookup(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        monkeypatch.setattr(arguments, "_layout_of", None)

    return forbid


@pytest.mark.parametrize("absent", [(), ("A_log", "initial_state"), ("dt_bias", "final_state")])
@pytest.mark.parametrize("in_place", [False, True])
def test_metadata_that_recur_are_not_looked_up(
    no_lookup: Callable[[], None], absent: tuple[str, ...], in_place: bool
) -> None:
    if guards._guards is None:
        pytest.skip("this torch has no guards")
    calls = [make(), make()]
    for call in calls:
        if in_place:
            call["final_state"] = call["initial_state"]
        call.update(dict.fromkeys(absent))
    flash_kda.fwd(**calls[0])
    no_lookup()
    for call in calls:
        flash_kda.fwd(**call)


def test_only_metadata_that_recur_get_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    if guards._guards is None:
        pytest.skip("this torch has no guards")
    monkeypatch.setattr(arguments, "_layouts", {})
    monkeypatch.setattr(arguments, "_LOOKUPS_A_GUARD", 3)
    calls = [make(tokens=tokens, heads=1) for tokens in range(1, 7)]
    for expected in (0, 0, 4):
        for call in calls:
            flash_kda.fwd(**call)
        assert len(arguments._recent) == expected


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda x: x.to(torch.float64 if x.dtype == torch.float32 else torch.float32),
    "strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "fewer": lambda x: x[..., :-1],
    "dimensions": lambda x: x[None],
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("packed", [False, True])
def test_changed_metadata_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, packed: bool, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Or refused: what was remembered of the call before is not taken for this one."""
    monkeypatch.setattr(arguments, "_GUARD_LIMIT", 100)
    call = make_packed() if packed else make()
    flash_kda.fwd(**call)
    looked_up = []
    look_up = arguments._layout_of

    def recording(tensors: Any, guarded: Any) -> layout.Layout:
        looked_up.append(tensors)
        return look_up(tensors, guarded)

    monkeypatch.setattr(arguments, "_layout_of", recording)
    names = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    for name in names:
        for value in (change(call[name]), None):
            with contextlib.suppress(TypeError, ValueError):
                arguments.check(**{**call, name: value})
    assert len(looked_up) == 2 * len(names)
    if guards._guards is not None:
        flash_kda.fwd(**call)
        assert len(looked_up) == 2 * len(names)


def test_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_guards", None)
    call = make()
    for _ in range(3):
        flash_kda.fwd(**call)
    assert arguments._recent == ()
    refused({**call, "beta": call["beta"].double()}, TypeError, "beta: got dtype torch.float64")


@pytest.mark.parametrize(
    "overlooked", ["type", "dtype", "device", "size", "stride", "is_neg", "nothing"]
)
def test_guards_that_overlook_something_are_not_used(overlooked: str) -> None:
    """As those of some later torch might."""
    properties: dict[str, Callable[[torch.Tensor], Any]] = {
        "type": type,
        "dtype": lambda x: x.dtype,
        "device": lambda x: x.device,
        "size": lambda x: x.size(),
        "stride": lambda x: x.stride(),
        "is_neg": lambda x: x.is_neg(),
    }
    seen = [value for name, value in properties.items() if name != overlooked]

    class Guards:
        def __init__(self, first: torch.Tensor, **_: Any) -> None:
            self.first = [of(first) for of in seen]

        def check(self, x: torch.Tensor | None) -> bool:
            return x is not None and [of(x) for of in seen] == self.first

    assert guards._tells_apart(Guards) == (overlooked == "nothing")


def test_an_empty_tensor_is_not_an_absent_one() -> None:
    """Whatever guards see in the place of what is absent, no argument passes for it."""
    for absent, call in (
        ((), make()),
        (("A_log", "dt_bias"), make()),
        (("initial_state",), make()),
    ):
        call = {**call, **dict.fromkeys(absent)}
        for _ in range(3):
            flash_kda.fwd(**call)
        for name in ("A_log", "dt_bias", "cu_seqlens", "state_indices", "workspace"):
            for size in range(11):
                impostor = torch.empty(size, device="meta")
                with pytest.raises((TypeError, ValueError), match=rf"flash_kda\.fwd: {name}"):
                    flash_kda.fwd(**{**call, name: impostor})
        for size in range(11):
            impostor = torch.empty(size, device="meta")
            state = {"checkpoint_states": impostor}
            offsets = {"checkpoint_offsets": impostor}
            for changes in (state, offsets, state | offsets, {"final_state": impostor}):
                with pytest.raises((TypeError, ValueError), match=r"flash_kda\.fwd: "):
                    flash_kda.fwd(**{**call, **changes})


def test_what_looks_like_a_tensor_is_none() -> None:
    class Forwarding:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

    class Raising:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    call = make()
    flash_kda.fwd(**call)
    for name in ("q", "A_log", "final_state"):
        refused({**call, name: Forwarding(call[name])}, TypeError, f"{name}: got a value of type")
        refused({**call, name: Raising()}, TypeError, f"{name}: got a value of type")


@pytest.mark.parametrize("name", ["q", "v", "out", "A_log", "dt_bias", "initial_state"])
def test_views_of_a_storage_without_memory(name: str) -> None:
    """Their address is their offset."""
    call = make()
    whole = torch.cat([call[name], call[name]])
    view = whole[call[name].shape[0] :]
    assert view.storage_offset() > 0
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"flash_kda\.fwd: {name}: got a Tensor without memory"):
        flash_kda.fwd(**{**call, name: view})


@pytest.mark.parametrize("name", ["q", "out", "beta", "dt_bias", "initial_state", "final_state"])
def test_storages_that_end_before_their_views(name: str) -> None:
    call = make()
    flash_kda.fwd(**call)
    value = torch.cat([call[name], call[name]])[call[name].shape[0] :]
    call["out"].fill_(7.0)
    needed = value.untyped_storage().nbytes()
    value.untyped_storage().resize_(needed - 1)
    text = rf"fwd: {name}: got a storage of {needed - 1} bytes; needs at least {needed}"
    with pytest.raises(ValueError, match=text):
        flash_kda.fwd(**{**call, name: value})
    assert (call["out"] == 7.0).all()


class Everything(set[tuple[int, ...]]):
    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("name", ["q", "out", "beta", "dt_bias", "initial_state", "final_state"])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_storages_that_are_made_smaller_at_a_proven_address(
    name: str, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator hands addresses out again. On a GPU only what is written is looked at then."""
    call = make()
    layout = arguments.check(**call)[0]
    monkeypatch.setattr(layout, "on_cuda", on_cuda)
    monkeypatch.setattr(layout, "proven", Everything())
    storage = call[name].untyped_storage()
    needed = storage.nbytes()
    storage.resize_(needed - 1)
    if on_cuda and name not in ("out", "final_state"):
        assert arguments.check(**call)[0] is layout
        return
    with pytest.raises(ValueError, match=f"{name}: got a storage of {needed - 1} bytes"):
        arguments.check(**call)


# --- scalars ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
@pytest.mark.parametrize(
    "value", [True, "1.0", b"1", [1.0], 1j, torch.ones(1), torch.tensor(True), torch.tensor(1j)]
)
def test_not_a_number(name: str, value: Any) -> None:
    refused({**make(), name: value}, TypeError, f"fwd: {name}: got", "needs a real number (float)")


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_nested_numbers(name: str) -> None:
    for kind in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.tensor([1.0])], layout=kind)
        refused({**make(), name: nested}, TypeError, f"{name}: got a nested tensor; needs a real")


def test_numbers_on_other_devices() -> None:
    refused({**make(), "scale": torch.ones((), device="meta")}, TypeError, "scale: got a tensor on")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 10**400, -(10**400)])
def test_scale_is_finite(value: float) -> None:
    refused({**make(), "scale": value}, ValueError, "scale: got", "a finite number")


def test_scale_none() -> None:
    refused({**make(), "scale": None}, TypeError, "scale: got None; needs a real number")


class Stubborn(float):
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_numbers_that_cannot_be_read_or_shown(name: str) -> None:
    for value in (10**5000, -(10**5000)):
        refused({**make(), name: value}, ValueError, f"{name}: got a value of type int that cannot")
    refused({**make(), name: Stubborn(-9.0)}, TypeError, f"{name}: got a value of type Stubborn")
    refused({**make(), name: "x" * 1000}, TypeError, f"{name}: got 'xxx", "x... of type str")
    refused({**make(), name: "a\nb" * 9}, TypeError, f"{name}: got 'a")
    fake = FakeTensorMode().from_tensor(torch.tensor(-1.0))
    refused({**make(), name: fake}, TypeError, f"{name}: got a FakeTensor without a value")
    refused({**make(), "beta_is_logits": 10**5000}, TypeError, "beta_is_logits: got a value of ty")


@pytest.mark.parametrize(
    ("sizes", "kind", "text"),
    [
        ((10**5000, 1, 1), ValueError, "t_total: got a value of type int that cannot be printed"),
        (
            (2**31 - 31, 1, 1),
            ValueError,
            "t_total: got 2147483617; needs at least 0 and at most 2^3",
        ),
        ((1, 2**31, 1), ValueError, "heads: got 2147483648; needs at least 1 and below 2^31"),
        ((1, 0, 1), ValueError, "heads: got 0; needs at least 1"),
        ((1, 1, -1), ValueError, "sequences: got -1; needs at least 0"),
        (("1" * 1000, 1, 1), TypeError, "t_total: got '111"),
        ((torch.tensor(1, device="meta"), 1, 1), TypeError, "t_total: got tensor("),
        ((torch.tensor(True), 1, 1), TypeError, "t_total: got tensor(True) of type Tensor"),
    ],
)
def test_workspace_size_arguments(
    sizes: tuple[Any, Any, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as info:
        flash_kda.workspace_size(*sizes)
    assert text in str(info.value)
    assert len(str(info.value)) < 400


@pytest.mark.parametrize("value", [0.1, -5.0001, 5, math.nan, -math.inf, math.inf, 10**400])
def test_lower_bound_range(value: float) -> None:
    refused({**make(), "lower_bound": value}, ValueError, "lower_bound: got", "in [-5, 0]")


def test_lower_bound_none() -> None:
    refused(
        {**make(), "lower_bound": None},
        ValueError,
        "lower_bound: got None",
        "softplus-gated models (lower_bound=None) are not supported yet",
    )


def test_kinds_of_numbers() -> None:
    call = make()
    expected = torch.zeros_like(call["out"])
    flash_kda.fwd(**{**call, "scale": 2.0, "lower_bound": -3.0, "out": expected})
    for convert in (int, Fraction, torch.tensor, "float32", "float64", "int64", "float16"):
        if isinstance(convert, str):
            convert = getattr(pytest.importorskip("numpy"), convert)
        flash_kda.fwd(**{**call, "scale": convert(2), "lower_bound": convert(-3)})
        assert torch.equal(call["out"], expected)
    for bound in (0, -0.0, -5):
        flash_kda.fwd(**{**call, "lower_bound": bound})


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", (*TOKEN_TENSORS, "beta", "A_log", "dt_bias", "initial_state", "final_state")
)
def test_gradients(name: str) -> None:
    call = make()
    flash_kda.fwd(**call)
    call[name] = torch.nn.Parameter(call[name])
    refused(call, ValueError, f"fwd: {name}: got a tensor that requires grad", "forward only")
    with torch.no_grad():
        flash_kda.fwd(**call)
    with torch.inference_mode():
        flash_kda.fwd(**call)
    call[name].requires_grad_(False)
    flash_kda.fwd(**call)


@pytest.mark.parametrize("name", (*TOKEN_TENSORS, "beta", "A_log", "initial_state", "final_state"))
def test_forward_mode_differentiation(name: str) -> None:
    call = make()
    text = f"fwd: {name}: got a dual tensor"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                refused({**call, name: dual}, ValueError, text, "its primal")
        flash_kda.fwd(**{**call, name: forward_ad.unpack_dual(dual).primal})
        flash_kda.fwd(**call)

    def function(x: torch.Tensor) -> torch.Tensor:
        refused({**call, name: x}, ValueError, text)
        return x

    torch.func.jvp(function, (call[name],), (torch.ones_like(call[name]),))


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_numbers_that_would_have_gradients(name: str) -> None:
    """They would vanish without a word."""
    call = make()
    for number in (
        torch.tensor(-1.0, requires_grad=True),
        torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64)),
        torch.ones(3, requires_grad=True).sum() - 4,
    ):
        text = f"fwd: {name}: got a tensor that requires grad"
        refused({**call, name: number}, ValueError, text, "forward only")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                flash_kda.fwd(**{**call, name: number})
        flash_kda.fwd(**{**call, name: number.detach()})
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(-1.0), torch.tensor(1.0))
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                refused({**call, name: dual}, ValueError, f"fwd: {name}: got a dual", "its primal")
    refused({**call, name: torch.ones(2, requires_grad=True)}, TypeError, f"fwd: {name}: got")


def test_inference_tensors_outside_inference_mode() -> None:
    with torch.inference_mode():
        call = make()
    flash_kda.fwd(**call)
    assert call["out"].isfinite().all()


def test_subclasses() -> None:
    class Named(torch.Tensor):
        pass

    call = make()
    plain = torch.zeros_like(call["out"])
    flash_kda.fwd(**{**call, "out": plain})
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            call[name] = value.as_subclass(Named)
    flash_kda.fwd(**call)
    assert torch.equal(call["out"].as_subclass(torch.Tensor), plain)


# --- cu_seqlens' values on the CPU --------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([-1, 2, 3, T], "cu_seqlens[0] = -1; needs at least 0 and at most T = 6"),
        (
            [0, 3, 2, T],
            "cu_seqlens[2] = 2; needs at least 3, the value before it, and at most T = 6",
        ),
        ([0, 2, T + 1, T], f"cu_seqlens[2] = {T + 1}; needs"),
        ([0, 2, 3, 2**31 - 1], f"cu_seqlens[3] = {2**31 - 1}; needs"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_values(values: list[int], text: str, dtype: torch.dtype) -> None:
    call = make_packed()
    flash_kda.fwd(**call)
    call["cu_seqlens"] = torch.tensor(values, dtype=dtype)
    refused(call, ValueError, text)


def test_tokens_outside_cu_seqlens_stay() -> None:
    call = make_packed()
    before = call["out"].clone()
    table = torch.zeros(N + 1, 2, dtype=torch.int32)
    table[:, 0] = torch.tensor([1, 3, 3, 5])
    flash_kda.fwd(**{**call, "cu_seqlens": table[:, 0]})
    for row in (0, T - 1):
        assert torch.equal(call["out"][:, row], before[:, row])
    assert not torch.equal(call["out"][:, 1:5], before[:, 1:5])
    assert torch.equal(call["final_state"][1], call["initial_state"][1])


# --- empty calls --------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "tokens"), [(0, T), (B, 0), (0, 0)])
def test_empty_batches(batch: int, tokens: int) -> None:
    call = make(batch, tokens)
    flash_kda.fwd(**call)
    assert torch.equal(call["final_state"], call["initial_state"])
    flash_kda.fwd(**{**call, "initial_state": None})
    assert not call["final_state"].any()


@pytest.mark.parametrize("tokens", [0, T])
def test_no_sequences(tokens: int) -> None:
    call = make(1, tokens)
    before = call["out"].clone()
    for name in ("initial_state", "final_state"):
        call[name] = call[name][:0]
    flash_kda.fwd(**{**call, "cu_seqlens": torch.zeros(1, dtype=torch.int32)})
    assert torch.equal(call["out"], before)


# --- workspace, FLASH_KDA_PATH ------------------------------------------------------------------


def test_workspace_kinds() -> None:
    call = make()
    refused({**call, "workspace": torch.zeros(8)}, TypeError, "workspace: got dtype torch.float32")
    square = torch.zeros(8, 8, dtype=torch.uint8)
    for bad in (square, square.view(-1)[::2]):
        refused({**call, "workspace": bad}, ValueError, "workspace: got shape", "one contiguous")
    odd = make_workspace(1 << 20, 128)
    refused({**call, "workspace": odd}, ValueError, "workspace: got a first element 128 bytes past")


def test_workspace_size() -> None:
    if abi.launcher_or_none() is None:
        pytest.skip("needs the built launcher")
    if torch.cuda.is_available():
        pytest.skip("a GPU decides the size here")
    needed = flash_kda.workspace_size(B * T, H, B)
    flash_kda.fwd(**make(), workspace=make_workspace(needed))
    refused(
        {**make(), "workspace": make_workspace(needed - 1)},
        ValueError,
        f"workspace: got {needed - 1} bytes",
        f"at least {needed}, which is flash_kda.workspace_size({B * T}, {H}, {B})",
    )


def test_where_a_gpu_decides_workspace_sizes_they_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What workspace_size answers there may be less than what suffices on every GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flash_kda.fwd(**make(), workspace=make_workspace(256))


@pytest.mark.parametrize("name", (*INPUTS, "out", "final_state"))
def test_workspace_over_another_argument(name: str) -> None:
    call = make_packed()
    workspace = make_workspace(1 << 22)
    old = call[name]
    size = old.numel() * old.element_size()
    call[name] = workspace[256 : 256 + size].view(old.dtype).view(old.shape).copy_(old)
    pair = (name, "workspace") if name in ("out", "final_state") else ("workspace", name)
    call["workspace"] = workspace
    refused(call, ValueError, f"{pair[0]}: got a tensor that shares memory with {pair[1]}")


def test_path_names(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = abi.launcher_or_none()
    if launcher is None:
        pytest.skip("needs the built launcher")
    monkeypatch.setenv("FLASH_KDA_PATH", launcher.path_names[-1])
    flash_kda.fwd(**make())
    monkeypatch.setenv("FLASH_KDA_PATH", "no_such_path")
    refused(
        make(), ValueError, "FLASH_KDA_PATH: got 'no_such_path'", ", ".join(launcher.path_names)
    )


# --- pools, checkpoints and beta ----------------------------------------------------------------


def make_serving() -> dict[str, Any]:
    """A correct packed call with pools and checkpoints."""
    call = make_packed()
    call["initial_state"] = torch.randn(5, H, 128, 128)
    call["final_state"] = torch.randn(4, H, 128, 128)
    call["state_indices"] = torch.tensor([3, -1, 0], dtype=torch.int32)
    call["checkpoint_offsets"] = torch.tensor([2, T])
    call["checkpoint_states"] = torch.randn(2, H, 128, 128)
    return call


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"state_indices": torch.zeros(2, dtype=torch.int32)}, ValueError, "state_indices: got sh"),
        ({"state_indices": torch.zeros(N)}, TypeError, "state_indices: got dtype torch.float32"),
        ({"state_indices": [0, 1, 2]}, TypeError, "state_indices: got a value of type list"),
        (
            {"initial_state": None, "final_state": None},
            ValueError,
            "state_indices: got slots of no",
        ),
        (
            {"initial_state": torch.zeros(5, H + 1, 128, 128)},
            ValueError,
            "initial_state: got shape",
        ),
        ({"state_indices": torch.tensor([0, 4, 1])}, ValueError, "state_indices[1] = 4; needs -1"),
        ({"state_indices": torch.tensor([0, -2, 1])}, ValueError, "state_indices[1] = -2; needs"),
        ({"state_indices": torch.tensor([1, 2, 1])}, ValueError, "= 1 for the second time; needs"),
        (
            {
                "initial_state": torch.zeros(0, H, 128, 128),
                "final_state": None,
                "state_indices": torch.tensor([-1, 0, -1]),
            },
            ValueError,
            "state_indices[1] = 0; needs -1 (no state): a pool has no slots",
        ),
        (
            {"checkpoint_offsets": torch.tensor([-16, 6])},
            ValueError,
            "checkpoint_offsets[0] = -16; needs an offset behind a token",
        ),
        (
            {"checkpoint_offsets": None},
            ValueError,
            "checkpoint_offsets: got None with checkpoint_s",
        ),
        (
            {"checkpoint_states": None},
            ValueError,
            "checkpoint_states: got None with checkpoint_off",
        ),
        (
            {"checkpoint_offsets": torch.tensor([2])},
            ValueError,
            "checkpoint_offsets: got shape [1]",
        ),
        (
            {"checkpoint_offsets": torch.tensor([2.0, 6.0])},
            TypeError,
            "checkpoint_offsets: got dty",
        ),
        (
            {"checkpoint_offsets": torch.tensor([3, 2])},
            ValueError,
            "[0] = 3; needs a multiple of 16",
        ),
        ({"checkpoint_offsets": torch.tensor([T, 2])}, ValueError, "[1] = 2; needs ascending"),
        (
            {"checkpoint_offsets": torch.tensor([0, 2])},
            ValueError,
            "[0] = 0; needs an offset behind",
        ),
        (
            {"checkpoint_offsets": torch.tensor([2, T + 1])},
            ValueError,
            f"[1] = {T + 1}; needs an of",
        ),
        (
            {"checkpoint_states": torch.zeros(2, H, 128, 64)},
            ValueError,
            "checkpoint_states: got sh",
        ),
        (
            {"checkpoint_states": torch.zeros(2, H, 128, 128).half()},
            TypeError,
            "checkpoint_states: got dtype torch.float16",
        ),
        (
            {"checkpoint_states": torch.zeros(1, H, 128, 128).expand(2, -1, -1, -1)},
            ValueError,
            "checkpoint_states: got shape",
        ),
        ({"beta_is_logits": 1}, TypeError, "beta_is_logits: got 1; needs True or False"),
        ({"beta_is_logits": None}, TypeError, "beta_is_logits: got None; needs True or False"),
    ],
)
def test_serving_arguments(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    flash_kda.fwd(**make_serving())
    refused({**make_serving(), **changes}, kind, text)


def test_checkpoints_share_nothing() -> None:
    call = make_serving()
    call["checkpoint_states"] = call["initial_state"][:2]
    refused(call, ValueError, "checkpoint_states: got a tensor that shares memory with initial_st")
    call["checkpoint_states"] = call["final_state"][1:3]
    refused(call, ValueError, "shares memory with")


# --- devices ------------------------------------------------------------------------------------


def on_gpu(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A tensor that says it is on a GPU, with this one's metadata and no memory."""
    with FakeTensorMode():
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=f"cuda:{index}"
        )


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "name",
    [
        *(*TOKEN_TENSORS, "beta", *OPTIONAL),
        *("state_indices", "checkpoint_offsets", "checkpoint_states"),
    ],
)
def test_one_tensor_on_another_device(name: str) -> None:
    here = {**make_serving(), "workspace": make_workspace(1 << 20)}
    flash_kda.fwd(**here)  # the same metadata have passed before
    tensors = [other for other, value in here.items() if isinstance(value, torch.Tensor)]
    as_others = ", as all other tensors" if name == "q" else ", as q"
    # Where there are GPUs, torch asks for the one that a fake tensor names.
    two = not torch.cuda.is_available() or torch.cuda.device_count() > 1
    for index in range(1 + two):
        there = {other: on_gpu(here[other], index) for other in tensors}
        needs = f"needs cuda:{index}{as_others}"
        alone = {**here, **there, name: here[name]}
        refused(alone, ValueError, f"fwd: {name}: got a tensor on cpu; {needs}")
        got = f"got a tensor on cuda:{index}; needs cpu{as_others}"
        refused({**here, name: there[name]}, ValueError, f"fwd: {name}: {got}")
        if two:
            alone[name] = on_gpu(here[name], 1 - index)
            refused(alone, ValueError, f"fwd: {name}: got a tensor on cuda:{1 - index}; {needs}")
        # All of them together are right but for their memory.
        refused({**here, **there}, ValueError, "q: got a FakeTensor without memory")
    flash_kda.fwd(**here)


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_a_number_on_a_gpu(name: str) -> None:
    call = {**make(), name: on_gpu(torch.zeros(()))}
    text = f"{name}: got a tensor on cuda:0; needs a real number (float); reading it would wait"
    refused(call, TypeError, text)
