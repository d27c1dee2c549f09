"""JSON documents of measurements: read, and checked before anything is made of them.

What a page or a chart shows comes from a file that may have been cut short or written by hand. A
schema is a Kind, a list of one schema, a dict of them in which the key ``name?`` may be absent, or
a function that chooses the schema for an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flash_kda.manifest import read_regular

LARGEST = 64 << 20
"""Bytes; a real document has some thousand."""

Document = dict[str, Any]
Schema = Any


class Kind(NamedTuple):
    """What a value must be, in words and as a question."""

    needs: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """Null, or what fits the schema."""

    schema: Schema


def number(least: float, most: float, *, zero: bool = False) -> Kind:
    needs = f"{'0 or ' if zero else ''}a number from {least:g} to {most:g}"

    def fits(x: Any) -> bool:
        return type(x) in (int, float) and (least <= x <= most or (zero and x == 0))

    return Kind(needs, fits)


def integer(least: int, most: int) -> Kind:
    return Kind(
        f"an integer from {least} to {most}", lambda x: type(x) is int and least <= x <= most
    )


def one_of(*values: Any) -> Kind:
    """Of these values, and not of what Python takes for equal: 1 is not true."""
    return Kind(
        f"one of {', '.join(map(json.dumps, values))}",
        lambda x: any(type(x) is type(value) and x == value for value in values),
    )


def matching(needs: str, pattern: str) -> Kind:
    return Kind(needs, lambda x: isinstance(x, str) and re.fullmatch(pattern, x) is not None)


def _is_label(x: Any) -> bool:
    return isinstance(x, str) and 0 < len(x) <= 500 and x.isprintable() and not _MARKUP & set(x)


_MARKUP = set("<>|`[]\\")
LABEL = Kind(f"one line of text without {' '.join(sorted(_MARKUP))}", _is_label)
"""It goes into Markdown as it is."""
TEXT = Kind("text", lambda x: isinstance(x, str))
"""Of other programs; it goes through ``line`` before it is shown."""
NAME = matching("letters and digits", "[A-Za-z0-9]{1,64}")
"""It becomes a part of a file's name."""
COUNT = integer(0, 2**53)
TIME = number(1e-9, 1e12)
DURATION = number(1e-9, 1e12, zero=True)
ERROR = number(1e-100, 1e100, zero=True)


def read(path: Path, schema: dict[str, Schema], writer: str) -> Document:
    """The document in a file.

    Args:
        path: the file.
        schema: what it must hold.
        writer: the script that writes such documents, for the error.

    Raises:
        ValueError: it cannot be read, is not JSON or no such document; one line with the path.
    """
    try:
        document = json.loads(read_regular(path, LARGEST))
        json.dumps(document, ensure_ascii=False).encode()  # escapes may name what nothing can print
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON: it is nested too deeply") from error
    required = {name for name in schema if not name.endswith("?")}
    if not isinstance(document, dict) or not required <= document.keys():
        raise ValueError(f"{path} holds no measurements of {writer}")
    try:
        check(document, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return document


def check(value: Any, schema: Schema, where: str = "") -> None:
    """Compare a value with a schema.

    Raises:
        ValueError: the first difference; ``where`` names the value.
    """
    if isinstance(schema, Maybe):
        if value is not None:
            check(value, schema.schema, where)
    elif isinstance(schema, Kind):
        if not schema.fits(value):
            raise ValueError(f"{where}: got {_shown(value)}; needs {schema.needs}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: got {_shown(value)}; needs a list")
        for index, item in enumerate(value):
            check(item, schema[0], f"{where}[{index}]")
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'document'}: got {_shown(value)}; needs an object")
        if callable(schema):
            schema = schema(value)
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name in value:
                check(value[name], inner, f"{where}.{name}".lstrip("."))
            elif name == key:
                raise ValueError(f"{where or 'document'}: got no {name}; needs one")


def line(text: str) -> str:
    """The first line of a program's text, as Markdown can show it."""
    first = next(iter(text.strip().splitlines()), "")
    shown = "".join(x if x.isprintable() else " " for x in first)
    return shown.translate(str.maketrans("|<>`[]\\", "/()'()/"))


def between(path: Path, begin: str, end: str, block: str) -> str:
    """The text of a page with ``block`` in the place of what stands between its markers.

    Raises:
        ValueError: it cannot be read or has no such markers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    first, last = text.find(begin), text.find(end)
    if first < 0 or last < first:
        raise ValueError(f"{path}: got no markers; needs {begin} and, after it, {end}")
    return f"{text[:first]}{begin}\n{block}\n{text[last:]}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    text = json.dumps(value) if not isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
