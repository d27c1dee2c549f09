"""The path that cuts sequences: results across the borders of segments, and what may cross them.

Plans are made from the number of sequences and tokens, so all sequences are cut into equally many
segments, some of them empty in short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import cases
import paths
import pytest
import torch
from cases import (
    KINDS,
    TOKEN_INPUTS,
    Guarded,
    assert_accurate,
    assert_repeatable,
    forward,
    forward_with_checkpoints,
    make_case,
    same_bits,
)
from torch import Tensor

import flash_kda

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]

LENGTHS = (5000, 0, 1, 4321, 47, 4600)
STATES = [torch.float32, torch.bfloat16]
LARGEST = torch.finfo(torch.bfloat16).max
PAIR = 32


@pytest.fixture(autouse=True)
def _path(device: torch.device) -> Iterator[None]:
    if "segments" not in paths.kernel_paths(device):
        pytest.skip("this GPU has no path that cuts sequences")
    with paths.forced("segments"):
        yield


def workspace_bytes(case: cases.Case) -> int:
    batch, tokens, heads, _ = case.q.shape
    return flash_kda.workspace_size(batch * tokens, heads, case.state_shape[0], case.device)


def segments_of(case: cases.Case) -> int:
    """Into how many each sequence is cut; fails if they are not."""
    batch, tokens, heads, _ = case.q.shape
    sequences = case.state_shape[0]
    pairs = min(batch * tokens, (batch * tokens + (PAIR - 1) * sequences) // PAIR)
    cuts = (workspace_bytes(case) - pairs * heads * paths.PAIR_BYTES) // (sequences * heads)
    segments = 1 + cuts // paths.CUT_BYTES
    assert segments > 1, "the case has too few tokens to be cut"
    return segments


def borders(case: cases.Case, sequence: int) -> list[int]:
    """Tokens of the sequence before each of its segments but the first."""
    _, begin, end = case.spans[sequence]
    segments, length = segments_of(case), end - begin
    pairs = (length + PAIR - 1) // PAIR
    step = (pairs + segments - 1) // segments * PAIR
    return [n * step for n in range(1, segments) if n * step < length]


def test_borders(rng: cases.Random) -> None:
    """The cases here are cut in several places."""
    packed = make_case(rng, lengths=LENGTHS)
    assert segments_of(packed) == 3
    assert [borders(packed, n) for n in (1, 2, 4)] == [[], [], [32]]
    assert borders(packed, 0) == [1696, 3392]
    assert borders(make_case(rng, tokens=1536), 0) == [768]


@pytest.mark.parametrize("initial", [None, *STATES])
def test_packed(rng: cases.Random, initial: torch.dtype | None) -> None:
    case = make_case(rng, lengths=LENGTHS, before=3, after=5, initial_state=initial)
    segments_of(case)
    expected = cases.reference(case)
    for final in STATES:
        out, state = forward(case, final_state=final)
        assert_accurate(case, out, state, expected=expected)
        start = torch.zeros_like(state[1]) if initial is None else case.initial_state[1].to(final)
        assert same_bits(state[1], start), "the state of the empty sequence has changed"
    assert_accurate(case, *forward(case, final_state=None), expected=expected)


@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("tokens", [945, 960, 1521, 1536, 1537, 4097, 9000])
def test_one_sequence(rng: cases.Random, tokens: int, heads: int) -> None:
    case = make_case(rng, tokens=tokens, heads=heads)
    segments_of(case)
    assert_accurate(case, *forward(case))


def test_batch_rows(rng: cases.Random) -> None:
    case = make_case(rng, batch=3, tokens=2000, heads=4)
    segments_of(case)
    assert_accurate(case, *forward(case))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(rng: cases.Random, kind: str) -> None:
    case = make_case(rng, kind, lengths=(3300, 20, 2900))
    segments_of(case)
    assert_accurate(case, *forward(case), **KINDS[kind].bounds)


@pytest.mark.parametrize("dtype", STATES)
@pytest.mark.parametrize("initial", [None, torch.float32])
def test_checkpoints(rng: cases.Random, dtype: torch.dtype, initial: torch.dtype | None) -> None:
    """Inside of each segment, on its borders and beside them, between the chunks of a pair, and at
    the end of sequences."""
    case = make_case(rng, lengths=LENGTHS, before=5, after=7, initial_state=initial)
    expected = forward(case)
    wanted: list[tuple[int, int]] = []
    for n, (_, begin, end) in enumerate(case.spans):
        places = {16, 256, end - begin}
        for border in borders(case, n):
            places |= {border - 16, border, border + 16, border + 32, border + 640, border + 656}
        wanted += [(n, x) for x in sorted(places) if 0 < x <= end - begin]
    offsets = [case.spans[n][1] + x for n, x in wanted]
    out, final, states = forward_with_checkpoints(case, offsets, dtype)
    assert same_bits(out, expected[0]) and same_bits(final, expected[1])
    pairs = list(zip(states, _prefixes(case, wanted), strict=True))
    cases.assert_close("checkpoint_states", pairs, cases.ORDINARY_BOUND)


def _prefixes(case: cases.Case, wanted: list[tuple[int, int]]) -> Tensor:
    """float64 states of sequences after their first tokens."""
    parts = [case.part(n, 0, tokens) for n, tokens in wanted]
    joined = {name: torch.cat([getattr(x, name) for x in parts], 1) for name in TOKEN_INPUTS}
    bounds = torch.tensor([0, *(tokens for _, tokens in wanted)]).cumsum(0).to(case.device)
    initial = None
    if case.initial_state is not None:
        initial = case.initial_state[[n for n, _ in wanted]]
    return cases.reference(case.but(**joined, initial_state=initial, cu_seqlens=bounds))[1]


def test_offsets_that_name_nothing_are_passed_over(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(3300, 20, 2900), before=3)
    border = borders(case, 0)[0]
    named = [3 + 16, 3 + border, 3 + 3300]
    offsets = sorted([-7, 0, 3, 3 + 17, 3 + border - 1, 3 + border + 1, 3 + 3299, *named])
    _, _, states = forward_with_checkpoints(case, offsets)
    written = [offset for offset, x in zip(offsets, states, strict=True) if not x.isnan().any()]
    assert written == named


@pytest.mark.parametrize("dtype", STATES)
def test_pool(rng: cases.Random, dtype: torch.dtype) -> None:
    """Slots are read and written in place; -1 starts from zeros; the others keep their bits."""
    case = make_case(rng, lengths=LENGTHS, initial_state=None)
    pool, before, states = cases.call_with_pool(case, rng, dtype)
    pairs = [(pool[slot], state) for slot, state in states.items()]
    cases.assert_close("pool", pairs, cases.ORDINARY_BOUND)
    untouched = [slot for slot in range(pool.shape[0]) if slot not in states]
    untouched += [list(states)[n] for n, length in enumerate(LENGTHS[:2]) if not length]
    assert same_bits(pool[untouched], before[untouched])


@pytest.mark.parametrize("dtype", STATES)
def test_states_in_place(rng: cases.Random, dtype: torch.dtype) -> None:
    """The first segment reads the state that the last one replaces, which is done at once where a
    sequence is short; also while another stream takes multiprocessors away.
    """
    case = make_case(rng, lengths=(1, 0, 15000, 16, 33, 5), heads=3, initial_state=dtype)
    segments_of(case)
    out, state = forward(case, final_state=dtype)
    initial = case.initial_state.clone()
    crowd = make_case(rng, lengths=tuple(n * 7 % 71 for n in range(60)), heads=32)
    other = torch.cuda.Stream()
    different = torch.zeros((), dtype=torch.int64, device=case.device)
    torch.cuda.synchronize()
    for run in range(200):
        if run % 2:
            with torch.cuda.stream(other), paths.forced("fused"):
                forward(crowd, final_state=None)
        case.initial_state.copy_(initial)
        again, states = forward(case, final_state=case.initial_state)
        same = (cases.bits(again) == cases.bits(out)).all()
        different += ~(same & (cases.bits(states) == cases.bits(state)).all())
    assert int(different) == 0, f"{int(different)} of 200 runs differ"


@pytest.mark.parametrize("initial", [None, torch.float32])
def test_continued_sequences(rng: cases.Random, initial: torch.dtype | None) -> None:
    """Cut by the caller on, beside and far from the borders of segments."""
    case = make_case(rng, tokens=4000, heads=3, initial_state=initial)
    expected = cases.reference(case)
    border = borders(case, 0)[0]
    for at in (1, border - 1, border, border + 1, 2000, 4000 - 1536, 3999):
        first, middle = forward(case.part(0, 0, at))
        second, last = forward(case.part(0, at, 4000, initial_state=middle))
        assert_accurate(case, torch.cat((first, second), 1), last, expected=expected)


@pytest.mark.parametrize("name", TOKEN_INPUTS)
def test_no_finite_value_reaches_earlier_tokens(rng: cases.Random, name: str) -> None:
    """Bit for bit, across the borders of segments and inside of them."""
    case = make_case(rng, tokens=3200)
    out, _ = forward(case)
    places = {1, 16, 3199}
    for border in borders(case, 0):
        places |= {border - 16, border - 1, border, border + 1, border + 17}
    for cut in sorted(places):
        for value in (LARGEST, -LARGEST):
            x = getattr(case, name).clone()
            x[:, cut:] = value
            changed, _ = forward(case.but(**{name: x}))
            assert same_bits(changed[:, :cut], out[:, :cut]), f"{name} from {cut} on is {value:g}"


@pytest.mark.parametrize("name", TOKEN_INPUTS)
def test_nan_reaches_no_earlier_step(rng: cases.Random, name: str) -> None:
    case = make_case(rng, lengths=(3200,), before=3)
    out, _ = forward(case)
    for border in borders(case, 0):
        for at in (border - 1, border, border + 20):
            x = getattr(case, name).clone()
            x[:, 3 + at] = math.nan
            changed, _ = forward(case.but(**{name: x}))
            kept = slice(3, 3 + at // PAIR * PAIR)
            assert same_bits(changed[:, kept], out[:, kept]), f"{name} of token {at}"


@pytest.mark.parametrize("tokens", range(17, 25))
def test_state_behind_saturated_gates(rng: cases.Random, tokens: int) -> None:
    """What a pair's first chunk leaves, though the decay of both chunks is less than any fp32."""
    case = make_case(rng, "full_decay", tokens=tokens, heads=4)
    beta = case.beta.clone()
    beta[:, 16:] = -200  # the second chunk adds nothing
    case = case.but(beta=beta)
    out, state = forward(case)
    assert cases.relative_error(state, cases.reference(case)[1]) <= cases.ORDINARY_BOUND
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, LARGEST])
def test_sequences_do_not_depend_on_each_other(rng: cases.Random, value: float) -> None:
    case = make_case(rng, lengths=LENGTHS, before=2, after=3, heads=3)
    expected = forward(case)
    segments_of(case)
    for chosen, (_, begin, end) in enumerate(case.spans):
        spoilt = case.but(**{name: x.clone() for name, x in case.tensors().items()})
        spoilt.initial_state[chosen] = value
        for name in TOKEN_INPUTS:
            x = getattr(spoilt, name)
            for rows in (slice(0, 2), slice(begin, end), slice(-3, None)):
                x[:, rows] = value
        out, state = forward(spoilt)
        for n, (_, i, j) in enumerate(case.spans):
            if n != chosen:
                assert same_bits(out[:, i:j], expected[0][:, i:j]), f"{chosen} changes {n}"
                assert same_bits(state[n], expected[1][n]), f"{chosen} changes the state of {n}"


