"""Streams, graphs, workspaces, threads and repeated calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cases
import pytest
import torch
from cases import (
    Guarded,
    assert_accurate,
    assert_repeatable,
    forward,
    make_case,
    poisoned,
    same_bits,
)
from torch import Tensor

import flash_kda
from flash_kda.ops import PATH_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.cuda, pytest.mark.usefixtures("path")]

STATES = (None, torch.float32, torch.bfloat16)
SHAPES: dict[str, dict[str, Any]] = {
    "one_token": {"tokens": 1},
    "one_sequence": {"tokens": 130, "heads": 5},
    "batch": {"batch": 3, "tokens": 33},
    "packed": {"lengths": (40, 0, 1, 77, 16), "before": 2, "after": 9},
    "many_sequences": {"lengths": (1,) * 100},
    "long_sequences": {"lengths": (2100, 0, 3000)},
    "crowd": {"lengths": (64, 0, 1, 100, 17, 16, 300, 15) * 3, "heads": 7, "before": 1},
}
each_shape = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))


def workspace_bytes(case: cases.Case) -> int:
    batch, tokens, heads, _ = case.q.shape
    return flash_kda.workspace_size(batch * tokens, heads, case.state_shape[0])


@each_shape
def test_workspace(rng: cases.Random, shape: dict) -> None:
    """Its first contents do not matter, nothing beside it is written, and it may be used again."""
    case = make_case(rng, **shape)
    expected = forward(case)
    size = workspace_bytes(case)
    exact = Guarded(size, dtype=torch.uint8, device=case.device, margin=1 << 20)
    zeros = cases.aligned_bytes(size + 4096, case.device).zero_()
    for workspace in (exact.tensor, zeros, exact.tensor):
        out, state = forward(case, workspace=workspace)
        assert same_bits(out, expected[0]) and same_bits(state, expected[1])
    assert_accurate(case, *expected)
    exact.assert_margins_untouched()


def test_used_workspace_of_another_call(rng: cases.Random) -> None:
    workspace = cases.aligned_bytes(1 << 26, rng.device)
    for shape in [*SHAPES.values(), *reversed(list(SHAPES.values()))]:
        case = make_case(rng, **shape)
        assert workspace_bytes(case) <= workspace.numel()
        assert_accurate(case, *forward(case, workspace=workspace))


def test_workspace_too_small(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(100,))
    size = workspace_bytes(case)
    out = poisoned(*case.v.shape, dtype=torch.bfloat16, device=case.device)
    workspace = cases.aligned_bytes(size - 1, case.device)
    with pytest.raises(ValueError, match="workspace"):
        forward(case, out=out, workspace=workspace)
    assert bool((cases.bits(out) == -1).all())
    assert_accurate(case, *forward(case))


def test_fused_needs_no_workspace_for_equal_lengths(rng: cases.Random) -> None:
    """If every chain has a cluster at once. Then nothing is allocated, and any size will do."""
    if os.environ.get(PATH_VARIABLE) != "fused":
        pytest.skip("other paths keep their records there")
    case = make_case(rng, batch=3, tokens=33)
    out, state = forward(case)
    before = torch.cuda.memory_stats(case.device)["allocation.all.allocated"]
    forward(case, out=out, final_state=state)
    assert torch.cuda.memory_stats(case.device)["allocation.all.allocated"] == before
    assert_accurate(case, out, state)
    for size in (0, 1):
        workspace = Guarded(size, dtype=torch.uint8, device=case.device)
        assert_accurate(case, *forward(case, workspace=workspace.tensor))
        workspace.assert_margins_untouched()


def test_no_memory_for_the_workspace(rng: cases.Random) -> None:
    """The call says so and writes nothing, and the next one works as if it had not been."""
    case = make_case(rng, **cases.crowd(rng))
    expected = forward(case)  # with the kernels loaded
    out, state = (torch.empty_like(x) for x in expected)
    bits = [cases.bits(x).fill_(-1) for x in (out, state)]
    before = case.initial_state.clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(case.device).total_memory
    fillers = []
    # What torch has already is filled, and it may take no more.
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        size = workspace_bytes(case)
        assert size > 1 << 20  # smaller ones come from memory shared with many others
        with pytest.raises(torch.cuda.OutOfMemoryError):
            while True:
                fillers.append(torch.empty(size, dtype=torch.uint8, device=case.device))
        for final in (state, case.initial_state):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                forward(case, out=out, final_state=final)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del fillers
    torch.cuda.synchronize()
    assert all(bool((x == -1).all()) for x in bits)
    assert same_bits(case.initial_state, before)
    forward(case, out=out, final_state=state)
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


def test_memory_from_torch_holds_nan(rng: cases.Random) -> None:
    """The workspace that torch's allocator hands out holds whatever was freed before."""
    case = make_case(rng, lengths=(100, 31))
    size = workspace_bytes(case)
    for _ in range(3):
        freed = poisoned(size, dtype=torch.uint8, device=case.device)
        del freed
        assert_accurate(case, *forward(case))


