"""Draws whole calls of flash_kda.fwd and looks for one that goes wrong.

    python scripts/fuzz.py --seconds 60                      random calls for a minute
    python scripts/fuzz.py --seconds 600 --seed 7 --path portable_v64
    python scripts/fuzz.py --call '{"tokens": 17, "final": "float32"}'    one call again

Shapes, layouts, types, states, pools, checkpoints, gates and extreme values are drawn together.
Results are compared with the float64 recurrence, a second run must give the same bits, and no byte
may change but those that the call is to write. On a GPU a kernel path is drawn for each; without
one the CPU path is tested.

A call that fails is made simpler as long as it fails, and printed with the command that repeats
it. Exit status 0: no failure, 1: a failure, 2: wrong options.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# Appended, so that an installed flash_kda wins over the source tree, which may not be built.
sys.path += [str(ROOT), str(ROOT / "tests")]

import fuzz_check  # noqa: E402
from fuzz_calls import Call, draw, simpler  # noqa: E402
from paths import kernel_paths  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import abi, console  # noqa: E402
from flash_kda.demo import device_argument  # noqa: E402

HANG_SECONDS = 120
"""A call and its comparison take seconds; one that takes this long hangs."""
SHRINK_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    threads = torch.get_num_threads()
    if options.device.type == "cpu":
        # The calls are small: threads would wait for each other more than they compute.
        torch.set_num_threads(1)
    try:
        return _fuzz(options)
    finally:
        torch.set_num_threads(threads)


def _fuzz(options: argparse.Namespace) -> int:
    device: torch.device = options.device
    if options.call is not None:
        reason = attempt(options.call, device)
        if reason is None:
            print("no failure")
            return 0
        _report(options.call, reason, device, "this call")
        return 1
    rng = random.Random(options.seed)
    paths = _paths(device, options.path)
    counts: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    done = 0
    while time.monotonic() < end:
        call = draw(rng, options.largest, paths)
        reason = attempt(call, device)
        if reason is not None:
            print(f"call {done + 1} of seed {options.seed} fails: {reason}", flush=True)
            print(f"  {call.to_json()}", flush=True)
            smallest, reason, tried = shrink(call, reason, _attempt_again(device))
            _report(smallest, reason, device, f"the smallest failing call of {tried} tried")
            return 1
        counts.update(call.features())
        done += 1
    print(f"{done} calls in {options.seconds:g} s on {device}, seed {options.seed}: no failure")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


def attempt(call: Call, device: torch.device) -> str | None:
    """Why a call fails, or None."""
    try:
        with _watched(call, device):
            fuzz_check.check(call, device)
    except Exception as error:  # whatever it is, it is the finding
        text = " ".join(str(error).split())
        known = isinstance(error, (AssertionError, fuzz_check.Problem))
        return text[:500] if known and text else f"{type(error).__name__}: {text[:500]}"
    return None


def shrink(
    call: Call, reason: str, fails: Callable[[Call], str | None], seconds: float = SHRINK_SECONDS
) -> tuple[Call, str, int]:
    """A call that fails in the same way, of which nothing simpler was found to.

    Args:
        call: a failing one.
        reason: why it fails.
        fails: why a call fails, or None.
        seconds: how long to look.

    Returns:
        The call, why it fails, and how many were tried.
    """
    end, tried, progress = time.monotonic() + seconds, 0, True
    known: set[Call] = set()
    while progress:
        progress = False
        for candidate in simpler(call):
            if candidate in known:
                continue
            if time.monotonic() > end:
                return call, reason, tried
            known.add(candidate)
            tried += 1
            found = fails(candidate)
            if found is not None and _kind(found) == _kind(reason):
                call, reason, progress = candidate, found, True
                break
    return call, reason, tried


def _kind(reason: str) -> str:
    """Equal for failures of one kind: all wrong values, or texts that differ in numbers."""
    return "values" if " error " in reason else re.sub(r"\d+", "", reason)[:40]


def _attempt_again(device: torch.device) -> Callable[[Call], str | None]:
    """Tries simpler calls in this process, or in others when a fault has lost it the GPU."""

    def elsewhere(call: Call) -> str | None:
        command = [sys.executable, __file__, "--device", str(device), "--call", call.to_json()]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return None
        lines = (done.stdout.strip() or done.stderr.strip() or "a crash").splitlines()
        return f"{lines[0]} (exit status {done.returncode})"

    def anywhere(call: Call) -> str | None:
        return attempt(call, device) if _usable(device) else elsewhere(call)

    return anywhere


def _usable(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, dtype=torch.uint8, device=device).item()
    except RuntimeError:
        return False
    return True


@contextmanager
def _watched(call: Call, device: torch.device) -> Iterator[None]:
    """Ends the process with a report if the call hangs: a kernel cannot be stopped."""

    def hung() -> None:
        _report(call, f"hangs: no result after {HANG_SECONDS} s", device, "this call", detail=False)
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(HANG_SECONDS, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(call: Call, reason: str, device: torch.device, what: str, detail: bool = True) -> None:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU path"
    print(f"{reason}")
    print(f"{what}, on {where}, flash_kda {flash_kda.__version__}, torch {torch.__version__}:")
    if detail:
        # On the CPU: after a fault the GPU may not answer any more.
        try:
            lines = fuzz_check.describe(fuzz_check.Subject(call, torch.device("cpu")))
        except Exception as error:  # what fails may be the making of its tensors
            lines = [f"its tensors cannot be made: {' '.join(str(error).split())[:200]}"]
        print("\n".join(f"  {line}" for line in lines))
    print("again:")
    print(f"  python scripts/fuzz.py --device {device} --call '{call.to_json()}'")


def _paths(device: torch.device, name: str | None) -> list[str | None]:
    if name is not None:
        return [name]
    return [None, *kernel_paths(device)]


def _call(text: str) -> Call:
    try:
        return Call.from_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=console.number(1e-3, 1e9),
        default=60.0,
        help="how long to draw calls (60)",
    )
    parser.add_argument(
        "--seed",
        type=console.integer(0, 2**63),
        help="which calls are drawn; fresh ones without it",
    )
    parser.add_argument("--device", type=device_argument, help="cpu or cuda; a GPU if there is one")
    parser.add_argument("--path", help="the one kernel path to run, as doctor names them")
    parser.add_argument(
        "--largest",
        type=console.integer(1, 2**31),
        help="most tokens of a call (6000; 300 on a CPU)",
    )
    parser.add_argument("--call", type=_call, help="run one call, as a failure prints it")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.largest is None:
        options.largest = 6000 if options.device.type == "cuda" else 300
    if options.path is not None and (launcher := abi.launcher_or_none()) is not None:
        try:
            launcher.path_id(options.path)
        except ValueError as error:
            parser.error(f"--path: {error}")
    if options.seed is None:
        options.seed = secrets.randbits(31)
    return options


if __name__ == "__main__":
    sys.exit(console.run("fuzz.py", main))
