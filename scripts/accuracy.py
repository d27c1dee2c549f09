"""Error of flash_kda.fwd against the recurrence in float64, with FLA's Triton kernels beside it.

    python scripts/accuracy.py                       measure and print
    python scripts/accuracy.py --publish             and write the JSON, the plot and the page
    python scripts/accuracy.py --report docs/data/accuracy_h200.json    write plot and page again

--publish writes docs/data/accuracy_<gpu>.json, docs/assets/accuracy_<gpu>.svg and the tables in
docs/accuracy.md. Without a GPU the CPU path is measured, in smaller cases.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
# Appended, so that an installed flash_kda wins over the source tree, which may not be built.
sys.path.append(str(ROOT))

import accuracy_report  # noqa: E402
import bench_facts  # noqa: E402
import documents  # noqa: E402
import outputs  # noqa: E402
from bench_fla import FLA  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import console  # noqa: E402
from flash_kda.demo import MAX_HEADS, device_argument  # noqa: E402
from flash_kda.reference import recurrent_kda  # noqa: E402

WIDTH = 128
SEED = 20251030
LENGTHS = (16, 64, 256, 1024, 4096, 16384)
BOUNDS = (-5.0, -2.0, -1.0, -0.1, -0.01, 0.0)
GATES = (-30.0, -8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 30.0)
BETAS = (-2.0, 0.0, 2.0, 4.0, 8.0)
MOST_CALLS = 16
"""For a point. Where few tokens, or a key for each head, decide the error, one call says little."""
TOKENS_OF_POINT = 8192  # in all calls together, as far as MOST_CALLS allows
HEAD_DIMENSION = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), 2),
    **dict.fromkeys(("A_log", "dt_bias"), 0),
    "initial_state": 1,
}

Inputs = dict[str, Any]


def make_inputs(tokens: int, heads: int, device: torch.device) -> Inputs:
    """Ordinary random inputs of one sequence."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device=device)

    shape = (1, tokens, heads, WIDTH)
    return {
        **{name: normal(*shape).bfloat16() for name in ("q", "k", "v", "g")},
        "beta": normal(*shape[:3]).bfloat16(),
        "scale": WIDTH**-0.5,
        "A_log": uniform(heads),
        "dt_bias": uniform(heads, WIDTH),
        "lower_bound": -5.0,
        "initial_state": normal(1, heads, WIDTH, WIDTH),
        "cu_seqlens": None,
    }


def with_gate(inputs: Inputs, centre: float) -> Inputs:
    """Gate inputs around a value: very negative ones keep everything, large ones forget it."""
    return {**inputs, "g": (inputs["g"].float() + centre).bfloat16()}


def with_one_key(inputs: Inputs, beta: float) -> Inputs:
    """One key all over, as a run of one token gives: the chunks' triangular systems at their worst.

    Keys decay weakly and step sizes are near one.
    """
    key = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    return {
        **with_gate(inputs, -8.0),
        "q": key.clone(),
        "k": key,
        "beta": torch.full_like(inputs["beta"], beta),
    }


