"""Which path a call takes and how much workspace, asked of the built launcher; needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import native
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CUT_BYTES, PAIR_BYTES, STATE_BYTES

from flash_kda import abi

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import bench_cases  # noqa: E402

HOPPER = {"H20": abi.Gpu(90, 78), "H100 PCIe": abi.Gpu(90, 114), "H200": abi.Gpu(90, 132)}
OTHERS = {"B200": abi.Gpu(100, 148), "B300": abi.Gpu(103, 148), "RTX 5090": abi.Gpu(120, 170)}
HOPPER_ONLY = ("fused", "segments")
PORTABLE = ("portable_v128", "portable_v64", "portable_v32")

each_gpu = pytest.mark.parametrize("gpu", [*HOPPER.values(), *OTHERS.values()], ids=str)
each_hopper = pytest.mark.parametrize("gpu", HOPPER.values(), ids=list(HOPPER))

gpus = st.builds(
    abi.Gpu, st.sampled_from((90, 100, 103, 120, 121)), st.integers(1, 300) | st.just(2**31 - 1)
)
counts = st.integers(0, 40) | st.integers(0, 10**5)
shapes = st.tuples(
    st.integers(0, 5000) | st.integers(0, 10**8),
    st.integers(1, 100) | st.integers(1, 10**5),
    counts,
)

if abi.launcher_or_none() is None:
    pytest.skip("needs the built launcher", allow_module_level=True)


def plan(
    tokens: int,
    heads: int,
    sequences: int,
    gpu: abi.Gpu,
    path: str = "",
    packed: bool = True,
) -> abi.Plan:
    forced = abi.path_id(path) if path else abi.AUTOMATIC_PATH
    return abi.plan(tokens, heads, sequences, gpu, forced, packed)


def chosen(tokens: int, heads: int, sequences: int, gpu: abi.Gpu) -> str:
    return abi.path_names()[plan(tokens, heads, sequences, gpu).path]


def forced_plans(shape: tuple[int, int, int], gpu: abi.Gpu) -> Iterator[abi.Plan]:
    """Of every path that the GPU has, and the automatic choice."""
    for name in ("", *abi.path_names()):
        if gpu.capability == 90 or name not in HOPPER_ONLY:
            yield plan(*shape, gpu, name)


# Measured to be the fastest path of each case on an H200; docs/performance.md.
H200_PATHS = {
    "n1_h96_t8192": "fused",
    "mixed_h96": "fused",
    "n8x1024_h96": "fused",
    "n1_h64_t8192": "fused",
    "mixed_h64": "fused",
    "n8x1024_h64": "fused",
    "n1_h12_t8192": "segments",
    "n1_h12_t32768": "segments",
    "n1_h12_t131072": "segments",
    "n1_h8_t65536": "segments",
    "n8x2048_h16": "fused",
    "n128x64_h32": "fused",
    "n512x128_h8": "fused",
    "n1_h32_t1024": "fused",
    "n1_h32_t64": "fused",
    "n1_h32_t1": "fused",
    "n1_h12_t1024": "portable_v32",
    "n1_h12_t2048": "segments",
    "n4x512_h12": "fused",
}


@pytest.mark.parametrize("name", bench_cases.STANDARD_CASES)
def test_benchmark_cases_on_an_h200(name: str) -> None:
    case = bench_cases.parse_case(name)
    shape = (case.tokens, case.heads, case.sequences)
    assert chosen(*shape, HOPPER["H200"]) == H200_PATHS[name]


@pytest.mark.parametrize("gpu", OTHERS.values(), ids=list(OTHERS))
def test_other_gpus_have_the_portable_paths_only(gpu: abi.Gpu) -> None:
    sms = gpu.sm_count
    for chains, name in (
        *((sms // 4, "portable_v32"), (sms // 4 + 1, "portable_v64")),
        *((sms // 2, "portable_v64"), (sms // 2 + 1, "portable_v128")),
    ):
        for tokens in (1, 64, 8192, 10**6):
            assert chosen(tokens, chains, 1, gpu) == name
    for case in bench_cases.select_cases(None):
        assert chosen(case.tokens, case.heads, case.sequences, gpu) in PORTABLE
    major, minor = divmod(gpu.capability, 10)
    for name in HOPPER_ONLY:
        wanted = f"path {name} needs a GPU of compute capability 9.0, this one has {major}.{minor}"
        with pytest.raises(ValueError, match=wanted.replace(".", r"\.")):
            plan(8192, 12, 1, gpu, name)


@each_gpu
def test_forced_paths_are_taken(gpu: abi.Gpu) -> None:
    names = abi.path_names() if gpu.capability == 90 else PORTABLE
    for case in bench_cases.select_cases(None):
        shape = (case.tokens, case.heads, case.sequences)
        assert [plan(*shape, gpu, x).path for x in names] == [abi.path_id(x) for x in names]
    for unknown in (len(abi.path_names()), -2):
        with pytest.raises(ValueError, match=f"there is no kernel path {unknown}"):
            abi.plan(8192, 96, 1, gpu, unknown)


def schedule_bytes(sequences: int) -> int:
    return -(-4 * (3 * sequences + 2) // 256) * 256


@pytest.mark.parametrize("sms", [-1, 1, 2, 3, 32, 78, 114, 132, 143, 144, 145, 300, 2**31 - 1])
def test_fused(sms: int) -> None:
    """As many clusters as half of the multiprocessors hold, up to 72. If there are more chains,
    each has a share of 16 bytes, 8 flags and a state, and all have a counter."""
    gpu = abi.Gpu(90, sms)
    clusters = max(1, min(sms // 2, 72))
    sharing = -(-(48 * clusters + 4) // 256) * 256 + clusters * STATE_BYTES
    for chains in (0, 1, clusters, clusters + 1, clusters + 2, 10 * clusters, 10**4):
        for heads, sequences in ((1, chains), (chains, 1), (2, chains // 2)):
            if heads == 0:
                continue
            for tokens in (0, 1, 8192):
                shape = (tokens, heads, sequences)
                size = plan(*shape, gpu, "fused").workspace_bytes
                shared = heads * sequences > clusters
                assert size == schedule_bytes(sequences) + shared * sharing
                fixed = plan(*shape, gpu, "fused", packed=False).workspace_bytes
                assert fixed == (size if shared else 0)
                assert size <= abi.workspace_size(*shape)


@given(shapes, gpus)
def test_only_fused_needs_less_of_equal_lengths(shape: tuple[int, int, int], gpu: abi.Gpu) -> None:
    try:
        packed = plan(*shape, gpu)
    except ValueError:
        return
    fixed = plan(*shape, gpu, packed=False)
    assert fixed.path == packed.path
    if abi.path_names()[fixed.path] != "fused":
        assert fixed == packed
    assert fixed.workspace_bytes in (0, packed.workspace_bytes)


@each_hopper
def test_where_fused_is_chosen(gpu: abi.Gpu) -> None:
    """Wherever sequences are not cut, but for some 24 chunks or more of few chains."""
    few = gpu.sm_count // 7
    for chains, length, name in (
        *((few, 368, "fused"), (few, 369, "portable_v32"), (few, 1904, "portable_v32")),
        *((few + 1, 368, "fused"), (few + 1, 369, "fused"), (few + 1, 1904, "fused")),
    ):
        # Nobody knows where sequences end: each may have 15 tokens of padding.
        assert chosen(length, chains, 1, gpu) == name
    for chains in (gpu.sm_count // 2, gpu.sm_count // 2 + 1, 10 * gpu.sm_count):
        for heads, sequences in ((1, chains), (chains, 1)):
            for length in (0, 1, 8, 17, 49, 369, 10**5):
                assert chosen(length * sequences, heads, sequences, gpu) == "fused"


def pairs_of(tokens: int, sequences: int) -> int:
    return min(tokens, (tokens + 31 * sequences) // 32)


@each_hopper
@pytest.mark.parametrize(
    ("tokens", "heads", "sequences"),
    [
        *((944, 1, 1), (945, 1, 1), (1904, 1, 1), (1905, 1, 1), (8192, 12, 1), (8192, 96, 1)),
        *((3810, 2, 2), (10**6, 3, 4), (300, 5, 300), (7, 1, 20), (0, 2, 3)),
    ],
)
def test_segments(tokens: int, heads: int, sequences: int, gpu: abi.Gpu) -> None:
    """As many as half of the multiprocessors hold, and one more for every 60 chunks; each but the
    last of a sequence leaves a state and a map behind the records of all pairs."""
    chains = heads * sequences
    chunks = min(tokens, (tokens + 15 * sequences) // 16) // sequences
    segments = max(1, min(gpu.sm_count // 2 // chains, 1 + chunks // 60))
    size = plan(tokens, heads, sequences, gpu, "segments").workspace_bytes
    records = pairs_of(tokens, sequences) * heads * PAIR_BYTES
    assert size == schedule_bytes(sequences) + records + chains * (segments - 1) * CUT_BYTES
    assert (chosen(tokens, heads, sequences, gpu) == "segments") == (segments >= 3)


@each_hopper
def test_where_cutting_pays(gpu: abi.Gpu) -> None:
    """In three from 120 chunks a sequence on, in two from 256 on: as many as are walked at once."""
    places = gpu.sm_count // 2
    for chains, tokens in (
        *((places // 3, 1905), (places // 3 + 1, 4081), (places // 2, 4081), (1, 1905)),
    ):
        assert chosen(tokens, chains, 1, gpu) == "segments"
        assert chosen(tokens - 1, chains, 1, gpu) != "segments"
        assert chosen(10**6, chains, 1, gpu) == "segments"
    for tokens in (1905, 4081, 8192, 10**6):
        assert chosen(tokens, places // 2 + 1, 1, gpu) != "segments"
        assert chosen(2 * tokens, 1, places // 2 + 1, gpu) != "segments"


@each_gpu
def test_workspace_at_8192_tokens(gpu: abi.Gpu) -> None:
    """Below 1.2 KB a token and head, and linear in the tokens."""
    for sequences in (*range(1, 9), 128):
        # Packed sequences are padded to pairs of chunks, by what the host knows of them.
        padded = 32 * pairs_of(8192, sequences)
        for heads in range(1, 97):
            shape = (8192, heads, sequences)
            assert plan(*shape, gpu).workspace_bytes <= 1200 * padded * heads
            for found in forced_plans(shape, gpu):
                assert found.workspace_bytes <= 1228 * padded * heads
                assert found.workspace_bytes <= abi.workspace_size(*shape)
    for heads in (1, 12, 96):
        names = ("fused", *PORTABLE) if gpu.capability == 90 else PORTABLE
        for name in names:
            sizes = [plan(t, heads, 1, gpu, name).workspace_bytes for t in (0, 8192, 16384, 81920)]
            step = sizes[1] - sizes[0]
            assert sizes == [sizes[0] + n * step for n in (0, 1, 2, 10)]


@pytest.mark.parametrize("heads", [1, 12, 96])
def test_segments_carry_no_more_for_more_tokens(heads: int) -> None:
    """Once there are as many as can be walked at once only the records grow."""
    gpu = HOPPER["H200"]
    cuts = max(1, gpu.sm_count // 2 // heads) - 1
    for tokens in (2**17, 2**20, 2**24):
        size = plan(tokens, heads, 1, gpu, "segments").workspace_bytes
        assert size == 256 + tokens // 32 * heads * PAIR_BYTES + heads * cuts * CUT_BYTES


@each_hopper
def test_many_one_token_sequences(gpu: abi.Gpu) -> None:
    """They do not pay for the padding of their chunks."""
    for tokens, heads in ((10**5, 1), (2 * 10**5, 1), (10**5, 96)):
        found = plan(tokens, heads, 10**5, gpu)
        assert abi.path_names()[found.path] == "fused" and found.workspace_bytes < 1e9


@settings(max_examples=500, deadline=None)
@given(shape=shapes, gpu=gpus)
def test_no_path_exceeds_what_suffices_everywhere(
    shape: tuple[int, int, int], gpu: abi.Gpu
) -> None:
    try:
        bound = abi.workspace_size(*shape)
    except ValueError:
        for name in ("", *PORTABLE):
            with pytest.raises(ValueError, match="too large for one call"):
                plan(*shape, gpu, name)
        return
    for found in forced_plans(shape, gpu):
        assert 0 < found.workspace_bytes <= bound


@settings(max_examples=300, deadline=None)
@given(shape=shapes, smaller=st.tuples(*[st.floats(0, 1)] * 3), gpu=gpus)
def test_what_suffices_everywhere_does_for_smaller_calls(
    shape: tuple[int, int, int], smaller: tuple[float, float, float], gpu: abi.Gpu
) -> None:
    """The automatic path of a smaller call may need more than that of the larger one."""
    try:
        bound = abi.workspace_size(*shape)
    except ValueError:
        return
    tokens, heads, sequences = (round(x * y) for x, y in zip(shape, smaller, strict=True))
    for found in forced_plans((tokens, max(1, heads), sequences), gpu):
        assert found.workspace_bytes <= bound


@each_gpu
@pytest.mark.parametrize(
    "shape",
    [
        *((-1, 1, 1), (2**31 - 31, 1, 1), (1, 0, 1), (1, 2**31, 1), (1, 1, -1), (1, 1, 2**31 - 31)),
        *((2**31 - 32, 2**31 - 1, 2**31 - 32), (2**31 - 32, 17, 1)),
    ],
)
def test_impossible_sizes_are_refused(shape: tuple[int, int, int], gpu: abi.Gpu) -> None:
    refused = pytest.raises(ValueError, match=r"sizes out of range|too large for one call")
    for name in ("", "portable_v128"):
        with refused:
            plan(*shape, gpu, name)
    with refused:
        abi.workspace_size(*shape)


EXTREMES = r"""
#include <climits>
#include <cstdio>
#include "host/error.h"
#include "host/plan.h"
using namespace flash_kda::host;

