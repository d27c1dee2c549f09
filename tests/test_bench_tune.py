"""scripts/bench_tune.py and how bench.py uses it, with fake FLA and Triton and without a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import bench  # noqa: E402
import bench_cases  # noqa: E402
import bench_tune  # noqa: E402

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--warmup", "0", "--iters", "2", "--repeats", "1"]

# Writes one file for each call, named after its shape and holding what its tuning was asked for.
FAKE_KDA = """
import json, os, pathlib, triton.testing

def chunk_kda(q, cu_seqlens, **arguments):
    if q.shape[2] == 3:
        raise RuntimeError("made to fail")
    packed = "dense" if cu_seqlens is None else "packed"
    options = triton.testing.do_bench(lambda: None, quantiles=(0.5, 0.2, 0.8))
    options["states"] = str(arguments["initial_state"].dtype)
    name = f"h{q.shape[2]}_t{q.shape[1]}_{packed}.json"
    (pathlib.Path(os.environ["FAKE_FLA_OUT"]) / name).write_text(json.dumps(options))
    return q, None
"""
FAKE_TESTING = "def do_bench(kernel_call, **options): return options\n"


def parse(*names: str) -> list[bench_cases.Case]:
    return [bench_cases.parse_case(name) for name in names]


def test_groups() -> None:
    groups = bench_tune.group_cases(bench_cases.select_cases(None))
    assert len(groups) == 11
    assert sum(len(group) for group in groups) == len(bench_cases.STANDARD_CASES)
    by_title = {bench_tune.group_title(group): group for group in groups}
    assert len(by_title) == 11
    assert [case.name for case in by_title["H = 96, packed"]] == ["mixed_h96", "n8x1024_h96"]
    tokens = [case.tokens for case in by_title["H = 12, one sequence"]]
    assert tokens == [8192, 32768, 131072, 1024, 2048]
    assert bench_tune.group_cases([]) == []


def test_worker_command() -> None:
    group = parse("n1_h2_t5", "n1_h2_t7")
    command = bench_tune.worker_command(group, torch.device("cuda", 1), Path("/tmp/lock"))
    script = str(ROOT / "scripts" / "bench_tune.py")
    options = ["--device", "cuda:1", "--lock", "/tmp/lock"]
    assert command == [sys.executable, script, *options, "n1_h2_t5", "n1_h2_t7"]


def test_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes: every case is called, and the group that fails becomes a note."""
    out = tmp_path / "out"
    out.mkdir()
    for path, text in {
        "fla/__init__.py": "",
        "fla/ops/__init__.py": "",
        "fla/ops/kda.py": FAKE_KDA,
        "triton/__init__.py": "",
        "triton/testing.py": FAKE_TESTING,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_FLA_OUT", str(out))
    notes = bench_tune.tune(parse("n1_h1_t4", "n2x3_h1", "n1_h3_t4", "n1_h1_t5"), CPU, workers=3)
    (note,) = notes
    assert "H = 3, one sequence" in note and "RuntimeError: made to fail" in note
    names = ["h1_t4_dense.json", "h1_t5_dense.json", "h1_t6_packed.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    options = json.loads((out / names[0]).read_text())
    assert (options["warmup"], options["rep"]) == (bench_tune.WARMUP_MS, bench_tune.RUNS_MS)
    assert (options["quantiles"], options["states"]) == ([0.5, 0.2, 0.8], "torch.float32")
    printed = capsys.readouterr()
    assert "tuning FLA for 3 groups of cases, 3 at a time" in printed.out
    assert printed.out.count(" s  tuned\n") == 2 and "FLA tuned in" in printed.out
    assert printed.err == f"note: {note}\n"


def test_worker_without_fla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Missing:
        available, error = False, "not installed"

    monkeypatch.setattr(bench_tune, "FLA", Missing)
    assert bench_tune.main(["--device", "cpu", "--lock", str(tmp_path / "lock"), "n1_h1_t4"]) == 1


@pytest.mark.parametrize(
    ("command", "limit_s", "word"),
    [
        ([sys.executable, "-c", "pass"], 60.0, None),
        ([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, "ended after 0 s"),
        ([sys.executable, "-c", "raise SystemExit(3)"], 60.0, "exit status 3: it printed nothing"),
        ([sys.executable, "-c", "1 / 0"], 60.0, "exit status 1: ZeroDivisionError"),
        (["/nonexistent/python"], 60.0, "not started"),
    ],
)
def test_run_worker(command: Sequence[str], limit_s: float, word: str | None) -> None:
    seconds, problem = bench_tune.run_worker(command, limit_s)
    assert 0 <= seconds < 60
    assert problem is None if word is None else problem is not None and word in problem


def test_results_are_kept_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "0")  # so that it is as before after the test
    bench_tune.keep_results(Path("/tmp/ours"))
    assert os.environ["TRITON_CACHE_DIR"] == "0"
    assert os.environ["FLA_CACHE_RESULTS"] == os.environ["TRITON_CACHE_AUTOTUNING"] == "1"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    bench_tune.keep_results(Path("/tmp/ours"))
    assert os.environ["TRITON_CACHE_DIR"] == "/tmp/ours"


class FakeFLA:
    version, error, available = "0.0", None, True

    def __init__(self) -> None:
        self.calls = 0

    def bind(self, inputs: dict[str, Any]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            self.calls += 1
            return inputs["out"]

        return call


def test_bench_tunes_what_it_does_not_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fla = FakeFLA()
    tuned: list[list[str]] = []

    def tune(cases: Sequence[bench_cases.Case], device: torch.device, workers: int) -> list[str]:
        assert (device, workers, fla.calls) == (CPU, 5, 0)
        tuned.append([case.name for case in cases])
        return ["a worker failed"] if cases else []

    monkeypatch.setenv("FLASH_KDA_COMMIT", "abc")
    monkeypatch.setattr(bench, "open_fla", lambda *_: fla)
    monkeypatch.setattr(bench_tune, "tune", tune)
    path = tmp_path / "out.json"
    options = [*QUICK, "--json", str(path), "--fla-workers", "5", "--resume"]
    assert bench.main([*options, "--cases", "n1_h1_t4"]) == 0
    document = json.loads(path.read_text())
    assert document["settings"]["fla"] == bench_tune.SETTING
    assert document["notes"][-1] == "a worker failed"
    first, second = document["rows"]
    assert first["fla_ms"] == second["fla_ms"] > 0 and first["fla_first_call_s"] >= 0

    fla.calls = 0
    assert bench.main([*options, "--cases", "n1_h1_t4,n2x3_h1"]) == 0
    assert tuned == [["n1_h1_t4"], ["n2x3_h1"]]

    fla.calls = 0
    assert bench.main([*QUICK, "--cases", "n1_h1_t4", "--json", str(path), "--fla-workers=0"]) == 0
    assert len(tuned) == 2 and "fla" not in json.loads(path.read_text())["settings"]
    assert fla.calls > 0


def test_fla_is_opened_for_gpus_only() -> None:
    for options in (["--no-fla"], []):
        arguments = bench.parse_arguments(options)
        assert bench.open_fla(arguments, CPU, "CPU") is None
    arguments = bench.parse_arguments(["--no-fla"])
    assert bench.open_fla(arguments, torch.device("cuda", 0), "H200") is None
    assert arguments.fla_workers == os.cpu_count()
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--fla-workers", "-1"])
