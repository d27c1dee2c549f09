"""The ring of `fused` as a model: who waits for which phase of which barrier, in random schedules.

The kernel's warps are generators that stop at each wait and at each place where another warp may
come first. The scheduler picks any warp that need not wait, some of them far more often than
others. A barrier is only asked whether the phase of a parity is over, as the hardware is: who
comes too early or too late is told the wrong thing. Two orders that hung or went wrong on a GPU
must do so here, too; that of the kernel never.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import cases
import native
import pytest

Waits = Iterator[Callable[[], bool]]
CTAS, CHAIN_WARPS, GROUP_WARPS = 2, 2, 2  # of each kind two are enough to come apart
STATE_STAGES = 3
STATE, CHUNK = "s", "c"  # what stands in a stage: a part of a state, or a chunk


@dataclass
class Barrier:
    """An mbarrier: phases that are complete, and arrivals that the current one still needs."""

    count: int
    phase: int = 0
    pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.phase += 1
            self.pending = self.count

    def over(self, phase: int) -> bool:
        """Whether the phase of that number's parity is, for all that the hardware knows."""
        return self.phase % 2 != phase % 2


class WrongData(Exception):
    """Somebody reads what is not there yet, or overwrites what is still to be read."""


class Ring:
    """Both CTAs of a cluster. ``order`` says when a part of a state is sent."""

    def __init__(
        self, kinds: str, stages: int, groups: int, solvers: int, order: str = "kernel"
    ) -> None:
        self.kinds, self.stages, self.groups, self.solvers = kinds, stages, groups, solvers
        self.order = order
        ctas = range(CTAS)
        self.empty = [Barrier(CTAS * CHAIN_WARPS) for _ in range(stages)]
        self.images = [Barrier(GROUP_WARPS) for _ in range(stages)]
        self.full = [[Barrier(1) for _ in range(stages)] for _ in ctas]
        self.solved = [[Barrier(1) for _ in range(solvers)] for _ in ctas]
        self.squares = [[Barrier(GROUP_WARPS) for _ in range(groups)] for _ in ctas]
        # Of each group's two places: the chunk and the warps that have published sums of it.
        self.sums = [[[(-1, 0), (-1, 0)] for _ in range(groups)] for _ in ctas]
        self.sums_read = [0] * len(kinds)
        self.content: list[list[tuple[str, int]]] = [[("", -1)] * stages for _ in ctas]
        self.growing: list[list[int | None]] = [[None] * solvers for _ in ctas]
        self.made = [0] * len(kinds)  # warps whose images are complete
        self.read = [[0] * len(kinds) for _ in ctas]  # chain warps that have read it

    def warps(self) -> list[Waits]:
        every = itertools.product
        return [
            *(self.chain(cta) for cta, _ in every(range(CTAS), range(CHAIN_WARPS))),
            *(self.rows(*at) for at in every(range(CTAS), range(self.groups), range(GROUP_WARPS))),
            *(self.solver(*at) for at in every(range(CTAS), range(self.solvers))),
        ]

    def put(self, cta: int, index: int, what: str) -> None:
        """Into the stage of that index, from which all must have read what stood there before."""
        before = index - self.stages
        if before >= 0 and self.read[cta][before] < CHAIN_WARPS:
            raise WrongData(f"{what} {index} overwrites {before}")
        self.content[cta][index % self.stages] = (what, index)

    def hand_over(self, cta: int, index: int, what: str) -> Waits:
        for to in (cta, 1 - cta):
            self.put(to, index, what)
            self.full[to][index % self.stages].arrive()
            yield lambda: True

    def free(self, index: int) -> Callable[[], bool]:
        turn, stage = divmod(index, self.stages)
        return lambda: turn == 0 or self.empty[stage].over(turn - 1)

    def publish(self, cta: int, group: int, index: int, place: int) -> None:
        chunk, published = self.sums[cta][group][place]
        if chunk != index:
            if chunk >= 0 and self.sums_read[chunk] < GROUP_WARPS:
                raise WrongData(f"sums of {index} overwrite those of {chunk}")
            published = 0
        self.sums[cta][group][place] = (index, published + 1)

    def rows(self, cta: int, group: int, member: int) -> Waits:
        chunks = 0
        for index in range(cta + CTAS * group, len(self.kinds), CTAS * self.groups):
            yield self.free(index)
            if self.kinds[index] == CHUNK:
                self.put(cta, index, "rows")
                self.publish(cta, group, index, chunks % 2)
                yield lambda: True
                self.squares[cta][group].arrive()
                yield lambda n=chunks: self.squares[cta][group].over(n)
                if self.sums[cta][group][chunks % 2] != (index, GROUP_WARPS):
                    raise WrongData(f"sums of {index} are not complete")
                self.sums_read[index] += 1
                chunks += 1
            yield lambda: True
            turn, solver = divmod(index // CTAS, self.solvers)
            yield lambda at=solver, n=turn: n == 0 or self.solved[cta][at].over(n - 1)
            if self.kinds[index] == CHUNK:
                if self.growing[cta][solver] not in (None, index):
                    raise WrongData(f"K^ of {index} overwrites that of another chunk")
                self.growing[cta][solver] = index
            elif self.order == "sent by the group" and member == 0:
                yield from self.hand_over(cta, index, "state")
            yield lambda: True
            self.made[index] += 1
            self.images[index % self.stages].arrive()

    def solver(self, cta: int, solver: int) -> Waits:
        for index in range(cta + CTAS * solver, len(self.kinds), CTAS * self.solvers):
            turn, stage = divmod(index, self.stages)
            is_state = self.kinds[index] == STATE
            yield self.free(index)
            if is_state and self.order == "sent before the group has looked":
                yield from self.hand_over(cta, index, "state")
            yield lambda at=stage, n=turn: self.images[at].over(n)
            if self.made[index] < GROUP_WARPS:
                raise WrongData(f"images of {index} are not complete")
            if is_state and self.order == "kernel":
                yield from self.hand_over(cta, index, "state")
            if not is_state:
                if self.growing[cta][solver] != index:
                    raise WrongData(f"K^ of {index} is another's")
                self.growing[cta][solver] = None
            self.solved[cta][solver].arrive()
            yield lambda: True
            if not is_state:
                yield from self.hand_over(cta, index, "record")

    def chain(self, cta: int) -> Waits:
        for index, kind in enumerate(self.kinds):
            turn, stage = divmod(index, self.stages)
            yield lambda at=stage, n=turn: self.full[cta][at].over(n)
            if self.content[cta][stage] != ("state" if kind == STATE else "record", index):
                raise WrongData(f"stage of {index} holds {self.content[cta][stage]}")
            yield lambda: True
            self.read[cta][index] += 1
            self.empty[stage].arrive()


def work(rng: random.Random, least: int) -> str:
    """Pieces with a state in stages of the ring or without, and so many chunks."""
    kinds = ""
    while len(kinds) < least:
        kinds += STATE * rng.choice((STATE_STAGES, STATE_STAGES, 0))
        kinds += CHUNK * rng.choice((0, 1, 2, 4, 4, 9))
    return kinds


def outcome(ring: Ring, rng: random.Random) -> str:
    """ "ends", "hangs" or "wrong data"."""
    warps = dict(enumerate(ring.warps()))
    waits: dict[int, Callable[[], bool]] = {}
    weights = [1.0] * len(warps)
    try:
        for number, warp in list(warps.items()):
            wait = next(warp, None)
            if wait is not None:
                waits[number] = wait
        for step in itertools.count():
            if not waits:
                return "ends"
            ready = [number for number, wait in waits.items() if wait()]
            if not ready:
                return "hangs"
            if step % 50 == 0:
                weights = [1 / rng.choice((1, 1, 5, 50, 500)) for _ in warps]
            (number,) = rng.choices(ready, [weights[n] for n in ready])
            wait = next(warps[number], None)
            if wait is None:
                del waits[number]
            else:
                waits[number] = wait
    except WrongData:
        return "wrong data"
    raise AssertionError


def shape_of_kernel() -> tuple[int, int, int]:
    """Stages, groups and solvers in csrc/launch_shapes.h."""
    if not (native.ROOT / "csrc").is_dir():
        pytest.skip("needs the sources of the kernels")
    text = (native.ROOT / "csrc" / "launch_shapes.h").read_text(encoding="utf-8")
    found = re.search(r"FusedShape kFused\{(\d+), \d+, (\d+), (\d+), (\d+),", text)
    assert found and int(found[1]) == CTAS
    assert f"kStateStages = {STATE_STAGES};" in text
    solvers, groups, stages = map(int, found.groups()[1:])
    return stages, groups, solvers


def outcomes(runs: int, order: str) -> list[str]:
    stages, groups, solvers = shape_of_kernel()
    found = []
    for n in range(runs):
        rng = random.Random(f"{cases.BASE_SEED} {n}")
        ring = Ring(work(rng, 90), stages, groups, solvers, order)
        found.append(outcome(ring, rng))
    return found


def test_ring_of_fused_ends() -> None:
    assert set(outcomes(150, "kernel")) == {"ends"}


@pytest.mark.parametrize("order", ["sent by the group", "sent before the group has looked"])
def test_model_notices_orders_that_hung(order: str) -> None:
    assert "hangs" in outcomes(100, order)
