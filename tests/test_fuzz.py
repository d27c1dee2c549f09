"""scripts/fuzz.py: finds planted faults on the CPU path, and makes the calls that show them simple.

``main`` runs in this process, so that the faults can be planted by replacing functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import documents  # noqa: E402
import fuzz  # noqa: E402
import fuzz_calls  # noqa: E402
import fuzz_check  # noqa: E402
from fuzz_calls import Call, draw, simpler  # noqa: E402

from flash_kda import cpu  # noqa: E402

CPU = torch.device("cpu")
FLAGS = ["--device", "cpu", "--largest", "60"]


def test_finds_nothing_in_the_cpu_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main([*FLAGS, "--seconds", "4"]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert re.match(r"\d+ calls in 4 s on cpu, seed \d+: no failure\n", text)
    assert "packed" in text and "batches" in text


Spans = list[tuple[int, int]]


def _wrong(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    """The last token of a sequence of 20 or more, in the second head."""
    for begin, end in spans:
        if end - begin >= 20 and out.shape[2] > 1:
            out[(end - 1) // out.shape[1], (end - 1) % out.shape[1], 1] = 0


def _outside(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    """The row before the first sequence, whose inputs are NaN."""
    row = spans[0][0] - 1 if spans else -1
    if 0 <= row < out.shape[1] and given["q"][0, row].isnan().all():
        out[0, row, 0, 0] = 1.0


def _beside(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    """An element past the end of out."""
    if out.numel() and out.is_contiguous():
        whole = out.as_strided((out.numel() + 1,), (1,), out.storage_offset())
        whole[-1] = 1.0


def _input(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    if given["g"].shape[1] > 1:
        given["g"][:, 1] += 1


_calls = itertools.count()


def _unrepeatable(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    """Every other call has another last bit."""
    final = given["final_state"]
    if final is not None and final.dtype == torch.bfloat16:
        final.view(torch.int16).bitwise_xor_(next(_calls) % 2)


def _crash(given: dict[str, Any], spans: Spans, out: torch.Tensor) -> None:
    if given["A_log"] is not None and given["A_log"].dtype == torch.float16:
        raise RuntimeError("planted")


FAULTS: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "wrong": (_wrong, "out: ", {"heads": 2, "tokens": 20}),
    "outside": (_outside, "were written, beside out", {"before": 1, "lengths": (0,)}),
    "beside": (_beside, "were written, beside out", {"heads": 1, "tokens": 1}),
    "input": (_input, "were written, beside g", {"heads": 1, "tokens": 2}),
    "unrepeatable": (_unrepeatable, "other bits to final_state", {"final": "bfloat16"}),
    "crash": (_crash, "RuntimeError: planted", {"A_log": "float16"}),
}


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1, 0), (5,)])
@pytest.mark.parametrize(("before", "after"), [(0, 7), (1, 1), (7, 0), (7, 7)])
def test_rows_of_no_sequence_become_those_of_a_batch(
    lengths: tuple[int, ...], before: int, after: int
) -> None:
    """Where nothing but their number matters; not so, the simplest call was left packed."""
    call = Call(seed=1, lengths=lengths, before=before, after=after).settled()
    while ways := [x for x in simpler(call) if x.all_tokens > 1]:
        call = ways[0]
    assert call == Call(seed=1, tokens=2)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_and_made_simple(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, text, simplest = FAULTS[name]
    right = cpu.chunkwise_spans
    names = ("q", "k", "v", "g", "beta", "scale", "A_log", "dt_bias", "lower_bound")

    def faulty(*arguments: Any, **options: Any) -> None:
        right(*arguments, **options)
        spans, _, out, final = arguments[9:]
        given = dict(zip(names, arguments, strict=False), final_state=final)
        fault(given, spans, out)

    monkeypatch.setattr(cpu, "chunkwise_spans", faulty)
    assert fuzz.main([*FLAGS, "--seconds", "60"]) == 1
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 25
    report = printed.split("\n", 2)[2]  # after the call as it was drawn
    assert text in report.splitlines()[0], printed
    again = re.search(r"python scripts/fuzz.py --device cpu --call '(.*)'\n$", printed)
    assert again is not None
    call = Call.from_json(again[1])
    assert call == Call(seed=call.seed, **simplest), printed
    assert fuzz.main(["--device", "cpu", "--call", again[1]]) == 1
    monkeypatch.undo()
    assert fuzz.main(["--device", "cpu", "--call", again[1]]) == 0


def test_shrinking_keeps_to_one_kind_of_failure() -> None:
    def fails(call: Call) -> str | None:
        return "other" if call.heads < 3 else f"out: relative error {call.heads}, allowed 0"

    call, reason, _ = fuzz.shrink(Call(heads=9, tokens=5), "out: error of one row 9", fails)
    assert call == Call(heads=3) and reason == "out: relative error 3, allowed 0"


def test_calls_are_written_and_read_back() -> None:
    rng = random.Random(3)
    for _ in range(300):
        call = draw(rng, 200, [None, "portable_v64"])
        assert Call.from_json(call.to_json()) == call == call.settled()
        for candidate in simpler(call):
            assert candidate != call and candidate == candidate.settled()
    assert not list(simpler(Call(seed=7)))


def test_every_value_of_a_call_is_known() -> None:
    """So that a call with another one is refused, and no call that can be drawn."""
    assert set(fuzz_calls._VALUES) == {field.name for field in dataclasses.fields(Call)}
    rng = random.Random(5)
    for call in [Call(), *(draw(rng, 2000, [None]) for _ in range(300))]:
        documents.check(json.loads(json.dumps(dataclasses.asdict(call))), fuzz_calls._SCHEMA)


def test_tensors_that_cannot_be_made_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not enough memory:\nyou tried")

    monkeypatch.setattr(fuzz_check, "Subject", fail)
    assert fuzz.main(["--device", "cpu", "--call", '{"tokens": 3}']) == 1
    assert "its tensors cannot be made: not enough memory: you" in capsys.readouterr().out


def test_equal_calls_have_equal_bits() -> None:
    rng = random.Random()
    for _ in range(5):
        call = draw(rng, 60, [None])
        first, second = (fuzz_check.Subject(call, CPU).arguments for _ in range(2))
        assert first.keys() == second.keys()
        for name, x in first.items():
            if isinstance(x, torch.Tensor):
                assert fuzz_check.cases.same_bits(x, second[name])


def test_every_kernel_path_takes_its_turn() -> None:
    rng = random.Random(1)
    drawn = {draw(rng, 60, [None, "a", "b"]).path for _ in range(60)}
    assert drawn == {None, "a", "b"}


def test_long_sequences_for_the_path_that_cuts_them() -> None:
    rng = random.Random(1)
    drawn = [draw(rng, 6000, ["segments"]) for _ in range(400)]
    assert all(call.all_tokens - call.before - call.after <= 6000 for call in drawn)
    long = [x for x in drawn if x.sequences and x.all_tokens >= 960 * x.sequences and x.heads < 4]
    assert 150 < len(long) < 300
    assert {None} < {x.lengths and min(x.lengths) < 41 for x in long}
    assert {x.sequences for x in long} >= {1, 2, 3}
    assert all(x.all_tokens < 1000 for x in (draw(rng, 900, ["segments"]) for _ in range(100)))


def test_more_chains_than_clusters() -> None:
    rng = random.Random(1)
    drawn = [draw(rng, 6000, [None, "fused"]) for _ in range(600)]
    assert all(call.all_tokens - call.before - call.after <= 6000 for call in drawn)
    crowds = [call for call in drawn if "crowd" in call.features()]
    assert 60 < len(crowds) < 200
    assert all(call.sequences * call.heads > 66 for call in crowds)
    tokens = [(call.all_tokens - call.before - call.after) * call.heads for call in crowds]
    assert max(tokens) <= 24000
    shapes = {(call.lengths is None, call.sequences > 30, call.heads > 30) for call in crowds}
    assert len(shapes) > 4


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('no failure')", None),
        ("print('out: wrong\\nmore'); raise SystemExit(1)", "out: wrong (exit status 1)"),
        ("import os; os.abort()", "a crash (exit status -6)"),
    ],
)
def test_other_processes_try_when_a_fault_lost_the_gpu(
    program: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "again.py").write_text(program)
    monkeypatch.setattr(fuzz, "__file__", str(tmp_path / "again.py"))
    monkeypatch.setattr(fuzz, "_usable", lambda device: False)
    assert fuzz._attempt_again(CPU)(Call()) == expected


def test_a_call_that_hangs_ends_the_process() -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import fuzz\n"
        "fuzz.HANG_SECONDS = 0.2\n"
        "fuzz.fuzz_check.check = lambda *given: time.sleep(60)\n"
        "fuzz.main(['--device', 'cpu', '--seed', '5'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1 and "hangs: no result after 0.2 s" in done.stdout
    assert "--call '" in done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "meta"],
        ["--device", "nope"],
        ["--device", "cuda:9999"],
        ["--largest", "0"],
        ["--call", "{"],
        ["--call", '{"nonsense": 1}'],
        ["--call", "[1]"],
        ["--call", "null"],
        ["--call", "[" * 100_000],
        ["--call", '{"lengths": [3, -1]}'],
        ["--call", '{"lengths": 3}'],
        ["--call", '{"kind": "nonsense"}'],
        ["--call", '{"kind": []}'],
        ["--call", '{"q": null}'],
        ["--call", '{"heads": 0}'],
        ["--call", '{"tokens": 1.5}'],
        ["--call", '{"tokens": true}'],
        ["--call", '{"scale": NaN}'],
        ["--call", '{"spoiled": ["q"]}'],
        ["--call", '{"one_buffer": 1}'],
        ["--seconds", "soon"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
        ["--seconds", "0"],
        ["--seconds", "-1"],
        ["--seed", "-1"],
    ],
    ids=lambda flags: " ".join(flags)[:40],
)
def test_wrong_options(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        fuzz.main(flags)
    assert info.value.code == 2 and flags[0] in capsys.readouterr().err
