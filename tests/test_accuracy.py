"""scripts/accuracy.py: a small run on the CPU, its plot and its page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import accuracy  # noqa: E402
import accuracy_report  # noqa: E402


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "accuracy.md", tmp_path / "docs")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(accuracy, "ROOT", tmp_path)
    return tmp_path


def test_publishes(tree: Path) -> None:
    flags = ["--device", "cpu", "--heads", "1", "--max-tokens", "16"]
    assert accuracy.main([*flags, "--publish"]) == 0
    document = json.loads((tree / "docs/data/accuracy_cpu.json").read_text())
    errors = [row["flash_kda"][x] for row in document["rows"] for x in ("out", "final_state")]
    assert len(errors) > 30 and all(0 < error < 2.5e-3 for error in errors)
    svg = (tree / "docs/assets/accuracy_cpu.svg").read_text()
    assert svg.count("<circle") == len(document["rows"]) + 1
    ElementTree.fromstring(svg)
    page = (tree / "docs/accuracy.md").read_text()
    assert "assets/accuracy_cpu.svg" in page and "### Over lower_bound" in page
    assert "yet" not in page[page.index(accuracy_report.BEGIN) :]

    before = page, svg
    report = tree / "docs/data/accuracy_cpu.json"
    assert accuracy.main(["--report", str(report)]) == 0
    assert before == (
        (tree / "docs/accuracy.md").read_text(),
        (tree / "docs/assets/accuracy_cpu.svg").read_text(),
    )


def test_report_beside_fla(tree: Path) -> None:
    """A row that FLA got wrong is shown as such and leaves no mark in the plot."""
    numbers = {"out": 3e-3, "final_state": 2e-3}
    row = {"sweep": "length", "tokens": 16, "flash_kda": numbers}
    document = {
        **{"gpu": "NVIDIA H200", "gpu_short": "H200", "device": "cuda", "flash_kda": "0.1.0"},
        **{"fla": "0.6.0", "torch": "2.13.0", "heads": 8, "date": "today", "commit": "abc"},
        "rows": [
            {**row, "point": "16", "fla": numbers},
            {**row, "point": "64", "fla": {"out": None, "final_state": None}},
        ],
    }
    accuracy_report.write(tree, document)
    page = (tree / "docs/accuracy.md").read_text()
    assert "| 64 | 3.00e-03 | 2.00e-03 | not finite | not finite |" in page
    assert (tree / "docs/assets/accuracy_h200.svg").read_text().count("<circle") == 2 + 3


@pytest.mark.parametrize("flags", [["--heads", "-1"], ["--heads", "0"], ["--max-tokens", "-5"]])
def test_wrong_options(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        accuracy.main(["--device", "cpu", *flags])
    assert stopped.value.code == 2
    assert f"{flags[0]}: got '{flags[1]}'; needs an integer from 1" in capsys.readouterr().err


def test_help() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "accuracy.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--publish" in done.stdout


def test_inputs_that_fla_refuses(tree: Path) -> None:
    """Its column stays empty there, and the run goes on."""

    class Fla:
        def bind_both(self, inputs: dict[str, Any]) -> Callable[[], Any]:
            def call() -> Any:
                if inputs["lower_bound"] == 0:
                    raise ValueError("`lower_bound` must be in the safe range [-5, 0)")
                return accuracy.run_ours(inputs)

            return call

    base = accuracy.make_inputs(16, 6, torch.device("cpu"))
    for bound, refused in ((-1.0, False), (0.0, True)):
        row = accuracy.measure(lambda bound=bound: {**base, "lower_bound": bound}, 2, Fla())
        assert ("fla" in row) is not refused and row["flash_kda"]["out"] < 2.5e-3
        assert row["calls"] == 3
