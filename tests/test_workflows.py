"""The workflows: pinned, few permissions, and every ``run:`` is a call that works here too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wheel_support
from build_support import ROOT

yaml = pytest.importorskip("yaml")
pytest.importorskip("packaging")

from ci import matrix  # noqa: E402

FOLDER = ROOT / ".github" / "workflows"
if not FOLDER.is_dir():
    pytest.skip("an sdist has no workflows", allow_module_level=True)
FILES = sorted(FOLDER.glob("*.yml"))
DOCUMENTS = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
JOBS = [
    pytest.param(workflow, job, id=f"{workflow}-{name}")
    for workflow, document in DOCUMENTS.items()
    for name, job in document["jobs"].items()
]
CALLS = [
    pytest.param(job, step["run"], id=f"{workflow}-{name}-{step['run'][:40]}")
    for workflow, document in DOCUMENTS.items()
    for name, job in document["jobs"].items()
    for step in job.get("steps", [])
    if "run" in step
]
CALL = re.compile(
    r"(python3? -m ci\.\w+|(bash|python3?) (ci|scripts|tests)/\w+\.(sh|py))( [^\n]*)?"
)
PROGRAMS = Path(sys.executable).parent


def test_workflows() -> None:
    assert set(DOCUMENTS) == {"checks", "wheels", "gpu-smoke", "release"}


def test_actions_are_pinned_by_commit() -> None:
    pins: dict[str, set[str]] = {}
    for file in FILES:
        for line in re.findall(r"uses: (.*)", file.read_text()):
            if line.startswith("$/"):
                assert (ROOT / line[2:]).is_file()
                continue
            found = re.fullmatch(r"([\w-]+/[\w-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", line)
            assert found, line
            pins.setdefault(found[1], set()).add(found[2])
    assert pins
    assert all(len(versions) == 1 for versions in pins.values()), pins


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_permissions_are_few(workflow: str, job: dict[str, Any]) -> None:
    assert DOCUMENTS[workflow]["permissions"] == {}
    writes = {name for name, level in job["permissions"].items() if level == "write"}
    if workflow == "release":
        allowed = {"gates": {"id-token", "attestations"}, "pypi": {"id-token"}}
        allowed |= {"assets": {"contents"}, "index": {"pages", "id-token"}}
        (name,) = [n for n, j in DOCUMENTS["release"]["jobs"].items() if j is job]
        assert writes == allowed.get(name, set())
    else:
        assert not writes
    if "steps" in job:
        assert job["timeout-minutes"] <= 60


def test_gpu_smoke_has_no_checkout() -> None:
    assert not any("checkout" in str(s) for s in DOCUMENTS["gpu-smoke"]["jobs"]["smoke"]["steps"])
    assert DOCUMENTS["gpu-smoke"]["jobs"]["smoke"]["runs-on"] == ["self-hosted", "gpu"]


@pytest.mark.parametrize(("job", "command"), CALLS)
def test_every_call_works(job: dict[str, Any], command: str, tmp_path: Path) -> None:
    """Run it, where it needs the outside as a dry run, with values of the matrix."""
    assert CALL.fullmatch(command), "a run: is one call of a file in ci/, scripts/ or tests/"
    assert "${{" not in command
    if command == "bash tests/test.sh":
        return  # what runs these tests
    if "lint_workflows" in command and not shutil.which("zizmor", path=str(PROGRAMS)):
        pytest.skip("zizmor is not installed")
    environ = {
        **os.environ,
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "FLASH_KDA_CI_DRY_RUN": "1",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        **{name: _value(str(text)) for name, text in job.get("env", {}).items()},
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--github" in command:
        name, _, value = (tmp_path / "output").read_text().partition("=")
        assert name == "matrix" and json.loads(value)["include"]


def _value(text: str) -> str:
    described = matrix.load()
    cell = matrix.github(described, "cells")[0]
    leg = matrix.github(described, "legs")[0]
    known = {f"matrix.{name}": str(value) for name, value in {**leg, **cell}.items()}
    known |= {"github.ref_name": f"v{wheel_support.VERSION}", "github.repository": "owner/name"}
    known |= {"github.token": "none"}
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: known[found[1]], text)


def test_matrices_come_from_the_file() -> None:
    outputs = DOCUMENTS["wheels"]["jobs"]["matrix"]["outputs"]
    for job in DOCUMENTS["wheels"]["jobs"].values():
        include = job.get("strategy", {}).get("matrix", "")
        if include:
            found = re.fullmatch(r"\$\{\{ fromJSON\(needs\.matrix\.outputs\.(\w+)\) \}\}", include)
            assert found and found[1] in outputs
