"""Which tokens, records, states and checkpoints each warp of the sm90 family's paths works on.

``tests/slices`` runs the launcher and the kernels' outlines and index arithmetic on the CPU, each
warp as 32 threads, and lists what every warp of every CTA is given to do. Here that is compared
with what the call asks for.
"""

from __future__ import annotations

import bisect
import json
import random
import re
import struct
import subprocess
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import native
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import MIDDLE_BYTES, RECORD_BYTES, STATE_BYTES

from flash_kda import abi

CHUNK, PAIR, DIM = 16, 32, 128
# The record of a pair of chunks and head: where its parts begin, where they do as it is stored,
# without two blocks of zeros, and their bytes.
WHOLE = ((0, 0, 27264), (27776, 27264, 512), (28800, 27776, 512))
# What the maps need: K~ and K- of either half, then the decay, b and the inverse.
WITHOUT_QUERIES = (
    *((at, at, 4096) for at in (0, 8192, 12288, 20480)),
    (24576, 24576, 1664),
    (27776, 27264, 512),
)
SHARE_BYTES, STATE_WARPS, MOST_CLUSTERS = 16, 8, 72
CHAIN_COST = 4  # what a chain takes beside its chunks, as so many chunks
STATE_STAGES, STATE_ROWS = 3, 22  # of the ring, and of a state in one of them
STATE_ROW = DIM + DIM // 8  # elements, of a row in a stage
PATHS = {"fused": 3, "segments": 4}  # as host/plan.h numbers them
RECORD_TOKENS = {"fused": CHUNK, "segments": PAIR}
STATE_MAP = ("state", "map")  # of a segment in the workspace; of the first one the map is a copy
LIST_ALL, LIST_CHAINS, COMBINE, COUNT = range(4)
FLOAT32, BFLOAT16, INT32, INT64 = 1, 2, 5, 6
ELEMENT = {FLOAT32: 4, BFLOAT16: 2}
INTEGER = {INT32: np.int32, INT64: np.int64}
Event = list[Any]

CSRC = native.ROOT / "csrc"
STAND_INS = native.ROOT / "tests" / "slices"
LARGEST = 2**31 - 32  # tokens of a call


@dataclass(frozen=True)
class Shape:
    """The fused kernel's shape in csrc/launch_shapes.h, as the list of who does what in a CTA."""

    warps: int
    solvers: int
    groups: int
    stages: int = 14
    cluster: int = 2

    @property
    def fetch_warp(self) -> int:
        return self.warps + self.solvers

    @property
    def first_rows_warp(self) -> int:
        return self.fetch_warp + 1

    @property
    def all_warps(self) -> int:
        return self.first_rows_warp + 4 * self.groups


@dataclass(frozen=True)
class WalkShape:
    """A shape of the kernels that walk through records: ``parts`` CTAs of 64 rows each a job."""

    parts: int
    stages: int
    helpers: int  # the first of them copies records
    warps: int = 4

    @property
    def all_warps(self) -> int:
        return self.warps + self.helpers


FUSED = Shape(4, 3, 2)
ROW_TURNS, GROWING_IMAGES = 4, 4
# The raw rows of k, q and g in a record of one chunk: two tiles of 64 channels each.
TILE_BYTES, HALF_BYTES, TILE_PLACES = 2048, 6144, {"k": 0, "g": 4096, "q": 2048}
PREFETCHED = 3  # chunks of a piece, whose V is brought near
WALKS = {"affine": WalkShape(4, 3, 4), "walk": WalkShape(2, 6, 1)}
SCHEDULE_THREADS, COMBINE_THREADS, COMBINE_ROWS = 1024, 512, 16
PAIRS_OF_CTA = 2


@dataclass(frozen=True)
class Pool:
    """A tensor of states: where it is, and its strides in elements."""

    base: int
    slots: int
    dtype: int = FLOAT32
    slot_stride: int = DIM * DIM * 8
    head_stride: int = DIM * DIM

    def state(self, slot: int, head: int, row: int) -> Event | None:
        """Address, dtype and whether fours are aligned; None: nowhere."""
        if not 0 <= slot < self.slots:
            return None
        element = ELEMENT[self.dtype]
        offset = slot * self.slot_stride + head * self.head_stride + row * DIM
        return [self.base + element * offset, self.dtype, int(self.aligned(4 * element))]

    def aligned(self, size: int) -> bool:
        element = ELEMENT[self.dtype]
        places = (self.base, self.slot_stride * element, self.head_stride * element)
        return all(x % size == 0 for x in places)


@dataclass(frozen=True)
class Integers:
    """A tensor of integers. What lies between its elements would be an offset, too."""

    values: list[int]
    dtype: int = INT64
    stride: int = 1

    def memory(self) -> bytes:
        if not self.values:
            return b""
        memory = np.full((len(self.values) - 1) * self.stride + 1, CHUNK, INTEGER[self.dtype])
        memory[:: self.stride] = self.values
        return memory.tobytes()


