"""One NVRTC compilation in a process of its own; standard library only, run by file path.

Reads a JSON request on standard input::

    {"library": path, "builtins": path or null, "source": path, "options": [...], "output": path}

writes the cubin to ``output`` and a JSON answer to standard output::

    {"status": "ok" or NVRTC's error text, "version": "12.9", "log": NVRTC's program log}

A process per target lets targets compile side by side and turns a compiler crash into an exit
status.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path


class Nvrtc:
    """The few NVRTC entry points used here."""

    def __init__(self, library: str, builtins: str | None) -> None:
        if builtins is not None:
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(library)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: bytes, name: str, options: list[str]) -> tuple[str, str, bytes]:
        """Compile; returns (``"ok"`` or an error text, program log, cubin)."""
        program = ctypes.c_void_p()
        status = self._lib.nvrtcCreateProgram(
            ctypes.byref(program), source, name.encode(), 0, None, None
        )
        if status != 0:
            return self._text(status), "", b""
        encoded = [os.fsencode(option) for option in options]
        arguments = (ctypes.c_char_p * len(encoded))(*encoded)
        status = self._lib.nvrtcCompileProgram(program, len(encoded), arguments)
        log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        cubin = self._fetch(program, "CUBIN") if status == 0 else b""
        self._lib.nvrtcDestroyProgram(ctypes.byref(program))
        return ("ok" if status == 0 else self._text(status)), log, cubin

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) != 0:
            return b""
        data = ctypes.create_string_buffer(size.value)
        getattr(self._lib, f"nvrtcGet{what}")(program, data)
        return data.raw

    def _text(self, status: int) -> str:
        return self._lib.nvrtcGetErrorString(status).decode()


def main() -> None:
    request = json.load(sys.stdin)
    nvrtc = Nvrtc(request["library"], request["builtins"])
    source = Path(request["source"])
    status, log, cubin = nvrtc.compile(source.read_bytes(), source.name, request["options"])
    if status == "ok":
        Path(request["output"]).write_bytes(cubin)
    json.dump({"status": status, "version": nvrtc.version(), "log": log}, sys.stdout)


if __name__ == "__main__":
    main()
