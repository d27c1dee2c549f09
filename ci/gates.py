"""The conditions that a wheel has to meet before anybody may install it.

Each gate takes a wheel and what the matrix expects, and yields one line per violation. ``GATES``
lists them all; tests/test_gates.py has a failing wheel for each.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from packaging.utils import canonicalize_name
from packaging.version import Version

from build_tools.common import CSRC

from .matrix import Matrix
from .wheelfile import PACKAGE, Wheel, local_torch, pinned

MANIFEST = f"{PACKAGE}/manifest.json"
LAUNCHER = f"{PACKAGE}/lib/libflash_kda.so"
ALLOWED_LIBRARIES = frozenset(
    {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"}
    | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
)
LICENCES = ("LICENSE", "licenses/CUTLASS-BSD-3-Clause.txt")
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
_CUDA_MACHINE = 190
# Symbols of torch, of CUDA's libraries and of Python: the launcher may use none of them.
_FOREIGN = re.compile(r"_ZN?K?(2at|3c10|5torch)|aoti_|c10_|torch|THP|_?Py[A-Z_]|cuda[A-Z]|cu[A-Z]")
# PTX is text that starts so, or sits in a fat binary.
_PTX = (b".nv_fatbin", b"\n.target sm_", b"\n.version ")

Problems = Iterator[str]


def platform_tag(wheel: Wheel, matrix: Matrix) -> Problems:
    """py3-none, and manylinux of the promised glibc or an older one."""
    newest = Version(matrix.glibc)
    for tag in sorted(map(str, wheel.tags)):
        python, abi, platform = tag.split("-", 2)
        if (python, abi) != ("py3", "none"):
            yield f"tag {tag} is not py3-none"
        found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{wheel.arch}", platform)
        legacy = re.fullmatch(rf"manylinux(1|2010|2014)_{wheel.arch}", platform)
        if found is None and legacy is None:
            yield f"platform {platform} is not a manylinux of {wheel.arch}"
        elif found is not None and Version(f"{found[1]}.{found[2]}") > newest:
            yield f"platform {platform} needs a newer glibc than {matrix.glibc}"


def wheel_metadata(wheel: Wheel, matrix: Matrix) -> Problems:
    """WHEEL: platlib, and the tags of the filename."""
    message = wheel.message("WHEEL")
    if message["Root-Is-Purelib"] != "false":
        yield f"Root-Is-Purelib is {message['Root-Is-Purelib']}, not false"
    if set(message.get_all("Tag", [])) != {str(tag) for tag in wheel.tags}:
        yield f"WHEEL's tags {message.get_all('Tag')} are not the filename's"


def contents(wheel: Wheel, matrix: Matrix) -> Problems:
    """The package and its metadata, nothing grafted and nothing beside them."""
    for name in sorted(wheel.files):
        top = name.partition("/")[0]
        if top not in (PACKAGE, wheel.dist_info):
            yield f"{name} lies outside {PACKAGE}/"
    if any(".libs/" in name for name in wheel.files):
        yield "auditwheel grafted libraries (.libs/): the launcher must need none"


def record(wheel: Wheel, matrix: Matrix) -> Problems:
    """RECORD lists every file with its hash and size."""
    own = f"{wheel.dist_info}/RECORD"
    rows = list(csv.reader(io.StringIO(wheel.files.get(own, b"").decode())))
    listed = {row[0]: row[1:] for row in rows if len(row) == 3}
    if listed.keys() != wheel.files.keys():
        yield f"RECORD and contents differ in {sorted(listed.keys() ^ wheel.files.keys())}"
    for name, (digest, size) in listed.items():
        data = wheel.files.get(name)
        if data is None or name == own:
            continue
        hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if (digest, size) != (f"sha256={hashed}", str(len(data))):
            yield f"RECORD has another hash or size for {name}"


def metadata(wheel: Wheel, matrix: Matrix) -> Problems:
    """METADATA agrees with the filename, and the version with what it may be."""
    message = wheel.message("METADATA")
    if canonicalize_name(message["Name"]) != wheel.name:
        yield f"METADATA names {message['Name']}, the filename {wheel.name}"
    if message["Version"] != str(wheel.version):
        yield f"METADATA has version {message['Version']}, the filename {wheel.version}"
    if wheel.dist_info != f"{PACKAGE}-{wheel.version}.dist-info":
        yield f"{wheel.dist_info} is not named after version {wheel.version}"
    document = _manifest(wheel)
    if document and document["package_version"] != wheel.version.public:
        yield f"the files are of version {document['package_version']}"


def local_version(wheel: Wheel, matrix: Matrix) -> Problems:
    """None on the default wheel (PyPI refuses it), else the toolkit's, with a known torch."""
    document = _manifest(wheel)
    if not document:
        return
    toolkit = document["compiler"]["cuda"]
    cuda = "cu" + toolkit.replace(".", "")
    allowed = {matrix.base_local(toolkit)}
    allowed |= {
        name
        for name, cells in matrix.combinations().items()
        if name.startswith(f"{cuda}torch") and any(leg.arch == wheel.arch for leg, _ in cells)
    }
    if wheel.version.local not in allowed:
        names = ", ".join(sorted(name or "none" for name in allowed))
        yield f"local version {wheel.version.local}: CUDA {toolkit}, {wheel.arch} has {names}"


