"""``python -m flash_kda doctor``: what is installed, and what each GPU of this machine gets.

The checks are the loader's own, so that what is said here is what a call would meet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from . import abi, console, driver, loader, manifest
from ._version import __version__
from .errors import FlashKDAError, LoaderError
from .ops import CHECK_VARIABLE, PATH_VARIABLE

SCHEMA = 1
SHAPES = ((8192, 96, 1), (8192, 12, 1))
"""(tokens, heads, sequences) of the calls whose kernel path is shown for each GPU."""

MIN_TORCH = (2, 4)
VARIABLES = (
    PATH_VARIABLE,
    CHECK_VARIABLE,
    loader.CUBIN_VARIABLE,
    loader.OLD_DRIVER_VARIABLE,
    "FLA_FLASH_KDA",
    "CUDA_VISIBLE_DEVICES",
)

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ``doctor`` command to ``parser``."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--require-gpu", action="store_true", help="fail when there is no GPU")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0 when nothing is broken, else 1."""
    report = collect(require_gpu=arguments.require_gpu)
    print(json.dumps(report, indent=1) if arguments.json else render(report))
    return 1 if report["problems"] else 0


def collect(require_gpu: bool = False) -> Report:
    """Gather everything into plain lists and dicts.

    ``problems`` holds what makes the exit status 1; ``warnings`` what a user should know.
    """
    problems: list[str] = []
    warnings: list[str] = []
    installed = _install(problems, warnings)
    _check_overrides(problems)
    if os.environ.get(CHECK_VARIABLE, "0") not in ("", "0"):
        warnings.append(
            f"{CHECK_VARIABLE} is set: every call on a GPU with cu_seqlens, state_indices or "
            "checkpoint_offsets reads them first, and waits for the device to do so"
        )
    gpus = _gpus(problems)
    report = {
        "schema": SCHEMA,
        "version": __version__,
        "directory": str(manifest.PACKAGE_DIR),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": _torch(problems, warnings, bool(gpus)),
        "install": installed,
        "driver": driver_facts(),
        "gpus": gpus,
        "environment": {name: _value(name) for name in VARIABLES if name in os.environ},
        "problems": problems,
        "warnings": warnings,
    }
    if require_gpu and not gpus:
        problems.append("no GPU was found, and --require-gpu asks for one")
    # A broken install or override would otherwise be told once for each GPU as well.
    problems[:] = dict.fromkeys(problems)
    report["status"] = "broken" if problems else "ok"
    return report


def planned_path(tokens: int, heads: int, sequences: int, gpu: abi.Gpu) -> str:
    """Name of the kernel path of such a call, FLASH_KDA_PATH taken into account.

    Raises:
        BrokenInstallError: no usable launcher.
        ValueError: FLASH_KDA_PATH names no path.
    """
    forced = os.environ.get(PATH_VARIABLE)
    path = abi.path_id(forced) if forced else abi.AUTOMATIC_PATH
    return abi.path_names()[abi.plan(tokens, heads, sequences, gpu, path).path]


def driver_facts() -> Report:
    """``cuda`` (version the driver supports), ``release`` and ``error``; None where unknown."""
    try:
        major, minor = loader.find_driver()
    except LoaderError as error:
        return {"cuda": None, "release": driver.kernel_module_version(), "error": str(error)}
    return {
        "cuda": f"{major}.{minor}",
        "release": driver.kernel_module_version(),
        "error": None,
    }


def _install(problems: list[str], warnings: list[str]) -> Report | None:
    """The manifest's content, each file checked; None when there is no usable manifest."""
    try:
        installed = manifest.read()
    except LoaderError as error:
        problems.append(str(error))
        return None
    if installed.package_version != __version__:
        warnings.append(
            f"the libraries were built for version {installed.package_version}, "
            f"the Python files are version {__version__}: install again"
        )
    launcher: Report = {"file": _relative(installed.launcher, installed), "ok": True, "error": None}
    try:
        opened = abi.launcher()
        launcher |= {"abi_version": opened.abi_version, "paths": list(opened.path_names)}
    except LoaderError as error:
        problems.append(str(error))
        launcher |= {"ok": False, "error": str(error)}
    cubins = []
    for target, record in installed.cubins.items():
        cubin: Report = {
            "target": target,
            "file": _relative(record, installed),
            "size": record.size,
            "sha256": record.sha256,
            "ok": True,
            "error": None,
        }
        try:
            manifest.read_file(record)
        except LoaderError as error:
            problems.append(str(error))
            cubin |= {"ok": False, "error": str(error)}
        cubins.append(cubin)
    if not cubins:
        empty = manifest.broken(installed.path, "at least one cubin", "an empty list of cubins")
        problems.append(str(empty))
    return {
        "compiler": installed.raw["compiler"],
        "cutlass_version": installed.raw.get("cutlass_version"),
        "csrc_sha256": installed.raw.get("csrc_sha256"),
        "launcher": launcher,
        "cubins": cubins,
    }


def _check_overrides(problems: list[str]) -> None:
    """What the variables name that change which kernels run, GPU or not."""
    forced, cubin = os.environ.get(PATH_VARIABLE), os.environ.get(loader.CUBIN_VARIABLE)
    try:
        if forced:
            abi.path_id(forced)
    except (LoaderError, ValueError) as error:
        problems.append(str(error))
    try:
        if cubin:
            loader.read_selected(loader.Selection(loader.OVERRIDE_TARGET, Path(cubin), None))
    except LoaderError as error:
        problems.append(str(error))


