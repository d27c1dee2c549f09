"""Calls of flash_kda.fwd as plain values: drawn at random, made simpler, written and read back."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import documents
from cases import KINDS
from documents import Maybe
from layouts import BETAS, LAYOUTS, STATE_LAYOUTS

TOKEN_INPUTS = ("q", "k", "v", "g", "beta")
TOKEN_LAYOUTS = ("q", "k", "v", "g", "out")
SPOILED = ("nan", "inf", "-inf", "huge")
# The bounds of the other two kinds are drawn by themselves.
VALUE_KINDS = tuple(kind for kind in KINDS if not kind.startswith("bound_"))
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_STATES = ("float32", "bfloat16")
_INTEGERS = ("int64", "int32")
_LONG = 960
"""Tokens of a sequence, on average, from which the path ``segments`` cuts them."""
_CLUSTERS = 72
"""Of the path ``fused``, at most: where there are more chains, they are shared out and cut."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call. Each default is the simplest value; equal calls are equal in bits.

    Types are names in torch. ``lengths`` packs sequences into one row, between ``before`` and
    ``after`` rows of NaN; without it there are ``batch`` rows of ``tokens``.
    """

    seed: int = 0
    lengths: tuple[int, ...] | None = None
    before: int = 0
    after: int = 0
    batch: int = 1
    tokens: int = 1
    heads: int = 1
    path: str | None = None
    checkpoints: int | None = None
    pool: int | None = None
    """Slots that no sequence uses; None: no pool."""
    spoiled: tuple[str, str] | None = None
    """An input of one sequence, and what it is filled with: the others must not change."""
    workspace: int | None = None
    """Bytes more than needed; None: none is given."""
    initial: str | None = None
    final: str | None = None
    """A type, or "same": the tensor given as initial state."""
    kind: str = "ordinary"
    lower_bound: float = -5.0
    scale: float = 0.0883883
    values: float = 1.0
    """A factor on v and the initial state."""
    one_buffer: bool = False
    """q, k, v, g and out lie side by side in one buffer, whatever the layouts."""
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    g: str = "contiguous"
    out: str = "contiguous"
    beta: str = "contiguous"
    beta_type: str = "bfloat16"
    beta_is_logits: bool = True
    A_log: str | None = None
    A_log_value: float | None = None
    A_log_gaps: bool = False
    dt_bias: str | None = None
    dt_bias_shape: str = "matrix"
    state_layout: str = "contiguous"
    final_layout: str = "contiguous"
    checkpoint_type: str = "float32"
    integers: str = "int64"
    integers_gaps: bool = False

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def all_tokens(self) -> int:
        if self.lengths is None:
            return self.batch * self.tokens
        return self.before + sum(self.lengths) + self.after

    def settled(self) -> Call:
        """The call without what makes no sense in it."""
        changes: dict[str, Any] = {}
        if self.lengths is None:
            changes.update(before=0, after=0)
        else:
            changes.update(batch=1, tokens=1)
        if self.final == "same" and self.initial is None:
            changes["final"] = "float32"
        if self.initial is None and self.final is None:
            changes["pool"] = None
        if self.sequences < 2:
            changes["spoiled"] = None
        if not self._covered():
            changes["checkpoints"] = 0 if self.checkpoints is not None else None
        return dataclasses.replace(self, **changes)

    def _covered(self) -> int:
        return self.all_tokens - self.before - self.after

    def to_json(self) -> str:
        """What differs from the defaults."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The inverse of to_json. Raises ValueError for what is no call."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("got JSON that is nested too deeply; needs an object") from None
        documents.check(values, _SCHEMA)
        if unknown := values.keys() - _VALUES.keys():
            raise ValueError(f"got {min(unknown)!r}; needs some of {', '.join(_VALUES)}")
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values).settled()

    def features(self) -> list[str]:
        """What the summary of a run counts."""
        names = ["packed" if self.lengths is not None else "batches"]
        names += [f"kind {self.kind}"] if self.kind != "ordinary" else []
        names += [f"path {self.path}"] if self.path else []
        names += ["with empty sequences"] if 0 in (self.lengths or ()) else []
        names += ["no token at all"] if not self._covered() else []
        for name in ("initial", "final", "pool", "checkpoints", "workspace", "spoiled"):
            names += [name] if getattr(self, name) is not None else []
        names += ["in place"] if self.final == "same" else []
        names += ["crowd"] if self.sequences * self.heads > _CLUSTERS else []
        names += ["one buffer"] if self.one_buffer else []
        return names


