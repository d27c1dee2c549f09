"""Every check that needs a GPU, one after the other, each under a time limit.

    python scripts/gpu_checks.py --out logs [--parts tests,sanitizer] [--wheel dist/pypi]
        [--variant FOLDER]

racecheck needs a variant build of flash_kda (docs/testing.md), installed in the folder --variant.

Needs flash_kda, torch and pytest; what else a part needs (pytest-xdist, compute-sanitizer,
flash-linear-attention) is missed with a line that says so. Each part writes its own log. Exit
status 0 if every part that ran is well. docs/testing.md tells what each takes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from build_tools.common import package_module  # noqa: E402

FLA_TESTS = ("tests/gpu/test_fla.py", "tests/gpu/test_fla_backend.py")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROCESSES = 8
"""How many share the GPU in the tests: they wait for small kernels most of the time."""


@dataclass(frozen=True)
class Part:
    """One command of a check."""

    check: str
    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: str | None = None
    """What is missing to run it; None if nothing is."""
    package: Path | None = None
    """Folder whose flash_kda it runs, instead of the installed one."""


def module_missing(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"the Python module {name}"


def program_missing(name: str) -> str | None:
    return None if shutil.which(name) else f"{name} on PATH"


def parts(wheel: Path | None, variant: Path | None = None) -> Iterator[Part]:
    """All of them, the quick and telling ones first."""
    python = sys.executable
    pytest = (python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    shared = () if module_missing("xdist") else ("-n", str(PROCESSES))
    skipped = tuple(f"--ignore={path}" for path in FLA_TESTS)
    yield Part("tests", "tests", (*pytest, "tests/gpu", *skipped, *shared), 600)
    # One after the other: each takes up to half of the GPU's memory.
    slow = (*pytest, "tests/gpu", *skipped, "-m", "slow", "--runslow")
    yield Part("slow", "slow", slow, 300)
    fla = module_missing("fla")
    yield Part("fla", "fla", (*pytest, *FLA_TESTS), 600, fla)
    smoke = (python, "scripts/gpu_smoke.py", *(("--wheel", str(wheel)) if wheel else ()))
    yield Part("smoke", "smoke", smoke, 120)
    sanitizer = program_missing("compute-sanitizer")
    for tool in SANITIZERS:
        races = tool == "racecheck"
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", python)
        yield Part(
            "sanitizer",
            tool,
            (*command, "scripts/small_calls.py"),
            120,
            sanitizer or ("the folder --variant" if races and variant is None else None),
            variant if races else None,
        )
    # Without a GPU these two would take the CPU path, and be well.
    on_gpu = ("--device", "cuda")
    fuzz = (python, "scripts/fuzz.py", "--seconds", "60", "--seed", "1", *on_gpu)
    yield Part("fuzz", "fuzz", fuzz, 120)
    yield Part("bench", "bench", (python, "scripts/bench.py"), 600)
    yield Part("layer", "layer", (python, "scripts/bench_layer.py", "--publish"), 300, fla)
    yield Part("accuracy", "accuracy", (python, "scripts/accuracy.py", "--publish", *on_gpu), 300)


def run(part: Part, log: Path) -> str:
    """Run one part; returns "ok", or what happened instead.

    The time limit ends all processes that the part has started: one that lives on would disturb
    the next part's times. So does SIGTERM to this process.
    """
    with log.open("w", encoding="utf-8") as output, terminating():
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=environment(part),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(part.limit_s)
            answer = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            answer = f"ended after {part.limit_s:.0f} s"
        finally:
            end_group(process.pid)
            process.wait()
    return answer


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that what is running can be ended first."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment(part: Part) -> dict[str, str]:
    # Without a GPU the tests would all be skipped.
    environ = {**os.environ, "FLASH_KDA_REQUIRE_GPU": "1"}
    if part.package is not None:
        others = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = os.pathsep.join([str(part.package), *([others] if others else [])])
    return environ


def end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the logs")
    parser.add_argument("--parts", help="checks to run, comma-separated (default: all)")
    parser.add_argument("--wheel", type=Path, help="wheel, or folder of wheels, for the smoke test")
    parser.add_argument("--variant", type=Path, help="folder with the variant for racecheck")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    arguments = parser.parse_args(argv)
    known = list(
        parts(
            arguments.wheel.resolve() if arguments.wheel else None,
            arguments.variant.resolve() if arguments.variant else None,
        )
    )
    names = list(dict.fromkeys(part.check for part in known))
    chosen = names
    if arguments.parts is not None:
        chosen = [name.strip() for name in arguments.parts.split(",")]
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(
            f"--parts: got {', '.join(map(repr, unknown))}, needs some of {', '.join(names)}"
        )
    if arguments.variant and not (arguments.variant / "flash_kda").is_dir():
        parser.error(f"--variant: there is no flash_kda in {arguments.variant}")
    if not arguments.list:
        if arguments.out is None:
            parser.error("--out names the folder for the logs")
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {error}")
    failed = False
    for part in known:
        if part.check not in chosen:
            continue
        if arguments.list:
            print(f"{part.name:10} {' '.join(part.command)}")
        elif part.needs:
            print(f"{part.name:10} not run: it needs {part.needs}", flush=True)
        else:
            begin = time.monotonic()
            answer = run(part, arguments.out / f"{part.name}.log")
            failed |= answer != "ok"
            print(f"{part.name:10} {time.monotonic() - begin:6.1f} s  {answer}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(package_module("console").run("gpu_checks.py", main))
