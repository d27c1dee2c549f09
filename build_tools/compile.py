"""Compiles csrc/kernels.cu to one cubin per target with NVRTC.

By hand: ``python -m build_tools.compile --target 90a --cuda 12.9 --out DIR [--verbose]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import cache, cutlass, ptxas_log, toolkit
from .common import CSRC, BuildError, hash_files, package_module, require_file, source_files

_WORKER = Path(__file__).with_name("nvrtc_worker.py")
_MEMORY_PER_COMPILE = 1 << 30  # bytes; keeps a many-core machine with little memory alive

Report = Callable[[str], None]


@dataclass(frozen=True)
class Cubin:
    """One compiled target."""

    target: str
    data: bytes
    kernels: list[ptxas_log.KernelResources]
    log: str
    from_cache: bool

    @property
    def file_name(self) -> str:
        return f"flash_kda.sm_{self.target}.cubin"


def options(target: str) -> list[str]:
    """NVRTC's options for a target, without the include directories.

    CuTe's unannotated constexpr functions need ``-default-device``; NDEBUG drops its device
    asserts; ``-v`` makes ptxas report registers and spills in the program log.
    """
    return [
        f"-arch={package_module('targets').sm_name(target)}",
        "-std=c++17",
        "-default-device",
        "-DNDEBUG",
        "--ptxas-options=-v",
    ]


def compile_targets(
    targets: Sequence[str],
    *,
    tools: toolkit.Toolkit | None = None,
    headers: cutlass.Cutlass | None = None,
    csrc: Path = CSRC,
    cache_dir: Path | None = None,
    jobs: int | None = None,
    extra_options: Sequence[str] = (),
    report: Report = lambda text: None,
) -> list[Cubin]:
    """Compile every target, side by side as far as cores and memory go.

    Args:
        targets: names such as ``"90a"``.
        tools, headers: compiler and CUTLASS; located when None.
        csrc: folder that holds kernels.cu.
        cache_dir: where compiled cubins are kept; the default cache when None.
        jobs: how many compilers run at once; as many as cores when None.
        extra_options: more NVRTC options, for experiments.
        report: called with progress lines.

    Raises:
        BuildError: anything missing, an error in the sources, or a warning about slow code.
    """
    require_file(csrc / "kernels.cu")
    tools = tools or toolkit.locate()
    headers = headers or cutlass.locate()
    cache_dir = cache_dir or cache.directory()
    inputs = {
        # The launcher's sources do not reach the device compiler.
        "csrc": hash_files(
            [f for f in source_files(csrc) if f.relative_to(csrc).parts[0] != "host"], csrc
        ),
        "cutlass": [headers.version, headers.tree_hash()],
        "nvrtc": tools.version,
        "toolkit": tools.header_hash(),
    }

    def one(target: str) -> Cubin:
        flags = [*options(target), *extra_options]
        name = cache.key({**inputs, "options": flags, "target": target})
        found = cache.load(cache_dir, name)
        if found is None or not is_for(target, found.cubin):
            report(f"sm_{target}: compiling with NVRTC {tools.version}")
            found = _run_nvrtc(tools, headers, csrc, flags, target)
            cache.store(cache_dir, name, found)
            return _describe(target, found, from_cache=False)
        report(f"sm_{target}: unchanged, taken from the cache")
        return _describe(target, found, from_cache=True)

    with ThreadPoolExecutor(jobs or _parallel_jobs()) as pool:
        return list(pool.map(one, targets))


def is_for(target: str, cubin: bytes) -> bool:
    """Whether a cubin's header names the architecture of a target (which leaves out a and f)."""
    if len(cubin) < 52 or not cubin.startswith(b"\x7fELF"):
        return False
    flags = int.from_bytes(cubin[48:52], "little")
    # The number lies in the lowest byte, since version 8 of the ABI in the next one.
    number = flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF
    major, minor = package_module("targets").target_capability(target)
    return number == 10 * major + minor


def _describe(target: str, found: cache.Compiled, *, from_cache: bool) -> Cubin:
    return Cubin(target, found.cubin, ptxas_log.resources(found.log), found.log, from_cache)


def _parallel_jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _available_memory() // _MEMORY_PER_COMPILE))


def _available_memory() -> int:
    """Bytes that programs can take without swapping; all of the memory where /proc is missing."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(text.partition("MemAvailable:")[2].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _run_nvrtc(
    tools: toolkit.Toolkit, headers: cutlass.Cutlass, csrc: Path, flags: list[str], target: str
) -> cache.Compiled:
    include = [csrc, headers.include, *tools.include_dirs]
    with tempfile.TemporaryDirectory(prefix="flash-kda-") as scratch:
        output = Path(scratch) / "kernels.cubin"
        request = {
            "library": str(tools.library),
            "builtins": str(tools.builtins) if tools.builtins else None,
            "source": str(csrc / "kernels.cu"),
            "options": flags + [f"-I{directory}" for directory in include],
            "output": str(output),
        }
        process = subprocess.run(
            [sys.executable, "-I", str(_WORKER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=scratch,  # NVRTC also looks for quoted includes in the current directory
        )
        if process.returncode != 0:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise BuildError(
                f"sm_{target}: NVRTC {tools.version} stopped with status {process.returncode}: "
                f"{last}"
            )
        answer = json.loads(process.stdout)
        if answer["status"] != "ok":
            print(answer["log"], file=sys.stderr)
            raise BuildError(
                f"sm_{target}: NVRTC {tools.version} could not compile csrc/kernels.cu "
                f"({answer['status']}); its messages are above"
            )
        if slow := ptxas_log.slow_code(answer["log"]):
            raise BuildError(f"sm_{target}: the compiler warns of slow code: {slow[0]}")
        data = output.read_bytes()
    if not is_for(target, data):
        raise BuildError(f"sm_{target}: NVRTC {tools.version} produced no cubin for it")
    return cache.Compiled(data, answer["log"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.compile", description=__doc__)
    parser.add_argument("--target", default="all", help="90a, a comma list, or all")
    parser.add_argument("--cuda", help="12.9 or 13.0 (default: FLASH_KDA_CUDA, else 12.9)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the cubins")
    parser.add_argument("--csrc", type=Path, default=CSRC, help="folder that holds kernels.cu")
    parser.add_argument("--option", action="append", default=[], help="one more NVRTC option")
    parser.add_argument("--jobs", type=int, help="compilers that run at once")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's whole log")
    arguments = parser.parse_args(argv)
    try:
        targets = package_module("targets").parse_archs(arguments.target)
        cubins = compile_targets(
            targets,
            tools=toolkit.locate(arguments.cuda),
            csrc=arguments.csrc.resolve(),
            extra_options=arguments.option,
            jobs=arguments.jobs,
            report=print,
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for cubin in cubins:
        cache.write_atomic(arguments.out / cubin.file_name, cubin.data)
        print(f"{arguments.out / cubin.file_name}: {len(cubin.data)} bytes")
        for kernel in cubin.kernels:
            print(
                f"  {kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} B static "
                f"shared, {kernel.local_bytes} B stack, spills {kernel.spill_store_bytes} B "
                f"stored {kernel.spill_load_bytes} B loaded"
            )
        for line in [cubin.log] if arguments.verbose else ptxas_log.warnings(cubin.log):
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(package_module("console").run("build_tools.compile", main))
