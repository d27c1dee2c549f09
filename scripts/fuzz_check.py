"""Runs one drawn call of flash_kda.fwd and looks for everything that could be wrong with it."""

from __future__ import annotations

from typing import Any

import cases
import torch
from cases import Case, Random, poisoned
from fuzz_calls import TOKEN_INPUTS, Call
from layouts import BETAS, MARGIN, lay_out, lay_out_state
from paths import forced
from torch import Tensor

import flash_kda
from flash_kda import abi
from flash_kda.errors import BrokenInstallError

_SPOILED = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "huge": 3e38}
_FEW_ROWS = 512


class Problem(Exception):
    """What is wrong with a call's results; one line."""


class Subject:
    """The arguments of a call, what they mean, and what may be written."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call = call
        rng = Random("call", base_seed=call.seed)  # on the CPU: the same values everywhere
        case = _plain_case(call, rng)
        self.spans = [(b * call.tokens + i, b * call.tokens + j) for b, i, j in case.spans]
        self.slots = _draw_slots(call, rng)
        self.offsets = _draw_offsets(call, rng, self.spans)
        self.spoiled = _spoiled_sequence(call)
        if self.slots is not None and case.initial_state is not None:
            for n, slot in enumerate(self.slots):
                if slot < 0:
                    case.initial_state[n] = 0
        self.case = case.but(**{name: x.to(device) for name, x in case.tensors().items()})
        self.given = self._spoil(self.case)
        self.arguments = self._arguments(rng)

    def _arguments(self, rng: Random) -> dict[str, Any]:
        call, case = self.call, self.given
        device = case.device
        arguments: dict[str, Any] = {**vars(case), "beta_is_logits": call.beta_is_logits}
        out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=device)
        inputs = {name: getattr(case, name) for name in ("q", "k", "v", "g")}
        if call.one_buffer:
            side_by_side = torch.cat((*inputs.values(), out), -1).split(cases.WIDTH, -1)
            arguments.update(zip((*inputs, "out"), side_by_side, strict=True))
        else:
            for name, x in (*inputs.items(), ("out", out)):
                arguments[name] = lay_out(x, getattr(call, name))
        # The case has logits; arithmetic on them in float64 may not change them.
        beta = case.beta if call.beta_is_logits else case.beta.double().sigmoid()
        arguments["beta"] = BETAS[call.beta](beta.to(_type(call.beta_type)))
        arguments["A_log"] = _with_gaps(case.A_log, call.A_log_gaps)
        arguments["dt_bias"] = _shape_bias(case.dt_bias, call.dt_bias_shape)
        arguments.update(self._state_arguments(rng))
        if self.offsets is not None:
            states = poisoned(
                *(len(self.offsets), *case.state_shape[1:]),
                dtype=_type(call.checkpoint_type),
                device=device,
            )
            arguments["checkpoint_states"] = lay_out_state(states, call.final_layout)
        if call.workspace is not None:
            size = _workspace_size(call, device) + call.workspace
            whole = cases.aligned_bytes(size + 2 * MARGIN, device).fill_(0xFF)
            arguments["workspace"] = whole[MARGIN : MARGIN + size]
        for name, values in (
            ("cu_seqlens", None if call.lengths is None else case.cu_seqlens),
            ("state_indices", self.slots),
            ("checkpoint_offsets", self.offsets),
        ):
            if values is not None:
                x = torch.as_tensor(values, dtype=_type(call.integers), device=device)
                arguments[name] = _with_gaps(x, call.integers_gaps)
        return arguments

    def _state_arguments(self, rng: Random) -> dict[str, Tensor | None]:
        call, initial = self.call, self.given.initial_state
        count, *inner = self.case.state_shape
        pool = count if call.pool is None else count + call.pool
        given: Tensor | None = None
        if initial is not None:
            states = initial
            if self.slots is not None:
                states = rng.normal(pool, *inner, dtype=initial.dtype).to(initial.device)
                for n, slot in enumerate(self.slots):
                    if slot >= 0:
                        states[slot] = initial[n]
            given = lay_out_state(states, call.state_layout)
        final = given
        if call.final != "same":
            final = None
            if call.final is not None:
                states = poisoned(pool, *inner, dtype=_type(call.final), device=self.case.device)
                final = lay_out_state(states, call.final_layout)
        return {"initial_state": given, "final_state": final}

    def _spoil(self, case: Case) -> Case:
        """The case with one input of one sequence spoiled, and NaN in rows of no sequence."""
        call = self.call
        inputs = {name: getattr(case, name).clone() for name in TOKEN_INPUTS}
        for x in inputs.values():
            x[:, : call.before] = float("nan")
            x[:, x.shape[1] - call.after :] = float("nan")
        changed = case.but(**inputs)
        if call.spoiled is not None and self.spoiled is not None:
            name, what = call.spoiled
            if name == "initial":
                if case.initial_state is not None:
                    changed.initial_state = case.initial_state.clone()
                    changed.initial_state[self.spoiled] = _SPOILED[what]
            else:
                b, i, j = case.spans[self.spoiled]
                inputs[name][b, i:j] = _SPOILED[what]
        return changed

    def final_states(self) -> list[tuple[int, Tensor]]:
        """Each sequence with a final state, and that state."""
        final = self.arguments.get("final_state")
        if final is None:
            return []
        slots = range(len(self.spans)) if self.slots is None else self.slots
        return [(n, final[slot]) for n, slot in enumerate(slots) if slot >= 0]

    def writable(self) -> list[Tensor]:
        """The views that the call writes."""
        out = self.arguments["out"]
        views = [out[b, i:j] for b, i, j in self.case.spans]
        views += [state for _, state in self.final_states()]
        views += [self.arguments.get(name) for name in ("checkpoint_states", "workspace")]
        return [view for view in views if view is not None]


def check(call: Call, device: torch.device) -> Subject:
    """Run the call twice and compare it with float64, its bits with each other, and memory.

    Raises:
        Problem: something is wrong with the results.
        AssertionError: a result is not accurate.
        Exception: whatever the call raises.
    """
    subject = Subject(call, device)
    memory = _storages(subject.arguments)
    before = {at: x.clone() for at, x in memory.items()}
    _run(subject)
    _check_untouched(subject, memory, before)
    _check_values(subject)
    first = {at: x.clone() for at, x in memory.items()}
    for at, x in memory.items():
        x.copy_(before[at])
    _run(subject)
    workspace = subject.arguments.get("workspace")
    scratch = None if workspace is None else workspace.untyped_storage().data_ptr()
    for at, x in memory.items():
        if at != scratch and not torch.equal(x, first[at]):
            names = ", ".join(_names_at(subject, at))
            raise Problem(f"the same call again wrote other bits to {names}")
    return subject


def describe(subject: Subject) -> list[str]:
    """One line for each argument."""
    lines = []
    for name, x in subject.arguments.items():
        if isinstance(x, Tensor):
            kind = str(x.dtype).removeprefix("torch.")
            text = f"{kind} {list(x.shape)}, strides {list(x.stride())}"
            if x.dim() == 1 and x.numel() <= 12 and not x.is_floating_point():
                text += f", {x.tolist()}" if name != "workspace" else ""
        else:
            text = repr(x)
        lines.append(f"{name:18} {text}")
    return lines


def _run(subject: Subject) -> None:
    with forced(subject.call.path):
        flash_kda.fwd(**subject.arguments)
    if subject.case.device.type == "cuda":
        torch.cuda.synchronize(subject.case.device)


def _check_untouched(
    subject: Subject, memory: dict[int, Tensor], before: dict[int, Tensor]
) -> None:
    writable = {at: torch.zeros_like(x) for at, x in memory.items()}
    for view in subject.writable():
        if view.numel():
            mask = writable[view.untyped_storage().data_ptr()].untyped_storage()
            same = torch.empty(0, dtype=view.dtype, device=view.device)
            same.set_(mask, view.storage_offset(), view.shape, view.stride())
            same.copy_(poisoned(*view.shape, dtype=view.dtype, device=view.device))
    for at, x in memory.items():
        if not bool(((x == before[at]) | (writable[at] != 0)).all()):
            names = ", ".join(_names_at(subject, at))
            raise Problem(f"bytes that are not the call's to write were written, beside {names}")


def _check_values(subject: Subject) -> None:
    call, case = subject.call, subject.case
    # Other gates than the kind's own make repeated keys as hard as they get.
    kind = cases.KINDS["repeated_keys_weak_decay" if "repeated" in call.kind else call.kind]
    bound = kind.bound
    if _few_rows(call):
        bound *= 1.5  # a few roundings decide the error of a few rows
    true_out, true_state = cases.reference(case)
    out, finals = subject.arguments["out"], subject.final_states()
    judged = [span for n, span in enumerate(case.spans) if n != subject.spoiled]
    pairs = [(out[b, i:j], true_out[b, i:j]) for b, i, j in judged]
    cases.assert_close("out", pairs, bound)
    states = [(x, true_state[n]) for n, x in finals if n != subject.spoiled]
    cases.assert_close("final_state", states, kind.state_bound)
    for n, x in finals:
        begin, end = subject.spans[n]
        if begin == end and n != subject.spoiled:
            start = torch.zeros_like(x)
            if case.initial_state is not None:
                start = case.initial_state[n].to(x.dtype)
            if not cases.same_bits(x, start):
                raise Problem(f"the final state of sequence {n}, which is empty, is another")
    if subject.offsets:
        _check_checkpoints(subject, kind.state_bound)


def _check_checkpoints(subject: Subject, bound: float) -> None:
    """Each is the final state of the tokens before it."""
    assert subject.offsets is not None
    case, device = subject.case, subject.case.device
    owners = [
        next(n for n, (begin, end) in enumerate(subject.spans) if begin < offset <= end)
        for offset in subject.offsets
    ]
    parts = [
        torch.arange(subject.spans[n][0], offset, dtype=torch.int64, device=device)
        for n, offset in zip(owners, subject.offsets, strict=True)
    ]
    rows = torch.cat(parts)
    bounds = torch.tensor([0, *map(len, parts)], dtype=torch.int64, device="cpu").cumsum(0)
    prefixes = case.but(
        **{name: getattr(case, name).flatten(0, 1)[rows][None] for name in TOKEN_INPUTS},
        initial_state=None if case.initial_state is None else case.initial_state[owners],
        cu_seqlens=bounds.to(device),
    )
    _, expected = cases.reference(prefixes)
    pairs = zip(owners, subject.arguments["checkpoint_states"], expected, strict=True)
    judged = [(x, y) for n, x, y in pairs if n != subject.spoiled]
    cases.assert_close("checkpoint_states", judged, bound)


def _plain_case(call: Call, rng: Random) -> Case:
    """The call's values on the CPU, contiguous, beta as logits."""
    case = cases.make_case(
        rng,
        call.kind,
        batch=call.batch,
        tokens=call.tokens,
        lengths=call.lengths,
        before=call.before,
        after=call.after,
        heads=call.heads,
        initial_state=None if call.initial is None else _type(call.initial),
    )
    if _few_rows(call):
        # Where a query happens to be at right angles to everything, its output is nothing but
        # rounding. Among few rows that would decide the error, so here they lean on their keys.
        case.q = (case.k.float() + 0.5 * case.q.float()).to(case.q.dtype)
    beta = case.beta.to(_type(call.beta_type))
    if call.beta_type == "float32":
        beta = beta * 1.001  # not a number in bf16
    if not call.beta_is_logits:
        beta = beta.double().sigmoid().to(beta.dtype).double().logit()
    case.beta = beta
    # Results are linear in v and the initial state together. With one of them much larger, what
    # the other adds may be all that is left where the larger cancels, and drown in its rounding.
    case.v = (case.v.double() * call.values).to(case.v.dtype)
    if case.initial_state is not None:
        x = case.initial_state
        case.initial_state = (x.double() * call.values).to(x.dtype)
    if call.A_log_value is not None:
        case.A_log = torch.full_like(case.A_log, call.A_log_value)
    case.A_log = None if call.A_log is None else case.A_log.to(_type(call.A_log))
    case.dt_bias = None if call.dt_bias is None else case.dt_bias.to(_type(call.dt_bias))
    return case.but(lower_bound=call.lower_bound, scale=call.scale)


