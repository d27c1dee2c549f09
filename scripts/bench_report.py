"""BENCHMARK_<GPU>.md, its chart and the tables of other pages, from the JSON of bench.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import documents
import outputs
from bench_cases import (
    BASELINE_GPU,
    BASELINE_HOST_US,
    BASELINE_MS,
    BASELINE_SOURCE,
    STANDARD_CASES,
    parse_case,
)
from bench_chart import Bars, speedup_chart
from documents import COUNT, DURATION, ERROR, LABEL, NAME, TEXT, TIME, Kind, Maybe

README_BEGIN = "<!-- benchmark table: written by scripts/bench.py --report -->"
README_END = "<!-- end of benchmark table -->"
PAGES = ("README.md", "README.zh.md", "docs/performance.md")
"""Where the short tables stand between the two markers."""
REPOSITORY = "https://github.com/flash-kda/flash-kda/blob/main"
STATE_TITLES = {"fp32": "fp32 states", "bf16": "bf16 states"}

Row = dict[str, Any]


def _is_case(x: Any) -> bool:
    try:
        return isinstance(x, str) and parse_case(x).tokens > 0
    except ValueError:
        return False


_CASE = Kind("a case such as n1_h96_t8192", _is_case)
_STATES = documents.one_of(*STATE_TITLES)
_FAILED_ROW = {
    "case": _CASE,
    "states": _STATES,
    "flash_kda_ms": Maybe(TIME),
    "fla_ms": Maybe(TIME),
    "error": TEXT,
}
_GOOD_ROW = {
    "case": _CASE,
    "states": _STATES,
    "flash_kda_ms": TIME,
    "fla_ms": Maybe(TIME),
    "path": LABEL,
    "host_us": TIME,
    "floor_ms?": Maybe(TIME),
    "workspace_bytes?": Maybe(COUNT),
    "fla_difference?": Maybe(ERROR),
    "fla_error?": Maybe(TEXT),
}
SCHEMA = {
    "gpu": LABEL,
    "gpu_short": NAME,
    "sm_count": Maybe(COUNT),
    "driver": Maybe({"release?": Maybe(LABEL), "cuda?": Maybe(LABEL)}),
    "compiler": Maybe({"name?": LABEL, "version?": LABEL}),
    "flash_kda": LABEL,
    "torch": LABEL,
    "torch_cuda": Maybe(LABEL),
    "fla": Maybe(LABEL),
    "fla_error": Maybe(TEXT),
    "commit": LABEL,
    "csrc_sha256": LABEL,
    "date": LABEL,
    "settings": {
        **dict.fromkeys(("warmup", "iters", "repeats"), COUNT),
        "rest_s?": DURATION,
        "forced_path?": Maybe(LABEL),
        "fla?": LABEL,
    },
    "small_call_host_us?": Maybe(TIME),
    "notes?": [TEXT],
    "rows": [lambda row: _FAILED_ROW if row.get("error") else _GOOD_ROW],
}


def read_document(path: Path) -> dict[str, Any]:
    """The JSON document that bench.py wrote to ``path``.

    Raises:
        ValueError: see ``documents.read``.
    """
    return documents.read(path, SCHEMA, "bench.py")


def read_gpu_document(path: Path) -> dict[str, Any]:
    """The same, refusing measurements of the CPU path, which say nothing about the kernels."""
    document = read_document(path)
    if document["gpu_short"] == "CPU":
        raise ValueError(f"{path} was measured on a CPU: reports are written for GPUs only")
    return document


def baseline_ms(document: dict[str, Any], row: Row) -> float | None:
    """The published v1 time for this row: same model of card, fp32 states, or None."""
    if document["gpu_short"] != BASELINE_GPU or row["states"] != "fp32":
        return None
    return BASELINE_MS.get(row["case"])


def ratio(other: float | None, ours: float | None) -> float | None:
    return other / ours if other and ours else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first column is text and whose others are right-aligned."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|---|" + "---:|" * (len(header) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines


def rows_with(document: dict[str, Any], states: str) -> list[Row]:
    return [row for row in document["rows"] if row["states"] == states]


HOST_BOUND_FACTOR = 2
"""How much more FLA may take for a token and head than in its fastest row."""


def fla_is_host_bound(document: dict[str, Any], row: Row) -> bool:
    """Whether FLA's time is that of launching its kernels, and says little about them.

    A call for one token keeps the GPU busy for next to nothing: what FLA takes for it is host time,
    and a case that takes no longer may be bound by the host as well. So may a small one that takes
    many times longer for each token and head than large ones do.
    """
    fla_ms = row.get("fla_ms")
    if not fla_ms:
        return False
    measured = [
        (parse_case(other["case"]), other["fla_ms"])
        for other in document["rows"]
        if other.get("fla_ms")
    ]
    one_token = [ms for case, ms in measured if case.tokens == 1]
    if one_token and fla_ms <= 1.02 * max(one_token):
        return True
    case = parse_case(row["case"])
    fastest = min(ms / (other.tokens * other.heads) for other, ms in measured)
    return bool(fla_ms > HOST_BOUND_FACTOR * fastest * case.tokens * case.heads)


def speedups(
    document: dict[str, Any], rows: Sequence[Row]
) -> list[tuple[float | None, float | None]]:
    """(over v1, over FLA) for each row; no ratio where FLA was bound by its host."""
    return [
        (
            ratio(baseline_ms(document, row), row["flash_kda_ms"]),
            None if fla_is_host_bound(document, row) else ratio(row["fla_ms"], row["flash_kda_ms"]),
        )
        for row in rows
    ]


def fla_text(document: dict[str, Any], row: Row) -> str:
    """FLA's time, in brackets where it is its host's."""
    text = milliseconds(row["fla_ms"])
    return f"({text})" if fla_is_host_bound(document, row) else text


HOST_BOUND_NOTE = (
    "- FLA times in brackets are at most 2 % above what FLA takes for a single token, or more than "
    "twice what it takes for a token and head in its fastest row: in this run they are the "
    "time its host needs to launch its kernels, not the time of the kernels, and no ratio is given."
)


def summary(document: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Sentences with the geometric means, each with the number of cases behind it."""
    lines = []
    pairs = speedups(document, rows)
    for index, name in enumerate(("published FlashKDA v1", "FLA's chunk_kda")):
        values = [pair[index] for pair in pairs if pair[index] is not None]
        mean = geometric_mean(values)
        if mean is not None:
            low = min(value for value in values if value is not None)
            lines.append(
                f"- Over {name}: geometric mean {mean:.2f}x on {len(values)} cases, "
                f"lowest {low:.2f}x."
            )
    return lines


