"""``python -m flash_kda demo``: one packed batch, its time, and its error against float64."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from . import console, ops
from .reference import recurrent_kda

HEAD_DIM = 128
GPU_LENGTHS = (1300, 547, 2048, 963, 271, 3063)
GPU_CALLS = 20
CPU_LENGTHS = (130, 54, 204, 1, 0, 307)
MAX_HEADS = 1024
TOLERANCE = 6e-3
"""Largest relative error that counts as right for bf16 inputs and outputs."""


def device_argument(text: str) -> torch.device:
    """The device a command line names: cpu, cuda, or cuda:<index>, if torch finds it here.

    Raises:
        argparse.ArgumentTypeError: any other text, or no such device.
    """
    match = re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs cpu, cuda or cuda:<index>")
    if text == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reason = "finds no GPU here" if torch.version.cuda else "is built without CUDA"
        raise argparse.ArgumentTypeError(f"got {text!r}, but torch {torch.__version__} {reason}")
    if match[1] is None:
        return torch.device("cuda")
    index = int(match[1][1:])
    if index >= count:
        raise argparse.ArgumentTypeError(f"got {text!r}; torch finds cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ``demo`` command to ``parser``."""
    parser.add_argument(
        "--device",
        type=device_argument,
        help="cpu, cuda or cuda:<index> (default: cuda when present)",
    )
    parser.add_argument(
        "--heads",
        type=console.integer(1, MAX_HEADS),
        help="number of heads (default: 32, on the CPU 4)",
    )
    parser.add_argument(
        "--seed", type=console.integer(0, 2**63 - 1), default=0, help="seed of the random inputs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its table.

    Returns 0 when the results are right, 1 when they are not or there are none, and 2 when
    FLASH_KDA_PATH names no path.
    """
    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    lengths = GPU_LENGTHS if on_gpu else CPU_LENGTHS
    heads = arguments.heads or (32 if on_gpu else 4)
    try:
        where = torch.cuda.get_device_name(device) if on_gpu else "CPU, reference path"
        print(f"flash_kda demo on {device} ({where})")
        sizes = ", ".join(map(str, lengths))
        print(f"{len(lengths)} packed sequences of {sizes} tokens, {heads} heads")
        with torch.inference_mode():
            milliseconds, errors = _measure(lengths, heads, device, arguments.seed)
    except (RuntimeError, ValueError) as error:
        # FlashKDAError and torch's own, such as too little memory: RuntimeErrors, all of them.
        first_line = console.line(str(error).partition("\n")[0])
        print(f"\n{type(error).__name__}: {first_line}")
        if on_gpu and not isinstance(error, ValueError):
            print("\nThe CPU path works everywhere: python -m flash_kda demo --device cpu")
        return 2 if isinstance(error, ValueError) else 1
    rows = [("time of one call", f"{milliseconds:.3f} ms")]
    rows.append(("tokens per second", f"{sum(lengths) / milliseconds * 1e3:,.0f}"))
    rows += [(name, f"{error:.1e}  (at most {TOLERANCE:.0e})") for name, error in errors.items()]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    right = all(error <= TOLERANCE for error in errors.values())
    verdict = "agrees with" if right else "DIFFERS from"
    print(f"\n{verdict} the float64 recurrence (relative errors in the 2-norm)")
    return 0 if right else 1


def _measure(
    lengths: tuple[int, ...], heads: int, device: torch.device, seed: int
) -> tuple[float, dict[str, float]]:
    """Time of one call in ms, and its relative errors by name."""
    inputs = _inputs(lengths, heads, device, seed)
    out = torch.empty_like(inputs["v"])
    final_state = torch.empty_like(inputs["initial_state"])

    def call() -> None:
        ops.fwd(**inputs, out=out, final_state=final_state)

    call()
    milliseconds = _time(call, device)
    expected_out, expected_state = recurrent_kda(**inputs)
    errors = {
        "error of out": _relative_error(out, expected_out),
        "error of final state": _relative_error(final_state, expected_state),
    }
    return milliseconds, errors


def _inputs(
    lengths: tuple[int, ...], heads: int, device: torch.device, seed: int
) -> dict[str, Any]:
    """Random bf16 inputs [1, sum(lengths), heads, 128], fp32 states and int64 cu_seqlens."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    wide = (1, sum(lengths), heads, HEAD_DIM)
    bounds = torch.tensor((0, *lengths), dtype=torch.int64, device="cpu").cumsum(0)
    state = 0.1 * normal(len(lengths), heads, HEAD_DIM, HEAD_DIM)
    inputs: dict[str, Any] = {
        name: normal(*wide).bfloat16().to(device) for name in ("q", "k", "v", "g")
    }
    inputs |= {
        "beta": normal(*wide[:3]).bfloat16().to(device),
        "A_log": normal(heads).mul(0.5).to(device),
        "dt_bias": normal(heads, HEAD_DIM).mul(0.5).to(device),
        "initial_state": state.to(device),
        "cu_seqlens": bounds.to(device),
    }
    return {**inputs, "scale": HEAD_DIM**-0.5, "lower_bound": -5.0}


def _time(call: Callable[[], None], device: torch.device) -> float:
    """Median time of one call in ms: by CUDA events on a GPU, else by the clock."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(GPU_CALLS + 1)]
            events[0].record()
            for event in events[1:]:
                call()
                event.record()
            torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = actual.to(expected.dtype) - expected
    return float(difference.norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