def torch_requirement(wheel: Wheel, matrix: Matrix) -> Problems:
    """Exactly torch, in the range that the version stands for."""
    lines = wheel.message("METADATA").get_all("Requires-Dist", [])
    wanted = pinned(local_torch(wheel.version.local))
    if [line.replace(" ", "") for line in lines] != [wanted]:
        yield f"requires {lines}, not {wanted}"


def licences(wheel: Wheel, matrix: Matrix) -> Problems:
    """Our own licence, and CUTLASS's for what the cubins were compiled from."""
    for name in LICENCES:
        if not wheel.files.get(f"{wheel.dist_info}/licenses/{name}", b"").strip():
            yield f"licence {name} is missing"
    if set(wheel.message("METADATA").get_all("License-File", [])) != set(LICENCES):
        yield f"METADATA does not list the licences {', '.join(LICENCES)}"


def size(wheel: Wheel, matrix: Matrix) -> Problems:
    """The file as it is downloaded."""
    found = wheel.path.stat().st_size
    if found > matrix.size_limit_bytes:
        yield f"{found / 2**20:.1f} MiB is above the limit of {matrix.size_limit_bytes / 2**20:.0f}"


def manifest(wheel: Wheel, matrix: Matrix) -> Problems:
    """The manifest lists exactly the files that are there, with their hashes, and all targets."""
    document = _manifest(wheel)
    if not document:
        yield f"{MANIFEST} is missing or not JSON"
        return
    entries = [document["launcher"], *document["cubins"]]
    for entry in entries:
        data = wheel.files.get(f"{PACKAGE}/{entry['file']}")
        if data is None:
            yield f"{entry['file']} is in the manifest but not in the wheel"
        elif (hashlib.sha256(data).hexdigest(), len(data)) != (entry["sha256"], entry["size"]):
            yield f"{entry['file']} has another sha256 or size than the manifest says"
    binary = {n for n in wheel.files if n.endswith((".so", ".cubin")) or ".so." in n}
    listed = {f"{PACKAGE}/{entry['file']}" for entry in entries}
    if unlisted := binary - listed:
        yield f"not in the manifest: {', '.join(sorted(unlisted))}"
    targets = [entry["target"] for entry in document["cubins"]]
    if targets != list(matrix.targets):
        yield f"cubins for {', '.join(targets) or 'no target'}, not {', '.join(matrix.targets)}"


def cubins(wheel: Wheel, matrix: Matrix) -> Problems:
    """Machine code for GPUs only: no PTX, which a driver would compile on the user's machine."""
    for name, data in wheel.files.items():
        if name.endswith(".ptx"):
            yield f"{name} is PTX"
        if not name.endswith(".cubin"):
            continue
        if data[:4] != b"\x7fELF" or int.from_bytes(data[18:20], "little") != _CUDA_MACHINE:
            yield f"{name} is not a cubin"
        if any(mark in data for mark in _PTX):
            yield f"{name} holds PTX"


