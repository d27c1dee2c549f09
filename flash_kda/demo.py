"""``python -m flash_kda demo``: one packed batch, its time, and its error against float64."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from . import ops
from .errors import FlashKDAError
from .reference import recurrent_kda

HEAD_DIM = 128
GPU_LENGTHS = (1300, 547, 2048, 963, 271, 3063)
GPU_CALLS = 20
CPU_LENGTHS = (130, 54, 204, 1, 0, 307)
TOLERANCE = 6e-3
"""Largest relative error that counts as right for bf16 inputs and outputs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ``demo`` command to ``parser``."""
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: cuda when present)")
    parser.add_argument("--heads", type=int, help="number of heads (default: 32, on the CPU 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its table; 0 when the results are right, else 1."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    lengths = GPU_LENGTHS if on_gpu else CPU_LENGTHS
    heads = arguments.heads or (32 if on_gpu else 4)
    where = torch.cuda.get_device_name(device) if on_gpu else "CPU, reference path"
    print(f"flash_kda demo on {device} ({where})")
    print(
        f"{len(lengths)} packed sequences of {', '.join(map(str, lengths))} tokens, {heads} heads"
    )
    with torch.inference_mode():
        inputs = _inputs(lengths, heads, device, arguments.seed)
        out = torch.empty_like(inputs["v"])
        final_state = torch.empty_like(inputs["initial_state"])

        def call() -> None:
            ops.fwd(**inputs, out=out, final_state=final_state)

        try:
            call()
            milliseconds = _time(call, device)
        except FlashKDAError as error:
            print(f"\n{type(error).__name__}: {error}")
            if on_gpu:
                print("\nThe CPU path works everywhere: python -m flash_kda demo --device cpu")
            return 1
        expected_out, expected_state = recurrent_kda(**inputs)
    tokens = sum(lengths)
    errors = {
        "error of out": _relative_error(out, expected_out),
        "error of final state": _relative_error(final_state, expected_state),
    }
    rows = [("time of one call", f"{milliseconds:.3f} ms")]
    rows.append(("tokens per second", f"{tokens / milliseconds * 1e3:,.0f}"))
    rows += [(name, f"{error:.1e}  (at most {TOLERANCE:.0e})") for name, error in errors.items()]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    right = all(error <= TOLERANCE for error in errors.values())
    verdict = "agrees with" if right else "DIFFERS from"
    print(f"\n{verdict} the float64 recurrence (relative errors in the 2-norm)")
    return 0 if right else 1


def _inputs(
    lengths: tuple[int, ...], heads: int, device: torch.device, seed: int
) -> dict[str, Any]:
    """Random bf16 inputs [1, sum(lengths), heads, 128], fp32 states and int64 cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    wide = (1, sum(lengths), heads, HEAD_DIM)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
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