def _value(name: str) -> str:
    """A variable's value; bytes that are not UTF-8 are shown as escapes."""
    return os.fsencode(os.environ[name]).decode(errors="backslashreplace")


def _relative(record: manifest.FileRecord, installed: manifest.Manifest) -> str:
    return record.path.relative_to(installed.path.parent).as_posix()


def _torch(problems: list[str], warnings: list[str], has_gpu: bool) -> Report:
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        problems.append(f"torch {version} is too old: flash_kda needs 2.4 or newer")
    if has_gpu and torch.version.cuda is None:
        warnings.append(
            f"torch {version} is built without CUDA, so there are no CUDA tensors to compute with"
        )
    return {"version": version, "cuda": torch.version.cuda}


def _gpus(problems: list[str]) -> list[Report]:
    """One entry for each visible GPU: its cubin and paths, or ``error`` saying why it has none."""
    try:
        devices = driver.devices()
    except driver.DriverUnavailable:
        return []  # told under "driver"
    except driver.DriverCallFailed as error:
        problems.append(f"the NVIDIA driver is installed but does not work: {error}")
        return []
    gpus = []
    for device in devices:
        explanation = loader.explain(device)
        gpu: Report = {
            "index": device.index,
            "name": device.name,
            "capability": f"{device.capability[0]}.{device.capability[1]}",
            "sm_count": device.sm_count,
            "memory_bytes": device.memory_bytes,
            "uuid": device.uuid,
            "target": explanation.target,
            "cubin": explanation.cubin,
            "paths": [],
            "error": str(explanation.error) if explanation.error else None,
        }
        if explanation.error is None:
            try:
                gpu["paths"] = [_path(*shape, loader.planning_facts(device)) for shape in SHAPES]
            except (FlashKDAError, ValueError) as error:
                gpu["error"] = str(error)
        if gpu["error"] is not None:
            problems.append(gpu["error"])
        gpus.append(gpu)
    return gpus


def _path(tokens: int, heads: int, sequences: int, gpu: abi.Gpu) -> Report:
    path = planned_path(tokens, heads, sequences, gpu)
    return {"tokens": tokens, "heads": heads, "sequences": sequences, "path": path}


def render(report: Report) -> str:
    """The report as text for a terminal."""
    cuda = report["torch"]["cuda"]
    lines = [
        f"flash_kda {report['version']} in {report['directory']}",
        f"Python {report['python']}, {report['platform']}, torch {report['torch']['version']} "
        f"({f'CUDA {cuda}' if cuda else 'no CUDA'})",
        *_render_install(report["install"]),
        "",
        "Driver",
        _render_driver(report["driver"]),
        "",
        "GPUs",
        *(line for gpu in report["gpus"] for line in _render_gpu(gpu)),
    ]
    if not report["gpus"]:
        lines.append("  none; CPU tensors are computed by the reference path")
    if report["environment"]:
        lines += ["", "Environment"]
        lines += [f"  {name}={value}" for name, value in report["environment"].items()]
    for title in ("warnings", "problems"):
        if report[title]:
            lines += ["", title.capitalize(), *(f"  - {text}" for text in report[title])]
    lines += ["", f"Result: {report['status']}"]
    # Names in a manifest, a variable or a path could otherwise make lines of their own.
    return "\n".join(map(console.line, lines))


def _render_install(install: Report | None) -> list[str]:
    lines = ["", "Installed"]
    if install is None:
        return [*lines, "  nothing usable (see Problems)"]
    compiler = install["compiler"]
    launcher = install["launcher"]
    state = f"ok, ABI {launcher['abi_version']}" if launcher["ok"] else "BROKEN"
    lines.append(f"  compiler  {compiler['name']} {compiler['version']} (CUDA {compiler['cuda']})")
    lines.append(f"  launcher  {launcher['file']}: {state}")
    if launcher["ok"]:
        lines.append(f"  paths     {', '.join(launcher['paths'])}")
    for cubin in install["cubins"]:
        state = f"ok, {cubin['size'] / 1024:.0f} KiB" if cubin["ok"] else "BROKEN"
        lines.append(f"  {'sm_' + cubin['target']:8}  {cubin['file']}: {state}")
    return lines


def _render_driver(facts: Report) -> str:
    if facts["error"]:
        return f"  {facts['error']}"
    release = f", version {facts['release']}" if facts["release"] else ""
    return f"  CUDA {facts['cuda']}{release}"


def _render_gpu(gpu: Report) -> list[str]:
    lines = [
        f"  {gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, "
        f"{gpu['sm_count']} SMs, {gpu['memory_bytes'] / 2**30:.0f} GiB"
    ]
    if gpu["error"]:
        return [*lines, f"     no kernels: {gpu['error']}"]
    lines.append(f"     cubin {gpu['cubin']} (sm_{gpu['target']})")
    for path in gpu["paths"]:
        shape = f"{path['sequences']} x {path['tokens']} tokens, H = {path['heads']}"
        lines.append(f"     {shape}: {path['path']}")
    return lines