_MOST = 2**31 - 32
_SIZE = documents.integer(0, _MOST)
_NUMBER = documents.number(-1e38, 1e38)
_SWITCH = documents.one_of(False, True)
_VALUES: dict[str, documents.Schema] = {
    "seed": documents.integer(0, 2**63 - 1),
    "lengths": Maybe([_SIZE]),
    **dict.fromkeys(("before", "after", "batch", "tokens"), _SIZE),
    "heads": documents.integer(1, _MOST),
    "path": Maybe(documents.TEXT),
    **dict.fromkeys(("checkpoints", "pool", "workspace"), Maybe(_SIZE)),
    "spoiled": documents.one_of(
        None, *([x, y] for x in (*TOKEN_INPUTS, "initial") for y in SPOILED)
    ),
    "initial": documents.one_of(None, *_STATES),
    "final": documents.one_of(None, *_STATES, "same"),
    "kind": documents.one_of(*KINDS),
    "lower_bound": documents.number(-5.0, 0.0),
    **dict.fromkeys(("scale", "values"), _NUMBER),
    **dict.fromkeys(TOKEN_LAYOUTS, documents.one_of(*LAYOUTS)),
    "beta": documents.one_of(*BETAS),
    "beta_type": documents.one_of(*_STATES),
    **dict.fromkeys(("A_log", "dt_bias"), documents.one_of(None, *_FLOATS)),
    "A_log_value": Maybe(_NUMBER),
    "dt_bias_shape": documents.one_of("matrix", "flat", "transposed"),
    **dict.fromkeys(("state_layout", "final_layout"), documents.one_of(*STATE_LAYOUTS)),
    "checkpoint_type": documents.one_of(*_STATES),
    "integers": documents.one_of(*_INTEGERS),
    **dict.fromkeys(("one_buffer", "beta_is_logits", "A_log_gaps", "integers_gaps"), _SWITCH),
}
_SCHEMA = {f"{name}?": schema for name, schema in _VALUES.items()}


def draw(rng: random.Random, largest: int, paths: Sequence[str | None]) -> Call:
    """A call whose sequences have at most ``largest`` tokens together, on one of the paths."""

    def maybe(odds: float, value: Any, otherwise: Any = None) -> Any:
        return value if rng.random() < odds else otherwise

    layout = rng.choice(["contiguous", *LAYOUTS])
    layouts = {name: maybe(0.3, rng.choice(list(LAYOUTS)), layout) for name in TOKEN_LAYOUTS}
    initial = maybe(0.65, rng.choice(_STATES))
    path = rng.choice(paths)
    if largest >= _LONG and rng.random() < (0.5 if path == "segments" else 0.05):
        sizes = {**_draw_long_sizes(rng, largest), "heads": rng.randint(1, 3)}
    elif largest >= _LONG and rng.random() < 0.15:
        sizes = _draw_crowd_sizes(rng, largest)
    else:
        sizes = _draw_sizes(rng, largest)
        sizes["heads"] = _draw_heads(rng, sizes, largest)
    return Call(
        **sizes,
        **layouts,
        seed=rng.randrange(2**31),
        path=path,
        checkpoints=maybe(0.25, rng.randrange(7)),
        pool=maybe(0.25, rng.randrange(4)),
        spoiled=maybe(0.2, (rng.choice((*TOKEN_INPUTS, "initial")), rng.choice(SPOILED))),
        workspace=maybe(0.3, rng.choice((0, 1, 4096))),
        initial=initial,
        final=maybe(0.75, rng.choice((*_STATES, "same"))),
        kind=maybe(0.5, rng.choice(VALUE_KINDS), "ordinary"),
        lower_bound=maybe(0.5, rng.choice((-4.0, -1.0, -0.1, -0.01, 0.0)), -5.0),
        scale=maybe(0.3, rng.choice((1.0, -2.5, 1e-15, 1e4)), Call.scale),
        values=maybe(0.2, rng.choice((1e-15, 1e4, 1e20)), 1.0),
        one_buffer=rng.random() < 0.1,
        beta=rng.choice(list(BETAS)),
        beta_type=rng.choice(_STATES),
        beta_is_logits=rng.random() < 0.75,
        A_log=maybe(0.8, rng.choice(_FLOATS)),
        A_log_value=maybe(0.2, rng.choice((-5.0, 0.0, 5.0, 20.0))),
        A_log_gaps=rng.random() < 0.3,
        dt_bias=maybe(0.8, rng.choice(_FLOATS)),
        dt_bias_shape=rng.choice(("matrix", "flat", "transposed")),
        state_layout=rng.choice(list(STATE_LAYOUTS)),
        final_layout=rng.choice(list(STATE_LAYOUTS)),
        checkpoint_type=rng.choice(_STATES),
        integers=rng.choice(_INTEGERS),
        integers_gaps=rng.random() < 0.3,
    ).settled()


