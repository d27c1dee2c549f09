"""The two steps of a release that are not somebody else's action.

  check      the tag, the package's version and CHANGELOG.md agree
  publish    makes the GitHub release with every wheel, and SITE/whl, the index that points to them

The index of a release is one of its assets (index.tar.gz), and the next release adds to it: wheels
of earlier versions stay listed.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_tools.common import package_module

from . import cli, index, matrix
from .cli import ROOT, BuildError

_ARCHIVE = "index.tar.gz"


def notes(version: str, changelog: Path = ROOT / "CHANGELOG.md") -> str:
    """The changelog's section about a version.

    Raises:
        BuildError: there is none, or it is empty.
    """
    text = changelog.read_text(encoding="utf-8")
    found = re.search(rf"(?ms)^## \[?{re.escape(version)}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", text)
    if found is None or not found[1].strip():
        raise BuildError(f"{changelog.name} says nothing about version {version}")
    return found[1].strip()


def check(tag: str) -> str:
    """The version that a tag releases.

    Raises:
        BuildError: the package has another version, or the changelog does not know it.
    """
    version: str = package_module("_version").__version__
    if tag != f"v{version}":
        raise BuildError(f"tag {tag} is not v{version}, the version in flash_kda/_version.py")
    notes(version)
    return version


def publish(tag: str, dist: Path, site: Path) -> None:
    """Make the release and the index.

    Raises:
        BuildError: an incomplete set of wheels, or gh fails.
    """
    version = check(tag)
    repository = os.environ.get("GH_REPO", "")
    if "/" not in repository:
        raise BuildError("GH_REPO has to name the repository, as owner/name")
    wheels = index.collect([dist / "pypi", dist / "wheels"], matrix.load())
    base_url = f"https://github.com/{repository}/releases/download/{tag}/"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        previous = _previous(folder / "previous")
        index.write(wheels, site / "whl", base_url, previous)
        archive = folder / _ARCHIVE
        with tarfile.open(archive, "w:gz") as file:
            file.add(site / "whl", "whl")
        text = folder / "notes.md"
        text.write_text(notes(version) + "\n", encoding="utf-8")
        assets = [*sorted((dist / "pypi").iterdir()), *sorted((dist / "wheels").iterdir()), archive]
        cli.call(
            *("gh", "release", "create", tag, "--verify-tag", "--title", f"flash-kda {version}"),
            "--notes-file",
            text,
            *assets,
        )


def _previous(folder: Path) -> Path | None:
    """The latest release's index, unpacked; None before the first release."""
    if not cli.call("gh", "release", "list", "--limit", "1", quiet=True).strip():
        return None
    cli.call("gh", "release", "download", "--pattern", _ARCHIVE, "--dir", folder, quiet=True)
    with tarfile.open(folder / _ARCHIVE) as file:
        file.extractall(folder, filter="data")
    return folder / "whl"


def work(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.parser("release", __doc__)
    parser.add_argument("what", choices=("check", "publish"))
    parser.add_argument("--tag", required=True, help="such as v0.1.0")
    parser.add_argument("--dist", type=Path, help="folder with pypi/ and wheels/")
    parser.add_argument("--index", type=Path, help="folder for the site")
    arguments = parser.parse_args(argv)
    if arguments.what == "check":
        cli.say(f"{arguments.tag} releases flash-kda {check(arguments.tag)}")
        return
    if arguments.dist is None or arguments.index is None:
        raise BuildError("publish needs --dist and --index")
    if cli.dry_run(f"release {arguments.dist} as {arguments.tag}, index in {arguments.index}"):
        return
    publish(arguments.tag, arguments.dist, arguments.index)


if __name__ == "__main__":
    sys.exit(cli.main(work))
