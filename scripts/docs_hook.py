"""A hook of mkdocs: docstrings introduce code with two colons, which Markdown shows as two."""

from __future__ import annotations

from typing import Any


def on_page_content(html: str, **context: Any) -> str:
    return html.replace("::</p>", ":</p>")
