"""``python -m build_tools.clangd`` writes ``.clangd``: how clangd should read csrc/.

clangd parses kernels as Clang's CUDA, which wants a toolkit folder with ``bin`` and ``include``
and the ``crt`` headers; those come in a package of their own since CUDA 13, so that release's
headers are used whatever the build uses.
"""

from __future__ import annotations

import sys

from . import cutlass, toolkit
from .common import CSRC, ROOT, BuildError, package_module

CUDA = "13.0"

_TEMPLATE = """\
# Written by scripts/setup_clangd.sh for this checkout; not in git.
CompileFlags:
  Add:
    - -std=c++17
{includes}
---
If:
  PathMatch: .*\\.(cu|cuh)
CompileFlags:
  Add:
    - -xcuda
    - --cuda-path={cuda_path}
    - --cuda-gpu-arch=sm_90a
    - --cuda-device-only
    - -nocudalib
    - -DNDEBUG
    - -Wno-unknown-cuda-version
"""


def main() -> int:
    """Write the file; returns the exit status."""
    try:
        cuda_include, *others = toolkit.locate(CUDA, {}).include_dirs
        folders = [CSRC, cutlass.locate().include, *others, cuda_include]
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shim = ROOT / "build" / "clangd" / "cuda"
    (shim / "bin").mkdir(parents=True, exist_ok=True)
    (shim / "include").unlink(missing_ok=True)
    (shim / "include").symlink_to(cuda_include)
    includes = "\n".join(f"    - -I{folder}" for folder in folders)
    file = ROOT / ".clangd"
    file.write_text(_TEMPLATE.format(includes=includes, cuda_path=shim), encoding="utf-8")
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(package_module("console").run("build_tools.clangd", main))
