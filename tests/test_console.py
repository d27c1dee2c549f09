"""How the programs end when their output cannot be written, and the numbers that options take."""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flash_kda import console

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
SMALL = ("--device", "cpu", "--heads", "1", "--max-tokens", "16")
PROGRAMS = {
    "flash_kda": ("-m", "flash_kda", "doctor"),
    "bench.py": (SCRIPTS / "bench.py", "--list"),
    "accuracy.py": (SCRIPTS / "accuracy.py", *SMALL),
    "fuzz.py": (SCRIPTS / "fuzz.py", "--device", "cpu", "--seconds", "0.1"),
    "gpu_checks.py": (SCRIPTS / "gpu_checks.py", "--list"),
}
EACH = pytest.mark.parametrize("name", PROGRAMS)
UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])


def run(
    name: str, output: int, unbuffered: str, limit: int = resource.RLIM_INFINITY
) -> tuple[int, str]:
    """Exit status and stderr of a program that may write files of at most ``limit`` bytes."""
    done = subprocess.run(
        [sys.executable, *PROGRAMS[name]],
        cwd=ROOT,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": unbuffered,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    return done.returncode, done.stderr


@EACH
@UNBUFFERED
def test_output_that_nobody_reads(name: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(name, writing, unbuffered) == (console.BROKEN_PIPE, "")
    finally:
        os.close(writing)


@EACH
@UNBUFFERED
def test_no_room_for_the_output(name: str, unbuffered: str, tmp_path: Path) -> None:
    """As on a full disk: one line says so."""
    with (tmp_path / "output").open("wb") as file:
        status, text = run(name, file.fileno(), unbuffered, limit=0)
    assert (status != 0, text.splitlines()[1:]) == (True, []), text
    assert text.startswith(f"{name}: ") and "File too large" in text


def test_other_errors_stay_as_they_are() -> None:
    for error in (FileNotFoundError(2, "no", "x"), OSError(28, "full", "x"), OSError("text")):

        def command(error: OSError = error) -> int:
            raise error

        with pytest.raises(OSError) as info:
            console.run("program", command)
        assert info.value is error


@pytest.mark.parametrize("output", [None, io.StringIO()])
def test_output_that_is_no_file(
    monkeypatch: pytest.MonkeyPatch, output: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stdout", output)

    def command() -> int:
        raise BrokenPipeError

    assert console.run("program", command) == console.BROKEN_PIPE


def test_why_a_command_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.failed("program", ValueError("a\nb")) == 2
    assert console.failed("program", OSError(28, "full", "x")) == 2
    assert capsys.readouterr().err == "program: a\\nb\nprogram: [Errno 28] full: 'x'\n"
    for error in (BrokenPipeError(32, "pipe"), OSError(28, "full")):
        with pytest.raises(type(error)):
            console.failed("program", error)


@pytest.mark.parametrize("text", ["", "-1", "11", "1.0", "x", "9" * 5000, "٣", " 3", "nan"])
def test_what_is_no_integer_of_a_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="needs an integer from 0 to 10"):
        console.integer(0, 10)(text)
    assert console.integer(0, 10)("10") == 10


@pytest.mark.parametrize("text", ["", "-1e-9", "10.1", "x", "nan", "inf", "1e400", "1_0", "٣"])
def test_what_is_no_number_of_a_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="needs a number from 0 to 10"):
        console.number(0, 10)(text)
    assert console.number(0, 10)("2.5") == 2.5


def test_line() -> None:
    assert console.line("Grün 10 µs \\xfe") == "Grün 10 µs \\xfe"
    assert console.line("a\nb\r\x1b[2K\x07\u2028\u202e\ud800") == (
        "a\\nb\\r\\x1b[2K\\x07\\u2028\\u202e\\ud800"
    )