@each_shape
def test_repeats_are_equal_bit_for_bit(rng: cases.Random, shape: dict) -> None:
    case = make_case(rng, **shape)
    assert_accurate(case, *assert_repeatable(case, 20))


@pytest.mark.parametrize("final", STATES)
@pytest.mark.parametrize("initial", STATES)
@pytest.mark.parametrize("many", [False, True], ids=["few", "crowd"])
def test_repeats_with_states_of_each_kind(
    rng: cases.Random, many: bool, initial: torch.dtype | None, final: torch.dtype | None
) -> None:
    """Each kind of state comes and goes in its own way; none leaves something to chance."""
    few = {"lengths": (100, 0, 33, 1, 200), "before": 2}
    case = make_case(rng, **(cases.crowd(rng) if many else few), initial_state=initial)
    out, state = assert_repeatable(case, 20, final_state=final)
    if initial is not None:  # otherwise a first token's output may be small by chance
        assert_accurate(case, out, state)
    # Nor does one state depend on the other's kind, but for its own rounding.
    for other in STATES:
        again, other_state = forward(case, final_state=other)
        assert same_bits(again, out)
        if other == torch.float32 and final is not None:
            assert same_bits(other_state.to(final), state)


def test_larger_repeats_are_equal_bit_for_bit(rng: cases.Random) -> None:
    """Enough work to fill the GPU several times over."""
    case = make_case(rng, lengths=(1300, 547, 48, 963, 271, 1500), heads=32)
    expected = assert_repeatable(case, 10)
    assert torch.isfinite(expected[0]).all() and torch.isfinite(expected[1]).all()


def test_runs_on_the_current_stream(rng: cases.Random) -> None:
    case = make_case(rng, tokens=150, heads=4)
    expected = forward(case)
    stream = torch.cuda.Stream()
    late = case.but(**{name: torch.zeros_like(x) for name, x in case.tensors().items()})
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # The inputs arrive late on this stream: kernels on another one would read zeros.
        torch.cuda._sleep(50_000_000)
        for name, x in late.tensors().items():
            x.copy_(getattr(case, name))
        out, state = forward(late)
        out, state = out.clone(), state.clone()
    stream.synchronize()
    assert same_bits(out, expected[0]) and same_bits(state, expected[1])


