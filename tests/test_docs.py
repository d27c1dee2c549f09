"""The documentation: it builds, its links hold, and what it tells to run, runs.

Python blocks of a page run one after the other in one process, on the CPU where there is no GPU.
Commands run here or are skipped with a reason, such as the test that runs them. A comment before a
block can say otherwise::

    <!-- snippet: needs fla -->         Python that runs where that module can be imported
    <!-- snippet: skip: reason -->      commands that do not run

FLASH_KDA_TEST_FLA, which tests/test.sh sets, is a folder with FLA; it has to be importable then.
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

FLA = os.environ.get("FLASH_KDA_TEST_FLA", "")

ELSEWHERE = {
    "bash scripts/demo.sh": "downloads and builds; test_build takes the same steps",
    "bash tests/test.sh": "runs this test",
    "bash scripts/test_fla_versions.sh": "downloads FLA; runs tests/gpu/test_fla_backend",
    "pip install .": "test_build and test_packaging build and install in the same way",
    "python -m pytest tests/gpu": "the GPU tests",
    "bash ci/build_all.sh": "builds every wheel, which takes minutes; test_ci runs its steps",
    "pip install --extra-index-url 'file://$PWD/dist/whl' flash-kda": "test_ci installs from one",
    "python scripts/fuzz.py --seconds 60": "a minute; test_fuzz runs some seconds of it",
    "python scripts/fuzz.py --seconds 60 --seed 7 --device cpu": "a minute; test_fuzz, too",
    "python scripts/fuzz.py --seconds 300 --path portable_v64 --largest 10000": "needs a GPU",
    "sed -i '1i #define FLASH_KDA_EVERY_LANE_ARRIVES' csrc/common/ptx.cuh": "test_build runs it",
    "compute-sanitizer --tool racecheck python scripts/small_calls.py": "needs a GPU and CUDA's "
    "compute-sanitizer; scripts/gpu_checks.py runs it there",
    "bash scripts/setup_clangd.sh": "writes into the checkout; test_scripts runs it in a copy",
    "bash tests/test.sh tests/gpu": "the GPU tests",
    "bash tests/test.sh tests/test_loader.py -k gpu": "runs other tests",
    "pip install --no-deps 'flash_kda-*.whl'": "test_packaging installs wheels",
    "pip install pre-commit '&&' pre-commit install": "changes the checkout's hooks; "
    "test_pre_commit_uses_the_tools_of_the_tests looks at what they run",
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


def program(page: Path, module: str = "") -> str:
    """The page's Python blocks as one program, with the line numbers that they have in the page.

    Those that need a module are left out, except for one module.
    """
    lines: list[str] = []
    for snippet in snippets(page, "python"):
        assert not snippet.note or snippet.note.startswith("needs "), snippet.note
        if snippet.note in ("", f"needs {module}"):
            start = snippet.line + bool(snippet.note)
            lines += [""] * (start - len(lines))
            lines += snippet.text.splitlines()
    text = "\n".join(lines)
    return text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"')


def run_python(program: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not under the page's own name: fla.py would be found in the place of the package fla.
    file = folder / f"page_{name}.py"
    file.write_text(program, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, cwd=folder, env=environment()
    )


def environment() -> dict[str, str]:
    """The flash_kda that is tested, also for processes that start elsewhere."""
    path = os.pathsep.join(p for p in (*sys.path, FLA) if p)
    return {**os.environ, "PYTHONPATH": path}


def commands() -> Iterator[tuple[str, str]]:
    """Each command and, if its block says so, why it is not run."""
    for page in PAGES:
        for snippet in snippets(page, "bash"):
            assert not snippet.note or snippet.note.startswith("skip: "), snippet.note
            for line in snippet.text.splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words:
                    yield shlex.join(words), snippet.note.removeprefix("skip: ")


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
    done = run_python(source, page.stem, tmp_path)
    assert done.returncode == 0, f"{page.name}:\n{done.stderr}"


def pages_that_need(module: str) -> list[Path]:
    return [p for p in PAGES if any(x.note == f"needs {module}" for x in snippets(p, "python"))]


def test_needed_modules_are_those_of_a_test() -> None:
    notes = {x.note for page in PAGES for x in snippets(page, "python")}
    assert notes == {"", "needs fla"}


@pytest.fixture(scope="module")
def fla(tmp_path_factory: pytest.TempPathFactory) -> None:
    """FLA can be imported, and is one to which the examples are addressed."""
    source = """
