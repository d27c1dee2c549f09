"""Installs a wheel into a clean environment with a given torch, uses it there, removes it again.

Checks that torch stays what it was, that importing is quick, that doctor finds nothing broken,
that the CPU path agrees with the float64 reference, and that uninstalling leaves nothing. With
--tests the CPU tests of this checkout run against the installed package as well.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import cli, matrix
from .cli import ROOT, BuildError
from .wheelfile import only_wheel

IMPORT_LIMIT = 0.05
"""Seconds that `import flash_kda` may add to `import torch`."""
TESTS = ("test_fwd_cpu.py", "test_reference.py", "test_arguments.py", "test_import.py")

_IMPORT = """
import time, torch
begin = time.perf_counter()
import flash_kda
print(time.perf_counter() - begin)
"""


class Environment:
    """A virtual environment outside the checkout."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        # The checkout must not be what is imported, nor build requirements leak in.
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("FLASH_KDA_", "PYTHON"))}
        self.environ = keep | {"CUDA_VISIBLE_DEVICES": ""}
        # scripts/lib.sh sets it relative to the checkout, and pip runs elsewhere here.
        constraint = ROOT / keep.get("PIP_CONSTRAINT", "none")
        if constraint.is_file():
            shutil.copy(constraint, folder / "constraints.txt")
            self.environ["PIP_CONSTRAINT"] = "constraints.txt"
        cli.call(python, "-m", "venv", folder / "venv", cwd=folder, environ=self.environ)

    def run(self, *arguments: str | Path, quiet: bool = True, **changes: str) -> str:
        environ = self.environ | changes
        return cli.call(
            self.python, *arguments, cwd=self.folder, environ=environ, quiet=quiet
        ).strip()

    def pip(self, *arguments: str | Path) -> None:
        self.run("-m", "pip", "install", "--disable-pip-version-check", *arguments)

    def site(self) -> Path:
        return Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('platlib'))"))

    def version(self, name: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return self.run("-c", code)


def find_python(version: str | None) -> str:
    """The interpreter called ``python3.12``, or this one."""
    if version is None:
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        raise BuildError(f"python{version} is not on PATH: install it, or leave --python out")
    return found


def smoke(wheel: Path, torch: str, python: str, *, tests: bool = False) -> None:
    """Run all checks.

    Raises:
        BuildError: the first that fails.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-smoke-") as scratch:
        environment = Environment(Path(scratch), python)
        if "==" in torch:
            environment.environ.pop("PIP_CONSTRAINT", None)  # it may ask for another torch
        with cli.step(f"install torch ({torch})"):
            environment.pip(torch, "numpy<2.3")
        before = {path.name for path in environment.site().iterdir()}
        had = environment.version("torch")
        with cli.step(f"install {wheel.name}"):
            environment.pip(wheel.resolve())
        if environment.version("torch") != had:
            raise BuildError(f"installing {wheel.name} changed torch from {had}")
        _import_time(environment)
        with cli.step("doctor and demo"):
            environment.run("-m", "flash_kda", "doctor")
            environment.run("-m", "flash_kda", "demo", "--device", "cpu")
        if tests:
            environment.pip("-r", ROOT / "requirements" / "test.txt")
            names = {path.name for path in environment.site().iterdir()}
            before |= {name for name in names if not name.startswith("flash_kda")}
            _run_tests(environment)
        environment.run("-m", "pip", "uninstall", "--yes", "flash-kda")
        if left := {path.name for path in environment.site().iterdir()} - before:
            raise BuildError(f"uninstalling left {', '.join(sorted(left))}")
        cli.say(f"{wheel.name} works with torch {had} under {Path(python).name}")


def _import_time(environment: Environment) -> None:
    environment.run("-c", _IMPORT)  # the first import may still read files from a cold disk
    seconds = min(float(environment.run("-c", _IMPORT).splitlines()[-1]) for _ in range(3))
    cli.say(f"    import flash_kda adds {seconds * 1e3:.0f} ms to import torch")
    if seconds > IMPORT_LIMIT:
        raise BuildError(f"import flash_kda takes {seconds:.3f} s, the limit is {IMPORT_LIMIT}")


def _run_tests(environment: Environment) -> None:
    with cli.step("the CPU tests"):
        tests = environment.folder / "tests"
        shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
        files = [tests / name for name in TESTS]
        environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, quiet=False)


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("smoke", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--wheel", type=Path, help="a wheel, or a folder with one for this machine")
    what.add_argument("--dist", type=Path, help="folder with pypi/ and wheels/: --leg chooses")
    parser.add_argument("--leg", help="with --dist: take the wheel of --leg for --torch")
    parser.add_argument("--torch", default="torch", help="requirement or version (default: any)")
    parser.add_argument("--python", help="version, such as 3.12 (default: this interpreter)")
    parser.add_argument("--tests", action="store_true", help="run the CPU tests as well")
    arguments = parser.parse_args(argv)
    requirement = arguments.torch
    if requirement[:1].isdigit():
        requirement = f"torch=={requirement}"
    if arguments.dist is None:
        folder, pattern = arguments.wheel, f"*_{os.uname().machine}.whl"
    elif arguments.leg is None:
        raise BuildError("--dist needs --leg")
    else:
        place, pattern = published(matrix.load(), arguments.leg, arguments.torch)
        folder = arguments.dist / place
    if cli.dry_run(f"try {folder}/{pattern} with {requirement}"):
        return
    wheel = only_wheel(folder, pattern)
    smoke(wheel, requirement, find_python(arguments.python), tests=arguments.tests)


def published(described: matrix.Matrix, leg_name: str, torch: str) -> tuple[str, str]:
    """Folder and filename pattern of the wheel that a cell of the matrix tests."""
    leg = described.leg(leg_name)
    cell = next((cell for cell in leg.cells if cell.torch == torch), None)
    if cell is None:
        raise BuildError(f"{leg_name} has no cell for torch {torch}: {leg.absent.get(torch)}")
    # An experimental torch has no wheel of its own: the plain one is tried with it.
    local = described.base_local(leg.toolkit)
    if not cell.experimental:
        local = f"{leg.cuda}torch{cell.torch_minor}"
    version = "*" if local is None else f"*+{local}"
    return "pypi" if local is None else "wheels", f"flash_kda-{version}-py3-none-*_{leg.arch}.whl"


if __name__ == "__main__":
    sys.exit(cli.main(work))
