"""Benchmark flash_kda.fwd, and FLA's chunk_kda beside it when FLA is importable.

    python scripts/bench.py                             everything
    python scripts/bench.py --cases 'n1_*,mixed_h96'    some cases, printed only
    python scripts/bench.py --json out.json             the measurements to a file as well
    python scripts/bench.py --report docs/data/bench_h200.json    only the report, no GPU needed

FLA is tuned for all cases by parallel processes before anything is timed (bench_tune.py); what they
find stays in build/fla-tuning-<gpu>.

A complete run on a GPU rewrites docs/data/bench_<gpu>.json, BENCHMARK_<GPU>.md, the chart and the
tables in README.md, README.zh.md and docs/performance.md (unless --no-report). A case that fails is
reported and the others still run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# Appended, so that an installed flash_kda wins over the source tree, which may not be built.
sys.path.append(str(ROOT))

import bench_cases  # noqa: E402
import bench_facts  # noqa: E402
import bench_report  # noqa: E402
import bench_tune  # noqa: E402
import outputs  # noqa: E402
from bench_fla import FLA  # noqa: E402
from bench_timing import REST_S, Clock  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import abi, console  # noqa: E402
from flash_kda.demo import device_argument  # noqa: E402

HOST_CALLS_SMALL = 2000
HOST_CALLS_PER_ROW = 200


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="case names or globs, comma-separated (default: all)")
    parser.add_argument("--states", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--list", action="store_true", help="print the names of the standard cases")
    parser.add_argument(
        "--json", type=outputs.argument, help="write the measurements to this file as well"
    )
    parser.add_argument(
        "--warmup", type=console.integer(0, 10**6), default=10, help="calls before each measurement"
    )
    parser.add_argument(
        "--iters", type=console.integer(1, 10**6), default=50, help="timed calls per repeat"
    )
    parser.add_argument(
        "--repeats",
        type=console.integer(1, 10**6),
        default=3,
        help="repeats; the median one is reported",
    )
    parser.add_argument(
        "--rest",
        type=console.number(0, 3600),
        default=REST_S,
        help="seconds the GPU rests before each repeat, lest it lower its clock",
    )
    parser.add_argument("--no-fla", action="store_true", help="do not measure FLA")
    parser.add_argument(
        "--fla-workers",
        type=console.integer(0, 4096),
        default=os.cpu_count() or 1,
        help="processes that tune FLA (default: one per CPU); 0 tunes it here, at its first calls",
    )
    parser.add_argument(
        "--device",
        type=device_argument,
        help="cuda (the default), cuda:<index> or cpu",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep rows that --json already has from the same build",
    )
    parser.add_argument(
        "--no-report", action="store_true", help="leave docs and README as they are"
    )
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="only write the report from JSON"
    )
    arguments = parser.parse_args(argv)
    if arguments.resume and arguments.json is None:
        parser.error("--resume needs --json")
    return arguments


def pick_device(asked: torch.device | None) -> torch.device:
    """The device to measure, with its index filled in; the CPU, which takes hours, if asked for."""
    if asked is None and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU here; --device cpu times the reference path: name small cases with "
            "it, such as --cases n1_h4_t64"
        )
    device = asked or torch.device("cuda")
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """In the 2-norm; None when something is not finite, which JSON has no number for."""
    difference = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
    return difference if math.isfinite(difference) else None


def measure_fla(fla: FLA, inputs: dict[str, Any], clock: Clock, repeats: int) -> dict[str, Any]:
    """FLA's times on these inputs; a failure is recorded in the row, not raised."""
    try:
        call = fla.bind(inputs)
        # The first calls compile and autotune, or load what the workers left on disk, which the
        # time of the first one tells apart. Clock's own warm-up comes on top of them.
        begin = time.perf_counter()
        call()
        clock.synchronize()
        first = time.perf_counter() - begin
        out = call()
        clock.synchronize()
        difference = relative_difference(inputs["out"], out)
        times = [clock.device_ms(call) for _ in range(repeats)]
    except Exception as error:
        return {"fla_ms": None, "fla_error": f"{type(error).__name__}: {error}"}
    return {
        "fla_ms": statistics.median(times),
        "fla_difference": difference,
        "fla_first_call_s": round(first, 3),
    }


