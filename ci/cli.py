"""What the commands share: one-line errors, a dry run, progress with timings, other programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from build_tools.cache import write_atomic
from build_tools.common import ROOT, BuildError

DRY_RUN = "FLASH_KDA_CI_DRY_RUN"

__all__ = ["ROOT", "BuildError", "call", "dry_run", "main", "parser", "publish", "say", "step"]


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """An argument parser that names the command as it is typed."""
    return argparse.ArgumentParser(
        prog=f"python -m ci.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def main(work: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 1 after printing the one line of its BuildError."""
    try:
        work(argv)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def dry_run(plan: str) -> bool:
    """Whether to stop here; prints ``plan`` then."""
    if os.environ.get(DRY_RUN) != "1":
        return False
    say(f"dry run: {plan}")
    return True


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a long step, and say how long it took."""
    say(f"==> {text}")
    begin = time.monotonic()
    yield
    say(f"    {time.monotonic() - begin:.1f} s")


def publish(file: Path, out: Path) -> Path:
    """Put a finished file into ``out``: all of it, or nothing if this is interrupted."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / file.name, file.read_bytes())
    return out / file.name


def call(
    *command: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    quiet: bool = False,
) -> str:
    """Run a program and return its standard output; its output is shown unless ``quiet``.

    Raises:
        BuildError: it cannot be started or fails.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=dict(environ) if environ is not None else None,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"cannot run {words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        if quiet:
            print(done.stdout, file=sys.stderr)
        # The last line of a failed build is pip's; the reason is the line that the build printed.
        reasons = [x for x in (done.stdout or "").splitlines() if "flash-kda: " in x]
        reason = f": {reasons[0].partition('flash-kda: ')[2].strip()}" if reasons else ""
        raise BuildError(f"{shlex.join(words)} failed with status {done.returncode}{reason}")
    return done.stdout or ""