def test_streams_do_not_disturb_each_other(rng: cases.Random) -> None:
    work = [make_case(rng, lengths=(100 + 20 * n, 30), heads=4) for n in range(4)]
    expected = [forward(case) for case in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in work]
    for _ in range(10):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(forward(work[n]))
    torch.cuda.synchronize()
    for n, calls in enumerate(results):
        for out, state in calls:
            assert same_bits(out, expected[n][0]) and same_bits(state, expected[n][1])


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """``work(n)`` for each n at once; fails with what any of them raised."""
    wrong: list[str] = []

    def run(n: int) -> None:
        try:
            work(n)
        except Exception as error:
            wrong.append(f"thread {n}: {error!r}")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads(rng: cases.Random) -> None:
    work = [make_case(rng, tokens=60 + 16 * n, heads=n + 1) for n in range(4)]
    expected = [forward(case) for case in work]
    torch.cuda.synchronize()

    def repeat(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                out, state = forward(work[n])
                torch.cuda.current_stream().synchronize()
                assert same_bits(out, expected[n][0]) and same_bits(state, expected[n][1])

    in_threads(len(work), repeat)


def test_threads_share_a_stream_and_a_workspace(rng: cases.Random) -> None:
    """The launches of one call are not mixed with those of another."""
    work = [make_case(rng, lengths=(33, 20 * n, 7 * n, 40), heads=40 + n) for n in range(4)]
    expected = [forward(case) for case in work]
    workspace = cases.aligned_bytes(max(map(workspace_bytes, work)), rng.device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    def repeat(n: int) -> None:
        with torch.cuda.stream(stream):
            results = [forward(work[n], workspace=workspace) for _ in range(30)]
        stream.synchronize()
        for out, state in results:
            assert same_bits(out, expected[n][0]) and same_bits(state, expected[n][1])

    in_threads(len(work), repeat)


@pytest.mark.parametrize("workspace", [None, "given"])
def test_no_host_synchronisation(rng: cases.Random, workspace: str | None) -> None:
    case = make_case(rng, lengths=(40, 77, 16))
    given = None
    if workspace is not None:
        given = cases.aligned_bytes(workspace_bytes(case), case.device)
    out = torch.empty_like(case.v)
    state = torch.empty_like(case.initial_state)
    forward(case, out=out, final_state=state, workspace=given)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        forward(case, out=out, final_state=state, workspace=given)
        busy.record()
        waited = busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the call waited for the GPU"
    assert_accurate(case, out, state)


BOUNDS = (
    (0, 40, 117, 133, 163),
    (0, 0, 0, 173, 173),
    (1, 2, 3, 4, 5),
    (7, 57, 57, 100, 173),
    (173, 173, 173, 173, 173),
)


@pytest.mark.parametrize("sizes", [(4, 3), (4, 40), (50, 4)], ids=["few", "many_heads", "crowd"])
@pytest.mark.parametrize("workspace", [None, "given"])
def test_cuda_graph_with_other_sequence_bounds(
    rng: cases.Random, workspace: str | None, sizes: tuple[int, int]
) -> None:
    """Those of the same number of sequences in as many tokens; `fused` shares chains out anew."""
    count, heads = sizes
    replayed: Sequence[Sequence[int]] = BOUNDS
    if count > 4:
        drawn = [sorted(rng.integers(0, 1001, count + 1)) for _ in range(3)]
        replayed = (*drawn, [0] * count + [1000], [0, *[1000] * count], range(count + 1))
    tokens = max(bounds[-1] for bounds in replayed)
    lengths = (40, 77, 16, 30) if count == 4 else (18,) * count
    case = make_case(rng, lengths=lengths, after=tokens - sum(lengths), heads=heads)
    given = None
    if workspace is not None:
        given = cases.aligned_bytes(workspace_bytes(case), case.device)
    out = torch.empty_like(case.v)
    state = torch.empty_like(case.initial_state)
    torch.cuda.synchronize()  # what fills the inputs and the workspace runs on this stream
    with torch.cuda.stream(torch.cuda.Stream()):
        forward(case, out=out, final_state=state, workspace=given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(case, out=out, final_state=state, workspace=given)
    for bounds in replayed:
        new = make_case(rng, lengths=lengths, after=tokens - sum(lengths), heads=heads)
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            getattr(case, name).copy_(getattr(new, name))
        case.cu_seqlens.copy_(torch.tensor(list(bounds)))
        out.copy_(poisoned(*out.shape, dtype=out.dtype, device=out.device))
        state.copy_(poisoned(*state.shape, dtype=state.dtype, device=state.device))
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(case, out, state)
        outside = torch.cat((out[:, : bounds[0]], out[:, bounds[-1] :]), 1)
        assert bool((cases.bits(outside) == -1).all())


def test_cuda_graph_of_several_calls(rng: cases.Random) -> None:
    """A prompt and three later pieces, the state handed on in place."""
    case = make_case(rng, tokens=120, heads=4)
    expected = cases.reference(case)
    start = case.initial_state.clone()
    pieces = [slice(0, 64), slice(64, 65), slice(65, 100), slice(100, 120)]
    outs = [torch.empty_like(case.v[:, rows]) for rows in pieces]

    def run() -> None:
        for rows, out in zip(pieces, outs, strict=True):
            part = {x: getattr(case, x)[:, rows] for x in ("q", "k", "v", "g", "beta")}
            forward(case.but(**part), out=out, final_state=case.initial_state)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        case.initial_state.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(case, torch.cat(outs, 1), case.initial_state, expected=expected)


def test_every_device_gets_its_own_kernels(rng: cases.Random) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    case = make_case(rng, lengths=(40, 77, 16))
    expected = forward(case)
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        moved = case.but(**{name: x.to(f"cuda:{index}") for name, x in case.tensors().items()})
        out, state = forward(moved)
        assert torch.cuda.current_device() == current
        assert same_bits(out.to(case.device), expected[0])
        assert same_bits(state.to(case.device), expected[1])