def calls_for(tokens: int, most: int) -> int:
    return max(1, min(most, TOKENS_OF_POINT // tokens))


def sweeps(
    lengths: Sequence[int], tokens: int, heads: int, most: int, device: torch.device
) -> Iterator[tuple[str, str, Callable[[], Inputs]]]:
    """Name of a sweep, name of a point of it, and its inputs, with the heads of all its calls."""
    for sweep, make in (("length", make_inputs), ("length, no decay", _kept)):
        for count in lengths:
            yield sweep, str(count), partial(make, count, heads * calls_for(count, most), device)
    base = make_inputs(tokens, heads * calls_for(tokens, most), device)
    for centre in GATES:
        yield "gate input around", f"{centre:g}", partial(with_gate, base, centre)
    for bound in BOUNDS:
        yield "lower_bound", f"{bound:g}", partial(dict, base, lower_bound=bound)
    base = make_inputs(tokens, heads * most, device)
    for beta in BETAS:
        yield "one key, beta logit", f"{beta:g}", partial(with_one_key, base, beta)


def _kept(tokens: int, heads: int, device: torch.device) -> Inputs:
    return with_gate(make_inputs(tokens, heads, device), -30.0)


def relative_error(x: Tensor, truth: Tensor) -> float | None:
    """In the 2-norm; None when something is not finite, which JSON has no number for."""
    error = float((x.double() - truth).norm() / truth.norm())
    return error if math.isfinite(error) else None


def calls_of(inputs: Inputs, heads: int) -> Iterator[Inputs]:
    """The inputs of calls with so many heads each."""
    for first in range(0, inputs["q"].shape[2], heads):
        own = {
            name: inputs[name].narrow(dimension, first, heads).contiguous()
            for name, dimension in HEAD_DIMENSION.items()
        }
        yield {**inputs, **own}


def run_ours(inputs: Inputs) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(inputs["v"])
    state = torch.empty_like(inputs["initial_state"])
    flash_kda.fwd(**inputs, out=out, final_state=state)
    return out, state


def measure(make: Callable[[], Inputs], heads: int, fla: FLA | None) -> dict[str, Any]:
    inputs = make()
    truth = recurrent_kda(**inputs)
    calls = list(calls_of(inputs, heads))
    row: dict[str, Any] = {"tokens": inputs["q"].shape[1], "calls": len(calls)}
    callers: dict[str, Callable[[Inputs], tuple[Tensor, Tensor]]] = {"flash_kda": run_ours}
    if fla is not None:
        callers["fla"] = lambda own: fla.bind_both(own)()
    for name, run in callers.items():
        try:
            with torch.inference_mode():
                outs, states = zip(*(run(own) for own in calls), strict=True)
        except ValueError:
            if name != "fla":
                raise
            continue  # FLA refuses some inputs, as a lower_bound of 0; then its column stays empty
        joined = torch.cat(outs, HEAD_DIMENSION["v"])
        results = joined, torch.cat(states, HEAD_DIMENSION["initial_state"])
        errors = [relative_error(x, y) for x, y in zip(results, truth, strict=True)]
        row[name] = dict(zip(("out", "final_state"), errors, strict=True))
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", type=device_argument, help="cpu or cuda (default: cuda when present)"
    )
    parser.add_argument(
        "--heads", type=console.integer(1, MAX_HEADS), help="default: 8, on the CPU 2"
    )
    parser.add_argument(
        "--max-tokens",
        type=console.integer(1, 2**24),
        help="longest sequence (default: 16384, CPU 256)",
    )
    parser.add_argument("--no-fla", action="store_true", help="do not measure FLA")
    parser.add_argument("--publish", action="store_true", help="write JSON, plot and page")
    parser.add_argument("--report", type=Path, help="write plot and page from this JSON only")
    arguments = parser.parse_args(argv)
    try:
        if arguments.report:
            schema = accuracy_report.SCHEMA
            document = documents.read(arguments.report, schema, "accuracy.py")
        else:
            document = measure_all(arguments)
            if not arguments.publish:
                return 0
            documents.check(document, accuracy_report.SCHEMA)
            name = f"accuracy_{document['gpu_short'].lower()}.json"
            outputs.write(ROOT / "docs" / "data" / name, json.dumps(document, indent=1) + "\n")
        accuracy_report.write(ROOT, document)
    except (OSError, ValueError) as error:
        return console.failed("accuracy.py", error)
    return 0


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and print every point of every sweep; returns the JSON document."""
    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    heads = arguments.heads or (8 if on_cuda else 2)
    longest = arguments.max_tokens or (LENGTHS[-1] if on_cuda else 256)
    lengths = [n for n in LENGTHS if n <= longest] or [longest]
    fla = FLA()
    beside = fla if fla.available and on_cuda and not arguments.no_fla else None
    document = {
        **bench_facts.collect(ROOT, device),
        "heads": heads,
        "fla": beside and beside.version,
    }
    document["rows"] = []
    most = MOST_CALLS if on_cuda else 1
    for sweep, point, make in sweeps(lengths, min(2048, longest), heads, most, device):
        row = {"sweep": sweep, "point": point, **measure(make, heads, beside)}
        document["rows"].append(row)
        print(accuracy_report.line(row), flush=True)
    return document


if __name__ == "__main__":
    sys.exit(console.run("accuracy.py", main))
