"""Does an installed flash-kda work on this machine's GPU? Needs torch, and no compiler or network.

    python scripts/gpu_smoke.py --wheel dist/pypi [--json out.json]

Installs the wheel (or the one for this machine in the folder) into a fresh environment beside the
torch of this Python, and checks there, in this order:

* doctor finds nothing broken, and the GPU gets the cubin of its own architecture;
* results agree with the float64 recurrence, for fixed and packed batches, and for several heads;
* the first call, loading of the cubin included, takes at most 300 ms, the later ones far less;
* a second process opens the very same file, starts no other program, writes no file and opens no
  connection: nothing is built or downloaded.

Without --wheel it checks the flash_kda that this Python imports. Exit status 0 if all is well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FIRST_CALL_LIMIT = 0.3
"""Seconds for the first call on a GPU whose context exists."""
TOLERANCE = 6e-3
"""Largest relative error (2-norm) against float64: see docs/testing.md."""
CASES = ((None, 2, 130, 3), ((40, 0, 1, 300, 171), 1, 512, 4), (None, 1, 2048, 16))
"""(lengths of packed sequences or None, B, T, H)."""


class SmokeError(Exception):
    """A check failed; the text says which and how."""


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a fresh environment that sees this Python's torch; returns its Python.

    pip may not look for anything else, so a missing dependency is an error, not a download.
    """
    found = sorted(wheel.glob(f"*_{platform.machine()}.whl")) if wheel.is_dir() else [wheel]
    if len(found) != 1:
        raise SmokeError(f"{wheel} holds {len(found)} wheels for this machine, name one")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SmokeError(f"{sys.executable} has no torch")
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # Not --system-site-packages: this Python may be a virtual environment itself.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
    beside = Path(torch.origin).resolve().parent.parent
    Path(site, "torch.pth").write_text(f"{beside}\n", encoding="utf-8")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-index", "--force-reinstall", "--no-deps", found[0].resolve())
    return python


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program; its standard output, or a SmokeError with everything it printed."""
    words = [str(word) for word in command]
    # No bytecode: what a process writes is watched, and Python's own files are not meant.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise SmokeError(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_doctor(report: dict[str, Any], package: Path) -> dict[str, Any]:
    """The first GPU's entry of doctor's report, if it gets its own architecture's cubin."""
    if report["status"] != "ok":
        raise SmokeError(f"doctor: {report['problems']}")
    gpu: dict[str, Any] = report["gpus"][0]
    wanted = gpu["capability"].replace(".", "") + "a"
    cubin = Path(gpu["cubin"])
    if gpu["target"] != wanted or cubin.name != f"flash_kda.sm_{wanted}.cubin":
        raise SmokeError(f"{gpu['name']} gets {cubin.name} ({gpu['target']}), expected {wanted}")
    if package not in cubin.parents:
        raise SmokeError(f"{cubin} is not a file of the installed package {package}")
    return gpu


def compute(
    lengths: tuple[int, ...] | None, batch: int, tokens: int, heads: int, device: str = "cuda"
) -> float:
    """One forward pass; the larger relative error of output and final state."""
    import torch

    import flash_kda
    from flash_kda.reference import recurrent_kda

    make = torch.Generator(device=device).manual_seed(tokens + heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device, generator=make)

    q, k, v, g = (random(batch, tokens, heads, 128).bfloat16() for _ in range(4))
    beta = random(batch, tokens, heads).bfloat16()
    ends = None
    if lengths is not None:
        ends = torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0)
    sequences = batch if lengths is None else len(lengths)
    a_log, bias = random(heads).sigmoid(), random(heads, 128).sigmoid()
    state = random(sequences, heads, 128, 128) / 16
    out, final = torch.empty_like(v), torch.empty_like(state)
    flash_kda.fwd(
        *(q, k, v, g, beta),
        scale=128**-0.5,
        out=out,
        A_log=a_log,
        dt_bias=bias,
        lower_bound=-5.0,
        initial_state=state,
        final_state=final,
        cu_seqlens=ends,
    )
    wanted = recurrent_kda(q, k, v, g, beta, 128**-0.5, a_log, bias, -5.0, state, ends)
    return max(
        float((got.double() - want).norm() / want.norm())
        for got, want in zip((out, final), wanted, strict=True)
    )