int main() {
  const int64_t sizes[] = {INT64_MIN, -1, 0, 1, 2, 17, 768, 8192, 65536, (1ll << 29) - 1,
                           1ll << 29, (1ll << 31) - 33, (1ll << 31) - 32, (1ll << 31) - 1,
                           1ll << 31, INT64_MAX};
  const int32_t sm_counts[] = {INT_MIN, -132, -1, 0, 1, 2, 3, 32, 78, 132, 512, INT_MAX};
  const int32_t capabilities[] = {INT_MIN, -90, -1, 0, 89, 90, 100, INT_MAX};
  const int32_t paths[] = {INT_MIN, -2, -1, 0, 1, 2, 3, 4, 5, INT_MAX};
  long planned = 0, wrong = 0;
  const auto ctas_fit = [](int64_t ctas) { return ctas >= 0 && ctas <= INT_MAX; };
  // States that clusters hand on; segments but the last ones, which leave two.
  const int64_t state_bytes = 128 * 128 * 4;
  const auto states = [](const Plan& plan) {
    return plan.share_bytes > 0 ? plan.chain_ctas / 2 : 0;
  };
  const auto cuts = [](const Plan& plan, int64_t heads, int64_t sequences) {
    return heads * sequences * (plan.segments - 1);
  };
  for (int64_t tokens : sizes) for (int64_t heads : sizes) for (int64_t sequences : sizes)
    for (int32_t sms : sm_counts) for (int32_t capability : capabilities) for (int32_t path : paths)
    for (bool packed : {false, true})
      try {
        const Problem problem{tokens, heads, sequences, packed};
        const Plan plan = make_plan(problem, {capability, sms}, path);
        ++planned;
        const bool none = !packed && plan.path == kPathFused && plan.share_bytes == 0;
        wrong += (plan.workspace_bytes == 0) != none || plan.segments < 1 ||
                 plan.workspace_bytes > largest_workspace({tokens, heads, sequences}) ||
                 !ctas_fit(plan.prepare_ctas) || !ctas_fit(plan.affine_ctas) ||
                 !ctas_fit(plan.combine_ctas) || !ctas_fit(plan.chain_ctas) ||
                 plan.schedule_bytes < 0 || plan.record_bytes < 0 || plan.middle_bytes < 0 ||
                 plan.share_bytes < 0 || plan.schedule_bytes % 256 || plan.share_bytes % 256 ||
                 (plan.share_bytes > 0 && (plan.path != kPathFused || plan.record_bytes > 0)) ||
                 plan.share_bytes < (states(plan) > 0 ? 48 * states(plan) + 4 : 0) ||
                 plan.schedule_bytes + plan.record_bytes + plan.middle_bytes + plan.share_bytes +
                         state_bytes * (states(plan) + 2 * cuts(plan, heads, sequences)) >
                     plan.workspace_bytes;
      } catch (const Error&) {
      }
  std::printf("%ld %ld", planned, wrong);
}
"""


def test_no_sizes_overflow(tmp_path: Path) -> None:
    """Whatever the sizes, the GPU and the forced path: a plan that fits, or an Error."""
    host = ROOT / "csrc" / "host"
    if not host.is_dir():
        pytest.skip("needs the sources of the launcher")
    (tmp_path / "extremes.cpp").write_text(EXTREMES)
    program = native.link(
        [tmp_path / "extremes.cpp", host / "plan.cpp", host / "error.cpp"],
        tmp_path / "extremes",
        f"-I{ROOT / 'csrc'}",
        "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift",
        "-fsanitize-undefined-trap-on-error",
    )
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    planned, wrong = map(int, done.stdout.split())
    assert planned > 1000 and wrong == 0