def _draw_length(rng: random.Random, largest: int) -> int:
    """Short ones and those around multiples of the tile most of the time."""
    kind = rng.random()
    if kind < 0.2:
        length = rng.choice((0, 0, 1, 2))
    elif kind < 0.5:
        length = rng.randrange(40)
    elif kind < 0.8:
        length = 16 * rng.randrange(1, 9) + rng.choice((-1, 0, 1))
    else:
        length = round(largest ** rng.random())
    return min(length, largest)


def _draw_sizes(rng: random.Random, largest: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        tokens = _draw_length(rng, largest)
        most = max(1, min(8, largest // max(1, tokens)))
        batch = 0 if rng.random() < 0.03 else rng.randint(1, most)
        return {"batch": batch, "tokens": tokens}
    count = rng.choice((0, 1, 2, 3, 4, 6, 9, rng.randrange(60)))
    left, lengths = largest, []
    for _ in range(count):
        lengths.append(_draw_length(rng, min(left, 3 if count > 9 else largest)))
        left -= lengths[-1]
    edges = {name: rng.choice((0, 0, 1, 7, 20)) for name in ("before", "after")}
    return {"lengths": tuple(lengths), **edges}


def _draw_long_sizes(rng: random.Random, largest: int) -> dict[str, Any]:
    """Sequences of at least _LONG tokens on average, among them short ones."""
    count = rng.randint(1, min(4, largest // _LONG))
    tokens = rng.randint(count * _LONG, largest)
    if rng.random() < 0.4:
        return {"batch": count, "tokens": tokens // count}
    short = [_draw_length(rng, 40) for _ in range(rng.randrange(count))]
    rest = tokens - sum(short)
    cuts = sorted(rng.randint(0, rest) for _ in range(count - len(short) - 1))
    lengths = [*short, *(j - i for i, j in pairwise([0, *cuts, rest]))]
    rng.shuffle(lengths)
    edges = {name: rng.choice((0, 0, 1, 7, 20)) for name in ("before", "after")}
    return {"lengths": tuple(lengths), **edges}


def _draw_crowd_sizes(rng: random.Random, largest: int) -> dict[str, Any]:
    """More chains (sequences times heads) than clusters, of few tokens but for one at times."""
    chains = rng.randint(_CLUSTERS + 1, 4 * _CLUSTERS)
    heads = rng.randint(2, 40)
    count = -(-chains // heads)
    most = min(largest, 4 * largest // heads)
    if rng.random() < 0.3:
        return {"batch": count, "tokens": rng.randint(1, most // count), "heads": heads}
    lengths = [_draw_length(rng, most // count) for _ in range(count)]
    if rng.random() < 0.5:
        lengths[rng.randrange(count)] += rng.randint(0, most - sum(lengths))
    edges = {name: rng.choice((0, 0, 1, 7, 20)) for name in ("before", "after")}
    return {"lengths": tuple(lengths), **edges, "heads": heads}


def _draw_heads(rng: random.Random, sizes: dict[str, Any], largest: int) -> int:
    """More heads for fewer tokens and sequences, so that a call stays about as much work."""
    if "lengths" in sizes:
        tokens, sequences = sum(sizes["lengths"]), len(sizes["lengths"])
    else:
        tokens, sequences = sizes["batch"] * sizes["tokens"], sizes["batch"]
    most = min(4 * largest // max(1, tokens), 128 // max(1, sequences), 40)
    return rng.randint(1, max(1, min(most, rng.choice((2, 4, 8, 40)))))


def simpler(call: Call) -> Iterator[Call]:
    """The call with one thing made simpler, in every way; the most promising first."""
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if field.name == "seed" or value == field.default:
            continue
        if field.name == "lengths":
            changes = list(_simpler_lengths(value))
            # Where it takes rows of no sequence, a row of that many tokens may do as well.
            changes.append({"lengths": None, "tokens": call.all_tokens or 1})
        elif type(value) is int:
            changes = [{field.name: x} for x in _smaller(value, field.default)]
        else:
            changes = [{field.name: field.default}]
            if call.final == "same" and field.name in ("initial", "final"):
                changes.append({"final": call.initial})
        for change in changes:
            candidate = dataclasses.replace(call, **change).settled()
            if candidate != call:
                yield candidate


def _smaller(value: int, default: Any) -> list[int | None]:
    tries: list[int | None] = [default, 1, value // 2, value - 16, value - 1]
    least = 0 if default is None else default
    kept = [x for x in tries if x == default or (x is not None and least <= x < value)]
    return list(dict.fromkeys(kept))


def _simpler_lengths(lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    yield {"lengths": None, "tokens": max(lengths, default=1) or 1}
    size = len(lengths) // 2
    while size:
        for first in range(0, len(lengths), size):
            yield {"lengths": lengths[:first] + lengths[first + size :]}
        size //= 2
    for at, length in enumerate(lengths):
        for x in _smaller(length, 0):
            yield {"lengths": (*lengths[:at], x, *lengths[at + 1 :])}