def full_table(document: dict[str, Any], states: str) -> list[str]:
    rows = rows_with(document, states)
    header = [
        "sequences x tokens, heads",
        "flash_kda ms",
        "FLA ms",
        "over FLA",
        "v1 ms",
        "over v1",
        "floor ms",
        "host us",
        "workspace MiB",
        "path",
    ]
    body = []
    for row, (over_v1, over_fla) in zip(rows, speedups(document, rows), strict=True):
        title = parse_case(row["case"]).title
        if row.get("error"):
            body.append([title, "failed", *["-"] * 7, documents.line(row["error"])])
            continue
        body.append(
            [
                title,
                milliseconds(row["flash_kda_ms"]),
                fla_text(document, row),
                times(over_fla),
                milliseconds(baseline_ms(document, row)),
                times(over_v1),
                milliseconds(row.get("floor_ms")),
                f"{row['host_us']:.1f}",
                mebibytes(row.get("workspace_bytes")),
                str(row["path"]),
            ]
        )
    return [
        f"## {STATE_TITLES[states]}",
        "",
        *markdown_table(header, body),
        "",
        *summary(document, rows),
    ]


def facts_table(document: dict[str, Any]) -> list[str]:
    driver = document["driver"] or {}
    compiler = document["compiler"] or {}
    settings = document["settings"]
    rest = settings.get("rest_s")
    fla = document["fla"] or f"none ({documents.line(document['fla_error'] or '?')})"
    facts = [
        ("GPU", f"{document['gpu']}, {document['sm_count']} SMs"),
        ("driver", f"{driver.get('release') or '?'} (CUDA {driver.get('cuda') or '?'})"),
        ("compiler", f"{compiler.get('name', 'none')} {compiler.get('version', '')}".strip()),
        ("torch", f"{document['torch']} (CUDA {document['torch_cuda']})"),
        ("FLA", fla),
        ("flash_kda", f"{document['flash_kda']}, commit {document['commit']}"),
        ("csrc/ sha256", f"`{document['csrc_sha256']}`"),
        ("date", document["date"]),
        (
            "method",
            f"median of {settings['repeats']} repeats of the median of {settings['iters']} calls, "
            f"{settings['warmup']} warm-up calls, L2 flushed before each call"
            + (f", {rest} s of rest before each repeat" if rest else ""),
        ),
    ]
    if settings.get("forced_path"):
        facts.append(("forced path", settings["forced_path"]))
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]