import inspect
from fla.ops.kda import chunk_kda
if "state_v_first" not in inspect.signature(chunk_kda).parameters:
    raise SystemExit("FLA 0.5.0 has another name for state_v_first")
"""
    done = run_python(source, "import", tmp_path_factory.mktemp("fla"))
    if done.returncode:
        assert not FLA, done.stderr
        pytest.skip(f"FLA cannot be used: {done.stderr.splitlines()[-1]}")


@pytest.mark.parametrize("page", pages_that_need("fla"), ids=lambda page: page.name)
def test_python_with_fla(
    page: Path, fla: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLA hands its call over, and prints that it does. Its own kernels do not run on the CPU."""
    monkeypatch.delenv("FLA_FLASH_KDA", raising=False)
    log = "import logging; logging.basicConfig(level=logging.INFO)"
    source = program(page, "fla")
    assert source.startswith("\n")  # the first line is free
    done = run_python(log + source, page.stem, tmp_path)
    assert done.returncode == 0, f"{page.name}:\n{done.stderr}"
    assert re.search(r"chunk_kda -> flash_?kda$", done.stderr, re.MULTILINE), done.stderr


def test_functions_of_the_pages_are_called() -> None:
    """A body that no call reaches is no code that has run; those here have a test of their own."""
    found = []
    for page in PAGES:
        tree = ast.parse("".join(x.text for x in snippets(page, "python")))
        used = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
        functions = [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
        found += [f"{page.name}: {name}" for name in functions if name not in used]
    assert found == ["serving.md: register"]


def test_plugin_for_vllm(tmp_path: Path) -> None:
    """What docs/serving.md puts into a plugin, found by its entry point as vLLM does."""
    page = ROOT / "docs" / "serving.md"
    (block,) = [x for x in snippets(page, "python") if "# my_plugin.py" in x.text]
    (entry,) = [x for x in snippets(page, "toml") if "vllm.general_plugins" in x.text]
    (target,) = re.findall(r'^flash_kda = "(.+)"$', entry.text, re.MULTILINE)
    (tmp_path / "my_plugin.py").write_text(block.text, encoding="utf-8")
    source = f"""
import importlib.metadata
import torch
from flash_kda.integrations import vllm as adapter
assert not hasattr(torch.ops._flashkda_C, "fwd")
entry = importlib.metadata.EntryPoint("flash_kda", {target!r}, "vllm.general_plugins")
entry.load()()
assert torch.ops._flashkda_C.fwd is adapter.fwd
"""
    done = run_python(source, "plugin", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("command", "reason"), sorted(set(commands())))
def test_command(command: str, reason: str, tmp_path: Path) -> None:
    reason = reason or ELSEWHERE.get(command, "")
    if reason:
        pytest.skip(reason)
    assert command in HERE, f"{command!r} is neither run here nor listed with a reason"
    words = shlex.split(command)
    words[0] = {"python": sys.executable}.get(words[0], words[0])
    where = ROOT if words[0] == "bash" else tmp_path
    done = subprocess.run(words, capture_output=True, text=True, cwd=where, env=environment())
    assert done.returncode in HERE[command], done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_lists_of_commands_are_those_of_the_pages() -> None:
    there = {command for command, reason in commands() if not reason}
    assert there == {*ELSEWHERE, *HERE}
    assert not {*ELSEWHERE} & {*HERE}


def test_pre_commit_uses_the_tools_of_the_tests() -> None:
    """tests/test.sh runs them: what its hooks do, without the hooks."""
    pinned = (ROOT / "requirements" / "lint.txt").read_text(encoding="utf-8").splitlines()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    tools = re.findall(r'additional_dependencies: \["(.+)"\]', hooks)
    assert tools and set(tools) <= set(pinned)
    script = (ROOT / "tests" / "test.sh").read_text(encoding="utf-8")
    for entry in re.findall(r"entry: (?:python -m )?(\S+)", hooks):
        assert re.search(rf"^\W*(?:.* )?{entry}\b", script, re.MULTILINE), entry


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
