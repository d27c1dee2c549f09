"""One random mistake in a right call on the CPU: it is refused by name and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import flash_kda
from flash_kda import abi, arguments

Draw = Any
BF16 = torch.bfloat16
TOKEN_TENSORS = ("q", "k", "v", "g", "out")
STATES = ("initial_state", "final_state", "checkpoint_states")
INDICES = ("cu_seqlens", "state_indices", "checkpoint_offsets")
WRITTEN = ("out", "final_state", "checkpoint_states", "workspace")
POISON = 0xA5

FLOATS = (torch.float32, BF16, torch.float16, torch.float64)
ALLOWED = {
    **dict.fromkeys(TOKEN_TENSORS, (BF16,)),
    **dict.fromkeys(("beta", *STATES), (torch.float32, BF16)),
    **dict.fromkeys(("A_log", "dt_bias"), FLOATS),
    **dict.fromkeys(INDICES, (torch.int32, torch.int64)),
    "workspace": (torch.uint8,),
}
INTEGERS = ALLOWED["cu_seqlens"]
DTYPES = (
    *(*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    *(torch.bool, torch.complex64),
)


@pytest.fixture(autouse=True, scope="module")
def _guard_at_once() -> Iterator[None]:
    """Metadata that have passed once are those that the next call is compared with first."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(arguments, "_LOOKUPS_A_GUARD", 1)
        monkeypatch.setattr(arguments, "_recent", ())
        for name in ("FLASH_KDA_PATH", "FLASH_KDA_CHECK"):
            monkeypatch.delenv(name, raising=False)
        yield


@dataclass(frozen=True)
class Mistake:
    """An argument, the value that is wrong, the class of the error and what it may be about."""

    kind: str
    name: str
    value: Any
    error: type[Exception]
    named: tuple[str, ...] = ()
    """Other arguments that the error may name, which this one has to fit."""

    def __repr__(self) -> str:
        return f"{self.kind} of {self.name}: {shown(self.value)}"


class Misuse:
    """A right call and a mistake to make in it. (Of a dataclass hypothesis prints all values.)"""

    def __init__(self, call: dict[str, Any], mistake: Mistake) -> None:
        self.call, self.mistake = call, mistake

    def __repr__(self) -> str:
        lines = [f"  {name}: {shown(value)}" for name, value in self.call.items()]
        return "\n".join(["", *lines, f"  {self.mistake!r}"])


