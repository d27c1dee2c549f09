"""Tune FLA's Triton kernels for all cases of a benchmark at once, before anything is timed.

    python scripts/bench_tune.py --device cuda:0 --lock FILE n1_h12_t8192 n1_h12_t1024

is one worker: it calls FLA on its cases and leaves compiled kernels and tuning results in Triton's
cache, where the benchmark's first calls find them. ``tune`` runs one worker for each number of
heads and kind of packing. FLA's tuning keys hold these two and, for the norm of q and k, the number
of rows in steps of 65536.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from bench_cases import Case, make_inputs, parse_case
from bench_fla import FLA

# A worker that takes longer is ended; alone, a combination takes about 100 s on an H200's host.
LIMIT_S = 300.0

# Triton's own defaults are 25 and 100 ms for each configuration of each kernel.
WARMUP_MS = 3
RUNS_MS = 15

SETTING = (
    "in the same process; its configurations were tuned beforehand by parallel processes that took "
    f"turns on the GPU, with {WARMUP_MS} ms of warm-up and {RUNS_MS} ms of runs each"
)

Benchmarker = Callable[..., Any]


def keep_results(folder: Path) -> None:
    """Let Triton keep what it compiles and tunes in ``folder``; to be called before FLA's import.

    A TRITON_CACHE_DIR that is already set stays. A folder of our own keeps results of short tuning
    out of the user's cache, and those of one card from another of the same architecture, which
    Triton does not tell apart.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
    os.environ["FLA_CACHE_RESULTS"] = "1"  # FLA's default
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"  # for kernels that do not ask for it themselves


def group_cases(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases that share FLA's tuning keys, in their order: the first of them is tuned on."""
    groups: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.heads, case.sequences > 1), []).append(case)
    return list(groups.values())


def group_title(group: Sequence[Case]) -> str:
    return f"H = {group[0].heads}, {'packed' if group[0].sequences > 1 else 'one sequence'}"


def worker_command(group: Sequence[Case], device: torch.device, lock: Path) -> list[str]:
    options = ["--device", str(device), "--lock", str(lock)]
    return [sys.executable, str(Path(__file__).resolve()), *options, *(case.name for case in group)]


def run_worker(command: Sequence[str], limit_s: float) -> tuple[float, str | None]:
    """Run one worker; returns the seconds it took, and why it failed or None."""
    begin = time.monotonic()
    problem = None
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            problem = f"exit status {done.returncode}: {lines[-1]}"
    except subprocess.TimeoutExpired:
        problem = f"ended after {limit_s:.0f} s"
    except OSError as error:
        problem = f"not started: {error}"
    return time.monotonic() - begin, problem


def tune(
    cases: Sequence[Case], device: torch.device, workers: int, limit_s: float = LIMIT_S
) -> list[str]:
    """Tune for ``cases`` by up to ``workers`` processes; returns a note on each group that failed.

    FLA tunes such a group in the calling process, at its first call.
    """
    groups = group_cases(cases)
    notes: list[str] = []
    if not groups:
        return notes
    begin = time.monotonic()
    workers = min(workers, len(groups))
    print(f"tuning FLA for {len(groups)} groups of cases, {workers} at a time", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        lock = Path(folder) / "gpu.lock"
        jobs = {
            pool.submit(run_worker, worker_command(group, device, lock), limit_s): group
            for group in groups
        }
        for job in as_completed(jobs):
            title = group_title(jobs[job])
            seconds, problem = job.result()
            print(f"  {title:22} {seconds:6.1f} s  {problem or 'tuned'}", flush=True)
            if problem:
                notes.append(f"FLA was tuned in the benchmark's process for {title} ({problem})")
                print(f"note: {notes[-1]}", file=sys.stderr, flush=True)
    print(f"FLA tuned in {time.monotonic() - begin:.1f} s", flush=True)
    return notes


def in_turns(benchmark: Benchmarker, lock: Path) -> Benchmarker:
    """``triton.testing.do_bench``, shorter, and never in two processes at the same time.

    The first call compiles, which takes most of the time and needs no turn.
    """

    def do_bench(kernel_call: Callable[[], Any], **options: Any) -> Any:
        kernel_call()
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return benchmark(kernel_call, warmup=WARMUP_MS, rep=RUNS_MS, **options)

    return do_bench


def main(argv: Sequence[str] | None = None) -> int:
    """One worker."""
    parser = argparse.ArgumentParser(description="Tune FLA's kernels for some cases.")
    parser.add_argument("cases", nargs="+", type=parse_case)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--lock", type=Path, required=True, help="file that stands for the GPU")
    arguments = parser.parse_args(argv)
    fla = FLA()
    if not fla.available:
        print(f"bench_tune.py: FLA: {fla.error}", file=sys.stderr)
        return 1
    import triton.testing

    # Triton's autotuner looks this function up when it tunes for the first time.
    triton.testing.do_bench = in_turns(triton.testing.do_bench, arguments.lock)
    if arguments.device.type == "cuda":
        torch.cuda.set_device(arguments.device)
    with torch.inference_mode():
        for case in arguments.cases:
            fla.bind(make_inputs(case, "fp32", arguments.device))()
            if arguments.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
