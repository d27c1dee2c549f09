"""scripts/gpu_checks.py and scripts/small_calls.py, as far as they go without a GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_checks  # noqa: E402
import small_calls  # noqa: E402


def part(*command: str, limit_s: float = 30, needs: str | None = None) -> gpu_checks.Part:
    return gpu_checks.Part("made", "made", (sys.executable, *command), limit_s, needs)


def test_every_command_exists() -> None:
    for each in gpu_checks.parts(None):
        for word in each.command:
            path = word.removeprefix("--ignore=")
            if path.startswith(("scripts/", "tests/")):
                assert (SCRIPTS.parent / path).exists(), each


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_checks.main(["--list", "--parts", "sanitizer, smoke", "--wheel", "dist"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["smoke", *gpu_checks.SANITIZERS]
    assert lines[0].endswith(f"--wheel {Path('dist').resolve()}")


def test_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """racecheck, and nothing else, runs another package; without one it does not run."""
    (tmp_path / "flash_kda").mkdir()
    monkeypatch.setattr(gpu_checks, "program_missing", lambda name: None)
    needs = {each.name: each.needs for each in gpu_checks.parts(None)}
    assert needs["racecheck"] == "the folder --variant" and needs["memcheck"] is None
    found = {each.name: each for each in gpu_checks.parts(None, tmp_path)}
    assert found["racecheck"].needs is None
    assert [name for name, each in found.items() if each.package] == ["racecheck"]
    monkeypatch.setenv("PYTHONPATH", "before")
    path = os.pathsep.join((str(tmp_path), "before"))
    assert gpu_checks.environment(found["racecheck"])["PYTHONPATH"] == path
    assert gpu_checks.environment(found["memcheck"])["PYTHONPATH"] == "before"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "x", "--parts", "test"], "--parts: got 'test', needs some of"),
        (["--out", "x", "--parts", ""], "--parts: got '', needs some of"),
        (["--out", "x", "--parts", "smoke,"], "--parts: got '', needs some of"),
        (["--out", __file__], "--out: "),
        (["--list", "--variant", "no/such"], "--variant: there is no flash_kda in no/such"),
        ([], "--out names"),
    ],
)
def test_misuse(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu_checks.main(arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [part("-c", "print('fine')"), part("-c", "raise SystemExit(3)"), part(needs="a thing")]
    monkeypatch.setattr(gpu_checks, "parts", lambda wheel, variant: iter(made))
    assert gpu_checks.main(["--out", str(tmp_path / "logs")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines[:2]] == ["ok", "exit status 3"]
    assert lines[2].endswith("not run: it needs a thing")
    made.pop(1)
    assert gpu_checks.main(["--out", str(tmp_path / "logs")]) == 0
    assert (tmp_path / "logs" / "made.log").read_text() == "fine\n"


def test_the_limit_ends_what_a_part_has_started(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = f"""
import subprocess, time
process = subprocess.Popen({sleeper!r})
open({str(tmp_path / "pid")!r}, "w").write(str(process.pid))
time.sleep(60)
"""
    begin = time.monotonic()
    assert gpu_checks.run(part("-c", child, limit_s=3), tmp_path / "log") == "ended after 3 s"
    assert time.monotonic() - begin < 20
    assert ends(int((tmp_path / "pid").read_text()))


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True  # whoever inherited it has not looked yet
        time.sleep(0.05)
    return False


def test_a_part_does_not_outlive_the_script(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    made = [
        sys.executable,
        "-c",
        f"""
import os, pathlib, time
pathlib.Path({str(tmp_path / "new")!r}).write_text(str(os.getpid()))
os.rename({str(tmp_path / "new")!r}, {str(written)!r})
time.sleep(60)
""",
    ]
    script = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_checks
made = gpu_checks.Part("made", "made", tuple({made!r}), 60)
gpu_checks.parts = lambda wheel, variant: iter([made])
gpu_checks.main(["--out", {str(tmp_path / "logs")!r}])
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 20
        while not written.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 143
    assert ends(int(written.read_text()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "made",
    [each for each in gpu_checks.parts(None) if not each.needs],
    ids=lambda made: made.name,
)
def test_no_part_is_well_without_a_gpu(made: gpu_checks.Part, tmp_path: Path) -> None:
    """Skipped tests, or another device's results, are not what was asked for."""
    if made.check in ("fuzz", "accuracy"):  # not run without: one would rewrite a page
        assert made.command[-2:] == ("--device", "cuda")
    command = made.command[: made.command.index("-n")] if "-n" in made.command else made.command
    made = dataclasses.replace(made, command=command)  # tests in one process
    assert gpu_checks.run(made, tmp_path / "log").startswith("exit status")


def test_small_calls_on_the_cpu() -> None:
    device = torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the script does
    try:
        small_calls.check(None, small_calls.PACKED, device)
        small_calls.check_crowd(None, device)
        with pytest.raises(ValueError, match=r"cu_seqlens\[2\] = 30"):  # read on the CPU alone
            small_calls.call_hostile(None, small_calls.HEADS, device)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_small_calls_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert small_calls.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["x", "3,-1", "", "3,,4"])
def test_small_calls_of_no_lengths(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        small_calls.main(["--lengths", lengths])
    assert stopped.value.code == 2
    assert "--lengths: got" in capsys.readouterr().err
