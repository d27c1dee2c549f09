"""Rules about compilation targets: parsing FLASH_KDA_CUDA_ARCHS, choosing a target for a GPU."""

from __future__ import annotations

import pytest

from flash_kda import targets

CAPABILITIES = {(9, 0): "90a", (10, 0): "100a", (10, 3): "103a", (12, 0): "120a", (12, 1): "121a"}


def never() -> list[tuple[int, int]]:
    raise AssertionError("GPUs are looked for only with auto")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90a", ("90a",)),
        ("90a,100a", ("90a", "100a")),
        ("100a,90a", ("90a", "100a")),
        (" 90A , 100a,90a,, ", ("90a", "100a")),
        ("all", targets.ALL),
        (" ALL ", targets.ALL),
        ("100f,120F", ("100f", "120f")),
        ("121a,100f,90a", ("90a", "121a", "100f")),
    ],
)
def test_lists(text: str, expected: tuple[str, ...]) -> None:
    assert targets.parse_archs(text, never) == expected


@pytest.mark.parametrize("text", [None, "auto", " Auto "])
def test_auto_takes_the_distinct_gpus(text: str | None) -> None:
    gpus = [(12, 0), (9, 0), (9, 0)]
    assert targets.parse_archs(text, lambda: gpus) == ("90a", "120a")


def test_auto_leaves_out_gpus_that_are_too_old() -> None:
    assert targets.parse_archs("auto", lambda: [(8, 0), (9, 0)]) == ("90a",)


def test_auto_takes_the_family_of_a_gpu_without_a_target_of_its_own() -> None:
    assert targets.parse_archs("auto", lambda: [(10, 7)]) == ("100f",)


@pytest.mark.parametrize(
    ("text", "gpus", "words"),
    [
        ("9.0", [], ["'9.0'", "did you mean 90a?", "auto, all", "90a,100a"]),
        ("sm_90", [], ["'sm_90'", "did you mean 90a?"]),
        ("100", [], ["did you mean 100a or 100f?"]),
        ("foo", [], ["'foo'", "auto, all"]),
        ("90a;100a", [], ["'90a;100a'", "90a,100a"]),
        ("90a,auto", [], ["'auto' cannot be part of a list"]),
        ("80a", [], ["'80a'", "90a"]),
        ("", [], ["empty", "auto, all", "unset"]),
        (" , ", [], ["empty"]),
        ("auto", [], ["no NVIDIA GPU", "FLASH_KDA_CUDA_ARCHS to all"]),
        (None, [], ["no NVIDIA GPU"]),
        (None, [(8, 0), (8, 6)], ["8.0, 8.6", "9.0", "90a,100a"]),
        (None, [(11, 0)], ["11.0"]),
    ],
)
def test_refusals_are_one_line_and_say_what_would_work(
    text: str | None, gpus: list[tuple[int, int]], words: list[str]
) -> None:
    with pytest.raises(targets.TargetError) as caught:
        targets.parse_archs(text, lambda: gpus)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("capability", "target"), CAPABILITIES.items())
def test_each_supported_gpu_has_its_exact_target(capability: tuple[int, int], target: str) -> None:
    assert targets.choose(capability, targets.KNOWN) == target
    assert targets.target_for(capability) == target
    assert targets.target_capability(target) == capability


@pytest.mark.parametrize(
    ("capability", "available", "expected"),
    [
        ((10, 3), ["100a"], None),  # a B300 cannot run what was built for exactly a B200
        ((10, 3), ["100a", "100f"], "100f"),
        ((10, 3), ["100f", "103a"], "103a"),
        ((10, 3), ["100f", "103f"], "103f"),
        ((10, 0), ["103f"], None),
        ((12, 1), ["120f", "100f"], "120f"),
        ((9, 0), ["100f", "120a"], None),
        ((8, 0), list(targets.KNOWN), None),
        ((9, 0), [], None),
    ],
)
def test_exact_then_best_family_then_none(
    capability: tuple[int, int], available: list[str], expected: str | None
) -> None:
    assert targets.choose(capability, available) == expected


def test_names() -> None:
    assert targets.sm_name("121a") == "sm_121a"
    for wrong in ("90", "a", "sm_90a", "90b", ""):
        with pytest.raises(targets.TargetError):
            targets.sm_name(wrong)


@pytest.mark.parametrize("version", ["12.9", "12.9.86", "13.0.88", "14.1"])
def test_new_enough_compilers(version: str) -> None:
    targets.check_toolkit(version)


@pytest.mark.parametrize("version", ["12.8.93", "12.0", "11.8", "9.2", "nonsense"])
def test_old_compilers_are_refused(version: str) -> None:
    with pytest.raises(targets.TargetError, match=r"12\.9"):
        targets.check_toolkit(version)
