from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from phasewise.bench.prompts import prompts_from, random_prompts, text_prompts
from phasewise.bench.workloads import Shot, fit, lengths, workload
from phasewise.errors import UserError
from tests.serve.tiny_chat import chat_checkpoint

AZURE = Path(__file__).parents[3] / "shared" / "data" / "azure_llm_conv_2023.csv"
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:51.6805900,879,55
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_seed_gives_the_same_workload_again() -> None:
    first, again, other = (
        workload(lengths("lognormal"), 20, random_prompts(500, seed), rate=3.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert [len(shot.prompt) for shot in first] != [len(shot.prompt) for shot in other]


def test_lognormal_lengths_stay_in_their_bounds_and_around_their_medians() -> None:
    shots = workload(lengths("lognormal"), 400, random_prompts(50, 0))
    prompts, news = sorted(len(shot.prompt) for shot in shots), sorted(shot.new for shot in shots)
    assert prompts[0] >= 16 and prompts[-1] <= 1024 and news[0] >= 8 and news[-1] <= 256
    assert 100 < prompts[200] < 145 and 70 < news[200] < 92


def test_the_reference_load_is_the_published_one() -> None:
    shots = workload(lengths("lognormal"), 32, random_prompts(32000, 0), rate=8.0, seed=1)
    assert sum(len(shot.prompt) for shot in shots) == 4739
    assert sum(shot.new for shot in shots) == 3157


def test_poisson_gaps_are_exponential() -> None:
    shots = workload(lengths("fixed:prompt=1,new=1"), 4000, random_prompts(50, 0), rate=5.0)
    gaps = [b.arrival - a.arrival for a, b in pairwise(shots)]
    mean = sum(gaps) / len(gaps)
    assert shots[0].arrival == 0.0
    assert mean == pytest.approx(0.2, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_without_a_rate_or_with_an_infinite_one_all_come_at_once() -> None:
    for rate in (None, math.inf):
        assert {shot.arrival for shot in workload(lengths("fixed"), 5, random_prompts(50, 0), rate=rate)} == {0.0}


def test_a_trace_keeps_its_lengths_and_arrivals(trace: Path) -> None:
    shots = workload(lengths(f"trace:path={trace}"), 3, random_prompts(50, 0))
    assert [(len(shot.prompt), shot.new) for shot in shots] == [(374, 44), (396, 109), (879, 55)]
    assert [shot.arrival for shot in shots] == pytest.approx([0.0, 4.0, 5.0])


def test_a_trace_can_be_scaled_and_stretched(trace: Path) -> None:
    shots = workload(lengths(f"trace:path={trace},scale=0.1,start=1"), 2, random_prompts(50, 0), rate=4.0)
    assert [(len(shot.prompt), shot.new) for shot in shots] == [(40, 11), (88, 6)]
    assert [shot.arrival for shot in shots] == pytest.approx([0.0, 0.25])
    whole = workload(lengths(f"trace:path={trace}"), 3, random_prompts(50, 0), rate=4.0)
    assert [shot.arrival for shot in whole] == pytest.approx([0.0, 0.4, 0.5])  # the burst stays a burst


@pytest.mark.skipif(not AZURE.exists(), reason="the recorded trace ../shared/data/azure_llm_conv_2023.csv is not here")
def test_a_recorded_service_can_be_replayed() -> None:
    shots = workload(lengths(f"trace:path={AZURE},scale=0.05"), 500, random_prompts(50, 0))
    assert len(shots) == 500 and all(a.arrival <= b.arrival for a, b in pairwise(shots))
    assert len(shots[0].prompt) == round(374 * 0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lognorml", "Did you mean lognormal"),
        ("fixed:size=3", "no knob 'size'"),
        ("fixed:prompt=many", "'many'"),
        ("fixed:prompt", "knob=value"),
        ("trace", "trace:path=FILE"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        lengths(text)


def test_a_trace_that_cannot_be_used_is_named(tmp_path: Path, trace: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        workload(lengths(f"trace:path={tmp_path / 'no.csv'}"), 1, random_prompts(50, 0))
    broken = tmp_path / "broken.csv"
    broken.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n")
    with pytest.raises(UserError, match="GeneratedTokens"):
        workload(lengths(f"trace:path={broken}"), 1, random_prompts(50, 0))
    with pytest.raises(UserError, match="only 3 requests"):
        workload(lengths(f"trace:path={trace}"), 4, random_prompts(50, 0))
    with pytest.raises(UserError, match="rate=0"):
        workload(lengths("fixed"), 1, random_prompts(50, 0), rate=0.0)


def test_requests_are_cut_to_the_context() -> None:
    long, short = Shot(1.0, list(range(100)), 50), Shot(2.0, [1, 2, 3], 4)
    cut, kept = fit([long, short], 64)
    assert kept == short
    assert cut.new == 32 and cut.prompt == list(range(68, 100)) and cut.arrival == 1.0


def test_prompts_may_share_a_beginning() -> None:
    shots = workload(lengths("shared:prefix=40,prompt=5,new=7"), 3, random_prompts(500, 0))
    beginnings = {tuple(shot.prompt[:40]) for shot in shots}
    assert len(beginnings) == 1 and len({tuple(shot.prompt[40:]) for shot in shots}) == 3
    assert {(len(shot.prompt), shot.new, shot.shared) for shot in shots} == {(45, 7, 40)}
    assert {shot.shared for shot in workload(lengths("fixed"), 2, random_prompts(500, 0))} == {0}
    other = workload(lengths("shared:prefix=40"), 1, random_prompts(500, 1))
    assert tuple(other[0].prompt[:40]) not in beginnings
    cut = fit(shots, 32)
    assert {(len(shot.prompt), shot.shared) for shot in cut} == {(25, 20)}
    assert len({tuple(shot.prompt[:20]) for shot in cut}) == 1


def test_prompts_never_come_twice() -> None:
    take = text_prompts(list(range(50)), 0)
    starts = [take(4)[0] for _ in range(50)]
    assert sorted(starts) == list(range(50))
    assert take(120)[:1] * 1 and len(take(120)) == 120  # longer than the text: it wraps around


def test_prompts_come_from_code_or_a_file(tmp_path: Path) -> None:
    model = str(chat_checkpoint())
    notes = tmp_path / "notes.txt"
    notes.write_text("the quick brown fox " * 20)
    for kind in ("random", "code", str(notes)):
        take = prompts_from(kind, model, 320, seed=0)
        prompt = take(12)
        assert len(prompt) == 12 and all(0 <= token < 320 for token in prompt)
    with pytest.raises(UserError, match="say random, code"):
        prompts_from("nowhere.txt", model, 320, seed=0)
