"""Writes a PEP 503 index of the wheels below OUT, for --index-url.

  OUT/flash-kda/                       the default wheels, what PyPI has too
  OUT/cu130/flash-kda/                 the plain wheels of the other toolkit
  OUT/cu129/torch2.8/flash-kda/        the wheels that require one torch

Wheels with a local version never appear at the root, where a resolver would prefer them and move
the user's torch. Every wheel is verified again, and the set has to be complete: every leg of
ci/matrix.json, and every architecture of each torch (all of them, or those named by --local). The
same wheels give the same bytes.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from . import cli, gates, matrix, verify
from .cli import BuildError
from .wheelfile import Wheel, local_torch

PROJECT = "flash-kda"
Key = tuple[str | None, str]
"""Local version and architecture."""


def place(local: str | None) -> str:
    """Where wheels of a local version are listed: ``""``, ``cu130``, ``cu129/torch2.8``."""
    if local is None:
        return ""
    torch = local_torch(local)
    return local if torch is None else f"{local.partition('torch')[0]}/torch{torch}"


def expected(described: matrix.Matrix, locals_: Iterable[str] | None) -> set[Key]:
    """The wheels that a complete index has.

    Raises:
        BuildError: a local version that the matrix does not have.
    """
    combinations = described.combinations()
    chosen = list(combinations) if locals_ is None else list(locals_)
    for local in chosen:
        if local not in combinations:
            raise BuildError(f"--local {local!r}: ci/matrix.json has {', '.join(combinations)}")
    keys: set[Key] = {(described.base_local(leg.toolkit), leg.arch) for leg in described.legs}
    return keys | {(local, leg.arch) for local in chosen for leg, _ in combinations[local]}


def collect(
    folders: Iterable[Path], described: matrix.Matrix, locals_: Iterable[str] | None = None
) -> dict[Key, Path]:
    """The verified wheels of the folders.

    Raises:
        BuildError: any wheel is faulty, missing, there twice, not expected or of another version.
    """
    found: dict[Key, Wheel] = {}
    for path in sorted(file for folder in folders for file in folder.glob("*.whl")):
        wheel = Wheel(path)
        verify.verify(path, described)
        key = (wheel.version.local, wheel.arch)
        if key in found:
            raise BuildError(f"two wheels for {_name(key)}: {found[key].path.name} and {path.name}")
        found[key] = wheel
    wanted = expected(described, locals_)
    if missing := wanted - found.keys():
        raise BuildError(f"incomplete: no wheel for {', '.join(sorted(map(_name, missing)))}")
    if extra := found.keys() - wanted:
        raise BuildError(f"not in the matrix: wheels for {', '.join(sorted(map(_name, extra)))}")
    versions = {wheel.version.public for wheel in found.values()}
    if len(versions) > 1:
        raise BuildError(f"wheels of different versions: {', '.join(sorted(versions))}")
    for (local, arch), wheel in found.items():
        torch = local_torch(local)
        if local is not None and torch is not None:
            toolkit = next(g.toolkit for g in described.legs if local.startswith(f"{g.cuda}torch"))
            base = found[described.base_local(toolkit), arch]
            if problems := list(gates.unchanged(wheel, base)):
                raise BuildError(f"{wheel.path.name} was not derived from its base: {problems[0]}")
    return {key: wheel.path for key, wheel in found.items()}


def write(
    wheels: dict[Key, Path],
    out: Path,
    base_url: str | None = None,
    previous: Path | None = None,
) -> None:
    """Write the index; wheels lie in OUT/files unless ``base_url`` says where they are.

    With ``previous``, an index that was written with a ``base_url``, its links stay, except to
    files of the same names.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        root = Path(scratch) / "index"
        pages: dict[str, list[Path]] = {}
        for key, path in wheels.items():
            pages.setdefault(place(key[0]), []).append(path)
        kept = {} if previous is None else _links(previous)
        for where in sorted(kept.keys() | pages.keys()):
            folder = root / where / PROJECT
            folder.mkdir(parents=True, exist_ok=True)
            up = "../" * len(folder.relative_to(root).parts)
            links = dict(kept.get(where, {}))
            for path in pages.get(where, []):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                url = f"{base_url or up + 'files/'}{quote(path.name)}#sha256={digest}"
                links[path.name] = url
                if base_url is None:
                    (root / "files").mkdir(exist_ok=True)
                    shutil.copy2(path, root / "files" / path.name)
            _page(folder / "index.html", f"Links for {PROJECT}", links)
            _page(folder.parent / "index.html", "Simple index", {PROJECT: f"{PROJECT}/"})
        root.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        root.replace(out)


def _page(path: Path, title: str, links: dict[str, str]) -> None:
    lines = [f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>"]
    lines += [
        f'<a href="{html.escape(url)}">{html.escape(text)}</a><br>'
        for text, url in sorted(links.items())
    ]
    path.write_text("\n".join([*lines, "</body></html>", ""]), encoding="utf-8")


def _links(previous: Path) -> dict[str, dict[str, str]]:
    """Place -> filename -> address, of an index that ``write`` made."""
    found: dict[str, dict[str, str]] = {}
    for page in previous.rglob(f"{PROJECT}/index.html"):
        where = page.parent.parent.relative_to(previous).as_posix()
        links = re.findall(r'<a href="(https://[^"]+)">([^<]+)</a>', page.read_text("utf-8"))
        found["" if where == "." else where] = {
            html.unescape(name): html.unescape(url) for url, name in links
        }
    return found


def _name(key: Key) -> str:
    return f"{key[0] or 'default'} {key[1]}"


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("index", __doc__)
    parser.add_argument("--wheels", type=Path, required=True, action="append", help="a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to (re)place")
    parser.add_argument("--local", action="append", help="torch wheels to expect (default: all)")
    parser.add_argument("--base-url", help="where the wheels can be downloaded, ending in /")
    arguments = parser.parse_args(argv)
    if arguments.base_url is not None and not arguments.base_url.endswith("/"):
        raise BuildError("--base-url has to end in /")
    if cli.dry_run(f"index {', '.join(map(str, arguments.wheels))} in {arguments.out}"):
        return
    wheels = collect(arguments.wheels, matrix.load(), arguments.local)
    write(wheels, arguments.out, arguments.base_url)
    cli.say(f"{arguments.out}: {len(wheels)} wheels")


if __name__ == "__main__":
    sys.exit(cli.main(work))
