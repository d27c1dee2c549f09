"""What a benchmark ran on: card, driver, compiler, versions, commit; and which path a case took."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from bench_cases import Case

import flash_kda
from build_tools.common import csrc_hash
from flash_kda import doctor, loader

SCHEMA = 1
CPU_PATH = "reference (CPU)"


def short_gpu_name(name: str) -> str:
    """A card's name for files and titles: ``NVIDIA H100 80GB HBM3`` -> ``H100``."""
    words: list[str] = []
    for word in re.sub(r"[^A-Za-z0-9 ]", " ", name).split():
        if word in ("NVIDIA", "GeForce", "Tesla"):
            continue
        if words and re.fullmatch(r"\d+GB|HBM\w*|PCIe|SXM\d?", word):
            break
        words.append(word)
    return "".join(words) or "GPU"


def commit(root: Path) -> str:
    """FLASH_KDA_COMMIT, else git's HEAD with ``+dirty`` when tracked files differ, else unknown."""
    if given := os.environ.get("FLASH_KDA_COMMIT"):
        return given

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def manifest() -> dict[str, Any]:
    """The manifest of the flash_kda that is measured; empty when it was never built."""
    path = Path(flash_kda.__file__).parent / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def path_name(case: Case, device: torch.device) -> str:
    """Which kernels a call of this case runs on this device."""
    if device.type != "cuda":
        return CPU_PATH
    gpu = loader.module_for(device).gpu
    return doctor.planned_path(case.tokens, case.heads, case.sequences, gpu)


def workspace_bytes(case: Case) -> int | None:
    """Size of the workspace a call of this case takes; None where no launcher is built."""
    try:
        return flash_kda.workspace_size(case.tokens, case.heads, case.sequences)
    except flash_kda.FlashKDAError:
        return None


def collect(root: Path, device: torch.device) -> dict[str, Any]:
    """The head of the JSON document; ``notes`` holds remarks for whoever reads the numbers."""
    built = manifest()
    tree = csrc_hash(root / "csrc")
    notes = []
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = properties.name
        card: dict[str, Any] = {
            "gpu": gpu,
            "gpu_short": short_gpu_name(gpu),
            "capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
        if built.get("csrc_sha256") != tree:
            notes.append("the installed flash_kda was built from other sources than this csrc/")
    else:
        card = {
            "gpu": platform.processor() or platform.machine(),
            "gpu_short": "CPU",
            "capability": None,
            "sm_count": None,
            "memory_bytes": None,
        }
    return {
        "schema": SCHEMA,
        "device": device.type,
        **card,
        "driver": doctor.driver_facts(),
        "compiler": built.get("compiler"),
        "cutlass_version": built.get("cutlass_version"),
        "flash_kda": flash_kda.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(root),
        "csrc_sha256": built.get("csrc_sha256", tree),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "notes": notes,
    }
