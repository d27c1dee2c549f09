"""The plot and the tables of docs/accuracy.md, from the JSON that accuracy.py wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import documents
import outputs
from documents import COUNT, ERROR, LABEL, NAME, Maybe

BEGIN = "<!-- accuracy: written by scripts/accuracy.py -->"
END = "<!-- end of accuracy -->"
SERIES = {"flash_kda": ("flash-kda", "#1f6f8b"), "fla": ("FLA (Triton)", "#e07a3f")}
RESULTS = {"out": "out", "final_state": "final state"}
PANEL, HEIGHT, GAP, LEFT, TOP = 330, 190, 70, 60, 90

_ERRORS = {name: Maybe(ERROR) for name in RESULTS}
SCHEMA = {
    "gpu": LABEL,
    "gpu_short": NAME,
    "device": LABEL,
    "flash_kda": LABEL,
    "fla": Maybe(LABEL),
    "torch": LABEL,
    "heads": COUNT,
    "date": LABEL,
    "commit": LABEL,
    "rows": [{"sweep": LABEL, "point": LABEL, "flash_kda": _ERRORS, "fla?": _ERRORS}],
}

Row = dict[str, Any]


def line(row: Row) -> str:
    """One row as text."""
    parts = [f"{row['sweep']} {row['point']}".ljust(32)]
    for name, (title, _) in SERIES.items():
        if name in row:
            errors = "  ".join(f"{RESULTS[x]} {_number(row[name][x])}" for x in RESULTS)
            parts.append(f"{title}: {errors}")
    return "   ".join(parts)


def write(root: Path, document: dict[str, Any]) -> None:
    """Write docs/assets/accuracy_<gpu>.svg and the part of docs/accuracy.md between the markers.

    Raises:
        ValueError: the page has no markers; nothing has been written then.
        OSError: a file cannot be written.
    """
    name = f"accuracy_{document['gpu_short'].lower()}"
    page = root / "docs" / "accuracy.md"
    text = documents.between(page, BEGIN, END, "\n".join(_section(document, name)))
    outputs.write(root / "docs" / "assets" / f"{name}.svg", plot(document))
    outputs.write(page, text)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by sweep, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["sweep"], []).append(row)
    return found


def _out_error(row: Row, name: str) -> float | None:
    """What a logarithmic axis can show: not None and not 0."""
    return row.get(name, {}).get("out")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _section(document: dict[str, Any], name: str) -> list[str]:
    where = "the CPU path" if document["device"] == "cpu" else document["gpu"]
    beside = f", FLA {document['fla']}" if document["fla"] else ""
    lines = [
        f"Measured on {where}, flash-kda {document['flash_kda']}{beside}, torch "
        f"{document['torch']}, {document['heads']} heads a call, {document['date']}, commit "
        f"`{document['commit'][:12]}`. Numbers: [`data/{name}.json`](data/{name}.json).",
        "",
        f"![Relative errors of out and final state]({f'assets/{name}.svg'})",
        "",
    ]
    names = [x for x in SERIES if any(x in row for row in document["rows"])]
    header = ["input", *(f"{SERIES[x][0]}, {RESULTS[y]}" for x in names for y in RESULTS)]
    for sweep, rows in groups(document["rows"]).items():
        lines += [f"### Over {sweep}", "", "| " + " | ".join(header) + " |"]
        lines.append("|---|" + "---:|" * (len(header) - 1))
        for row in rows:
            cells = [_number(row[x][y]) if x in row else "-" for x in names for y in RESULTS]
            lines.append("| " + " | ".join([row["point"], *cells]) + " |")
        lines.append("")
    return lines[:-1]


def plot(document: dict[str, Any]) -> str:
    """An SVG with one panel per sweep: out's relative error on a logarithmic axis."""
    panels = groups(document["rows"])
    names = [x for x in SERIES if any(x in row for row in document["rows"])]
    columns = 2
    rows = math.ceil(len(panels) / columns)
    width, height = columns * (PANEL + GAP) + 20, TOP + rows * (HEIGHT + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="16" y="26" font-size="16" font-weight="bold">Relative error of out against '
        f"float64, {escape(document['gpu_short'])}</text>",
    ]
    x = LEFT
    for name in names:
        title, colour = SERIES[name]
        parts.append(f'<circle cx="{x}" cy="48" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="52">{escape(title)}</text>')
        x += 40 + 7 * len(title)
    errors = [
        row[name]["out"]
        for row in document["rows"]
        for name in names
        if row.get(name, {}).get("out")
    ]
    low = math.floor(math.log10(min(errors, default=1e-3)))
    high = math.ceil(math.log10(max(errors, default=1e-2)) + 1e-9)
    for index, (sweep, points) in enumerate(panels.items()):
        left = LEFT + (index % columns) * (PANEL + GAP)
        top = TOP + (index // columns) * (HEIGHT + GAP)
        parts += _panel(sweep, points, names, left, top, low, max(high, low + 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    sweep: str, points: list[Row], names: list[str], left: int, top: int, low: int, high: int
) -> list[str]:
    def y(error: float) -> float:
        return top + HEIGHT * (high - math.log10(error)) / (high - low)

    parts = [f'<text x="{left}" y="{top - 10}" font-weight="bold">over {escape(sweep)}</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{left} {at:.1f}h{PANEL}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    step = PANEL / max(1, len(points))
    for index, row in enumerate(points):
        x = left + step * (index + 0.5)
        label = escape(row["point"])
        parts.append(
            f'<text x="{x:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{label}</text>'
        )
    for name in names:
        colour = SERIES[name][1]
        marks = [
            (left + step * (index + 0.5), y(error))
            for index, row in enumerate(points)
            if (error := _out_error(row, name))
        ]
        path = "L".join(f"{x:.1f} {at:.1f}" for x, at in marks)
        if marks:
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3.5" fill="{colour}"/>' for x, at in marks
        ]
    return parts
