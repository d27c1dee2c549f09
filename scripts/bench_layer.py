"""FLA's layer KimiDeltaAttention end to end, prefill, with flash_kda behind it and without.

    python scripts/bench_layer.py                  measure and print
    python scripts/bench_layer.py --publish        write docs/data/layer_<gpu>.json and the table
    python scripts/bench_layer.py --report docs/data/layer_h200.json     the table only

Projections, convolutions, norms and the output gate are FLA's in both cases; FLA_FLASH_KDA decides
about the core. Needs a GPU and flash-linear-attention 0.5.1 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# Appended, so that an installed flash_kda wins over the source tree, which may not be built.
sys.path.append(str(ROOT))

import bench_facts  # noqa: E402
import documents  # noqa: E402
import outputs  # noqa: E402
from bench_fla import fla_version  # noqa: E402
from bench_timing import Clock  # noqa: E402
from documents import COUNT, ERROR, LABEL, NAME, TIME, Maybe  # noqa: E402

import flash_kda  # noqa: E402
from flash_kda import console  # noqa: E402

BEGIN = "<!-- layer table: written by scripts/bench_layer.py -->"
END = "<!-- end of layer table -->"
PAGE = Path("docs") / "performance.md"
# Hidden size and heads: a share of a layer that is split over GPUs, and two whole layers.
SIZES = ((4096, 8), (4096, 32), (8192, 64))
SWITCH = "FLA_FLASH_KDA"
SCHEMA = {
    "gpu": LABEL,
    "gpu_short?": NAME,
    "flash_kda": LABEL,
    "fla": Maybe(LABEL),
    "torch": LABEL,
    "date": LABEL,
    "commit": LABEL,
    "rows": [
        {
            **dict.fromkeys(("tokens", "hidden", "heads"), COUNT),
            **dict.fromkeys(("fla_ms", "flash_kda_ms"), TIME),
            "difference": ERROR,
        }
    ],
}


class Watch:
    """Counts the calls that reach flash_kda."""

    def __init__(self) -> None:
        self.calls = 0
        self._fwd = flash_kda.fwd
        flash_kda.fwd = self

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        self.calls += 1
        self._fwd(*arguments, **keywords)


def measure(hidden: int, heads: int, tokens: int, clock: Clock, repeats: int) -> dict[str, Any]:
    from fla.layers.kda import KimiDeltaAttention

    torch.manual_seed(0)
    layer = KimiDeltaAttention(
        hidden_size=hidden, num_heads=heads, safe_gate=True, lower_bound=-5.0, layer_idx=0
    )
    layer = layer.to(clock.device).bfloat16().eval()
    x = torch.randn(1, tokens, hidden, dtype=torch.float32, device=clock.device).bfloat16()
    row: dict[str, Any] = {"hidden": hidden, "heads": heads, "tokens": tokens}
    outputs = {}
    watch = Watch()
    try:
        for name, switch in (("fla_ms", "0"), ("flash_kda_ms", "1")):
            os.environ[SWITCH] = switch
            watch.calls = 0
            with torch.inference_mode():
                outputs[name] = layer(x)[0].double()  # compiles and tunes
                clock.spin()
                row[name] = statistics.median(
                    clock.device_ms(lambda: layer(x)) for _ in range(repeats)
                )
            if bool(watch.calls) != (switch == "1"):
                raise RuntimeError(f"{SWITCH}={switch}: flash_kda was called {watch.calls} times")
    finally:
        flash_kda.fwd = watch._fwd
    theirs, ours = outputs["fla_ms"], outputs["flash_kda_ms"]
    row["difference"] = float((ours - theirs).norm() / theirs.norm())
    return row


def table(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{document['gpu']}, one sequence, FLA {document['fla']}, flash-kda "
        f"{document['flash_kda']}, torch {document['torch']}, {document['date']}, commit "
        f"`{document['commit'][:12]}`. Difference: of the two outputs, relative in the 2-norm.",
        "",
        "| tokens, hidden size, heads | FLA alone ms | with flash-kda ms | speed-up | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in document["rows"]:
        speedup = row["fla_ms"] / row["flash_kda_ms"]
        lines.append(
            f"| {row['tokens']}, {row['hidden']}, {row['heads']} | {row['fla_ms']:.3f} | "
            f"{row['flash_kda_ms']:.3f} | {speedup:.2f}x | {row['difference']:.1e} |"
        )
    return lines


def write_table(root: Path, document: dict[str, Any]) -> None:
    page = root / PAGE
    outputs.write(page, documents.between(page, BEGIN, END, "\n".join(table(document))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = console.integer(1, 2**24)
    parser.add_argument("--tokens", type=count, default=8192)
    parser.add_argument("--iters", type=count, default=30, help="timed calls per repeat")
    parser.add_argument("--repeats", type=count, default=3, help="the median one is reported")
    parser.add_argument("--publish", action="store_true", help="write the JSON and the table")
    parser.add_argument("--report", type=Path, help="write the table from this JSON only")
    arguments = parser.parse_args(argv)
    try:
        if arguments.report:
            write_table(ROOT, documents.read(arguments.report, SCHEMA, "bench_layer.py"))
            return 0
        if not torch.cuda.is_available():
            print("bench_layer.py: FLA's layer needs a GPU, and torch finds none", file=sys.stderr)
            return 1
        document = measure_all(arguments)
        documents.check(document, SCHEMA)
        print("\n".join(table(document)))
        if arguments.publish:
            name = f"layer_{document['gpu_short'].lower()}.json"
            outputs.write(ROOT / "docs" / "data" / name, json.dumps(document, indent=1) + "\n")
            write_table(ROOT, document)
    except (OSError, ValueError) as error:
        return console.failed("bench_layer.py", error)
    return 0


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every size; returns the JSON document."""
    device = torch.device("cuda")
    clock = Clock(device, warmup=5, iters=arguments.iters)
    document = {**bench_facts.collect(ROOT, device), "fla": fla_version()}
    document["rows"] = [
        measure(hidden, heads, arguments.tokens, clock, arguments.repeats)
        for hidden, heads in SIZES
    ]
    return document


if __name__ == "__main__":
    sys.exit(console.run("bench_layer.py", main))