def _spoiled_sequence(call: Call) -> int | None:
    return None if call.spoiled is None else call.seed % call.sequences


def _few_rows(call: Call) -> bool:
    """Whether few rows of ``out`` are compared."""
    lengths = (call.tokens,) * call.batch if call.lengths is None else call.lengths
    judged = sum(x for n, x in enumerate(lengths) if n != _spoiled_sequence(call))
    return judged * call.heads < _FEW_ROWS


def _draw_slots(call: Call, rng: Random) -> list[int] | None:
    """A slot of its own for every sequence, or none of them for about one in five."""
    if call.pool is None:
        return None
    slots = torch.argsort(rng.uniform(call.sequences + call.pool))[: call.sequences]
    none = rng.uniform(call.sequences) < 0.2
    return [int(x) for x in torch.where(none, -1, slots).tolist()]


def _draw_offsets(call: Call, rng: Random, spans: list[tuple[int, int]]) -> list[int] | None:
    if call.checkpoints is None:
        return None
    allowed = [x for i, j in spans for x in (*range(i + 16, j, 16), *([j] if j > i else []))]
    if not call.checkpoints:
        return []
    return sorted(allowed[n] for n in rng.integers(0, len(allowed), call.checkpoints))


def _workspace_size(call: Call, device: torch.device) -> int:
    sizes = (call.all_tokens, call.heads, call.sequences)
    try:
        if device.type == "cpu":
            return abi.workspace_size(*sizes)
        with forced(call.path):
            return flash_kda.workspace_size(*sizes, device)
    except BrokenInstallError:  # not built: then CPU calls take any size
        return 1024


def _type(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _with_gaps(x: Tensor | None, gaps: bool) -> Tensor | None:
    if x is None or not gaps:
        return x
    filler = torch.full_like(x, torch.nan if x.is_floating_point() else -7)
    return torch.stack((x, filler), -1)[..., 0]


def _shape_bias(x: Tensor | None, shape: str) -> Tensor | None:
    if x is None or shape == "matrix":
        return x
    return x.flatten() if shape == "flat" else x.t().contiguous().t()


def _storages(arguments: dict[str, Any]) -> dict[int, Tensor]:
    """The bytes of every buffer that an argument lies in, by its address."""
    found = {}
    for x in arguments.values():
        if isinstance(x, Tensor) and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            found[storage.data_ptr()] = whole
    return found


def _names_at(subject: Subject, address: int) -> list[str]:
    return [
        name
        for name, x in subject.arguments.items()
        if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == address
    ]