def test_heads_do_not_depend_on_each_other(rng: cases.Random) -> None:
    case = make_case(rng, tokens=2500, heads=4)
    segments_of(case)
    out, state = forward(case)
    for name in (*TOKEN_INPUTS, "initial_state"):
        x = getattr(case, name).clone()
        (x[:, 2] if name == "initial_state" else x[:, :, 2]).fill_(math.nan)
        changed, changed_state = forward(case.but(**{name: x}))
        keep = [0, 1, 3]
        assert same_bits(changed[:, :, keep], out[:, :, keep]), name
        assert same_bits(changed_state[:, keep], state[:, keep]), name


def test_repeats_are_equal_bit_for_bit(rng: cases.Random) -> None:
    case = make_case(rng, lengths=LENGTHS, before=3, heads=3)
    segments_of(case)
    assert_accurate(case, *assert_repeatable(case, 20))
    case = make_case(rng, tokens=2400, heads=5)
    segments_of(case)
    assert_accurate(case, *assert_repeatable(case, 200))


def test_calls_on_two_streams(rng: cases.Random) -> None:
    """Each fills the card with its segments; every other call finds it taken."""
    work = [make_case(rng, tokens=3000 + 200 * n, heads=8) for n in range(2)]
    expected = [forward(case) for case in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results = []
    for n in [0, 1] * 20:
        with torch.cuda.stream(streams[n]):
            results.append((n, forward(work[n])))
    torch.cuda.synchronize()
    for n, (out, state) in results:
        assert same_bits(out, expected[n][0]) and same_bits(state, expected[n][1])
    for case, result in zip(work, expected, strict=True):
        segments_of(case)
        assert_accurate(case, *result)


@pytest.mark.parametrize(
    "bounds",
    [
        (0, 2000, 4000, 6000),
        (0, 0, 6000, 6000),
        (5, 60, 70, 180),
        (0, 6000, 0, 6000),
        (6000, 4000, 2000, 0),
        (-5000, 2**31 - 1, -(2**31), 6001),
    ],
    ids=["equal", "one", "short", "overlapping", "backwards", "outside"],
)
def test_any_bounds_stay_in_the_workspace(
    rng: cases.Random, bounds: tuple[int, int, int, int]
) -> None:
    """It is as large as the plan says, which knows no bounds, and at first holds NaN."""
    case = make_case(rng, lengths=(6000, 0, 0))
    segments_of(case)
    case.cu_seqlens.copy_(torch.tensor(bounds))
    workspace = Guarded(
        workspace_bytes(case), dtype=torch.uint8, device=case.device, margin=1 << 22
    )
    out = Guarded(*case.v.shape, dtype=torch.bfloat16, device=case.device, margin=1 << 22)
    state = Guarded(*case.state_shape, dtype=torch.float32, device=case.device, margin=1 << 22)
    forward(case, out=out.tensor, final_state=state.tensor, workspace=workspace.tensor)
    for guarded in (workspace, out, state):
        guarded.assert_margins_untouched()
    if list(bounds) == sorted(bounds):
        assert_accurate(case, out.tensor, state.tensor)


def test_cuda_graph_with_other_sequence_bounds(rng: cases.Random) -> None:
    case = make_case(rng, lengths=(3000, 100, 2900))
    segments_of(case)
    out, state = torch.empty_like(case.v), torch.empty_like(case.initial_state)
    torch.cuda.synchronize()  # what fills the inputs runs on this stream
    with torch.cuda.stream(torch.cuda.Stream()):
        forward(case, out=out, final_state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(case, out=out, final_state=state)
    for bounds in ((0, 0, 6000, 6000), (1, 2000, 2001, 5000), (10, 20, 30, 40)):
        new = make_case(rng, lengths=(3000, 100, 2900))
        for name in (*TOKEN_INPUTS, "initial_state"):
            getattr(case, name).copy_(getattr(new, name))
        case.cu_seqlens.copy_(torch.tensor(bounds))
        cases.bits(out).fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(case, out, state)
        outside = torch.cat((out[:, : bounds[0]], out[:, bounds[-1] :]), 1)
        assert bool((cases.bits(outside) == -1).all())
