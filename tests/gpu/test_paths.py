"""Every kernel path, forced through FLASH_KDA_PATH: accurate, and with the card filled many times.

What else all paths must hold is in the other files, which also run on each of them.
"""

from __future__ import annotations

import itertools

import cases
import paths
import pytest
import torch
from cases import KINDS, assert_accurate, assert_repeatable, forward, make_case, same_bits

from flash_kda import abi, loader

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]
on_each_path = pytest.mark.usefixtures("path")
# More chains than any card has multiprocessors, in sequences of up to five chunks.
CROWD = tuple(n * 7 % 71 for n in range(60))


def test_paths_of_this_gpu(device: torch.device) -> None:
    """The Hopper family where it belongs, and nowhere else."""
    index = torch.device("cuda", torch.cuda.current_device())
    assert loader.module_for(index).gpu == paths.planning_facts(device)
    names = paths.kernel_paths(device)
    if torch.cuda.get_device_capability(device) == (9, 0):
        assert names == list(abi.path_names())
    else:
        assert names == ["portable_v128", "portable_v64", "portable_v32"]


def test_paths_of_other_gpus_are_refused(rng: cases.Random) -> None:
    others = set(abi.path_names()) - set(paths.kernel_paths(rng.device))
    case = make_case(rng, tokens=20)
    out = torch.zeros_like(case.v)
    for name in others:
        with (
            paths.forced(name),
            pytest.raises(ValueError, match=rf"path {name} needs .* capability 9\.0"),
        ):
            forward(case, out=out)
    assert not out.any()
    assert_accurate(case, *forward(case))


@on_each_path
@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16])
def test_lengths(rng: cases.Random, initial: torch.dtype | None) -> None:
    lengths = (*range(100), 127, 128, 129, 200)
    for final in (torch.float32, torch.bfloat16):
        case = make_case(rng, lengths=lengths, heads=2, initial_state=initial, before=3, after=5)
        assert_accurate(case, *forward(case, final_state=final))


@on_each_path
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(rng: cases.Random, kind: str) -> None:
    case = make_case(rng, kind, lengths=(300, 0, 130, 1, 77), heads=3)
    assert_accurate(case, *forward(case), **KINDS[kind].bounds)
    case = make_case(rng, kind, batch=2, tokens=150, initial_state=None)
    assert_accurate(case, *forward(case), **KINDS[kind].bounds)


@on_each_path
@pytest.mark.parametrize("heads", [1, 7, 64, 200])
def test_heads(rng: cases.Random, heads: int) -> None:
    case = make_case(rng, batch=2, tokens=40, heads=heads)
    assert_accurate(case, *forward(case))


@on_each_path
def test_two_ctas_on_a_multiprocessor(rng: cases.Random) -> None:
    """Hundreds of runs of a shape whose CTAs share multiprocessors are equal bit for bit.

    Once a stage was refilled while loads from it were under way: a third of these runs differed.
    """
    case = make_case(rng, lengths=(130, 54, 204, 96, 27, 306), heads=32, initial_state=None)
    assert_repeatable(case, 500)


@on_each_path
@pytest.mark.parametrize("lengths", [CROWD, None], ids=["packed", "batch"])
def test_many_more_chains_than_multiprocessors(
    rng: cases.Random, lengths: tuple[int, ...] | None
) -> None:
    """Every cluster or CTA works on chain after chain, of changing lengths, none of them lost."""
    shape = {"batch": 60, "tokens": 37} if lengths is None else {"lengths": lengths, "before": 2}
    case = make_case(rng, heads=48, **shape)
    assert_accurate(case, *assert_repeatable(case, 20))


@pytest.mark.parametrize("initial", [torch.float32, torch.bfloat16])
def test_short_chains_with_states_many_times(
    rng: cases.Random, initial: torch.dtype, path: str | None
) -> None:
    """Thousands of runs in which states and chunks follow each other closely: none hangs.

    Once in some thousand a group of `fused` waited for a phase of a barrier that had passed, where
    a state had been on its way to a chain and read before the group looked.
    """
    lengths = tuple(64 if n % 5 else 16 * (n % 3) for n in range(128))
    case = make_case(rng, lengths=lengths, heads=8, initial_state=initial)
    assert_accurate(case, *assert_repeatable(case, 3000 if path == "fused" else 100))


@on_each_path
def test_two_streams_that_both_fill_the_card(rng: cases.Random) -> None:
    """Whichever clusters find no room at first, because the other call's hold it, come later."""
    work = [make_case(rng, lengths=CROWD, heads=32), make_case(rng, batch=2, tokens=1700, heads=2)]
    expected = [forward(case) for case in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results = []
    for _, (n, stream) in itertools.product(range(15), enumerate(streams)):
        with torch.cuda.stream(stream):
            results.append((n, forward(work[n])))
    torch.cuda.synchronize()
    for n, (out, state) in results:
        assert same_bits(out, expected[n][0]) and same_bits(state, expected[n][1])
    for case, result in zip(work, expected, strict=True):
        assert_accurate(case, *result)


def test_unknown_path(rng: cases.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_PATH", "no_such_path")
    case = make_case(rng, tokens=20)
    with pytest.raises(ValueError, match="FLASH_KDA_PATH"):
        forward(case)
    monkeypatch.delenv("FLASH_KDA_PATH")
    assert_accurate(case, *forward(case))