def require_gpu() -> None:
    """SmokeError where torch has none."""
    import torch

    if not torch.cuda.is_available():
        raise SmokeError("torch finds no CUDA device")


def first_process() -> dict[str, Any]:
    """Doctor, times and results, in the environment where the wheel is installed."""
    require_gpu()
    import torch

    import flash_kda
    from flash_kda import doctor, loader

    package = Path(flash_kda.__file__).resolve().parent
    gpu = check_doctor(doctor.collect(require_gpu=True), package)
    x = torch.zeros(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
    out, beta = torch.empty_like(x), torch.zeros(1, 64, 4, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()  # the context is torch's to make, and not counted
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        flash_kda.fwd(x, x, x, x, beta, 1.0, out, None, None, -5.0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if seconds[0] > FIRST_CALL_LIMIT:
        raise SmokeError(f"the first call took {seconds[0]:.3f} s, limit {FIRST_CALL_LIMIT}")
    module = loader.module_for(torch.device("cuda", 0))
    if (module.target, module.cubin) != (gpu["target"], gpu["cubin"]):
        raise SmokeError(f"opened {module.cubin}, doctor said {gpu['cubin']}")
    errors = {str(case): compute(*case) for case in CASES}
    if bad := {case: error for case, error in errors.items() if not error <= TOLERANCE}:
        raise SmokeError(f"differs from the float64 reference: {bad}")
    return {
        "gpu": gpu["name"],
        "torch": str(torch.__version__),
        "flash_kda": flash_kda.__version__,
        "cubin": gpu["cubin"],
        "first_call_ms": round(seconds[0] * 1e3, 2),
        "later_call_ms": round(min(seconds[1:]) * 1e3, 3),
        "errors": errors,
    }


class Watch:
    """An audit hook that notes started programs, connections, written files and read cubins."""

    _EVENTS = ("subprocess.", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.")

    def __init__(self) -> None:
        self.forbidden: list[str] = []
        self.opened: list[str] = []

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """What sys.addaudithook takes."""
        if event.startswith((*self._EVENTS, "urllib.")):
            self.forbidden.append(f"{event} {arguments!r}")
        elif event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.forbidden.append(f"writes {path}")
            elif str(path).endswith(".cubin"):
                self.opened.append(str(path))


def second_process() -> dict[str, Any]:
    """A call while everything is watched that it might do beside computing."""
    require_gpu()
    import torch

    import flash_kda
    import flash_kda.reference

    x = torch.zeros(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
    out, beta = torch.empty_like(x), torch.zeros(1, 64, 4, device="cuda", dtype=torch.float32)
    watch = Watch()
    sys.addaudithook(watch.audit)
    flash_kda.fwd(x, x, x, x, beta, 1.0, out, None, None, -5.0)
    torch.cuda.synchronize()
    if watch.forbidden:
        raise SmokeError(f"a second process builds or downloads: {watch.forbidden}")
    return {"opened": watch.opened}


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="a wheel, or a folder with one for this machine")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    parser.add_argument("--process", choices=("first", "second"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.environ.get("FLASH_KDA_CI_DRY_RUN") == "1":
        print(f"dry run: install {arguments.wheel} and use it on this machine's GPU")
        return 0
    try:
        if arguments.process:
            print(json.dumps(first_process() if arguments.process == "first" else second_process()))
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            python = install(arguments.wheel, folder) if arguments.wheel else Path(sys.executable)
            # From an empty folder: a checkout must not be what is imported.
            me = (python, Path(__file__).resolve(), "--process")
            found = json.loads(run(*me, "first", cwd=folder).splitlines()[-1])
            again = json.loads(run(*me, "second", cwd=folder).splitlines()[-1])
        if again["opened"] != [found["cubin"]]:
            raise SmokeError(f"the second process opened {again['opened']}, not {found['cubin']}")
    except SmokeError as error:
        print(f"gpu_smoke: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("gpu_smoke: all is well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
