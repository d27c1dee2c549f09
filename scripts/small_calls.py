"""One small call of every kernel path that this GPU has, compared with the float64 recurrence.

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

HEADS = 2
PACKED = (40, 0, 1, 33, 250)
"""The last has more chunks than any kernel's ring of stages, so that stages are filled again."""
CUT = (4000, 7)
"""Enough tokens a sequence for `segments` to cut each in three, on any Hopper card."""


def check(name: str | None, lengths: Sequence[int], device: torch.device) -> None:
    """Call on a path, or on the chosen one; AssertionError if it is not accurate."""
    case = cases.make_case(
        cases.Random(str(name), device),
        heads=HEADS,
        lengths=lengths,
        initial_state=torch.float32,
    )
    with paths.forced(name):
        # Poisoned, so that whatever is read of it unwritten spoils the results. initcheck alone
        # does not do: it reports records as unwritten that bulk stores have left
        # (docs/testing.md).
        workspace = None
        if device.type == "cuda":
            size = flash_kda.workspace_size(sum(lengths), HEADS, len(lengths), device)
            workspace = cases.poisoned(size, dtype=torch.uint8, device=device)
        out, state = cases.forward(case, workspace=workspace)
    # The reference is thousands of small kernels: under a sanitizer, not on the GPU.
    host = case.but(**{key: x.cpu() for key, x in case.tensors().items()})
    cases.assert_accurate(host, out.cpu(), state.cpu())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="default: all that the GPU has")
    parser.add_argument(
        "--lengths", help="of the packed sequences, comma-separated, instead of each path's own"
    )
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("small_calls.py: there is no GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    # The reference takes thousands of small steps, in which threads wait for each other.
    torch.set_num_threads(1)
    for name in arguments.paths or paths.kernel_paths(device):
        lengths: Sequence[int] = CUT if name == "segments" else PACKED
        if arguments.lengths:
            lengths = tuple(map(int, arguments.lengths.split(",")))
        check(name, lengths, device)
        print(f"{name}: well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
