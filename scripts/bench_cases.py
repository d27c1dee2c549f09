"""Benchmark cases: their names, sizes, inputs, memory floors and published baselines.

A case is named after its shape, so that a name is enough to rebuild it:

* ``n<N>_h<H>_t<T>``   one sequence (N = 1) of T tokens, H heads;
* ``n<N>x<T>_h<H>``    N packed sequences of T tokens each;
* ``mixed_h<H>``       the six packed sequences of ``MIXED``.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Any

import torch

HEAD_DIM = 128
MIXED = (1300, 547, 2048, 963, 271, 3063)
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# q, k, v and g read and out written (bf16, 128 wide), and one bf16 beta.
BYTES_PER_TOKEN_HEAD = 5 * 2 * HEAD_DIM + 2

# Measured device-to-device copy rate (bytes read + written per second) by short GPU name.
COPY_BANDWIDTH = {"H200": 4.27e12}

STANDARD_CASES = (
    "n1_h96_t8192",
    "mixed_h96",
    "n8x1024_h96",
    "n1_h64_t8192",
    "mixed_h64",
    "n8x1024_h64",
    "n1_h12_t8192",
    "n1_h12_t32768",
    "n1_h12_t131072",
    "n1_h8_t65536",
    "n8x2048_h16",
    "n128x64_h32",
    "n512x128_h8",
    "n1_h32_t1024",
    "n1_h32_t64",
    "n1_h32_t1",
    "n1_h12_t1024",
    "n1_h12_t2048",
    "n4x512_h12",
)

BASELINE_SOURCE = (
    "public FlashKDA v1, measured on the same model of card (NVIDIA H200), CUDA 13.0, 2026-11, "
    "fp32 states"
)
BASELINE_GPU = "H200"

# Milliseconds of the published FlashKDA v1 kernels; see BASELINE_SOURCE.
BASELINE_MS = {
    "n1_h96_t8192": 1.397,
    "mixed_h96": 1.391,
    "n8x1024_h96": 1.195,
    "n1_h64_t8192": 1.192,
    "mixed_h64": 1.027,
    "n8x1024_h64": 0.812,
    "n1_h12_t8192": 0.856,
    "n1_h12_t32768": 3.302,
    "n1_h12_t131072": 13.20,
    "n1_h8_t65536": 6.345,
    "n8x2048_h16": 0.449,
    "n128x64_h32": 0.684,
    "n512x128_h8": 1.125,
    "n1_h32_t1024": 0.154,
    "n1_h32_t64": 0.034,
    "n1_h32_t1": 0.027,
}
BASELINE_HOST_US = 55.0


@dataclass(frozen=True)
class Case:
    """One shape: ``lengths`` tokens per sequence and ``heads`` heads."""

    name: str
    lengths: tuple[int, ...]
    heads: int

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def title(self) -> str:
        """Human-readable shape, such as ``8 x 1024, H = 96``."""
        if self.lengths == MIXED:
            shape = f"{self.sequences} mixed"
        else:
            shape = f"{self.sequences} x {self.lengths[0]}"
        return f"{shape}, H = {self.heads}"


def parse_case(name: str) -> Case:
    """Build the case a name describes; ValueError when it describes none."""
    if match := re.fullmatch(r"mixed_h(\d{1,9})", name, re.ASCII):
        case = Case(name, MIXED, int(match[1]))
    elif match := re.fullmatch(r"n1_h(\d{1,9})_t(\d{1,9})", name, re.ASCII):
        case = Case(name, (int(match[2]),), int(match[1]))
    elif match := re.fullmatch(r"n(\d{1,6})x(\d{1,9})_h(\d{1,9})", name, re.ASCII):
        case = Case(name, (int(match[2]),) * int(match[1]), int(match[3]))
    else:
        raise ValueError(
            f"unknown case {name!r}: expected a name like n1_h96_t8192, n8x1024_h96 or mixed_h96, "
            f"or a glob over {', '.join(STANDARD_CASES)}"
        )
    if case.heads < 1 or case.sequences < 1:
        raise ValueError(f"case {name!r} needs at least one sequence and one head")
    return case


def select_cases(patterns: str | None) -> list[Case]:
    """Cases for a comma-separated list of names and globs; None selects the standard list.

    Globs are matched against the standard list; any well-formed name is accepted as it is.
    """
    if patterns is None:
        return [parse_case(name) for name in STANDARD_CASES]
    chosen: dict[str, Case] = {}
    for pattern in (part.strip() for part in patterns.split(",")):
        if not pattern:
            continue
        if any(char in pattern for char in "*?["):
            names = fnmatch.filter(STANDARD_CASES, pattern)
            if not names:
                raise ValueError(f"no case matches {pattern!r}; cases: {', '.join(STANDARD_CASES)}")
        else:
            names = [pattern]
        for name in names:
            chosen[name] = parse_case(name)
    if not chosen:
        raise ValueError("the list of cases is empty")
    return list(chosen.values())


def floor_ms(case: Case, states: str, gpu_short: str) -> float | None:
    """Least time in ms to move the inputs, the output and the states; None for unknown cards."""
    bandwidth = COPY_BANDWIDTH.get(gpu_short)
    if bandwidth is None:
        return None
    element = STATE_DTYPES[states].itemsize
    tokens = BYTES_PER_TOKEN_HEAD * case.tokens * case.heads
    state = 2 * element * HEAD_DIM * HEAD_DIM * case.sequences * case.heads
    return (tokens + state) / bandwidth * 1e3


def make_inputs(case: Case, states: str, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for ``flash_kda.fwd``.

    q, k, v, g, out: bf16 [1, T, H, 128]; beta: bf16 [1, T, H]; states: [N, H, V, K]. Packed cases
    carry ``cu_seqlens`` int64 [N + 1] on the device. Kernel times do not depend on the values, so
    plain normal inputs and a moderate gate are used.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    wide = (1, case.tokens, case.heads, HEAD_DIM)
    state_shape = (case.sequences, case.heads, HEAD_DIM, HEAD_DIM)
    cu_seqlens = None
    if case.sequences > 1:
        bounds = [0]
        for length in case.lengths:
            bounds.append(bounds[-1] + length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int64, device=device)
    return {
        "q": normal(*wide),
        "k": normal(*wide),
        "v": normal(*wide),
        "g": normal(*wide),
        "beta": normal(1, case.tokens, case.heads),
        "scale": HEAD_DIM**-0.5,
        "out": torch.empty(wide, dtype=torch.bfloat16, device=device),
        "A_log": 0.5 * normal(case.heads, dtype=torch.float32),
        "dt_bias": 0.5 * normal(case.heads, HEAD_DIM, dtype=torch.float32),
        "lower_bound": -5.0,
        "initial_state": (0.1 * normal(*state_shape, dtype=torch.float32)).to(STATE_DTYPES[states]),
        "final_state": torch.empty(state_shape, dtype=STATE_DTYPES[states], device=device),
        "cu_seqlens": cu_seqlens,
    }