def shown(value: object) -> str:
    """Metadata for a tensor, but the values of integers."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    values = f" {value.tolist()}" if value.dim() == 1 and value.dtype in INTEGERS else ""
    strides = list(value.stride())
    return f"{list(value.shape)} by {strides} {value.dtype} on {value.device}{values}"


# --- right calls --------------------------------------------------------------------------------


def tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, inner: int) -> torch.Tensor:
    """Zeros, perhaps a view: with gaps, or with the first outer dimensions in another order.

    The ``inner`` last dimensions are contiguous.
    """
    outer = len(shape) - inner
    order = draw(st.permutations(range(outer)))
    gaps = [draw(st.sampled_from((0, 0, 1))) for _ in range(outer)]
    sizes = [shape[at] + gaps[at] for at in order]
    memory = torch.zeros(*sizes, *shape[outer:], dtype=dtype)
    back = [order.index(at) for at in range(outer)]
    view = memory.permute(*back, *range(outer, len(shape)))
    return view[tuple(slice(size) for size in shape)]


@st.composite
def calls(draw: Draw) -> dict[str, Any]:
    """The arguments of a right call."""
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    packed, serving = draw(st.booleans()), draw(st.booleans())
    batch = 1 if packed else draw(st.integers(1, 3))
    wide = (batch, tokens, heads, 128)
    call: dict[str, Any] = {name: tensor(draw, wide, BF16, 1) for name in TOKEN_TENSORS}

    def one_of(name: str) -> torch.dtype:
        return draw(st.sampled_from(ALLOWED[name]))

    call["beta"] = tensor(draw, wide[:3], one_of("beta"), 0)
    call["scale"] = draw(st.floats(-2, 2))
    call["lower_bound"] = draw(st.floats(-5, 0))
    call["beta_is_logits"] = draw(st.booleans())
    call["A_log"] = tensor(draw, (heads,), one_of("A_log"), 0) if draw(st.booleans()) else None
    call["dt_bias"] = None
    if draw(st.booleans()):
        shape = draw(st.sampled_from(((heads, 128), (heads * 128,))))
        call["dt_bias"] = tensor(draw, shape, one_of("dt_bias"), 0)
    bounds = [n * tokens for n in range(batch + 1)]
    if packed:
        bounds = sorted(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=3)))
        bounds = [0, *bounds, tokens]
        call["cu_seqlens"] = tensor(draw, (len(bounds),), one_of("cu_seqlens"), 0)
        call["cu_seqlens"].copy_(torch.tensor(bounds))
    sequences = len(bounds) - 1
    slots = sequences
    if serving:
        slots += draw(st.integers(0, 1))
        chosen = draw(st.permutations(range(slots)))[:sequences]
        chosen = [-1 if draw(st.booleans()) else slot for slot in chosen]
        call["state_indices"] = tensor(draw, (sequences,), one_of("state_indices"), 0)
        call["state_indices"].copy_(torch.tensor(chosen))
    pools = draw(st.sampled_from((("final_state",), STATES[:2], ("initial_state",))))
    for name in pools if serving or draw(st.booleans()) else ():
        call[name] = tensor(draw, (slots, heads, 128, 128), one_of(name), 2)
    if draw(st.booleans()):
        ends = sorted({b for a, b in pairwise(bounds) if b > a})
        offsets = tensor(draw, (len(ends),), one_of("checkpoint_offsets"), 0)
        call["checkpoint_offsets"] = offsets.copy_(torch.tensor(ends))
        shape = (len(ends), heads, 128, 128)
        call["checkpoint_states"] = tensor(draw, shape, one_of("checkpoint_states"), 2)
    if draw(st.booleans()):
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        call["workspace"] = memory[-memory.data_ptr() % 256 :]
    for name in WRITTEN:
        if name in call:
            poison(call[name])
    return call


def poison(tensor: torch.Tensor) -> None:
    memory_of(tensor).fill_(POISON)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory of which a tensor shows a part."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


# --- mistakes -----------------------------------------------------------------------------------


def mistakes_of_kind(draw: Draw, name: str, good: torch.Tensor) -> Mistake:
    if draw(st.booleans()):
        return Mistake("meta", name, good.to("meta"), ValueError)
    values = [1.5, "text", [1.0], object()]
    if name in (*TOKEN_TENSORS, "beta"):
        values.append(None)
    return Mistake("no tensor", name, draw(st.sampled_from(values)), TypeError)


def mistakes_of_dtype(draw: Draw, name: str, good: torch.Tensor) -> Mistake:
    wrong = draw(st.sampled_from([x for x in DTYPES if x not in ALLOWED[name]]))
    return Mistake("dtype", name, torch.zeros_like(good, dtype=wrong), TypeError)


def mistakes_of_rank(draw: Draw, name: str, good: torch.Tensor) -> Mistake | None:
    if name == "A_log":  # of any shape
        return None
    if draw(st.booleans()) and not (name == "dt_bias" and good.dim() == 2):
        dim = draw(st.integers(0, good.dim() - 1))
        return Mistake("rank", name, good.select(dim, 0), ValueError)
    value = good.unsqueeze(draw(st.integers(0, good.dim())))
    if name == "dt_bias" and value.shape == (1, 128):  # of one head, right in either form
        return None
    return Mistake("rank", name, value, ValueError)


def mistakes_of_size(draw: Draw, name: str, good: torch.Tensor, call: Any) -> Mistake | None:
    if name == "cu_seqlens":  # gives the number of sequences, and others have to fit
        return Mistake("size", name, good[:0], ValueError)
    if name == "workspace":
        return Mistake("size", name, good[:255], ValueError) if sizes_are_judged() else None
    pool = name in STATES[:2] and call.get("state_indices") is not None
    dim = draw(st.integers(int(pool), good.dim() - 1))
    shape = list(good.shape)
    shape[dim] = draw(
        st.sampled_from([n for n in (0, 1, *range(2, 9), 64, 256) if n != shape[dim]])
    )
    if name in ("A_log", "dt_bias") and torch.Size(shape).numel() == good.numel():
        return None
    named: tuple[str, ...] = ()
    if name == "q" and dim < 3:
        named = ("k",)
    elif name == "checkpoint_states" and dim == 0:
        named = ("checkpoint_offsets",)
    return Mistake("size", name, good.new_zeros(shape), ValueError, named)


def sizes_are_judged() -> bool:
    """Whether a workspace that is too small is refused here."""
    return abi.launcher_or_none() is not None and not torch.cuda.is_available()


def mistakes_of_stride(draw: Draw, name: str, good: torch.Tensor) -> Mistake | None:
    sizes = list(good.shape)
    kinds = ["inner"] if name in (*TOKEN_TENSORS, *STATES, "workspace") else []
    if name in TOKEN_TENSORS:
        kinds += ["address", *["outer" for size in sizes[:3] if size > 1][:1]]
    if name == "workspace":
        kinds.append("address")
    inner = 2 if name in STATES else 1
    if name in WRITTEN and any(size > 1 for size in sizes[:-inner]):
        kinds.append("expanded")
    if not kinds:
        return None
    kind = draw(st.sampled_from(kinds))
    if kind == "inner":
        memory = good.new_zeros(*sizes[:-1], 2 * sizes[-1])
        value = memory[..., ::2]
    elif kind == "address":
        past = draw(st.integers(1, 255 if name == "workspace" else 7))
        memory = good.new_zeros(good.numel() + 512)
        aligned = -memory.data_ptr() // memory.element_size() % 256
        value = memory[aligned + past :][: good.numel()].view(sizes)
    elif kind == "outer":
        dim = draw(st.sampled_from([at for at in range(3) if sizes[at] > 1]))
        strides = [2**16, 2**11, 2**8, 1]
        strides[dim] += draw(st.integers(1, 7))
        memory = good.new_zeros(1 << 19)
        value = memory[-(memory.data_ptr() // 2) % 8 :].as_strided(sizes, strides)
    else:
        dim = draw(st.sampled_from([at for at, size in enumerate(sizes[:-inner]) if size > 1]))
        value = good.select(dim, 0).unsqueeze(dim).expand(sizes)
    return Mistake(kind, name, value, ValueError)


def mistakes_of_value(draw: Draw, name: str, good: torch.Tensor, call: Any) -> Mistake | None:
    if name not in INDICES:
        return None
    values, at = good.tolist(), draw(st.integers(0, len(good) - 1))
    tokens = call["q"].shape[0] * call["q"].shape[1]
    if name == "cu_seqlens":
        values[at] = draw(st.sampled_from((-1, -(2**31), tokens + 1, 2**31 - 1)))
    elif name == "state_indices":
        pools = [call[x].shape[0] for x in STATES[:2] if call.get(x) is not None]
        values[at] = draw(st.sampled_from((-2, -(2**31), max(pools), 2**31 - 1)))
    else:
        values[at] = draw(st.sampled_from((0, -16, tokens + 1, 2**31 - 16)))
    value = torch.tensor(values, dtype=good.dtype)
    return Mistake("value", name, value, ValueError)


def mistakes_of_memory(draw: Draw, name: str, good: torch.Tensor, call: Any) -> Mistake | None:
    if good.is_floating_point() and draw(st.booleans()):
        return Mistake("gradient", name, torch.zeros_like(good).requires_grad_(), ValueError)
    if name == "out":
        return Mistake("shared", name, call[draw(st.sampled_from("qkvg"))], ValueError)
    return None


NUMBERS = {
    "scale": (
        *((value, ValueError) for value in (float("nan"), float("inf"), -float("inf"), 1e39)),
        *((value, TypeError) for value in (None, True, "1", 1j, [1.0], torch.zeros(1))),
    ),
    "lower_bound": (
        *((value, ValueError) for value in (float("nan"), -float("inf"), -5.001, 1e-30, None)),
        *((value, TypeError) for value in (False, "-5", 0j, (), torch.zeros(2))),
    ),
    "beta_is_logits": tuple((value, TypeError) for value in (None, 0, 1.0, "yes")),
}


@st.composite
def misuses(draw: Draw) -> Misuse:
    call = draw(calls())
    if draw(st.sampled_from((False,) * 4 + (True,))):
        name = draw(st.sampled_from(sorted(NUMBERS)))
        value, error = draw(st.sampled_from(NUMBERS[name]))
        return Misuse(call, Mistake("number", name, value, error))
    names = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
    mistake = None
    while mistake is None:
        name = draw(st.sampled_from(names))
        good = call[name]
        kind = draw(st.sampled_from(("kind", "dtype", "rank", "size", "stride", "value", "memory")))
        if kind == "kind":
            mistake = mistakes_of_kind(draw, name, good)
        elif kind == "dtype":
            mistake = mistakes_of_dtype(draw, name, good)
        elif kind == "rank":
            mistake = mistakes_of_rank(draw, name, good)
        elif kind == "size":
            mistake = mistakes_of_size(draw, name, good, call)
        elif kind == "stride":
            mistake = mistakes_of_stride(draw, name, good)
        elif kind == "value":
            mistake = mistakes_of_value(draw, name, good, call)
        else:
            mistake = mistakes_of_memory(draw, name, good, call)
    return Misuse(call, mistake)


@settings(max_examples=400, deadline=None)
@given(misuse=misuses())
def test_one_mistake(misuse: Misuse) -> None:
    call, mistake = misuse.call, misuse.mistake
    event(f"{mistake.kind} of {mistake.name}")
    checked = {"initial_state": None, "final_state": None, **call}
    del checked["beta_is_logits"]
    for _ in range(2):
        arguments.check(**checked)  # right without the mistake, and known by then
    wrong = {**call, mistake.name: mistake.value}
    tensors = [x for x in (*call.values(), mistake.value) if isinstance(x, torch.Tensor)]
    memories = [memory_of(x.detach()) for x in tensors if x.device.type == "cpu"]
    before = [memory.clone() for memory in memories]
    with pytest.raises((TypeError, ValueError)) as info:
        flash_kda.fwd(**wrong)
    assert type(info.value) is mistake.error
    text = str(info.value)
    named = re.match(r"flash_kda\.fwd: (\w+): got .*; needs .", text)
    assert named is not None and named[1] in (mistake.name, *mistake.named), text
    assert "\n" not in text and len(text) < 500
    assert all(map(torch.equal, memories, before))
    arguments.check(**checked)
