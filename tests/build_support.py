"""What the tests of the build share: access to build_tools and to the compilers, and one build.

``FLASH_KDA_TEST_TOOLS`` (a path list that tests/test.sh sets) says where the CUDA packages and
CUTLASS are; without it they are looked for in the running environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = [p for p in os.environ.get("FLASH_KDA_TEST_TOOLS", "").split(os.pathsep) if p]

# At the end: an installed flash_kda stays the one that is imported.
sys.path += [p for p in [*TOOLS, str(ROOT)] if p not in sys.path]

from build_tools import cutlass, toolkit  # noqa: E402  (the paths above come first)
from build_tools.common import BuildError  # noqa: E402


def why_no_build(cuda: str = toolkit.DEFAULT_CUDA) -> str | None:
    """Why nothing can be built with CUDA ``cuda`` here, or None."""
    try:
        toolkit.locate(cuda)
        cutlass.locate()
    except BuildError as error:
        if TOOLS:
            raise  # tests/test.sh has set them up: not a reason to skip
        return str(error)
    return None if shutil.which("g++") or shutil.which("c++") else "no C++ compiler"


def copy_sources(destination: Path) -> Path:
    """Copy what a build needs out of the checkout, so that nothing is written into it."""
    names = ["LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"]
    for name in [n for n in names if (ROOT / n).exists()]:
        destination.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, destination / name)
    junk = shutil.ignore_patterns("__pycache__", "cubin", "lib", "manifest.json")
    for name in ("build_tools", "csrc", "flash_kda", "licenses", "requirements"):
        shutil.copytree(ROOT / name, destination / name, ignore=junk)
    return destination


def environment(**changes: str | None) -> dict[str, str]:
    """The environment for a build in a process of its own; None removes a variable.

    Compiled cubins come from the checkout's cache, and this machine's GPUs do not matter.
    """
    values: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(TOOLS),
        "FLASH_KDA_CUBIN_CACHE": os.environ.get("FLASH_KDA_CUBIN_CACHE")
        or str(ROOT / "build" / "cubin-cache"),
        "FLASH_KDA_CUDA_ARCHS": None,
        "FLASH_KDA_CUDA": None,
        "FLASH_KDA_CUDA_HOME": None,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def backend(
    hook: str, sources: Path, *arguments: str, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a hook of the PEP 517 backend in ``sources``; its result is the last line printed."""
    call = ", ".join(map(repr, arguments))
    return subprocess.run(
        [sys.executable, "-c", f"from build_tools import backend; print(backend.{hook}({call}))"],
        cwd=sources,
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )
