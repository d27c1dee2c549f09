"""The benchmark's chart, written as plain SVG so that the report needs no plotting package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6f8b", "#e07a3f")
ROW_HEIGHT = 34
BAR_HEIGHT = 12
LEFT = 170
RIGHT = 60
TOP = 74
PLOT = 560


@dataclass(frozen=True)
class Bars:
    """One group of bars: a label and one value per series; None leaves a bar out."""

    label: str
    values: tuple[float | None, ...]


def _ticks(largest: float) -> list[float]:
    """Round tick values from 0 to just above ``largest``."""
    rough = max(largest, 1e-9) / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    return [step * index for index in range(math.ceil(largest / step) + 1)]


def _text(
    x: float, y: float, text: str, size: int = 12, anchor: str = "start", extra: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>'
        f"{escape(text)}</text>"
    )


def speedup_chart(title: str, series: Sequence[str], groups: Sequence[Bars]) -> str:
    """An SVG of horizontal bars, one group per case, with a line at 1x (equal speed)."""
    values = [value for bars in groups for value in bars.values if value is not None]
    ticks = _ticks(max(values, default=1.0))
    scale = PLOT / ticks[-1]
    bottom = TOP + ROW_HEIGHT * len(groups)
    width, height = LEFT + PLOT + RIGHT, bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(16, 26, title, 16, extra=' font-weight="bold"'),
    ]
    x = float(LEFT)
    for name, colour in zip(series, COLOURS, strict=False):
        parts.append(f'<rect x="{x:.1f}" y="42" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 52, name))
        x += 40 + 7 * len(name)
    for tick in ticks:
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}x", 11, "middle"))
    for index, bars in enumerate(groups):
        y = TOP + index * ROW_HEIGHT + 4
        parts.append(_text(LEFT - 10, y + BAR_HEIGHT + 4, bars.label, 12, "end"))
        for slot, value in enumerate(bars.values):
            if value is None:
                continue
            top = y + slot * (BAR_HEIGHT + 1)
            length = value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR_HEIGHT}" '
                f'fill="{COLOURS[slot]}"/>'
            )
            parts.append(_text(LEFT + length + 5, top + 10, f"{value:.2f}", 10))
    one = LEFT + scale
    parts.append(f'<path d="M{one:.1f} {TOP - 6}V{bottom}" stroke="#222" stroke-dasharray="4 3"/>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