@dataclass(frozen=True)
class Call:
    """Sequences and what is kept of them. ``bounds`` makes a packed batch of one row."""

    heads: int
    batch: int = 1
    tokens: int = 0
    bounds: list[int] | None = None
    initial: Pool | None = None
    final: Pool | None = None
    slots: Integers | None = None
    offsets: Integers | None = None
    checkpoint: Pool | None = None
    order: int = 0  # a seed for that of packed sequences; any is allowed
    v_stride: tuple[int, int, int] = (2**33, 1536, 128)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(row, begin, length) of each sequence."""
        if self.bounds is None:
            return [(row, 0, self.tokens) for row in range(self.batch)]
        return [(0, begin, end - begin) for begin, end in pairwise(self.bounds)]

    @property
    def ranks(self) -> list[int]:
        """The sequences in the order in which they are worked on."""
        found = list(range(len(self.spans)))
        if self.bounds is not None:
            random.Random(self.order).shuffle(found)
        return found

    @property
    def chains(self) -> list[tuple[int, int]]:
        """(sequence, head) in the order in which clusters share them."""
        return [(n, head) for head in range(self.heads) for n in range(len(self.spans))]


V, OUT = 2**44, 2**45
ROWS = {"q": 2**46, "k": 2**47, "g": 2**48}


def records_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


def record_room(call: Call, size: int) -> int:
    """Records of a head that a plan has room for, wherever the sequences are cut."""
    total, count = call.batch * call.tokens, len(call.spans)
    return min(total, (total + (size - 1) * count) // size)


def share_bytes(clusters: int) -> int:
    """Of shares, flags and the next turn."""
    return -(-((SHARE_BYTES + 4 * STATE_WARPS) * clusters + 4) // 256) * 256


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CSRC.is_dir():
        pytest.skip("needs the sources of the kernels")
    host = [CSRC / "host" / f"{name}.cpp" for name in ("launch", "plan", "error", "tensor_map")]
    return native.link(
        [STAND_INS / "program.cpp", *host],
        tmp_path_factory.mktemp("slices") / "slices",
        f"-I{STAND_INS}",  # before what it replaces
        f"-I{CSRC}",
        "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift",
        "-fsanitize-undefined-trap-on-error",
    )


def execute(
    program: Path, mode: int, numbers: tuple[int, int, int], args: bytes, *arrays: bytes
) -> bytes:
    parts = [struct.pack("<4i", mode, *numbers), args]
    parts += [struct.pack("<q", len(array)) + array for array in arrays]
    done = subprocess.run(
        [str(program)], input=b"".join(parts), capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr.decode()}"
    return done.stdout


def run(
    program: Path,
    call: Call,
    path: str = "segments",
    sms: int = 132,
    segments: int = 0,
    mode: int = LIST_ALL,
    carried: bytes = b"",
) -> bytes:
    """As planned for a GPU of ``sms``, or in so many ``segments``."""
    spans = call.spans
    slots, offsets = call.slots or Integers([]), call.offsets or Integers([])
    bounds = Integers(call.bounds or [])
    order = np.array(call.ranks if call.bounds else [], np.int32)
    initial, final, checkpoint = (
        x or Pool(0, len(spans), 0) for x in (call.initial, call.final, call.checkpoint)
    )
    kept = (initial, final, checkpoint)
    no_stride = (0, 0, 0)
    args = abi.ARGS.pack(
        *(
            ROWS["q"],
            ROWS["k"],
            V,
            ROWS["g"],
            1,
            OUT,
            1,
            1,
            initial.base,
            final.base,
            0,
            0,
            0,
            checkpoint.base,
        ),
        *(0, 0),  # workspace, stream
        *(0, call.batch, call.tokens, call.heads, len(spans), initial.slots, final.slots),
        len(offsets.values),
        *(*no_stride, *no_stride, *call.v_stride, *no_stride, *call.v_stride, *no_stride),
        *(x for pool in kept for x in (pool.slot_stride, pool.head_stride)),
        *(1, slots.stride, offsets.stride, 1.0, -1.0),
        *(BFLOAT16, FLOAT32, FLOAT32, initial.dtype, final.dtype, INT64),
        *(slots.dtype, offsets.dtype, checkpoint.dtype, 1, 0, 0),
    )
    arrays = (slots.memory(), offsets.memory(), bounds.memory(), order.tobytes(), carried)
    return execute(program, mode, (PATHS[path], sms, segments), args, *arrays)


@dataclass
class Job:
    """What one warp of a chain does for one segment, or piece of a sequence, and head."""

    sequence: int
    head: int
    segment: int
    tokens: tuple[int, int, int]
    has_values: int
    v: int
    out: int
    events: list[Event] = field(default_factory=list)
    turn: int = 0  # of the cluster
    first: int = 0  # of its stages among all that the cluster goes through

    @property
    def name(self) -> tuple[int, int, int]:
        return self.sequence, self.head, self.segment


def jobs_of(events: list[Event], turn: int = 0) -> list[Job]:
    jobs: list[Job] = []
    for kind, *rest in events:
        if kind in ("wait", "raise"):
            continue
        if kind == "job":
            sequence, head, segment, row, begin, length, has_values, v, out = rest
            tokens = (row, begin, length)
            jobs.append(Job(sequence, head, segment, tokens, has_values, v, out, turn=turn))
        else:
            # An absent state has no address.
            absent = kind in ("load", "store") and rest[1] == 0
            jobs[-1].events.append([kind, None] if absent else [kind, *rest])
    return jobs


class Expected:
    """What a call asks for, of a result's segments and workspace."""

    def __init__(
        self, call: Call, result: dict[str, Any], path: str, segments: int, clusters: int
    ) -> None:
        self.call, self.segments = call, segments
        self.record_tokens = RECORD_TOKENS[path]
        self.spans = call.spans
        self.fused, self.clusters = path == "fused", min(clusters, len(call.chains))
        # Where there are more chains than clusters these share them.
        self.shared = self.fused and len(call.chains) > clusters
        # The workspace: schedule, and of `segments` records, middles and what segments carry; or
        # of `fused` shares, flags, the next turn, and what clusters carry.
        room = call.heads * record_room(call, PAIR) if path == "segments" else 0
        self.records_base = result["workspace"] + result["schedule_bytes"]
        self.middles_base = self.records_base + room * RECORD_BYTES
        self.carried_base = self.middles_base + room * MIDDLE_BYTES
        self.shares_base = self.flags_base = self.turn_base = 0
        if self.shared:
            self.shares_base = self.carried_base
            self.flags_base = self.shares_base + SHARE_BYTES * clusters
            self.turn_base = self.flags_base + 4 * STATE_WARPS * clusters
            self.carried_base += share_bytes(clusters)
            assert self.turn_base + 4 <= self.carried_base
        elif self.fused and call.bounds is None:  # needs no workspace, and so is given none
            self.records_base = self.middles_base = self.carried_base = 0
        # Where the initial state comes by way of the ring: by copies of whole rows.
        self.staged = self.fused and call.initial is not None and call.initial.aligned(16)
        self.end = result["workspace"] + result["workspace_bytes"]
        # Records of each segment of each sequence: even parts, the later ones of short sequences
        # empty. And the number of each sequence's first record among all.
        self.parts: list[list[range]] = []
        self.first: list[int] = [0]
        for *_, length in self.spans:
            records = range(records_of(length, self.record_tokens))
            step = -(-len(records) // segments)
            parts = [records[n * step : (n + 1) * step] for n in range(segments)]
            assert sum(map(len, parts)) == len(records)
            self.parts.append(parts)
            self.first.append(self.first[-1] + len(records))

    def part(self, job: Job) -> range:
        """The records of a segment, or of a piece that a sequence is cut into between clusters."""
        records = self.parts[job.sequence][job.segment]
        if not self.shared:
            return records
        first, rest = divmod(job.tokens[1] - self.spans[job.sequence][1], CHUNK)
        assert rest == 0 and first >= 0
        return records[first : first + records_of(job.tokens[2], CHUNK)]

    def tokens(self, sequence: int, records: range) -> tuple[int, int, int]:
        row, begin, length = self.spans[sequence]
        if not records:
            return row, begin + length, 0
        size = self.record_tokens
        first, end = size * records.start, min(size * records.stop, length)
        return row, begin + first, end - first

    def place(self, job: Job, step: int) -> int:
        """Of a segment's record among those of all heads."""
        record = self.first[job.sequence] + self.part(job)[step]
        return record * self.call.heads + job.head

    def copies(self, job: Job) -> list[int]:
        """Addresses of the records of a segment, one after the other."""
        places = [self.place(job, n) for n in range(len(self.part(job)))]
        found = [self.records_base + RECORD_BYTES * place for place in places]
        assert all(x + RECORD_BYTES <= self.middles_base for x in found)
        return found

    def carried(self, sequence: int, head: int, segment: int, which: str, row: int) -> Event:
        """[N][H][segments - 1][state, map][V][K] after the records."""
        assert 0 <= segment < self.segments - 1
        chain = sequence * self.call.heads + head
        index = 2 * (chain * (self.segments - 1) + segment) + STATE_MAP.index(which)
        address = self.carried_base + index * STATE_BYTES
        assert address + STATE_BYTES <= self.end
        return [address + 4 * DIM * row, FLOAT32, 1]

    def state(self, pool: Pool | None, sequence: int, head: int, row: int) -> Event:
        if pool is None:
            return [None]
        slots = self.call.slots
        slot = sequence if slots is None else slots.values[sequence]
        return pool.state(slot, head, row) or [None]

    def handed_on(self, turn: int, row: int) -> Event:
        """[clusters][V][K] after the shares: where the cluster of that turn leaves a state."""
        assert 0 <= turn < self.clusters - 1  # nobody comes after the last one
        address = self.carried_base + STATE_BYTES * turn
        assert address + STATE_BYTES <= self.end
        return [address + 4 * DIM * row, FLOAT32, 1]

    def flag(self, turn: int, row: int) -> int:
        """[clusters][state warps]: the one of a warp's rows."""
        return self.flags_base + 4 * (STATE_WARPS * turn + row // 16)

    def checkpoints(self, job: Job) -> list[tuple[int, int]]:
        """(row, tokens of the segment or piece before it); offsets ascend."""
        if self.call.checkpoint is None or self.call.offsets is None:
            return []
        row, begin, length = self.spans[job.sequence]
        _, first, own = self.tokens(job.sequence, self.part(job))
        found = []
        for index, offset in enumerate(self.call.offsets.values):
            tokens = offset - row * self.call.tokens - begin
            if 0 < tokens <= length and (tokens % CHUNK == 0 or tokens == length):
                inside = tokens - (first - begin)
                if 0 < inside <= own:  # it has the last token before it
                    found.append((index, inside))
        return found

    def kept(self, job: Job, row: int, index: int, tokens: int) -> list[Event]:
        """How a chain leaves a checkpoint: at the end of a record or between two chunks."""
        assert self.call.checkpoint is not None
        state = self.call.checkpoint.state(index, job.head, row)
        assert state is not None
        if tokens % self.record_tokens == 0 or tokens == job.tokens[2]:
            return [["run", records_of(tokens, self.record_tokens)], ["store", *state]]
        assert tokens % PAIR == CHUNK
        step = tokens // PAIR
        middle = self.middles_base + MIDDLE_BYTES * self.place(job, step)
        assert middle + MIDDLE_BYTES <= self.carried_base
        return [["run", step], ["between", middle, *state]]

    def affine(self, job: Job, which: str, row: int) -> list[Event]:
        events: list[Event]
        carried = self.carried(*job.name, which, row)
        if job.segment == 0:
            events = [["load", *self.state(self.call.initial, job.sequence, job.head, row)]]
        else:
            events = [["identity", row] if which == "map" else ["load", None]]
        events.append(["run", len(self.part(job))])
        return [*events, ["store", *carried]]

    def states(self, job: Job, row: int) -> tuple[Event, Event]:
        """Where a chain's state comes from and where it is left."""
        sequence, head, segment = job.name
        initial = self.state(self.call.initial, sequence, head, row)
        final = self.state(self.call.final, sequence, head, row)
        if self.fused:
            part, (records,) = self.part(job), self.parts[sequence]
            return (
                self.handed_on(job.turn - 1, row) if part.start > 0 else initial,
                self.handed_on(job.turn, row) if part.stop < records.stop else final,
            )
        if self.segments > 1 and (segment == 0 or self.spans[sequence][2] == 0):
            initial = self.carried(sequence, head, 0, "map", row)
        elif segment > 0:
            initial = self.carried(sequence, head, segment - 1, "state", row)
        return initial, final if segment == self.segments - 1 else [None]

    def state_stages(self, job: Job) -> int:
        """Those in which the state before a chain comes, if nobody hands it on."""
        return STATE_STAGES if self.staged and self.part(job).start == 0 else 0

    def chain(self, job: Job, row: int, kept: bool = True) -> list[Event]:
        """With the checkpoints or without."""
        initial, final = self.states(job, row)
        events: list[Event] = [["load", *initial]]
        if self.state_stages(job):
            assert self.call.initial is not None
            place, dtype = job.first % FUSED.stages, self.call.initial.dtype
            events = [["read", place, dtype, row % 64, int(initial != [None])]]
        for index, tokens in self.checkpoints(job) if kept else []:
            events += self.kept(job, row, index, tokens)
        return [*events, ["run", len(self.part(job))], ["finish"], ["store", *final]]


def check(
    call: Call,
    result: dict[str, Any],
    path: str,
    segments: int = 1,
    exact: bool = True,
    clusters: int = 0,
) -> None:
    """All launches; without ``exact`` offsets do not ascend, and only some are kept.

    ``clusters``: of the GPU, for path ``fused``.
    """
    expected = Expected(call, result, path, segments, clusters)
    names = ["schedule"] * (call.bounds is not None or expected.shared)
    if path == "fused":
        names.append("fused")
    else:
        names += ["prepare_pairs"] * (record_room(call, PAIR) > 0)
        names += ["affine"] * (segments > 1) + ["combine"] * (segments > 2) + ["walk"]
    launches = result["launches"]
    assert [launch["kernel"] for launch in launches] == names
    chains = call.heads * len(call.spans)
    for launch in launches:
        kernel, grid = launch["kernel"], (launch["ctas"], launch["threads"])
        assert launch["records"] == expected.records_base
        assert launch["middles"] == expected.middles_base
        assert launch["carried"] == expected.carried_base
        assert launch["shares"] == expected.shares_base
        assert launch["handed_on"] == expected.flags_base
        assert launch["next_turn"] == expected.turn_base
        if kernel == "schedule":
            assert grid == (1, SCHEDULE_THREADS)
            assert not expected.shared or launch["clusters"] == clusters
            check_schedule(expected, launch)
        elif kernel == "combine":
            assert grid == (chains * (DIM // COMBINE_ROWS), COMBINE_THREADS)
        elif kernel == "prepare_pairs":
            pairs = call.heads * record_room(call, PAIR)
            assert grid == (records_of(pairs, PAIRS_OF_CTA), 64 * PAIRS_OF_CTA)
            if launch["warps"]:
                check_prepared(expected, launch)
        else:
            assert launch["segments"] == segments
            assert launch["job_segments"] == segments - (kernel == "affine")
            assert launch["jobs"] == chains * launch["job_segments"]
            if kernel == "fused":
                assert grid == (FUSED.cluster * expected.clusters, 32 * FUSED.all_warps)
                check_fused(expected, launch, exact)
            else:
                shape = WALKS[kernel]
                assert grid == (launch["jobs"] * shape.parts, 32 * shape.all_warps)
                check_walk(expected, launch, shape, exact)
    if result["records"]:  # of all, and of three past the last one
        assert result["records"] == [*whole_records(expected), *[[0, 0, 0]] * 3]


def whole_records(expected: Expected) -> list[list[int]]:
    """The tokens of all records in order."""
    size = expected.record_tokens
    return [
        [row, begin + size * n, min(size, length - size * n)]
        for row, begin, length in expected.spans
        for n in range(records_of(length, size))
    ]


def check_schedule(expected: Expected, launch: dict[str, Any]) -> None:
    call = expected.call
    if call.bounds is None:
        assert "starts" not in launch
        return
    assert launch["starts"] == call.bounds
    assert launch["begins"] == expected.first
    if launch["shares"]:
        assert launch["order"] == []  # for others
        return
    # The longest first, but for less than a quarter.
    assert sorted(launch["order"]) == list(range(len(expected.spans)))
    chunks = [records_of(expected.spans[n][2], CHUNK) for n in launch["order"]]
    assert all(4 * later <= 5 * sooner for sooner, later in pairwise(chunks))


def check_prepared(expected: Expected, launch: dict[str, Any]) -> None:
    """Two warps make each pair's record, and leave it where the walk will look for it."""
    call = expected.call
    pair_base, pair_stride = launch["smem"]
    records = whole_records(expected)
    every = [(head, *record) for record in records for head in range(call.heads)]
    events = {(x["cta"], x["warp"]): x["events"] for x in launch["warps"]}
    assert len(events) == 2 * PAIRS_OF_CTA * launch["ctas"]
    for (cta, warp), own in events.items():
        index, chunk = divmod(warp, 2)
        place = PAIRS_OF_CTA * cta + index
        if place >= len(every):
            assert own == []
            continue
        head, row, begin, length = every[place]
        pair = pair_base + index * pair_stride
        fetch, *rest = own
        tokens = min(CHUNK, length - CHUNK * chunk)
        # Rows of 64 channels are 128 bytes. The second chunk may have no tokens.
        assert fetch[:-1] == ["fetch", pair + 128 * CHUNK * chunk, head, row, begin + CHUNK * chunk]
        assert fetch[-1] == tokens if tokens > 0 else fetch[-1] <= 0
        to = expected.records_base + RECORD_BYTES * place
        leaves = [["leave", to + stored, pair + at, size] for at, stored, size in WHOLE]
        assert rest == (leaves if chunk == 0 else [])
    # What is kept of the first chunk of each: the rows' mark, everywhere, or nothing.
    kept = call.checkpoint is not None and bool(call.offsets and call.offsets.values)
    marks = [
        1 + (row * call.tokens + begin) * call.heads + head if kept else 0
        for head, row, begin, _ in every
    ]
    assert launch["marks"] == [*marks, *[0] * (len(launch["marks"]) - len(marks))]
    assert len(launch["marks"]) == call.heads * record_room(call, PAIR)


def check_job(expected: Expected, job: Job, row: int, has_values: bool) -> None:
    tokens = expected.tokens(job.sequence, expected.part(job))
    assert job.tokens == tokens
    assert job.has_values == has_values
    places = (tokens[0], tokens[1], job.head)
    strides = expected.call.v_stride
    offset = 2 * (row + sum(x * y for x, y in zip(places, strides, strict=True)))
    assert (job.v, job.out) == (V + offset, OUT + offset)


def check_walk(expected: Expected, launch: dict[str, Any], shape: WalkShape, exact: bool) -> None:
    """Each CTA has one job and 64 rows of it: in affine of B, then of M, both in two parts."""
    affine = launch["kernel"] == "affine"
    jobs = [
        (sequence, head, segment)
        for sequence in expected.call.ranks
        for segment in range(launch["job_segments"])
        for head in range(expected.call.heads)
    ]
    warps = {(x["cta"], x["warp"]): x["events"] for x in launch["warps"]}
    assert len(warps) in (shape.warps * launch["ctas"], shape.all_warps * launch["ctas"])
    for cta in range(launch["ctas"]):
        name, part = jobs[cta // shape.parts], cta % shape.parts
        which = STATE_MAP[part // 2] if affine else "state"
        # Of the first segment only a copy of the initial state is left, and no chain begins.
        copies = affine and which == "map" and name[2] == 0
        job = None
        for warp in range(shape.warps):
            row, events = 64 * (part % 2) + 16 * warp, warps[cta, warp]
            if copies:
                check_copy(expected, events, name, row)
                continue
            (job,) = jobs_of(events)
            assert job.name == name
            check_job(expected, job, row, which == "state")
            if affine:
                assert job.events == expected.affine(job, which, row)
            elif exact:
                assert job.events == expected.chain(job, row)
            else:
                check_unordered(expected, job, row)
        if (cta, shape.warps) in warps:
            records = expected.copies(job) if job is not None else []
            pieces = WITHOUT_QUERIES if affine else WHOLE
            assert warps[cta, shape.warps] == ring_events(launch, shape, records, pieces)


def check_copy(
    expected: Expected, events: list[Event], name: tuple[int, int, int], row: int
) -> None:
    sequence, head, segment = name
    initial = expected.state(expected.call.initial, sequence, head, row)
    load, store = events
    assert load == ["load", *initial] or (initial == [None] and load[0] == "load" and not load[2])
    assert store == ["store", *expected.carried(sequence, head, segment, "map", row)]


def ring_events(
    launch: dict[str, Any],
    shape: WalkShape,
    records: list[int],
    pieces: tuple[tuple[int, int, int], ...],
) -> list[Event]:
    """What fills a ring: a stage is filled again once its record before has been read."""
    stages, stage_bytes, full, empty, barrier_bytes = launch["smem"]
    events: list[Event] = []
    for n, record in enumerate(records):
        turn, stage = divmod(n, shape.stages)
        if turn > 0:
            events.append(["await", empty + barrier_bytes * stage, (turn - 1) % 2])
        to, barrier = stages + stage_bytes * stage, full + barrier_bytes * stage
        events += [["copy", to + at, record + stored, size, barrier] for at, stored, size in pieces]
    return events


@dataclass(frozen=True)
class FusedSmem:
    """Where things lie in the shared memory of a CTA."""

    stages: int
    stage_bytes: int
    full: int
    empty: int
    rows: int
    barrier_bytes: int
    growing: int
    growing_bytes: int
    solved: int

    def stage(self, number: int) -> int:
        return self.stages + self.stage_bytes * number

    def barrier(self, first: int, number: int) -> int:
        return first + self.barrier_bytes * number

    def rows_of(self, index: int) -> tuple[int, int]:
        """Where those of a chunk are waited for, and the phase."""
        turn, group = divmod(index // FUSED.cluster, FUSED.groups)
        phase, place = divmod(turn, ROW_TURNS)
        return self.barrier(self.rows, ROW_TURNS * group + place), phase


def check_fused(expected: Expected, launch: dict[str, Any], exact: bool) -> None:
    shape = FUSED
    # Clusters in the order in which they began: that of their turns, if they take any.
    clusters: dict[int, dict[tuple[int, int], list[Event]]] = {}
    copies: dict[int, list[Event]] = {}
    for x in launch["warps"]:
        cluster, cta = divmod(x["cta"], shape.cluster)
        clusters.setdefault(cluster, {})[cta, x["warp"]] = x["events"]
        copies.setdefault(cluster, []).extend(x["sent"])
        kinds = {kind for kind, *_ in x["sent"]}
        assert kinds <= {"prefetch" if x["warp"] == shape.fetch_warp else "send"}
    sent = list(copies.values())
    assert sorted(clusters) == list(range(expected.clusters))
    assert launch["turns"] == [expected.clusters] * expected.shared
    turns: list[list[Job]] = []
    for turn, mine in enumerate(clusters.values()):
        jobs = jobs_of(mine[0, 0], turn)
        number_stages(expected, jobs)
        turns.append(jobs)
        for (cta, warp), events in mine.items():
            if warp >= shape.warps:
                continue
            # Every warp of the chain has all jobs, in the same order, and rows of its own.
            row = 64 * cta + 16 * warp
            own = jobs_of(events, turn)
            number_stages(expected, own)
            assert [job.name for job in own] == [job.name for job in jobs]
            assert [job.tokens for job in own] == [job.tokens for job in jobs]
            for job in own:
                check_job(expected, job, row, has_values=True)
                if exact:
                    assert job.events == expected.chain(job, row)
                else:
                    check_unordered(expected, job, row)
        if len(mine) == shape.cluster * shape.all_warps:
            check_walks(expected, launch, jobs, mine)
            check_sent(expected, launch, jobs, [x for x in sent[turn] if x[0] == "send"])
            check_prefetched(expected, jobs, [x for x in sent[turn] if x[0] == "prefetch"])
        else:
            assert len(mine) == shape.cluster * shape.warps
    if expected.shared:
        check_shares(expected, turns)
        for cta in range(shape.cluster):
            for warp in range(shape.warps):
                events_of_turns = [mine[cta, warp] for mine in clusters.values()]
                check_flags(expected, turns, 64 * cta + 16 * warp, events_of_turns)
    else:
        assert [[job.name for job in jobs] for jobs in turns] == [
            [(sequence, head, 0)] for sequence, head in expected.call.chains
        ]


def number_stages(expected: Expected, jobs: list[Job]) -> None:
    stages = 0
    for job in jobs:
        job.first = stages
        stages += expected.state_stages(job) + len(expected.part(job))


def check_sent(
    expected: Expected, launch: dict[str, Any], jobs: list[Job], sent: list[Event]
) -> None:
    """Every row of every initial state that comes through the ring is copied once, to its CTA."""
    smem = FusedSmem(*launch["smem"])
    copies = []
    for job in jobs:
        for row in range(DIM if expected.state_stages(job) else 0):
            state = expected.state(expected.call.initial, job.sequence, job.head, row)
            if state == [None]:
                continue
            cta, own = divmod(row, DIM // FUSED.cluster)
            part, place = divmod(own, STATE_ROWS)
            stage = (job.first + part) % FUSED.stages
            to = smem.stage(stage) + ELEMENT[state[1]] * STATE_ROW * place
            size = ELEMENT[state[1]] * DIM
            copies.append(["send", cta, to, state[0], size, smem.barrier(smem.full, stage)])
    assert sorted(sent) == sorted(copies)


def check_prefetched(expected: Expected, jobs: list[Job], sent: list[Event]) -> None:
    """V of the first chunks of each piece, every line of 128 bytes once."""
    batch, token, head = expected.call.v_stride
    lines = [
        ["prefetch", V + 2 * (job.tokens[0] * batch + n * token + job.head * head) + 128 * line]
        for job in jobs
        for n in range(job.tokens[1], job.tokens[1] + min(job.tokens[2], PREFETCHED * CHUNK))
        for line in range(2)
    ]
    assert sorted(sent) == sorted(lines)


def check_shares(expected: Expected, turns: list[list[Job]]) -> None:
    """All chunks of all chains stand in a row that is cut into even shares."""
    row = [job for jobs in turns for job in reversed(jobs)]
    chains = [(name, list(jobs)) for name, jobs in groupby(row, key=lambda job: job.name)]
    assert [name for name, _ in chains] == [(*chain, 0) for chain in expected.call.chains]
    for (sequence, _, _), pieces in chains:
        (records,), parts = expected.parts[sequence], [expected.part(job) for job in pieces]
        assert [n for part in parts for n in (part.start, part.stop)] in (
            [0, len(records)],
            [0, parts[0].stop, parts[0].stop, len(records)],
        )
        if len(pieces) == 2:
            assert all(parts)
            # The first piece of a cluster and the last of the next one's.
            first, second = pieces
            assert second.turn == first.turn + 1
            assert turns[first.turn][0] is first and turns[second.turn][-1] is second
    # A part of all, or the longest chain. A cluster may have to take up a chain or begin one whose
    # cost beside its chunks is the cluster's before.
    costs = [CHAIN_COST + len(parts[0]) for parts in expected.parts]
    part = -(-expected.call.heads * sum(costs) // expected.clusters)
    for jobs in turns:
        cost = sum(CHAIN_COST + len(expected.part(job)) for job in jobs)
        assert cost <= max(part, *costs) + CHAIN_COST


def check_flags(
    expected: Expected, turns: list[list[Job]], row: int, events_of_turns: list[list[Event]]
) -> None:
    """Of the warps with the same rows: before a piece that is taken each waits for the flag that
    the one of the turn before raises after its first piece, and before it waits itself."""
    before_flag: list[list[str]] = []  # what the warp of each turn does
    for turn, events in enumerate(events_of_turns):
        outline = outline_of(events)
        kinds = [kind for kind, _ in outline]
        assert all(rest == [expected.flag(turn, row)] for kind, rest in outline if kind == "raise")
        for n, (kind, rest) in enumerate(outline):
            if kind == "wait":
                assert rest == [expected.flag(turn - 1, row)]
                assert before_flag[turn - 1] == ["job"]
                assert kinds[n + 1 :].count("job") == 1
        assert kinds.count("wait") == sum(expected.part(job).start > 0 for job in turns[turn])
        before_flag.append(kinds[: kinds.index("raise")] if "raise" in kinds else [])


def outline_of(events: list[Event]) -> list[tuple[str, list[int]]]:
    """Pieces and flags, which no warp waits for or raises within a piece."""
    outline: list[tuple[str, list[int]]] = []
    for kind, *rest in events:
        if kind in ("job", "wait", "raise"):
            outline.append((kind, [] if kind == "job" else rest))
        else:
            assert outline[-1][0] == "job"
    return outline


def check_unordered(expected: Expected, job: Job, row: int) -> None:
    """Whatever is kept is a state that its offset names, once at most."""
    whole = expected.chain(job, row, kept=False)
    kept = job.events[len(whole) - 3 : -3]
    assert [*job.events[: len(whole) - 3], *job.events[-3:]] == whole
    allowed = expected.checkpoints(job)
    done = 0
    for found in zip(kept[::2], kept[1::2], strict=True):
        index = [x for x in allowed if expected.kept(job, row, *x) == list(found)]
        assert len(index) == 1
        assert index[0][1] >= done
        done = index[0][1]
        allowed.remove(index[0])


def check_walks(
    expected: Expected,
    launch: dict[str, Any],
    jobs: list[Job],
    mine: dict[tuple[int, int], list[Event]],
) -> None:
    """Fetches, rows and solvers: every part of a state that comes by way of the ring and every
    chunk of the cluster's jobs once, by the CTA that owns its stage."""
    shape, smem = FUSED, FusedSmem(*launch["smem"])
    every: list[Event] = []
    for job in jobs:
        assert len(every) == job.first
        every += [["part", job.head, job.sequence, n] for n in range(expected.state_stages(job))]
        row, begin, length = job.tokens
        every += [
            ["chunk", job.head, row, begin + CHUNK * n, min(CHUNK, length - CHUNK * n)]
            for n in range(records_of(length, CHUNK))
        ]
    makers = [
        [(cta, [shape.warps + solver]) for solver in range(shape.solvers) for cta in (0, 1)],
        [
            (cta, [shape.first_rows_warp + 4 * group + warp for warp in range(4)])
            for group in range(shape.groups)
            for cta in (0, 1)
        ],
    ]
    for kind in makers:
        seen: list[int] = []
        for cta, warps in kind:
            walks = [mine[cta, warp] for warp in warps]
            assert all(walk == walks[0] for walk in walks)
            walk = [event for event in walks[0] if event[0] in ("chunk", "part")]
            indices = [event[1] for event in walk]
            assert indices == sorted(indices)
            seen += indices
            before = [event for event in walks[0] if event[0] not in ("chunk", "part")]
            waits = warps[0] >= shape.first_rows_warp
            assert before == [x for n in indices for x in growing_events(smem, n, waits)]
            for name, index, stage, turn, *what in walk:
                assert [name, *what] == every[index]
                assert (turn, stage) == divmod(index, shape.stages)
                assert index % shape.cluster == cta
        assert sorted(seen) == list(range(len(every)))
    for cta in range(shape.cluster):
        fetches = [
            event
            for index in range(cta, len(every), shape.cluster)
            for event in fetch_events(smem, index, every[index])
        ]
        assert mine[cta, shape.fetch_warp] == fetches


def growing_events(smem: FusedSmem, index: int, waits: bool) -> list[Event]:
    """Where K^ of a chunk stands; before it, what a group of warps that makes it waits for."""
    turn, place = divmod(index // FUSED.cluster, GROWING_IMAGES)
    events: list[Event] = [["growing", smem.growing + smem.growing_bytes * place]]
    if waits and turn > 0:
        events.insert(0, ["await", smem.barrier(smem.solved, place), (turn - 1) % 2])
    if waits:
        barrier, phase = smem.rows_of(index)
        events.insert(0, ["await", barrier, phase % 2])
    return events


def fetch_events(smem: FusedSmem, index: int, what: Event) -> list[Event]:
    """Of a chunk's rows, as tiles, or of a part of a state, of which the group is only told. The
    stage's chunk before has been read. Addresses in shared memory have 32 bits."""
    events: list[Event] = []
    turn, stage = divmod(index, FUSED.stages)
    if turn > 0:
        events.append(["await", smem.barrier(smem.empty, stage), (turn - 1) % 2])
    barrier = smem.rows_of(index)[0] % 2**32
    if what[0] == "part":
        return [*events, ["expect", barrier, 0]]
    _, head, row, begin, _ = what
    events.append(["expect", barrier, 2 * len(TILE_PLACES) * TILE_BYTES])
    for name, place in TILE_PLACES.items():
        for half in range(2):
            to = (smem.stage(stage) + place + half * HALF_BYTES) % 2**32
            events.append(["tile", to, ROWS[name], 64 * half, head, begin, row, barrier])
    return events


def forced(program: Path, call: Call, segments: int, exact: bool = True) -> None:
    result = json.loads(run(program, call, segments=segments))
    check(call, result, "segments", segments, exact)


def fused(program: Path, call: Call, clusters: int, exact: bool = True) -> None:
    result = json.loads(run(program, call, "fused", sms=2 * clusters))
    check(call, result, "fused", exact=exact, clusters=clusters)


lengths = st.sampled_from((0, 0, 1, 15, 16, 17, 32, 48)) | st.integers(0, 400)


@st.composite
def calls(draw: st.DrawFn, ascending: bool = True) -> Call:
    heads = draw(st.integers(1, 3))
    if draw(st.booleans()):
        parts = draw(st.lists(lengths, min_size=1, max_size=6))
        bounds = [draw(st.sampled_from((0, 3, 16)))]
        for length in parts:
            bounds.append(bounds[-1] + length)
        batch, tokens = 1, bounds[-1] + draw(st.sampled_from((0, 5)))
        call = Call(heads, batch, tokens, bounds, order=draw(st.integers(0, 99)))
    else:
        call = Call(heads, draw(st.integers(1, 3)), draw(lengths))
    count = len(call.spans)
    slots = None
    if draw(st.booleans()):
        values = st.integers(-1, count + 3) | st.sampled_from((-(2**31), 2**31 - 1))
        chosen = draw(st.lists(values, min_size=count, max_size=count))
        slots = Integers(chosen, *draw(strides))
    initial, final = (
        draw(st.none() | pools(base, count, slots is not None)) for base in (2**41, 2**42)
    )
    offsets = draw(places(call))
    if ascending:
        offsets.sort()
    return replace(
        call,
        initial=initial,
        final=final,
        slots=slots,
        offsets=Integers(offsets, *draw(strides)),
        checkpoint=draw(pools(2**43, len(offsets), False)) if offsets else None,
        v_stride=draw(st.sampled_from(((2**33, 1536, 128), (640, 2**34, 2**32), (0, 128, 8)))),
    )


strides = st.tuples(st.sampled_from((INT32, INT64)), st.sampled_from((1, 2, 5)))


@st.composite
def pools(draw: st.DrawFn, base: int, count: int, free: bool) -> Pool:
    slots = draw(st.integers(1, count + 3)) if free else count
    dtype = draw(st.sampled_from((FLOAT32, BFLOAT16)))
    head = draw(st.sampled_from((DIM * DIM, DIM * DIM + 1, 2**35)))
    slot = draw(st.sampled_from((DIM * DIM * 8, 2**36 + 1)))
    return Pool(base + draw(st.sampled_from((0, 4))) * (dtype == FLOAT32), slots, dtype, slot, head)


@st.composite
def places(draw: st.DrawFn, call: Call) -> list[int]:
    """Offsets at ends of chunks and of sequences, beside them, outside, some of them twice."""
    found = draw(st.lists(st.integers(-40, call.batch * call.tokens + 40), max_size=10))
    for row, begin, length in call.spans:
        first = row * call.tokens + begin
        every = [first + n for n in (0, *range(CHUNK, length + 1, CHUNK), length)]
        kept = draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
        chosen = draw(st.randoms(use_true_random=False))
        found += [x for x in every if chosen.random() < kept]
    found += draw(st.lists(st.sampled_from(found), max_size=4)) if found else []
    return draw(st.permutations(found)) if found else []


segments_counts = st.integers(1, 12)
cluster_counts = st.sampled_from((1, 2, 3, 5, 8))


@settings(max_examples=150, deadline=None)
@given(call=calls(), segments=segments_counts)
def test_any_cuts(program: Path, call: Call, segments: int) -> None:
    forced(program, call, segments)


@settings(max_examples=100, deadline=None)
@given(call=calls(), clusters=cluster_counts)
def test_any_clusters(program: Path, call: Call, clusters: int) -> None:
    fused(program, call, clusters)


@st.composite
def shared_calls(draw: st.DrawFn) -> Call:
    """Many chains, most of them of the same length or hardly any."""
    heads = draw(st.integers(1, 12))
    if draw(st.booleans()):
        tokens = draw(st.sampled_from((0, 1, 16, 17, 100, 700)) | st.integers(0, 300))
        return Call(heads, draw(st.integers(1, 120 // heads)), tokens)
    usual = st.just(draw(st.sampled_from((0, 1, 16, 40, 200))))
    several = st.sampled_from((usual, usual | st.just(0), usual | st.integers(0, 3000)))
    parts = draw(st.lists(draw(several), min_size=1, max_size=120 // heads))
    bounds = np.cumsum([draw(st.sampled_from((0, 7))), *parts]).tolist()
    return Call(heads, 1, bounds[-1], bounds)


@settings(max_examples=200, deadline=None)
@given(call=shared_calls(), clusters=st.integers(1, 24) | st.integers(1, 80))
def test_any_shares(program: Path, call: Call, clusters: int) -> None:
    ends = {row * call.tokens + begin + length for row, begin, length in call.spans}
    offsets = sorted({*ends, *range(0, call.batch * call.tokens, 6 * CHUNK)})
    call = replace(
        call,
        initial=Pool(2**41, len(call.spans)),
        final=Pool(2**42, len(call.spans), BFLOAT16),
        offsets=Integers(offsets),
        checkpoint=Pool(2**43, len(offsets)),
    )
    result = json.loads(run(program, call, "fused", sms=2 * clusters, mode=LIST_CHAINS))
    check(call, result, "fused", clusters=min(clusters, MOST_CLUSTERS))


@pytest.mark.parametrize("count", [1022, 1023, 1024, 1025, 2047, 2048, 2500])
def test_shares_of_thousands(program: Path, count: int) -> None:
    """As many sequences as the schedule has threads or more, and the longest among the later."""
    generator = random.Random(count)
    lengths = [generator.choice((0, 0, 1, 5, 16, 33, 90)) for _ in range(count)]
    for longest, where in ((0, 700), (900, count - 1), (5000, 1000), (20000, count - 3)):
        lengths[where] = longest
        bounds = np.cumsum([0, *lengths]).tolist()
        call = Call(1, 1, bounds[-1], bounds, Pool(2**41, count), Pool(2**42, count))
        result = json.loads(run(program, call, "fused", sms=132, mode=LIST_CHAINS))
        check(call, result, "fused", clusters=66)


@settings(max_examples=60, deadline=None)
@given(call=calls(ascending=False), segments=segments_counts, clusters=cluster_counts)
def test_offsets_in_any_order(program: Path, call: Call, segments: int, clusters: int) -> None:
    forced(program, call, segments, exact=False)
    fused(program, call, clusters, exact=False)


def many_checkpoints() -> Call:
    """Of each chunk, and more than a warp reads at once; sequences of none, one and many."""
    bounds = [3, 3, 4, 700, 716, 716, 1903]
    spans = list(pairwise(bounds))
    every = [x for a, b in spans for x in (*range(a + CHUNK, b, CHUNK), *[b] * (b > a))]
    return Call(
        2,
        1,
        1950,
        bounds,
        initial=Pool(2**41, 6, BFLOAT16),
        final=Pool(2**41, 6, BFLOAT16),
        offsets=Integers(every, INT32),
        checkpoint=Pool(2**43, len(every)),
    )


def check_all_kept(call: Call, result: dict[str, Any]) -> None:
    """Independently of who keeps them: each row of each head and offset, once."""
    place = {"store": 1, "between": 2}
    stores = [
        event[place[event[0]]]
        for warp in result["launches"][-1]["warps"]
        for event in warp["events"]
        if event[0] in place and event[place[event[0]] + 1]
        if 2**43 <= event[place[event[0]]] < V
    ]
    rows = range(0, DIM, 16)
    pool, offsets = call.checkpoint, call.offsets
    assert pool is not None and offsets is not None
    count = len(offsets.values)
    wanted = [pool.state(c, h, r) for c in range(count) for h in (0, 1) for r in rows]
    assert sorted(stores) == sorted(x[0] for x in wanted if x is not None)


@pytest.mark.parametrize("segments", range(1, 13))
def test_many_checkpoints_of_segments(program: Path, segments: int) -> None:
    call = many_checkpoints()
    result = json.loads(run(program, call, segments=segments))
    check(call, result, "segments", segments)
    check_all_kept(call, result)


@pytest.mark.parametrize("clusters", [1, 2, 7, 66])
def test_many_checkpoints_of_clusters(program: Path, clusters: int) -> None:
    call = many_checkpoints()
    result = json.loads(run(program, call, "fused", sms=2 * clusters))
    check(call, result, "fused", clusters=clusters)
    check_all_kept(call, result)


def test_carried_states_do_not_overlap(program: Path) -> None:
    """What the segments write in the workspace lies after the records and below its end."""
    call = Call(3, 1, 500, [0, 100, 100, 500])
    for segments in (2, 3, 7):
        result = json.loads(run(program, call, segments=segments))
        affine = result["launches"][2]
        stores = sorted(
            event[1] for warp in affine["warps"] for event in warp["events"] if event[0] == "store"
        )
        # Every piece of 16 rows once, without gaps.
        room = 3 * record_room(call, PAIR) * (RECORD_BYTES + MIDDLE_BYTES)
        first = result["workspace"] + result["schedule_bytes"] + room
        count = 3 * 3 * (segments - 1) * 2 * 8
        assert stores == [first + n * 16 * DIM * 4 for n in range(count)]
        assert stores[-1] + 16 * DIM * 4 <= result["workspace"] + result["workspace_bytes"]


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize(
    "call",
    [
        Call(12, 1, 8192),
        Call(1, 1, 945),
        Call(4, 3, 2000),
        Call(2, 1, 14000, [3, 5003, 5003, 5004, 9325, 9372, 13972]),
        Call(1, 1, 9000, [0, 0, 9000, 9000]),
        Call(50, 1, 800),
        Call(7, 2, 0),
    ],
    ids=["one", "short", "rows", "packed", "unequal", "heads", "empty"],
)
def test_planned(program: Path, call: Call, sms: int) -> None:
    ends = sorted({row * call.tokens + begin + length for row, begin, length in call.spans})
    inner = [ends[0] - CHUNK, *range(0, call.batch * call.tokens, 5 * CHUNK), *ends]
    call = replace(
        call,
        initial=Pool(2**41, len(call.spans)),
        final=Pool(2**42, len(call.spans), BFLOAT16),
        offsets=Integers(sorted(inner)),
        checkpoint=Pool(2**43, len(inner), BFLOAT16),
    )
    schedule = -(-4 * (3 * len(call.spans) + 2) // 256) * 256
    chains = call.heads * len(call.spans)

    result = json.loads(run(program, call, sms=sms))
    chunks = record_room(call, CHUNK) // len(call.spans)
    segments = max(1, min(sms // 2 // chains, 1 + chunks // 60))
    check(call, result, "segments", segments)
    room = call.heads * record_room(call, PAIR) * (RECORD_BYTES + MIDDLE_BYTES)
    size = schedule + room + chains * (segments - 1) * 2 * STATE_BYTES
    assert result["workspace_bytes"] == size

    result = json.loads(run(program, call, "fused", sms))
    clusters = sms // 2
    check(call, result, "fused", clusters=clusters)
    carried = share_bytes(clusters) + clusters * STATE_BYTES
    assert result["workspace_bytes"] == schedule + carried * (chains > clusters)


@pytest.mark.parametrize(
    "call",
    [
        Call(1, 1, LARGEST),
        Call(1, 3, LARGEST // 3),
        Call(1, 1, LARGEST, [LARGEST - 10**9 - 5, LARGEST - 5, LARGEST - 5, LARGEST]),
        Call(1, 1, LARGEST, [0, LARGEST]),
    ],
    ids=["one", "rows", "packed", "one packed"],
)
@pytest.mark.parametrize("sms", [78, 132])
def test_most_tokens(program: Path, call: Call, sms: int) -> None:
    """No sum overflows: the program would end."""
    places = {
        row * call.tokens + begin + tokens
        for row, begin, length in call.spans
        for tokens in (CHUNK, length // CHUNK * CHUNK - CHUNK, length // CHUNK * CHUNK, length)
    }
    offsets = sorted({*places, LARGEST // 2, LARGEST, LARGEST + 31})
    for dtype in INTEGER:
        kept = replace(
            call,
            initial=Pool(2**41, 3),
            offsets=Integers(offsets, dtype),
            checkpoint=Pool(2**43, len(offsets)),
        )
        result = json.loads(run(program, kept, sms=sms, mode=LIST_CHAINS))
        segments = result["launches"][-1]["segments"]
        assert segments == sms // 2 // len(call.spans)
        check(kept, result, "segments", segments)
        result = json.loads(run(program, kept, "fused", sms, mode=LIST_CHAINS))
        check(kept, result, "fused", clusters=sms // 2)


@pytest.mark.parametrize(
    "call",
    [
        Call(16, 1, LARGEST),
        Call(5, 3, LARGEST // 3),
        Call(16, 1, LARGEST, [0, LARGEST]),
        Call(7, 1, LARGEST, [LARGEST - 10**9 - 5, LARGEST - 5, LARGEST - 5, LARGEST]),
    ],
    ids=["one", "rows", "one packed", "packed"],
)
@pytest.mark.parametrize("clusters", [1, 2, 3, 7, 14])
def test_most_tokens_shared(program: Path, call: Call, clusters: int) -> None:
    """No sum overflows, as above."""
    ends = [row * call.tokens + begin + length for row, begin, length in call.spans]
    call = replace(call, offsets=Integers(sorted(ends)), checkpoint=Pool(2**43, len(ends)))
    result = json.loads(run(program, call, "fused", sms=2 * clusters, mode=LIST_CHAINS))
    check(call, result, "fused", clusters=clusters)
    assert result["launches"][-1]["shares"] != 0


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.integers(-100, 100), max_size=100)
    | st.lists(st.integers(-(2**40), 2**40), max_size=40)
    | st.integers(0, 5000).map(lambda n: [x // 3 for x in range(n)]),
    values=st.lists(st.integers(-110, 110) | st.integers(-(2**41), 2**41), max_size=20),
)
def test_count_at_most(program: Path, entries: list[int], values: list[int]) -> None:
    entries.sort()
    values += [x + y for x in entries[:: 1 + len(entries) // 20] for y in (-1, 0, 1)]
    args = bytes(abi.ARGS.size)
    arrays = [np.array(x, np.int64).tobytes() for x in (values, entries, [], [], [])]
    printed = execute(program, COUNT, (0, 0, 0), args, *arrays)
    found = json.loads(printed) if values else []
    assert found == [bisect.bisect_right(entries, x) for x in values]


@pytest.mark.parametrize("segments", [2, 3, 5])
def test_combine(program: Path, segments: int) -> None:
    """S <- S M + B through the segments of each sequence and head; no other state changes."""
    generator = np.random.default_rng(segments)
    shape = (2, 3, segments - 1, 2, DIM, DIM)
    before = generator.standard_normal(shape).astype(np.float32)
    before[:, :, :, 1] /= DIM**0.5
    call = Call(3, 2, 64)
    after = run(program, call, segments=segments, mode=COMBINE, carried=before.tobytes())
    found = np.frombuffer(after, np.float32).reshape(shape)
    wanted = before.astype(np.float64)
    for n in range(1, segments - 1):
        wanted[:, :, n, 0] += wanted[:, :, n - 1, 0] @ wanted[:, :, n, 1]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    assert (found[:, :, :, 1] == before[:, :, :, 1]).all()
    assert (found[:, :, 0] == before[:, :, 0]).all()


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("rows", (r"RowsTurn<kShape> rows\([^;]*;\s*Barrier::wait\(rows\.[^;]*;",)),
        ("solver", ()),
    ],
)
def test_walks_are_those_of_the_kernels(name: str, turns: tuple[str, ...]) -> None:
    """Two classes are too much for the host and stand in tests/slices, with the same walks."""
    growing = r"const GrowingTurn<kShape> growing\([^;]*;"
    walk = (r"walk_\(p, [^)]*\)", r"ChunkWalk<[^>]*> walk_;")
    same_in_kernels(f"sm90/{name}.cuh", *walk, growing, *turns)


def test_clusters_of_their_own_have_their_own_numbers() -> None:
    """The turn is read by assembly, so that function stands in program.cpp."""
    own_number = r"if \(p\.shares == nullptr\) return [^;]*;"
    same_in_kernels("sm90/fused.cuh", own_number, stand_in="program.cpp")


def same_in_kernels(file: str, *parts: str, stand_in: str | None = None) -> None:
    if not CSRC.is_dir():
        pytest.skip("needs the sources of the kernels")
    texts = [(CSRC / file).read_text(), (STAND_INS / (stand_in or file)).read_text()]
    for part in parts:
        first, second = (re.findall(part, text, re.DOTALL) for text in texts)
        assert first == second and len(first) == 1
