"""The documentation: it builds, its links hold, and what it tells to run, runs.

Python blocks of a page run one after the other in one process, on the CPU where there is no GPU.
Commands run here, unless another test runs them. A comment before a block can say otherwise::

    <!-- snippet: needs fla -->         runs where that module can be imported
    <!-- snippet: skip: reason -->      does not run
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- snippet: (?P<note>.*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

ELSEWHERE = {
    "bash scripts/demo.sh": "downloads and builds; test_build takes the same steps",
    "bash tests/test.sh": "runs this test",
    "bash scripts/test_fla_versions.sh": "downloads FLA; runs tests/gpu/test_fla_backend",
    "pip install .": "test_build and test_packaging build and install in the same way",
    "python -m pytest tests/gpu": "the GPU tests",
    "bash ci/build_all.sh": "builds every wheel, which takes minutes; test_ci runs its steps",
    "pip install --extra-index-url 'file://$PWD/dist/whl' flash-kda": "test_ci installs from one",
    "python scripts/fuzz.py --seconds 60": "a minute; test_fuzz runs some seconds of it",
    "python scripts/fuzz.py --seconds 60 --seed 7 --device cpu": "the same",
    "python scripts/fuzz.py --seconds 300 --path portable_v64 --largest 10000": "the same",
    "python scripts/bench.py": "minutes on a GPU; test_bench runs parts of it",
    "sed -i '1i #define FLASH_KDA_EVERY_LANE_ARRIVES' csrc/common/ptx.cuh": "test_build runs it",
    "compute-sanitizer --tool racecheck python scripts/small_calls.py": "needs a GPU",
    "bash scripts/setup_clangd.sh": "writes into the checkout; test_scripts runs what it refuses",
    "bash tests/test.sh tests/gpu": "the GPU tests",
    "bash tests/test.sh tests/test_loader.py -k gpu": "runs other tests",
    "pip install --no-deps 'flash_kda-*.whl'": "test_packaging installs wheels",
    "pip install pre-commit '&&' pre-commit install": "changes the checkout's hooks",
}
"""Commands of the documentation that are not run here, and why."""

HERE = {
    "python -m flash_kda doctor": (0, 1),  # 1: damaged or unbuilt, which it says
    "python -m flash_kda doctor --json": (0, 1),
    "python -m flash_kda demo": (0,),
    "bash ci/build_all.sh --help": (0,),
}
"""Commands that are run here, and the exit statuses that they may have; scripts run in the root."""


class Snippet(NamedTuple):
    page: Path
    line: int
    note: str
    text: str


def snippets(page: Path, language: str) -> list[Snippet]:
    source = page.read_text(encoding="utf-8")
    return [
        Snippet(page, source.count("\n", 0, found.start()) + 1, found["note"] or "", found["text"])
        for found in BLOCK.finditer(source)
        if found["language"] == language
    ]


def runnable(snippet: Snippet) -> bool:
    if snippet.note.startswith("needs "):
        return importlib.util.find_spec(snippet.note.removeprefix("needs ")) is not None
    assert not snippet.note or snippet.note.startswith("skip: "), snippet.note
    return not snippet.note


def program(page: Path) -> str:
    """The page's Python blocks as one program, with the line numbers that they have in the page."""
    lines: list[str] = []
    for snippet in snippets(page, "python"):
        if runnable(snippet):
            start = snippet.line + bool(snippet.note)
            lines += [""] * (start - len(lines))
            lines += snippet.text.splitlines()
    text = "\n".join(lines)
    return text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"')


def environment() -> dict[str, str]:
    """The flash_kda that is tested, also for processes that start elsewhere."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path}


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for snippet in snippets(page, "bash"):
            if not runnable(snippet):
                continue
            for line in snippet.text.splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words:
                    yield f"{page.name}:{snippet.line}", shlex.join(words)


def anchors(page: Path) -> set[str]:
    """What GitHub and mkdocs call the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
        found.add(re.sub(r"\s+", "-", kept.strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python(page: Path, tmp_path: Path) -> None:
    source = program(page)
    if not source:
        pytest.skip("no Python block")
    file = tmp_path / f"{page.stem}.py"
    file.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stderr}"


@pytest.mark.parametrize("command", sorted({command for _, command in commands()}))
def test_command(command: str, tmp_path: Path) -> None:
    if command in ELSEWHERE:
        pytest.skip(ELSEWHERE[command])
    assert command in HERE, f"{command!r} is neither run here nor listed with a reason"
    words = shlex.split(command)
    words[0] = {"python": sys.executable}.get(words[0], words[0])
    where = ROOT if words[0] == "bash" else tmp_path
    done = subprocess.run(words, capture_output=True, text=True, cwd=where, env=environment())
    assert done.returncode in HERE[command], done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and not anchor.startswith("flash_kda."):  # those are mkdocstrings'
            assert anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_name_files_that_exist(page: Path) -> None:
    for name in re.findall(r"`(?:python|bash) ((?:scripts|tests)/[\w./]+)", page.read_text()):
        assert (ROOT / name).exists(), name


def test_translation_has_the_same_code() -> None:
    """Comments may be translated; what runs may not differ."""

    def trees(page: Path) -> list[str]:
        return [ast.dump(ast.parse(x.text)) for x in snippets(page, "python")]

    assert trees(ROOT / "README.md") == trees(ROOT / "README.zh.md")


def test_troubleshooting_quotes_messages() -> None:
    """Headings of the sections on errors are parts of messages in the sources."""
    messages = []
    for folder in ("flash_kda", "build_tools"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    messages.append(node.value)
    scripts = (ROOT / "scripts" / "lib.sh").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for section in ("Loading", "Arguments", "Building"):
        part = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        for heading in re.findall(r"^### (.+)$", part, re.MULTILINE):
            for piece in re.split(r"\.\.\.| needs$|: got$|: $", heading):
                piece = piece.strip(" :")
                known = any(piece in message for message in messages) or piece in scripts
                assert known, f"no message says {piece!r}"


def test_site_builds_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (requirements/docs.txt)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("fwd", "chunk_kda", "workspace_size", "integrations.vllm.route"):
        assert f'id="flash_kda.{name}"' in api
    assert 'class="mermaid"' in (tmp_path / "how-it-works" / "index.html").read_text()
