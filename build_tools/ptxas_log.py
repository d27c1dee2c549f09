"""Reads what ptxas says in NVRTC's program log: resources per kernel, and performance warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# The code is right but slow: C7510 "Potential Performance Loss: wgmma.mma_async instructions are
# serialized due to ...", or setmaxnreg ignored. Without a look at the log nobody would notice.
_SLOW = re.compile(r"Potential Performance Loss")
# Front-end warnings, and ptxas notes such as C7519 "warpgroup.arrive is injected".
_WARNING = re.compile(r"(?:\): |^)warning\b|\(C\d{4}\)")


@dataclass
class KernelResources:
    """What one kernel uses: registers per thread, bytes of static shared memory per block, bytes
    of stack (local memory) and of spilled registers per thread."""

    name: str
    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0


def resources(log: str) -> list[KernelResources]:
    """The kernels of a program log, by name.

    A log names each entry function, then its properties, then its registers; device functions
    that were not inlined have properties too, which belong to no kernel.
    """
    kernels: dict[str, KernelResources] = {}
    entry: KernelResources | None = None
    described = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = kernels.setdefault(match[1], KernelResources(match[1]))
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif entry is None:
            continue
        elif (match := _STACK.search(line)) and described == entry.name:
            entry.local_bytes, entry.spill_store_bytes, entry.spill_load_bytes = map(
                int, match.groups()
            )
        elif match := _USED.search(line):
            entry.registers = int(match[1])
            shared = _SHARED.search(line)
            entry.shared_bytes = int(shared[1]) if shared else 0
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def slow_code(log: str) -> list[str]:
    """The lines that warn of slow code; a build with any of them is refused."""
    return [line.strip() for line in log.splitlines() if _SLOW.search(line)]


def warnings(log: str) -> list[str]:
    """The first line of each warning or numbered note of the compiler."""
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]
