"""Links the launcher library with the machine's C++ compiler; of CUDA it needs only cuda.h."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .common import CSRC, BuildError, require_file

FILE_NAME = "libflash_kda.so"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
    "-shared",
    "-s",
    # The C++ run time goes inside, so that neither its version nor torch's copy matters.
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--no-undefined",
    "-Wl,--as-needed",
    "-Wl,-z,relro,-z,now",
)


def find_compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler's command: ``$CXX`` (which may carry arguments), else g++, c++ or clang++.

    Raises:
        BuildError: there is none, or CXX or CXXFLAGS cannot be read.
    """
    path = environ.get("PATH")
    named = _words("CXX", environ)
    _words("CXXFLAGS", environ)  # told with the rest, before anything is compiled
    if named:
        if shutil.which(named[0], path=path) is None:
            raise BuildError(f"CXX is {named[0]}, which is not a program on PATH: correct it")
        return named
    for name in _COMPILERS:
        if found := shutil.which(name, path=path):
            return [found]
    raise BuildError(
        "no C++ compiler was found: install one (Debian, Ubuntu: apt-get install g++; Fedora: "
        "dnf install gcc-c++) or set CXX"
    )


def _words(variable: str, environ: Mapping[str, str]) -> list[str]:
    text = environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{variable} is {text!r} ({error}): correct its quotes") from None


def abi_version(csrc: Path = CSRC) -> int:
    """The version of the C ABI, ``FLASH_KDA_ABI_VERSION`` in csrc/host/flash_kda.h.

    Raises:
        BuildError: the header is missing or does not define it.
    """
    header = require_file(csrc / "host" / "flash_kda.h")
    found = re.search(r"FLASH_KDA_ABI_VERSION\s*=?\s*(\d+)", header.read_text(encoding="utf-8"))
    if found is None:
        raise BuildError(f"{header} does not define FLASH_KDA_ABI_VERSION")
    return int(found[1])


def build(cuda_include: Path, csrc: Path = CSRC, environ: Mapping[str, str] = os.environ) -> bytes:
    """Compile csrc/host/*.cpp; returns the shared library.

    Args:
        cuda_include: folder with cuda.h.
        csrc: folder with host/.
        environ: gives CXX, CXXFLAGS and PATH.

    Raises:
        BuildError: no compiler, a missing file, or an error in the sources.
    """
    exports = require_file(csrc / "host" / "exports.map")
    sources = sorted((csrc / "host").glob("*.cpp"))
    if not sources:
        raise BuildError(f"no *.cpp in {csrc / 'host'}: the checkout or sdist is incomplete")
    compiler = find_compiler(environ)
    with tempfile.TemporaryDirectory(prefix="flash-kda-") as scratch:
        output = Path(scratch) / FILE_NAME
        command = [
            *compiler,
            *_FLAGS,
            *_words("CXXFLAGS", environ),
            f"-Wl,-soname,{FILE_NAME}",
            # Not -Wl, which takes a comma in the path for its end.
            *("-Xlinker", f"--version-script={exports}"),
            f"-I{csrc}",
            "-isystem",
            str(cuda_include),
            *map(str, sources),
            "-o",
            str(output),
            "-ldl",  # a library of its own before glibc 2.34
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",  # of messages and names in them
                check=False,
                env=dict(environ),
            )
        except OSError as error:
            raise BuildError(f"cannot run {compiler[0]} ({error.strerror}): correct CXX") from None
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            raise BuildError(
                f"{compiler[0]} could not build the launcher from csrc/host (status "
                f"{done.returncode}); its messages are above"
            )
        library = output.read_bytes() if output.is_file() else b""
    if not library.startswith(b"\x7fELF"):
        raise BuildError(f"{compiler[0]} made no library, though it ended well: correct CXX")
    return library
