"""Rules about compilation targets, shared by the build and the loader. Pure: no torch, no driver.

A target is the part of an NVIDIA architecture name after ``sm_``: ``90a``, ``100a``, ``100f``.

* ``a`` (architecture specific) code runs on exactly its compute capability;
* ``f`` (family) code runs on every capability of the same major version whose minor version is
  not below its own.

A compute capability is a pair such as ``(9, 0)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

ALL: tuple[str, ...] = ("90a", "100a", "103a", "120a", "121a")
"""What ``FLASH_KDA_CUDA_ARCHS=all`` builds: one exact target for each supported GPU."""

FAMILIES: tuple[str, ...] = ("100f", "120f")
"""Targets that are built only when asked for (or for a GPU newer than this list)."""

KNOWN: tuple[str, ...] = ALL + FAMILIES

MIN_CAPABILITY: tuple[int, int] = (9, 0)
MIN_TOOLKIT: tuple[int, int] = (12, 9)
"""The first CUDA release whose compiler knows every target in ``KNOWN``."""

ARCHS_VARIABLE = "FLASH_KDA_CUDA_ARCHS"

_TARGET = re.compile(r"([0-9]{1,3})([0-9])([af])")
_CHOICES = f"use auto, all, or a comma list of {', '.join(KNOWN)} (for example 90a,100a)"

Capability = tuple[int, int]


class TargetError(ValueError):
    """A request for targets that cannot be met; the text is one line and says what would work."""


def target_capability(target: str) -> Capability:
    """The compute capability a target is named after: ``"103a" -> (10, 3)``.

    Raises:
        TargetError: ``target`` is not of the form ``<major><minor><a|f>``.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        raise TargetError(f"{target!r} is not a CUDA target such as 90a or 100f")
    return int(match[1]), int(match[2])


def sm_name(target: str) -> str:
    """The compiler's name for a target: ``"90a" -> "sm_90a"``."""
    target_capability(target)
    return f"sm_{target}"


def runs_on(target: str, capability: Capability) -> bool:
    """Whether code built for ``target`` runs on a GPU of ``capability``."""
    major, minor = target_capability(target)
    if target.endswith("a"):
        return (major, minor) == tuple(capability)
    return major == capability[0] and minor <= capability[1]


def choose(capability: Capability, targets: Iterable[str]) -> str | None:
    """The best of ``targets`` for a GPU of ``capability``, or None when none of them runs there.

    The exact ``a`` target wins; then the family target with the highest minor version.
    """
    usable = [target for target in targets if runs_on(target, capability)]
    return max(usable, key=lambda t: (t.endswith("a"), target_capability(t)), default=None)


def target_for(capability: Capability) -> str | None:
    """The target to build for a GPU of ``capability``, or None when no known target fits it."""
    return choose(capability, KNOWN)


def parse_archs(
    text: str | None, detect: Callable[[], Iterable[Capability]] | None = None
) -> tuple[str, ...]:
    """The targets that a value of ``FLASH_KDA_CUDA_ARCHS`` asks for, each once, in KNOWN's order.

    Args:
        text: the variable's value; None (unset) means ``auto``.
        detect: returns the compute capabilities of this machine's GPUs; called only for ``auto``.

    Raises:
        TargetError: an unknown or empty list, or ``auto`` where no usable GPU is found.
    """
    value = "auto" if text is None else text.strip().lower()
    if value == "auto":
        return _detected(list(detect()) if detect is not None else [])
    if value == "all":
        return ALL
    wanted = [part.strip() for part in value.split(",")]
    wanted = [part for part in wanted if part]
    if not wanted:
        raise TargetError(f"{ARCHS_VARIABLE} is empty: {_CHOICES}, or unset it to mean auto")
    for part in wanted:
        if part not in KNOWN:
            raise TargetError(_unknown(part))
    return tuple(target for target in KNOWN if target in wanted)


def check_toolkit(version: str) -> None:
    """Refuse a compiler that does not know the targets.

    Args:
        version: dotted CUDA version, at least ``major.minor``.

    Raises:
        TargetError: the version is below ``MIN_TOOLKIT`` or cannot be read.
    """
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version)
    if match is None:
        raise TargetError(f"cannot read the CUDA compiler version {version!r}: expected 12.9 or so")
    if (int(match[1]), int(match[2])) < MIN_TOOLKIT:
        raise TargetError(
            f"the CUDA compiler is version {version}, which is too old: flash-kda needs "
            f"{MIN_TOOLKIT[0]}.{MIN_TOOLKIT[1]} or newer"
        )


def _detected(capabilities: list[Capability]) -> tuple[str, ...]:
    advice = f"set {ARCHS_VARIABLE} to all or to a list such as 90a,100a"
    if not capabilities:
        raise TargetError(f"{ARCHS_VARIABLE} is auto but no NVIDIA GPU was found here: {advice}")
    found = {target_for(capability) for capability in capabilities} - {None}
    if not found:
        names = ", ".join(sorted({f"{major}.{minor}" for major, minor in capabilities}))
        raise TargetError(
            f"{ARCHS_VARIABLE} is auto but no target fits the GPUs here (compute capability "
            f"{names}; flash-kda needs 9.0, 10.x or 12.x): to build for other machines {advice}"
        )
    return tuple(target for target in KNOWN if target in found)


def _unknown(part: str) -> str:
    if part in ("auto", "all"):
        return f"{ARCHS_VARIABLE}: {part!r} cannot be part of a list: {_CHOICES}"
    digits = re.sub(r"\D", "", part)
    near = [target for target in KNOWN if digits and target[:-1] == digits]
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"{ARCHS_VARIABLE}: unknown target {part!r}{hint}: {_CHOICES}"
