"""Files that the scripts write: each in one step, and only where a regular file is or can be."""

from __future__ import annotations

import argparse
from pathlib import Path

from build_tools.cache import write_atomic


def argument(text: str) -> Path:
    """The file that an option names.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there, or it is not a regular file.
    """
    try:
        return _file(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write(path: Path, text: str) -> None:
    """Replace the contents of a file; an interrupted run leaves the old ones.

    Raises:
        OSError: it cannot be written, or is not a regular file.
    """
    file = _file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(file, text.encode())
    except OSError as error:
        # What fails in the middle of a file does not say in which.
        raise OSError(error.errno, error.strerror, str(path)) from None


def _file(path: Path) -> Path:
    """The file itself, where the path is a symbolic link to it.

    What is renamed over a FIFO or a device destroys it, and one over a link leaves its file behind.
    """
    try:
        file = path.resolve()
        if file.exists() and not file.is_file():
            raise OSError(f"got {path}, which is not a regular file; needs one, or a new name")
        folder = next(x for x in file.parents if x.exists())
        if not folder.is_dir():
            raise OSError(f"got {path}; needs a file in a folder, and {folder} is none")
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise OSError(f"got {path}; needs a file: {error}") from None
    except ValueError as error:
        raise OSError(f"got {str(path)!r}; needs a file: {error}") from None
    return file
