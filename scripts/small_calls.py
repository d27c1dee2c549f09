"""Small calls of every kernel path that this GPU has, compared with the float64 recurrence: one of
packed sequences and one whose cu_seqlens fall, of `fused` one of many chains as well.

For compute-sanitizer, under which larger ones take too long:

    compute-sanitizer --tool memcheck python scripts/small_calls.py [PATH ...]
    compute-sanitizer --tool memcheck python scripts/small_calls.py --lengths 4000,7 fused
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# Appended, so that an installed flash_kda wins over the source tree, which may not be built.
sys.path[1:1] = [str(ROOT / "tests")]

import cases  # noqa: E402
import paths  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import console  # noqa: E402

HEADS = 2
PACKED = (40, 0, 1, 33, 250)
"""The last has more chunks than any kernel's ring of stages, so that stages are filled again."""
CUT = (4000, 7)
"""Enough tokens a sequence for `segments` to cut each in three, on any Hopper card."""
CROWD, CROWD_HEADS = (40, 0, 17), 40
"""More chains than any Hopper card has clusters, so that `fused` shares them out and cuts some."""
HOSTILE = (0, 60, 30, -5, 10**6)


def poisoned_workspace(case: cases.Case) -> torch.Tensor | None:
    """As large as a call needs on the path that is forced; none on a CPU.

    Poisoned, so that whatever is read of it unwritten spoils the results. initcheck alone does not
    do: it reports records as unwritten that bulk stores have left (docs/testing.md).
    """
    if case.device.type != "cuda":
        return None
    batch, tokens, heads, _ = case.q.shape
    size = flash_kda.workspace_size(batch * tokens, heads, case.state_shape[0], case.device)
    return cases.poisoned(size, dtype=torch.uint8, device=case.device)


def on_host(case: cases.Case) -> cases.Case:
    """The reference is thousands of small kernels: under a sanitizer, not on the GPU."""
    return case.but(**{key: x.cpu() for key, x in case.tensors().items()})


def check(name: str | None, lengths: Sequence[int], device: torch.device) -> None:
    """Call on a path, or on the chosen one; AssertionError if it is not accurate."""
    case = cases.make_case(
        cases.Random(str(name), device),
        heads=HEADS,
        lengths=lengths,
        initial_state=torch.float32,
    )
    with paths.forced(name):
        out, state = cases.forward(case, workspace=poisoned_workspace(case))
    cases.assert_accurate(on_host(case), out.cpu(), state.cpu())


def check_crowd(name: str | None, device: torch.device) -> None:
    """Call with many chains and a pool of bf16 states that no bulk copy can take, one sequence
    without a slot; AssertionError if it is not accurate.
    """
    rng = cases.Random(f"crowd {name}", device)
    case = cases.make_case(rng, heads=CROWD_HEADS, lengths=CROWD, initial_state=torch.bfloat16)
    case.initial_state[2] = 0  # what the sequence without a slot starts from
    pool = cases.misaligned(case.initial_state.flip(0))
    out = cases.poisoned(*case.v.shape, dtype=torch.bfloat16, device=device)
    arguments = {**vars(case), "initial_state": pool}
    slots = torch.tensor([2, 1, -1], dtype=torch.int32, device=device)
    with paths.forced(name):
        workspace = poisoned_workspace(case)
        flash_kda.fwd(
            **arguments, out=out, final_state=pool, workspace=workspace, state_indices=slots
        )
    host, states = on_host(case), pool.flip(0).cpu()
    expected, expected_states = cases.reference(host)
    cases.assert_accurate(host, out.cpu(), None, expected=(expected, expected_states))
    pairs = list(zip(states[:2], expected_states[:2], strict=True))
    cases.assert_close("pool", pairs, cases.ORDINARY_BOUND)
    assert not states[2].any(), "a slot that no sequence names was written"


def call_hostile(name: str | None, heads: int, device: torch.device) -> None:
    """Call with cu_seqlens that fall and leave the row: of no use but to a sanitizer."""
    case = cases.make_case(cases.Random(f"hostile {name}", device), heads=heads, lengths=(25,) * 4)
    case.cu_seqlens = torch.tensor(HOSTILE, dtype=torch.int64, device=device)
    with paths.forced(name):
        cases.forward(case, workspace=poisoned_workspace(case))


def lengths_argument(text: str) -> tuple[int, ...]:
    """What --lengths takes."""
    return tuple(map(console.integer(0, 2**24), text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="default: all that the GPU has")
    parser.add_argument(
        "--lengths",
        type=lengths_argument,
        help="of the packed sequences, comma-separated, instead of each path's own",
    )
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("small_calls.py: there is no GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    # The reference takes thousands of small steps, in which threads wait for each other.
    torch.set_num_threads(1)
    known = paths.kernel_paths(device)
    if unknown := sorted(set(arguments.paths) - set(known)):
        got = ", ".join(map(repr, unknown))
        parser.error(f"PATH: got {got}; needs some of {', '.join(known)}")
    for name in arguments.paths or known:
        lengths = arguments.lengths or (CUT if name == "segments" else PACKED)
        check(name, lengths, device)
        call_hostile(name, CROWD_HEADS if name == "fused" else HEADS, device)
        if name == "fused":
            check_crowd(name, device)
        print(f"{name}: well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(console.run("small_calls.py", main))
