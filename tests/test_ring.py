"""The ring of `fused` as a model: who waits for which phase of which barrier, in random schedules.

The kernel's warps are generators that stop at each wait and at each place where another warp may
come first; so are copies under way, which land whenever the scheduler wants. It picks any of them
that need not wait, some of them far more often than others. A barrier is only asked whether the
phase of a parity is over, as the hardware is: who comes too early or too late is told the wrong
thing. Orders that hung or went wrong on a GPU must do so here, too, and so must rings in which a
parity could mislead; that of the kernel never.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import cases
import native
import pytest

Waits = Iterator[Callable[[], bool]]
CTAS, CHAIN_WARPS, GROUP_WARPS = 2, 2, 2  # of each kind two are enough to come apart
TILES = 2  # of the rows of a chunk, which land each by itself
STATE_STAGES = 3
STATE, CHUNK = "s", "c"  # what stands in a stage: a part of a state, or a chunk


@dataclass(frozen=True)
class Shape:
    """What csrc/launch_shapes.h says of a CTA."""

    stages: int
    groups: int
    solvers: int
    row_turns: int
    growing_images: int


class WrongData(Exception):
    """Somebody reads what is not there yet, or overwrites what is still to be read."""


@dataclass
class Barrier:
    """An mbarrier: phases that are complete, and what the current one still needs."""

    count: int
    phase: int = 0
    pending: int = field(init=False)
    copies: int = 0  # that it has been told of and that have not landed

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, copies: int = 0) -> None:
        if self.pending == 0:
            raise WrongData("an arrival more than the phase has")
        self.pending -= 1
        self.copies += copies
        self._settle()

    def land(self) -> None:
        self.copies -= 1
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.copies == 0:
            self.phase += 1
            self.pending = self.count

    def over(self, phase: int) -> bool:
        """Whether the phase of that number's parity is, for all that the hardware knows."""
        return self.phase % 2 != phase % 2