def report_text(document: dict[str, Any], json_name: str, chart_name: str) -> str:
    """The whole of BENCHMARK_<GPU>.md."""
    name = document["gpu_short"]
    lines = [
        f"# Benchmark: {name}",
        "",
        f"Written by `python scripts/bench.py --report {json_name}` from the measurements in "
        f"[{json_name}]({json_name}); do not edit by hand.",
        "",
        *facts_table(document),
        "",
        f"![Speed-up of flash_kda on {name}]({chart_name})",
    ]
    for states in STATE_TITLES:
        if rows_with(document, states):
            lines += ["", *full_table(document, states)]
    fla = document["settings"].get("fla", "in the same process, autotuned before it is timed")
    small = document.get("small_call_host_us")
    lines += ["", "## Notes", ""]
    if small is not None:
        lines.append(
            f"- Host time of one asynchronous call at H = 8, T = 16: {small:.1f} us "
            f"(v1: {BASELINE_HOST_US:.0f} us a call)."
        )
    lines += [
        "- All calls read an initial state and write a final state."
        + (
            " FLA takes fp32 states only, so its time is the same in both tables."
            if rows_with(document, "bf16")
            else ""
        ),
        f"- FLA runs its Triton path on the same inputs, {fla}.",
        HOST_BOUND_NOTE,
        f"- v1: {BASELINE_SOURCE}. It was not run again here.",
        "- floor: the time this card needs to copy the bytes that any implementation must move "
        "(q, k, v, g, beta, out, states).",
        "- host: median time the calling thread spends in one call.",
    ]
    lines += [f"- {documents.line(note)}." for note in document.get("notes", [])]
    return "\n".join(lines) + "\n"


def page_block(documents: Sequence[dict[str, Any]], in_docs: bool) -> str:
    """The short tables between a page's two markers, one per measured card.

    Pages of the documentation get the charts as well, and links that leave its site.
    """
    lines: list[str] = []
    reports = f"{REPOSITORY}/" if in_docs else ""
    for document in documents:
        name = document["gpu_short"]
        rows = [
            row
            for row in rows_with(document, "fp32")
            if row["case"] in STANDARD_CASES and not row.get("error")
        ]
        body = [
            [
                parse_case(row["case"]).title,
                milliseconds(row["flash_kda_ms"]),
                fla_text(document, row),
                times(over_fla),
                times(over_v1),
            ]
            for row, (over_v1, over_fla) in zip(rows, speedups(document, rows), strict=True)
        ]
        header = ("sequences x tokens, heads", "flash_kda ms", "FLA ms", "over FLA", "over v1")
        lines += [
            "",
            f"{document['gpu']}, fp32 states read and written, medians. All columns, method and "
            f"versions: [BENCHMARK_{name}.md]({reports}BENCHMARK_{name}.md).",
            "",
            *([f"![Speed-up](assets/bench_{name.lower()}.svg)", ""] if in_docs else []),
            *markdown_table(header, body),
            "",
            *summary(document, rows),
            HOST_BOUND_NOTE,
            f"- v1: {BASELINE_SOURCE}.",
        ]
    if not lines:
        lines = ["", "No measurements are recorded in `docs/data/` yet."]
    return "\n".join(lines)


def pages(root: Path) -> dict[Path, str]:
    """The pages that have markers, with the tables of every docs/data/bench_*.json.

    Raises:
        ValueError: one of those is no measurement of a GPU.
    """
    paths = sorted((root / "docs" / "data").glob("bench_*.json"))
    measured = [read_gpu_document(path) for path in paths]
    texts = {}
    for name in PAGES:
        page = root / name
        if page.exists() and README_BEGIN in page.read_text(encoding="utf-8"):
            block = page_block(measured, in_docs=name.startswith("docs/"))
            texts[page] = documents.between(page, README_BEGIN, README_END, block)
    return texts


def chart(document: dict[str, Any]) -> str:
    rows = [row for row in rows_with(document, "fp32") if not row.get("error")]
    rows = rows or [row for row in document["rows"] if not row.get("error")]
    groups = [
        Bars(parse_case(row["case"]).title, pair)
        for row, pair in zip(rows, speedups(document, rows), strict=True)
    ]
    title = f"flash_kda {document['flash_kda']} on {document['gpu']}: speed-up"
    return speedup_chart(title, ("over FlashKDA v1 (published)", "over FLA (Triton)"), groups)


def write_report(root: Path, source: Path) -> list[Path]:
    """Write the report of ``source`` (bench.py's JSON) below ``root``; returns the files.

    Raises:
        ValueError: ``source``, or what docs/data/ holds, is no measurement of a GPU; nothing has
            been written then.
        OSError: a file cannot be written.
    """
    document = read_gpu_document(source)
    name = document["gpu_short"]
    chart_path = root / "docs" / "assets" / f"bench_{name.lower()}.svg"
    try:
        json_name = source.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        json_name = source.name
    chart_name = chart_path.relative_to(root).as_posix()
    texts = {
        root / f"BENCHMARK_{name}.md": report_text(document, json_name, chart_name),
        chart_path: chart(document),
        **pages(root),
    }
    for path, text in texts.items():
        outputs.write(path, text)
    return list(texts)
