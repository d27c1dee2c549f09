"""scripts/bench.py without a GPU: case names, a tiny CPU run, failures, and the report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import flash_kda

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import bench  # noqa: E402
import bench_cases  # noqa: E402
import bench_facts  # noqa: E402
import bench_report  # noqa: E402
import outputs  # noqa: E402

QUICK = ["--device", "cpu", "--warmup", "0", "--iters", "2", "--repeats", "1"]
ROW_KEYS = {"case", "states", "N", "H", "tokens", "flash_kda_ms", "fla_ms", "path", "host_us"}


def test_standard_cases() -> None:
    cases = bench_cases.select_cases(None)
    assert [case.name for case in cases] == list(bench_cases.STANDARD_CASES)
    assert len({case.name for case in cases}) == len(cases) == 19
    assert set(bench_cases.BASELINE_MS) < set(bench_cases.STANDARD_CASES)
    by_name = {case.name: case for case in cases}
    assert by_name["mixed_h96"].tokens == by_name["n1_h96_t8192"].tokens == 8192
    assert (by_name["n512x128_h8"].sequences, by_name["n512x128_h8"].heads) == (512, 8)
    assert by_name["n4x512_h12"].lengths == (512,) * 4


def test_selection() -> None:
    names = [case.name for case in bench_cases.select_cases("mixed_*, n1_h32_t1, n3x5_h2")]
    assert names == ["mixed_h96", "mixed_h64", "n1_h32_t1", "n3x5_h2"]
    for bad in ("nonsense", "zzz*", "n1_h0_t5", " , "):
        with pytest.raises(ValueError, match=r"case"):
            bench_cases.select_cases(bad)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("n8x1024_h96", 0.260), ("n512x128_h8", 0.283), ("n128x64_h32", 0.204), ("mixed_h64", 0.168)],
)
def test_floor(name: str, expected: float) -> None:
    case = bench_cases.parse_case(name)
    assert bench_cases.floor_ms(case, "fp32", "H200") == pytest.approx(expected, abs=1.5e-3)
    assert bench_cases.floor_ms(case, "fp32", "H100") is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_short_gpu_name(name: str, short: str) -> None:
    assert bench_facts.short_gpu_name(name) == short


def test_cpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_COMMIT", "abc")
    path = tmp_path / "out.json"
    assert bench.main([*QUICK, "--cases", "n1_h1_t32,n2x9_h2", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert (document["gpu_short"], document["commit"], document["fla"]) == ("CPU", "abc", None)
    assert len(document["csrc_sha256"]) == 64
    assert document["small_call_host_us"] > 0
    rows = document["rows"]
    expected = [(c, s) for c in ("n1_h1_t32", "n2x9_h2") for s in ("fp32", "bf16")]
    assert [(row["case"], row["states"]) for row in rows] == expected
    for row in rows:
        assert set(row) >= ROW_KEYS
        assert row["flash_kda_ms"] > 0 and row["host_us"] > 0
        assert row["fla_ms"] is None and row["path"] == bench_facts.CPU_PATH

    document["rows"][0]["flash_kda_ms"] = 123.0
    path.write_text(json.dumps(document))
    again = ["--cases", "n1_h1_t32", "--json", str(path), "--resume"]
    assert bench.main([*QUICK, *again]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["flash_kda_ms"] == 123.0
    assert len(rows) == 2
    monkeypatch.setenv("FLASH_KDA_COMMIT", "another")
    assert bench.main([*QUICK, *again]) == 0
    assert json.loads(path.read_text())["rows"][0]["flash_kda_ms"] != 123.0


def test_failing_case_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = flash_kda.fwd

    def fwd(**arguments: Any) -> None:
        if arguments["q"].shape[2] == 3:
            raise RuntimeError("made to fail")
        right(**arguments)

    monkeypatch.setattr(flash_kda, "fwd", fwd)
    path = tmp_path / "out.json"
    options = ["--cases", "n1_h3_t4,n1_h1_t4", "--states", "fp32", "--json", str(path)]
    assert bench.main([*QUICK, *options]) == 1
    failed, good = json.loads(path.read_text())["rows"]
    assert failed["error"] == "RuntimeError: made to fail"
    assert failed["flash_kda_ms"] is None
    assert "error" not in good and good["flash_kda_ms"] > 0
    assert "made to fail" in capsys.readouterr().out


def test_cpu_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The standard cases would take hours there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*QUICK, "--cases", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    for options in (
        ["--iters", "0"],
        ["--warmup", "-1"],
        ["--rest", "nan"],
        ["--rest", "inf"],
        ["--fla-workers", "1e3"],
        ["--resume"],
        ["--states", "fp8"],
        ["--device", "tpu"],
        ["--device", "cuda:9999"],
    ):
        with pytest.raises(SystemExit) as stopped:
            bench.main(options)
        assert stopped.value.code == 2


def test_unknown_path_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Launcher:
        def path_id(self, name: str) -> int:
            raise ValueError(f"FLASH_KDA_PATH: got {name!r}")

    monkeypatch.setattr(bench.abi, "launcher_or_none", Launcher)
    monkeypatch.setenv("FLASH_KDA_PATH", "nonsense")
    assert bench.main([*QUICK, "--cases", "n1_h1_t4"]) == 2
    assert capsys.readouterr().err == "bench.py: FLASH_KDA_PATH: got 'nonsense'\n"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "cannot read"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "holds no measurements"),
        (b'{"rows": []}', "holds no measurements"),
        (b'{"rows": [], "settings": {}, "gpu_short": "CPU"}', "holds no measurements"),
    ],
)
def test_report_of_an_unusable_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    word: str,
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    path = tmp_path / "in.json"
    if content is not None:
        path.write_bytes(content)
    assert bench.main(["--report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and word in line
    assert sorted(tmp_path.iterdir()) == ([path] if content is not None else [])


def test_json_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_atomic", full)
    options = ["--cases", "n1_h1_t4", "--json", str(tmp_path / "out.json")]
    assert bench.main([*QUICK, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "out.json" in line and "No space left on device" in line


def row(case: str, ms: float | None, fla: float | None, states: str = "fp32") -> dict[str, Any]:
    return {
        "case": case,
        "states": states,
        "flash_kda_ms": ms,
        "fla_ms": fla,
        "path": "portable_v128",
        "host_us": 12.34,
        "floor_ms": 0.236,
        "workspace_bytes": 3 << 20,
    }


def document(gpu_short: str = "H200") -> dict[str, Any]:
    return {
        "gpu": f"NVIDIA {gpu_short}",
        "gpu_short": gpu_short,
        "sm_count": 132,
        "driver": {"cuda": "12.9", "release": "575.1"},
        "compiler": {"name": "nvrtc", "version": "12.9.86"},
        "flash_kda": "0.1.0",
        "torch": "2.13.0",
        "torch_cuda": "12.9",
        "fla": "0.6.0",
        "fla_error": None,
        "commit": "abc",
        "csrc_sha256": "0" * 64,
        "date": "2026-12-01 00:00 UTC",
        "settings": {"warmup": 10, "iters": 50, "repeats": 3, "forced_path": None},
        "small_call_host_us": 10.0,
        "notes": [],
        "rows": [
            row("n1_h96_t8192", 0.6985, 1.397),  # 2x over both
            row("n1_h12_t8192", 0.107, None),  # 8x over v1
            row("n1_h12_t1024", 0.1, 0.8),  # no v1
            row("n1_h96_t8192", 0.69, 1.397, "bf16"),
            row("mixed_h96", None, None) | {"error": "RuntimeError: launch | failed"},
        ],
    }


def write_fixture(root: Path, content: dict[str, Any]) -> Path:
    path = root / "docs" / "data" / f"bench_{content['gpu_short'].lower()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_report(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    markers = f"{bench_report.README_BEGIN}\nold\n{bench_report.README_END}"
    readme.write_text(f"before\n\n{markers}\n\nafter\n")
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(f"before\n\n{markers}\n")
    source = write_fixture(tmp_path, document())
    written = bench_report.write_report(tmp_path, source)
    report, chart = tmp_path / "BENCHMARK_H200.md", tmp_path / "docs/assets/bench_h200.svg"
    assert written == [report, chart, readme, page]
    assert "(assets/bench_h200.svg)" in page.read_text()
    assert "/blob/main/BENCHMARK_H200.md)" in page.read_text()
    text = report.read_text()
    assert (
        "| 1 x 8192, H = 96 | 0.699 | 1.397 | 2.00x | 1.397 | 2.00x | 0.236 | 12.3 | 3.0 |" in text
    )
    assert "geometric mean 4.00x on 2 cases, lowest 2.00x" in text  # over v1: 2x and 8x
    assert "| 6 mixed, H = 96 | failed |" in text and "launch / failed" in text
    assert "docs/data/bench_h200.json" in text and "575.1" in text and "2026-11" in text
    assert "## bf16 states" in text
    ElementTree.fromstring(chart.read_text())
    block = readme.read_text()
    assert block.startswith("before\n") and block.endswith("\nafter\n") and "old" not in block
    assert "| 1 x 8192, H = 12 | 0.107 | - | - | 8.00x |" in block

    first = [path.read_text() for path in written]
    bench_report.write_report(tmp_path, source)
    assert [path.read_text() for path in written] == first


def test_report_of_the_cpu(tmp_path: Path) -> None:
    """It would say nothing about the kernels."""
    with pytest.raises(ValueError, match="measured on a CPU"):
        bench_report.write_report(tmp_path, write_fixture(tmp_path, document("CPU")))


def test_report_of_another_card_cites_no_v1(tmp_path: Path) -> None:
    bench_report.write_report(tmp_path, write_fixture(tmp_path, document("H100")))
    text = (tmp_path / "BENCHMARK_H100.md").read_text()
    assert "Over published FlashKDA v1" not in text
    assert "Over FLA" in text


def test_reports_of_this_repository_are_as_bench_writes_them(tmp_path: Path) -> None:
    """So that --report changes nothing until the measurements do."""
    for page in bench_report.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    if (ROOT / "docs" / "data").exists():
        shutil.copytree(ROOT / "docs" / "data", tmp_path / "docs" / "data", dirs_exist_ok=True)
    for page, text in bench_report.pages(tmp_path).items():
        assert text == (ROOT / page.relative_to(tmp_path)).read_text()
    written = []
    for source in sorted((tmp_path / "docs" / "data").glob("bench_*.json")):
        written += bench_report.write_report(tmp_path, source)
    for path in written:
        assert path.read_bytes() == (ROOT / path.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize("page", bench_report.PAGES)
def test_pages_of_this_repository_have_the_markers(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.index(bench_report.README_BEGIN) < text.index(bench_report.README_END)


def test_fla_bound_by_its_host() -> None:
    """No ratio where FLA takes as long as for one token, or much longer a token than elsewhere."""
    content = document()
    content["rows"] = [
        row("n1_h96_t8192", 0.7, 2.6),
        row("n1_h12_t8192", 0.2, 0.85),
        row("n1_h12_t32768", 0.5, 1.9),
        row("n1_h32_t1", 0.01, 0.8),
        row("n1_h32_t64", 0.01, 0.81),
        row("n4x512_h12", 0.04, 1.6),
        row("n1_h64_t8192", 0.4, None),
    ]
    bound = [bench_report.fla_is_host_bound(content, x) for x in content["rows"]]
    assert bound == [False, True, False, True, True, True, False]