class Ring:
    """Both CTAs of a cluster. ``order`` says when a part of a state is sent."""

    def __init__(self, kinds: str, shape: Shape, order: str = "kernel") -> None:
        self.kinds, self.shape, self.order = kinds, shape, order
        self.stages = shape.stages
        ctas = range(CTAS)
        self.empty = [Barrier(CTAS * CHAIN_WARPS) for _ in range(shape.stages)]
        self.images = [Barrier(GROUP_WARPS) for _ in range(shape.stages)]
        self.full = [[Barrier(1) for _ in range(shape.stages)] for _ in ctas]
        self.solved = [[Barrier(1) for _ in range(shape.growing_images)] for _ in ctas]
        self.squares = [[Barrier(GROUP_WARPS) for _ in range(shape.groups)] for _ in ctas]
        self.fetched = [
            [[Barrier(1) for _ in range(shape.row_turns)] for _ in range(shape.groups)]
            for _ in ctas
        ]
        # Of each group's two places: the chunk and the warps that have published sums of it.
        self.sums = [[[(-1, 0), (-1, 0)] for _ in range(shape.groups)] for _ in ctas]
        self.sums_read = [0] * len(kinds)
        # What a stage holds, and how many of the copies that bring it are still to land.
        self.content: list[list[tuple[str, int]]] = [[("", -1)] * shape.stages for _ in ctas]
        self.to_land = [[0] * shape.stages for _ in ctas]
        self.growing: list[list[int | None]] = [[None] * shape.growing_images for _ in ctas]
        self.made = [0] * len(kinds)  # warps whose images are complete
        self.read = [[0] * len(kinds) for _ in ctas]  # chain warps that have read it
        self.started: list[Waits] = []  # copies that the scheduler does not have yet

    def warps(self) -> list[Waits]:
        every, ctas = itertools.product, range(CTAS)
        groups, solvers = range(self.shape.groups), range(self.shape.solvers)
        return [
            *(self.chain(cta) for cta, _ in every(ctas, range(CHAIN_WARPS))),
            *(self.fetch(cta) for cta in ctas),
            *(self.rows(*at) for at in every(ctas, groups, range(GROUP_WARPS))),
            *(self.solver(*at) for at in every(ctas, solvers)),
        ]

    def put(self, cta: int, index: int, what: str, copies: int = 0) -> None:
        """Into the stage of that index, from which all must have read what stood there before."""
        before, stage = index - self.stages, index % self.stages
        if before >= 0 and self.read[cta][before] < CHAIN_WARPS:
            raise WrongData(f"{what} {index} overwrites {before}")
        if self.to_land[cta][stage]:
            raise WrongData(f"{what} {index} comes before copies that land later")
        self.content[cta][stage] = (what, index)
        self.to_land[cta][stage] = copies

    def look(self, cta: int, index: int, what: str) -> None:
        stage = index % self.stages
        if self.content[cta][stage] != (what, index):
            raise WrongData(f"not {what} {index} but {self.content[cta][stage]}")
        if self.to_land[cta][stage]:
            raise WrongData(f"{what} {index} has not landed")

    def start(self, cta: int, index: int, what: str, barrier: Barrier, copies: int = 1) -> None:
        """An arrival and the copies that it tells of."""
        self.put(cta, index, what, copies)
        barrier.arrive(copies)
        self.started += [self.copy(cta, index, what, barrier) for _ in range(copies)]

    def copy(self, cta: int, index: int, what: str, barrier: Barrier) -> Waits:
        yield lambda: True
        stage = index % self.stages
        if self.content[cta][stage] != (what, index):
            raise WrongData(f"{what} {index} lands on {self.content[cta][stage]}")
        self.to_land[cta][stage] -= 1
        barrier.land()

    def send_state(self, index: int) -> Waits:
        for to in range(CTAS):
            self.start(to, index, "state", self.full[to][index % self.stages])
            yield lambda: True

    def hand_over(self, cta: int, index: int) -> Waits:
        stage = index % self.stages
        self.put(cta, index, "record")
        self.full[cta][stage].arrive()
        yield lambda: True
        for to in range(CTAS):
            if to != cta:
                self.look(cta, index, "record")
                self.start(to, index, "record", self.full[to][stage])
                yield lambda: True

    def free(self, index: int) -> Callable[[], bool]:
        turn, stage = divmod(index, self.stages)
        return lambda: turn == 0 or self.empty[stage].over(turn - 1)

    def rows_turn(self, cta: int, index: int) -> tuple[Barrier, int]:
        """Where the rows of a chunk are waited for, and the phase."""
        turn, group = divmod(index // CTAS, self.shape.groups)
        phase, place = divmod(turn, self.shape.row_turns)
        return self.fetched[cta][group][place], phase

    def fetch(self, cta: int) -> Waits:
        for index in range(cta, len(self.kinds), CTAS):
            yield self.free(index)
            barrier, _ = self.rows_turn(cta, index)
            if self.kinds[index] == CHUNK:
                self.start(cta, index, "rows", barrier, TILES)
            else:
                barrier.arrive()
            yield lambda: True

    def publish(self, cta: int, group: int, index: int, place: int) -> None:
        chunk, published = self.sums[cta][group][place]
        if chunk != index:
            if chunk >= 0 and self.sums_read[chunk] < GROUP_WARPS:
                raise WrongData(f"sums of {index} overwrite those of {chunk}")
            published = 0
        self.sums[cta][group][place] = (index, published + 1)

    def rows(self, cta: int, group: int, member: int) -> Waits:
        chunks = 0
        for index in range(cta + CTAS * group, len(self.kinds), CTAS * self.shape.groups):
            fetched, phase = self.rows_turn(cta, index)
            yield lambda at=fetched, n=phase: at.over(n)
            if self.kinds[index] == CHUNK:
                self.look(cta, index, "rows")
                self.publish(cta, group, index, chunks % 2)
                yield lambda: True
                self.squares[cta][group].arrive()
                yield lambda n=chunks: self.squares[cta][group].over(n)
                if self.sums[cta][group][chunks % 2] != (index, GROUP_WARPS):
                    raise WrongData(f"sums of {index} are not complete")
                self.sums_read[index] += 1
                chunks += 1
            yield lambda: True
            turn, place = divmod(index // CTAS, self.shape.growing_images)
            yield lambda at=place, n=turn: n == 0 or self.solved[cta][at].over(n - 1)
            if self.kinds[index] == CHUNK:
                if self.growing[cta][place] not in (None, index):
                    raise WrongData(f"K^ of {index} overwrites that of another chunk")
                self.growing[cta][place] = index
                self.look(cta, index, "rows")
            elif self.order == "sent by the group" and member == 0:
                yield from self.send_state(index)
            yield lambda: True
            self.made[index] += 1
            self.images[index % self.stages].arrive()

    def solver(self, cta: int, solver: int) -> Waits:
        for index in range(cta + CTAS * solver, len(self.kinds), CTAS * self.shape.solvers):
            turn, stage = divmod(index, self.stages)
            place = index // CTAS % self.shape.growing_images
            is_state = self.kinds[index] == STATE
            yield self.free(index)
            if is_state and self.order == "sent before the rows are waited for":
                yield from self.send_state(index)
            yield lambda at=stage, n=turn: self.images[at].over(n)
            if self.made[index] < GROUP_WARPS:
                raise WrongData(f"images of {index} are not complete")
            if is_state and self.order == "kernel":
                yield from self.send_state(index)
            if not is_state:
                if self.growing[cta][place] != index:
                    raise WrongData(f"K^ of {index} is another's")
                yield lambda: True
                if self.growing[cta][place] != index:
                    raise WrongData(f"K^ of {index} is overwritten")
                self.growing[cta][place] = None
            self.solved[cta][place].arrive()
            yield lambda: True
            if not is_state:
                yield from self.hand_over(cta, index)

    def is_full(self, cta: int, index: int) -> bool:
        turn, stage = divmod(index, self.stages)
        return self.full[cta][stage].over(turn)

    def chain(self, cta: int) -> Waits:
        known = 0  # stages to come of which it need not ask any more whether they are full
        for index, kind in enumerate(self.kinds):
            if known == 0:
                yield lambda n=index: self.is_full(cta, n)
            known = max(known - 1, 0)
            self.look(cta, index, "state" if kind == STATE else "record")
            yield lambda: True
            if known == 0:
                # Asked before this stage is let go; behind a piece for all that a state takes.
                known = int(self.is_full(cta, index + 1))
                if kind == CHUNK and self.kinds.startswith(STATE * STATE_STAGES, index + 1):
                    ahead = range(index + 1, index + 1 + STATE_STAGES)
                    known = STATE_STAGES if all(self.is_full(cta, n) for n in ahead) else known
            yield lambda: True
            self.read[cta][index] += 1
            self.empty[index % self.stages].arrive()


# Of pieces: the stages in which a state comes, and the chunks.
PIECES = {
    "all kinds": ((STATE_STAGES, STATE_STAGES, 0), (0, 1, 2, 4, 4, 9)),
    "states alone": ((STATE_STAGES,), (0,)),
    "hardly any chunks": ((STATE_STAGES, STATE_STAGES, 0), (0, 0, 0, 0, 1)),
    "no states": ((0,), (1, 40)),
}


def work(rng: random.Random, least: int, pieces: str) -> str:
    """Pieces with a state in stages of the ring or without, and so many chunks."""
    kinds = ""
    states, chunks = PIECES[pieces]
    while len(kinds) < least:
        kinds += STATE * rng.choice(states)
        kinds += CHUNK * rng.choice(chunks)
    return kinds


def outcome(ring: Ring, rng: random.Random) -> str:
    """ "ends", "hangs" or "wrong data"."""
    running: dict[int, Waits] = {}
    waits: dict[int, Callable[[], bool]] = {}
    weights: dict[int, float] = {}
    numbers = itertools.count()
    period = rng.choice((50, 50, 500))  # steps after which others are slow

    def go_on(number: int) -> None:
        wait = next(running[number], None)
        if wait is None:
            del running[number]
            waits.pop(number, None)
        else:
            waits[number] = wait

    def weight() -> float:
        return 1 / rng.choice((1, 1, 5, 50, 500))

    def take(started: list[Waits]) -> None:
        for one in started:
            number = next(numbers)
            running[number], weights[number] = one, weight()
            go_on(number)

    try:
        take(ring.warps())
        for step in itertools.count():
            if not waits:
                return "ends"
            ready = [number for number, wait in waits.items() if wait()]
            if not ready:
                return "hangs"
            if step % period == 0:
                weights = {number: weight() for number in running}
            (number,) = rng.choices(ready, [weights[n] for n in ready])
            go_on(number)
            started, ring.started = ring.started, []
            take(started)
    except WrongData:
        return "wrong data"
    raise AssertionError


def shape_of_kernel() -> Shape:
    """Of csrc/launch_shapes.h."""
    if not (native.ROOT / "csrc").is_dir():
        pytest.skip("needs the sources of the kernels")
    text = (native.ROOT / "csrc" / "launch_shapes.h").read_text(encoding="utf-8")
    found = re.search(r"FusedShape kFused\{(\d+), \d+, (\d+), (\d+), (\d+),", text)
    assert found and int(found[1]) == CTAS
    assert f"kStateStages = {STATE_STAGES};" in text
    solvers, groups, stages = map(int, found.groups()[1:])
    turns, images = (
        int(re.findall(rf"constexpr int {name} = (\d+);", text)[0])
        for name in ("kRowTurns", "kGrowingImages")
    )
    return Shape(stages, groups, solvers, turns, images)


def outcomes(
    runs: int, order: str = "kernel", pieces: str = "all kinds", **otherwise: int
) -> list[str]:
    """Of random runs of the kernel's ring, or of one of another shape."""
    shape = replace(shape_of_kernel(), **otherwise)
    found = []
    for n in range(runs):
        rng = random.Random(f"{cases.BASE_SEED} {n}")
        found.append(outcome(Ring(work(rng, 90, pieces), shape, order), rng))
    return found


@pytest.mark.parametrize("pieces", PIECES)
def test_ring_of_fused_ends(pieces: str) -> None:
    assert set(outcomes(60, pieces=pieces)) == {"ends"}


@pytest.mark.parametrize("order", ["sent by the group", "sent before the rows are waited for"])
def test_model_notices_orders_that_hung(order: str) -> None:
    assert "hangs" in outcomes(60, order, "states alone")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_model_notices_too_few_turns_of_rows(turns: int) -> None:
    """The copies of a chunk are taken for those of another one of the group's."""
    assert set(outcomes(60, row_turns=turns)) & {"hangs", "wrong data"}


@pytest.mark.parametrize("images", [1, 3])
def test_model_notices_too_few_places_for_growing_images(images: int) -> None:
    """Of three, two groups come to the same; with two, each has one of its own."""
    assert "wrong data" in outcomes(60, pieces="no states", growing_images=images)
