"""README.md and docs/: the snippets of "Use" run one after the other, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

# What makes the snippets small enough for the CPU path.
SMALLER = {
    'device="cuda"': 'device="cpu"',
    ").cuda()": ")",
    "B, T, H, D = 2, 4096, 32, 128": "B, T, H, D = 2, 50, 2, 128",
    "[1300, 547, 2048]": "[130, 54, 204]",
    "[512, 1024, 3895]": "[48, 128, 388]",
}


def test_snippets_run_in_order() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Use\n") : text.index("\n### Through flash-linear-attention")]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    for given, smaller in SMALLER.items():
        assert given in code
        code = code.replace(given, smaller)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (1, 388, 2, 128)
    for result in ("out", "state", "final_state", "checkpoints"):
        assert names[result].isfinite().all() and names[result].any()
    # Slots 17 and 3 hold the first and the last sequence's state, which the last checkpoint is.
    assert [i for i in range(64) if names["pool"][i].any()] == [3, 17]
    assert names["pool"][3].bfloat16().equal(names["checkpoints"][2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, target