def launcher_dependencies(wheel: Wheel, matrix: Matrix) -> Problems:
    """The right processor, the C library alone, and no newer glibc than promised."""
    elf = _launcher(wheel)
    if elf is None:
        yield f"{LAUNCHER} is missing or no ELF library"
        return
    if elf["e_machine"] != _MACHINES[wheel.arch]:
        yield f"the launcher is for {elf['e_machine']}, the wheel for {wheel.arch}"
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            # pyelftools gives a tag an attribute named after its kind.
            tags = section.iter_tags("DT_NEEDED")
            needed = {tag.needed for tag in tags}  # type: ignore[attr-defined]
            if needed - ALLOWED_LIBRARIES:
                yield f"the launcher links {', '.join(sorted(needed - ALLOWED_LIBRARIES))}"
            if any(section.iter_tags("DT_RPATH")) or any(section.iter_tags("DT_RUNPATH")):
                yield "the launcher has a library search path (RPATH)"
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    name, _, number = version.name.partition("_")
                    if name != "GLIBC" or not number[:1].isdigit():
                        yield f"the launcher needs {version.name}"
                    elif Version(number) > Version(matrix.glibc):
                        yield f"the launcher needs {version.name}, newer than {matrix.glibc}"


def launcher_symbols(wheel: Wheel, matrix: Matrix) -> Problems:
    """Exports the C ABI and nothing else; uses nothing of torch, Python or CUDA."""
    elf = _launcher(wheel)
    table = elf.get_section_by_name(".dynsym") if elf is not None else None
    if not isinstance(table, SymbolTableSection):
        return  # told by launcher_dependencies
    exported, imported = set(), set()
    for symbol in table.iter_symbols():
        if symbol["st_shndx"] == "SHN_UNDEF":
            imported.add(symbol.name)
        elif symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK"):
            exported.add(symbol.name)
    wanted = abi()
    if exported != wanted:
        yield f"exported symbols differ from the ABI in {', '.join(sorted(exported ^ wanted))}"
    if foreign := sorted(name for name in imported if _FOREIGN.match(name)):
        yield f"the launcher uses {', '.join(foreign)}"


def abi(exports: Path = CSRC / "host" / "exports.map") -> set[str]:
    """The functions that the linker's version script exports."""
    text = exports.read_text(encoding="utf-8").partition("local:")[0]
    return set(re.findall(r"(\w+);", text))


def unchanged(wheel: Wheel, base: Wheel) -> Problems:
    """A derived wheel has the very files of its base; only METADATA (and RECORD) differ."""

    def files(of: Wheel) -> dict[str, bytes]:
        plain = {n.replace(of.dist_info, "dist-info", 1): data for n, data in of.files.items()}
        return {n: d for n, d in plain.items() if n != "dist-info/RECORD"}

    mine, theirs = files(wheel), files(base)
    for name in sorted(mine.keys() | theirs.keys()):
        if name != "dist-info/METADATA" and mine.get(name) != theirs.get(name):
            yield f"{name} differs from {base.path.name}"

    def lines(data: bytes) -> list[str]:
        return re.sub(r"(?m)^(Version|Requires-Dist): .*$", r"\1", data.decode()).splitlines()

    if lines(mine["dist-info/METADATA"]) != lines(theirs["dist-info/METADATA"]):
        yield f"METADATA differs from {base.path.name} in more than version and requirement"


def _manifest(wheel: Wheel) -> dict | None:
    try:
        document = json.loads(wheel.files[MANIFEST])
        return document if isinstance(document, dict) else None
    except (KeyError, ValueError):
        return None


def _launcher(wheel: Wheel) -> ELFFile | None:
    try:
        return ELFFile(io.BytesIO(wheel.files[LAUNCHER]))
    except (KeyError, ELFError):
        return None


GATES: tuple[Callable[[Wheel, Matrix], Problems], ...] = (
    platform_tag,
    wheel_metadata,
    contents,
    record,
    metadata,
    local_version,
    torch_requirement,
    licences,
    size,
    manifest,
    cubins,
    launcher_dependencies,
    launcher_symbols,
)