def measure_case(
    case: bench_cases.Case, states: str, clock: Clock, repeats: int, gpu: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row for ``case`` without its FLA part, and the inputs it was measured on."""
    inputs = bench_cases.make_inputs(case, states, clock.device)

    def call() -> None:
        flash_kda.fwd(**inputs)

    call()
    times = [clock.device_ms(call) for _ in range(repeats)]
    if not bool(torch.isfinite(inputs["out"]).all()):
        raise RuntimeError("the output holds values that are not finite")
    host_calls = HOST_CALLS_PER_ROW if clock.on_gpu else 3
    row = {
        "flash_kda_ms": statistics.median(times),
        "flash_kda_ms_repeats": times,
        "path": bench_facts.path_name(case, clock.device),
        "host_us": clock.host_us(call, host_calls),
        "workspace_bytes": bench_facts.workspace_bytes(case),
        "floor_ms": bench_cases.floor_ms(case, states, gpu),
    }
    return row, inputs


def small_call_host_us(clock: Clock) -> float:
    """Host time of the smallest ordinary call: H = 8, T = 16, no workspace given."""
    inputs = bench_cases.make_inputs(bench_cases.parse_case("n1_h8_t16"), "fp32", clock.device)
    calls = HOST_CALLS_SMALL if clock.on_gpu else 5

    def call() -> None:
        flash_kda.fwd(**inputs)

    for _ in range(min(calls, 50)):
        call()
    return clock.host_us(call, calls)


def row_line(row: dict[str, Any]) -> str:
    if row.get("error"):
        return f"{row['case']:16} {row['states']:5} FAILED: {row['error']}"
    fla = f"{row['fla_ms']:9.4f}" if row["fla_ms"] is not None else "        -"
    return (
        f"{row['case']:16} {row['states']:5} {row['flash_kda_ms']:9.4f} ms   FLA {fla} ms   "
        f"host {row['host_us']:7.1f} us   {row['path']}"
    )


def write_json(path: Path, result: dict[str, Any]) -> None:
    outputs.write(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def kept_rows(path: Path, result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Good rows of an earlier run of the same build, card and settings, by case and states."""
    if not path.exists():
        return {}
    earlier = bench_report.read_document(path)
    for key in ("gpu", "commit", "csrc_sha256", "compiler", "torch", "fla", "settings"):
        if earlier.get(key) != result[key]:
            print(f"not resuming {path}: {key} is {earlier.get(key)!r} there, {result[key]!r} here")
            return {}
    rows = [row for row in earlier["rows"] if not row.get("error")]
    return {(row["case"], row["states"]): row for row in rows}


def measure_row(
    case: bench_cases.Case,
    states: str,
    clock: Clock,
    repeats: int,
    gpu: str,
    fla: FLA | None,
    fla_part: dict[str, Any] | None,
) -> dict[str, Any]:
    """The JSON row of one case; ``error`` in it says that, and why, it has no numbers.

    ``fla_part`` is FLA's share of a row of the same case: FLA takes fp32 states only, so the rows
    of a case that differ in our state dtype share one measurement of it.
    """
    row: dict[str, Any] = {
        "case": case.name,
        "states": states,
        "N": case.sequences,
        "H": case.heads,
        "tokens": case.tokens,
        "flash_kda_ms": None,
        "fla_ms": None,
        "path": None,
        "host_us": None,
    }
    try:
        part, inputs = measure_case(case, states, clock, repeats, gpu)
        row |= part
        if fla is not None and fla.available:
            row |= fla_part or measure_fla(fla, inputs, clock, repeats)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def open_fla(arguments: argparse.Namespace, device: torch.device, gpu: str) -> FLA | None:
    """FLA as this run measures it, or None when it does not."""
    if arguments.no_fla or device.type != "cuda":
        return None
    if arguments.fla_workers:
        bench_tune.keep_results(ROOT / "build" / f"fla-tuning-{gpu.lower()}")
    return FLA()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every selected case; returns the JSON document."""
    cases = bench_cases.select_cases(arguments.cases)
    device = pick_device(arguments.device)
    forced = os.environ.get("FLASH_KDA_PATH")
    launcher = abi.launcher_or_none()
    if forced and launcher is not None:
        launcher.path_id(forced)  # refuses an unknown name once, instead of in every row
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = bench_facts.collect(ROOT, device)
    fla = open_fla(arguments, device, facts["gpu_short"])
    tune = fla is not None and fla.available and arguments.fla_workers > 0
    clock = Clock(device, arguments.warmup, arguments.iters, arguments.rest)
    result = facts | {
        "fla": fla.version if fla is not None and fla.available else None,
        "fla_error": fla.error if fla is not None else "not measured",
        "settings": {
            "warmup": arguments.warmup,
            "iters": arguments.iters,
            "repeats": arguments.repeats,
            "rest_s": clock.rest_s,
            "l2_flush_bytes": clock.flush_bytes,
            "forced_path": forced,
        }
        | ({"fla": bench_tune.SETTING} if tune else {}),
        "small_call_host_us": None,
        "rows": [],
    }
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)
    kept = kept_rows(arguments.json, result) if arguments.resume else {}
    states_list = ("fp32", "bf16") if arguments.states == "both" else (arguments.states,)
    if tune:
        # The rows of a case share the measurement of FLA that comes with the first of them.
        missing = [case for case in cases if (case.name, states_list[0]) not in kept]
        result["notes"] += bench_tune.tune(missing, device, arguments.fla_workers)
    begin = time.monotonic()
    clock.spin()
    try:
        result["small_call_host_us"] = small_call_host_us(clock)
    except Exception as error:
        result["small_call_error"] = f"{type(error).__name__}: {error}"
        print(f"small call FAILED: {result['small_call_error']}", flush=True)
    for case in cases:
        fla_part: dict[str, Any] | None = None
        for states in states_list:
            row = kept.get((case.name, states)) or measure_row(
                case, states, clock, arguments.repeats, result["gpu_short"], fla, fla_part
            )
            if row.keys() & {"fla_difference", "fla_error"}:
                fla_part = {key: row[key] for key in row if key.startswith("fla_")}
            print(f"{time.monotonic() - begin:6.1f} s  {row_line(row)}", flush=True)
            result["rows"].append(row)
            if arguments.json is not None:
                write_json(arguments.json, result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.list:
        print("\n".join(bench_cases.STANDARD_CASES))
        return 0
    try:
        if arguments.report is not None:
            written = bench_report.write_report(ROOT, arguments.report)
            print("wrote " + ", ".join(str(path) for path in written))
            return 0
        return measure(arguments)
    except (OSError, ValueError) as error:
        return console.failed("bench.py", error)


def measure(arguments: argparse.Namespace) -> int:
    """Run the benchmark and, when it is complete, write the report; returns the exit status."""
    with torch.inference_mode():
        result = run(arguments)
    complete = arguments.cases is None and arguments.states != "bf16"
    if complete and result["device"] != "cpu" and not arguments.no_report:
        data = ROOT / "docs" / "data" / f"bench_{result['gpu_short'].lower()}.json"
        write_json(data, result)
        written = bench_report.write_report(ROOT, data)
        print("wrote " + ", ".join(str(path) for path in [data, *written]))
    failed = [row for row in result["rows"] if row.get("error")]
    if failed:
        print(f"{len(failed)} of {len(result['rows'])} rows failed", file=sys.stderr)
    return 1 if failed or result.get("small_call_error") else 0


if __name__ == "__main__":
    sys.exit(console.run("bench.py", main))
