"""The scripts' reports of files that are not what they should be, and what they write where."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import accuracy  # noqa: E402
import bench  # noqa: E402
import bench_cases  # noqa: E402
import bench_layer  # noqa: E402
import documents  # noqa: E402
import outputs  # noqa: E402

PAGES = ("README.md", "README.zh.md", "docs/performance.md", "docs/accuracy.md")
RUN = {
    **{"gpu": "NVIDIA H200", "gpu_short": "H200", "device": "cuda", "flash_kda": "0.1.0"},
    **{"fla": "0.6.0", "torch": "2.13.0", "date": "today", "commit": "abc"},
}
ERRORS = {"out": 3e-3, "final_state": 2e-3}
MEASURED: dict[str, dict[str, Any]] = {
    "bench": {
        **RUN,
        "sm_count": 132,
        "driver": {"cuda": "12.9", "release": "575.1"},
        "compiler": {"name": "nvrtc", "version": "12.9.86"},
        "torch_cuda": "12.9",
        "fla_error": None,
        "csrc_sha256": "0" * 64,
        "settings": {"warmup": 10, "iters": 50, "repeats": 3, "rest_s": 0.25, "forced_path": None},
        "small_call_host_us": 10.0,
        "notes": ["a note"],
        "rows": [
            {
                **{"case": "n1_h96_t8192", "states": "fp32", "flash_kda_ms": 0.5, "fla_ms": 1.5},
                **{"path": "fused", "host_us": 12.0, "floor_ms": 0.2, "workspace_bytes": 5},
            },
            {
                **{"case": "mixed_h96", "states": "fp32", "flash_kda_ms": None, "fla_ms": None},
                **{"path": None, "host_us": None, "error": "RuntimeError: launch"},
            },
        ],
    },
    "accuracy": {
        **RUN,
        "heads": 8,
        "rows": [{"sweep": "length", "point": "16", "flash_kda": ERRORS, "fla": ERRORS}],
    },
    "layer": {
        **RUN,
        "rows": [
            {
                **{"tokens": 8192, "hidden": 4096, "heads": 32},
                **{"fla_ms": 3.0, "flash_kda_ms": 2.0, "difference": 4e-3},
            }
        ],
    },
}
SCRIPTS: dict[str, Callable[[list[str]], int]] = {
    "bench": bench.main,
    "accuracy": accuracy.main,
    "layer": bench_layer.main,
}
EVIL = "x\n<script>alert(1)</script> <!-- end of benchmark table --> | ![x](http://x)"
EACH = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tree"
    (root / "docs").mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / page, root / page)
    for module in (bench, accuracy, bench_layer):
        monkeypatch.setattr(module, "ROOT", root)
    return root


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(name: str, source: Path, capsys: pytest.CaptureFixture[str], root: Path) -> str:
    """The script ends with one line, which is returned, and has written nothing."""
    before = contents(root)
    assert SCRIPTS[name](["--report", str(source)]) == 2
    assert contents(root) == before
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and str(source) in line
    return line


@EACH
def test_what_is_no_document(
    name: str, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.json"
    assert "cannot read" in refused(name, source, capsys, tree)
    source.mkdir()
    assert "not a regular file" in refused(name, source, capsys, tree)
    source.rmdir()
    os.mkfifo(source)
    assert "not a regular file" in refused(name, source, capsys, tree)
    source.unlink()
    good = json.dumps(MEASURED[name])
    for text, word in (
        ("", "not JSON"),
        (good[:-20], "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        (f'{good[:-1]}, "more": {"[" * 200_000}', "nested too deeply"),
        ('{"gpu": "\\ud800"}', "not JSON"),
        (f"[{good}]", "holds no measurements"),
        ("null", "holds no measurements"),
        ("{}", "holds no measurements"),
    ):
        source.write_text(text)
        assert word in refused(name, source, capsys, tree)


@EACH
@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("gpu", EVIL, "one line of text without"),
        ("gpu", "a\nb", "one line of text without"),
        ("gpu", "", "one line of text without"),
        ("gpu_short", "x/../../evil", "letters and digits"),
        ("gpu_short", ["H200"], "letters and digits"),
        ("commit", 5, "one line of text without"),
        ("date", "`", "one line of text without"),
        ("rows", {}, "a list"),
        ("rows", [5], "an object"),
        ("rows", [{}], "needs"),
    ],
)
def test_what_is_wrong_in_a_document(
    name: str,
    key: str,
    value: Any,
    needs: str,
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "in.json"
    source.write_text(json.dumps({**MEASURED[name], key: value}))
    line = refused(name, source, capsys, tree)
    assert f": {key}" in line and needs in line
    assert not (tmp_path / "evil.svg").exists()


@pytest.mark.parametrize(
    ("name", "key"),
    [("bench", "flash_kda_ms"), ("bench", "fla_ms"), ("bench", "host_us"), ("layer", "fla_ms")],
)
@pytest.mark.parametrize("value", [-1.0, 0, "1", True, 1e13, float("nan"), float("inf"), 10**400])
def test_numbers_that_are_no_times(
    name: str, key: str, value: Any, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(MEASURED[name])
    document["rows"][0][key] = value
    source = tmp_path / "in.json"
    source.write_text(json.dumps(document))
    assert f"rows[0].{key}: got" in refused(name, source, capsys, tree)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    pairs: Any = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else pairs:
        yield (*at, key)
        yield from places(inner, (*at, key))


@EACH
def test_anything_anywhere_is_published_as_text_or_refused(
    name: str, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, source = MEASURED[name], tmp_path / "in.json"
    published = 0
    for place in places(good):
        for value in (None, True, -1, 0, 1e-320, float("nan"), 2**70, EVIL, "", [], [5], {}, del_):
            document = copy.deepcopy(good)
            holder = document
            for key in place[:-1]:
                holder = holder[key]
            if value is del_:
                del holder[place[-1]]
            else:
                holder[place[-1]] = value
            source.write_text(json.dumps(document))
            before = contents(tree)
            status = SCRIPTS[name](["--report", str(source)])
            err = capsys.readouterr().err
            if status:
                assert status == 2 and len(err.splitlines()) == 1, (place, value, err)
                assert contents(tree) == before
                continue
            published += 1
            for path, data in contents(tree).items():
                assert b"<script" not in data and b"](http://x)" not in data, (place, value)
                if path.suffix == ".svg":
                    ElementTree.fromstring(data.decode())
    assert published > 5


def del_() -> None:
    """Stands for no value at all."""


@EACH
def test_a_page_without_markers(
    name: str, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.json"
    source.write_text(json.dumps(MEASURED[name]))
    for page in PAGES:
        text = (tree / page).read_text()
        (tree / page).write_text(text.replace("<!-- end of ", "<!-- "))
    before = contents(tree)
    assert SCRIPTS[name](["--report", str(source)]) == 2
    assert contents(tree) == before
    assert "got no markers" in capsys.readouterr().err


def test_nothing_is_written_where_another_document_is_bad(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = tmp_path / "in.json", tree / "docs" / "data" / "bench_h100.json"
    source.write_text(json.dumps(MEASURED["bench"]))
    other.parent.mkdir()
    other.write_text("{")
    before = contents(tree)
    assert bench.main(["--report", str(source)]) == 2
    assert contents(tree) == before
    assert str(other) in capsys.readouterr().err


QUICK = ["--device", "cpu", "--warmup", "0", "--iters", "1", "--repeats", "1", "--no-fla"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document["rows"][0].update(flash_kda_ms="1"),
        lambda document: document["rows"][0].pop("fla_ms"),
        lambda document: document["rows"][0].update(case=["n1_h1_t4"]),
        lambda document: document.update(rows={}),
        lambda document: document.update(settings=[]),
    ],
)
def test_resuming_a_spoiled_document(
    tmp_path: Path, spoil: Callable[[Any], object], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    options = [*QUICK, "--cases", "n1_h1_t4", "--states", "fp32", "--json", str(file)]
    assert bench.main(options) == 0
    document = json.loads(file.read_text())
    spoil(document)
    file.write_text(json.dumps(document))
    capsys.readouterr()
    assert bench.main([*options, "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench.py: {file}: ")
    assert json.loads(file.read_text()) == document


@pytest.mark.parametrize("name", ["n99999999x9_h1", "n1_h1_t" + "9" * 5000, "n1_h\u0663_t5"])
def test_cases_of_any_size_are_no_cases(name: str) -> None:
    with pytest.raises(ValueError, match="unknown case"):
        bench_cases.parse_case(name)


# What is written where


def test_write(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    file, link = folder / "new" / "a.json", tmp_path / "link.json"
    outputs.write(file, "one")
    link.symlink_to(file)
    outputs.write(link, "two")
    assert link.is_symlink() and file.read_text() == "two"
    file.unlink()
    outputs.write(link, "three")  # the link leads nowhere, and the folder is there
    assert link.is_symlink() and file.read_text() == "three"
    assert list(file.parent.iterdir()) == [file]


def test_what_is_not_a_regular_file_is_left_alone(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (fifo, link, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            outputs.write(path, "text")
        with pytest.raises(SystemExit) as stopped:
            bench.main([*QUICK, "--cases", "n1_h1_t4", "--json", str(path)])
        assert stopped.value.code == 2
    for name in ("loop", "x" * 300, "a\0b"):
        with pytest.raises(OSError):
            outputs.write(tmp_path / name, "text")
        with pytest.raises(SystemExit):
            bench.main([*QUICK, "--cases", "n1_h1_t4", "--json", str(tmp_path / name)])
    (tmp_path / "file").write_text("text")
    with pytest.raises(SystemExit):
        bench.main([*QUICK, "--cases", "n1_h1_t4", "--json", str(tmp_path / "file" / "x.json")])
    (tmp_path / "file").unlink()
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == sorted([fifo, link, tmp_path / "loop"])


def test_a_full_disk(tmp_path: Path) -> None:
    """The old contents stay, and the error names the file."""
    file = tmp_path / "a.json"
    file.write_text("old")
    program = (
        f"import resource, sys; sys.path[:0] = [{str(ROOT / 'scripts')!r}, {str(ROOT)!r}]\n"
        "import outputs, pathlib\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        f"outputs.write(pathlib.Path({str(file)!r}), 'new' * 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"File too large: '{file}'" in done.stderr.splitlines()[-1]
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_line() -> None:
    assert documents.line("a | b <c> [d](e)\nf") == "a / b (c) (d)(e)"
    assert documents.line("\x1b[31mred") == " (31mred"
    assert documents.line("") == ""
