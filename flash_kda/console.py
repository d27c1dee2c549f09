"""Command lines: the numbers that options take, and how a program ends that cannot print.

Imports nothing of this package and no torch, so that the build can use it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import math
import os
import re
import sys
from collections.abc import Callable

BROKEN_PIPE = 141
"""What a shell shows for a program that SIGPIPE has ended."""
NOT_WRITTEN = 74
"""EX_IOERR."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run(name: str, command: Callable[[], int]) -> int:
    """Run a program's command; returns its exit status.

    Where nobody reads the output any more the program ends quietly, as ``| head`` wants it. Where
    there is no room for the output, it says so in one line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths, variables and device names may hold what the terminal's encoding cannot say.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            # What is still buffered would otherwise fail after the last line of this program.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except OSError as error:
        if not _of_output(error):
            raise
        with contextlib.suppress(OSError):
            print(f"{name}: cannot write the output: {error.strerror}", file=sys.stderr)
        status = NOT_WRITTEN
    # The interpreter flushes once more.
    with contextlib.suppress(AttributeError, OSError, ValueError):  # without one, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def failed(name: str, error: Exception) -> int:
    """Say in one line why a command ends, and return exit status 2.

    Raises:
        OSError: the error itself, where it is one of the output: ``run`` ends the program.
    """
    if _of_output(error):
        raise error
    print(f"{name}: {line(str(error))}", file=sys.stderr)
    return 2


def _of_output(error: Exception) -> bool:
    """Errors of files have their names."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in (errno.EPIPE, *_NO_ROOM)


def integer(least: int, most: int) -> Callable[[str], int]:
    """What reads an integer in a range, for argparse."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs an integer from {least} to {most}"
            )
        return int(text)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """What reads a number in a range, for argparse."""

    def parse(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs a number from {least:g} to {most:g}"
            )
        return value

    return parse


def line(text: str) -> str:
    """A text as one line: what a terminal would obey, or show as another line, is escaped."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
