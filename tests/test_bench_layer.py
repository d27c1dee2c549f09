"""scripts/bench_layer.py as far as it goes without a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import bench_layer  # noqa: E402


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / bench_layer.PAGE, tmp_path / "docs")
    monkeypatch.setattr(bench_layer, "ROOT", tmp_path)
    times = {"fla_ms": 3.0, "flash_kda_ms": 2.0, "difference": 4e-3}
    document = {
        **{"gpu": "NVIDIA H200", "fla": "0.6.0", "flash_kda": "0.1.0", "torch": "2.13.0"},
        **{"date": "today", "commit": "abc"},
        "rows": [{"tokens": 8192, "hidden": 4096, "heads": 32, **times}],
    }
    source = tmp_path / "layer.json"
    source.write_text(json.dumps(document))
    for _ in range(2):
        assert bench_layer.main(["--report", str(source)]) == 0
        text = (tmp_path / bench_layer.PAGE).read_text()
        assert text.count("| 8192, 4096, 32 | 3.000 | 2.000 | 1.50x | 4.0e-03 |") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layer.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
