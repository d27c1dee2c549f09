"""Made-up wheels for the tests of ci/: every gate passes them, until a test spoils something."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import native

from build_tools.common import hash_bytes

VERSION = "0.1.0"
ABI = """
int flash_kda_abi_version(void) { return 2; }
const char* flash_kda_last_error(void) { return ""; }
long flash_kda_workspace_size(long a, long b, long c) { return a + b + c; }
int flash_kda_plan(void) { return 0; }
int flash_kda_path_count(void) { return 0; }
const char* flash_kda_path_name(int path) { return 0; }
int flash_kda_open(void) { return 2; }
int flash_kda_forward(void) { return 2; }
"""
CUBIN = b"\x7fELF\x02" + bytes(13) + (190).to_bytes(2, "little") + bytes(28) + b"\x5a\0\0\0code "
"""What the build takes for one of 90a."""
TARGETS = ("90a", "100a", "103a", "120a", "121a")
METADATA = """\
Metadata-Version: 2.4
Name: flash-kda
Version: {version}
License-Expression: MIT
License-File: LICENSE
License-File: licenses/CUTLASS-BSD-3-Clause.txt
Requires-Dist: {requirement}

Requires-Dist: torch>=1 is only text here.
"""
Files = dict[str, bytes]


@functools.cache
def library(extra: str = "", *options: str) -> bytes:
    """A launcher that needs the C library alone, in an old version; C++ source may be added."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch) / "launcher.cpp", Path(scratch) / "libflash_kda.so"
        source.write_text('extern "C" {' + ABI + extra + "}")
        command = [native.compiler(), "-shared", "-fPIC", "-nostdlib", str(source), "-o"]
        subprocess.run([*command, str(output), *options, "-lc"], check=True)
        return output.read_bytes()


def files(
    local: str | None = None,
    *,
    cuda: str = "12.9",
    arch: str = "x86_64",
    requirement: str = "torch>=2.4",
    targets: tuple[str, ...] = TARGETS,
) -> Files:
    """What is in a wheel, without RECORD."""
    version = VERSION if local is None else f"{VERSION}+{local}"
    code = library()
    if arch == "aarch64":
        code = code[:18] + (183).to_bytes(2, "little") + code[20:]
    cubins = {f"cubin/flash_kda.sm_{target}.cubin": CUBIN + target.encode() for target in targets}

    def entry(name: str, data: bytes) -> dict[str, object]:
        return {"file": name, "sha256": hash_bytes(data), "size": len(data)}

    manifest = {
        "schema": 1,
        "package_version": VERSION,
        "abi_version": 2,
        "compiler": {"name": "nvrtc", "version": f"{cuda}.86", "cuda": cuda},
        "launcher": entry("lib/libflash_kda.so", code),
        "cubins": [
            {"target": target, **entry(name, data), "kernels": []}
            for target, (name, data) in zip(targets, cubins.items(), strict=True)
        ],
    }
    info = f"flash_kda-{version}.dist-info"
    tag = f"Tag: py3-none-manylinux_2_17_{arch}\n"
    return {
        "flash_kda/__init__.py": b"",
        "flash_kda/manifest.json": json.dumps(manifest).encode(),
        "flash_kda/lib/libflash_kda.so": code,
        **{f"flash_kda/{name}": data for name, data in cubins.items()},
        f"{info}/METADATA": METADATA.format(version=version, requirement=requirement).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tag}".encode(),
        f"{info}/licenses/LICENSE": b"MIT",
        f"{info}/licenses/licenses/CUTLASS-BSD-3-Clause.txt": b"BSD",
    }


def write(path: Path, contents: Files, *, seal: Callable[[str], str] = lambda text: text) -> Path:
    """Write a wheel file with its RECORD, which ``seal`` may falsify."""
    info = next(name.partition("/")[0] for name in contents if ".dist-info/" in name)
    rows = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    record = seal("".join([*rows, f"{info}/RECORD,,\n"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*contents.items(), (f"{info}/RECORD", record.encode())]:
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data)
    path.write_bytes(buffer.getvalue())
    return path


def name(local: str | None = None, arch: str = "x86_64") -> str:
    """A wheel's file name."""
    version = VERSION if local is None else f"{VERSION}+{local}"
    return f"flash_kda-{version}-py3-none-manylinux_2_17_{arch}.whl"


def good(folder: Path, local: str | None = None, arch: str = "x86_64") -> Path:
    """A plain wheel (default, or +cu130) without any fault."""
    cuda = "13.0" if (local or "").startswith("cu130") else "12.9"
    return write(folder / name(local, arch), files(local, cuda=cuda, arch=arch))
