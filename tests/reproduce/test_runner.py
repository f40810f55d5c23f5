"""A system end to end: what is measured decides, and a report survives its way through JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from phasewise.reproduce import index, loads
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.page import document
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.report import Report
from phasewise.reproduce.runner import complete, reproduce, settled, stages, timed
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import PromptSource

SMALL = Scale(examples=6, rounds=1, time=False)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.open(SMALL) as made:
        yield made


@pytest.fixture
def clocked(lab: Lab) -> Iterator[Lab]:
    """The same models, and two rounds of time."""
    lab.scale = replace(SMALL, time=True, rounds=2)
    yield lab
    lab.scale = SMALL


def passes(case: Case, run: PlayedRun) -> float:
    return run.work.forwards / run.work.emitted


GUESSING = System(
    title="Guessing",
    paper=Paper("On guessing", where="a test"),
    claim="guesses save passes",
    conditions=("a pocket model",),
    method=Setting({"draft": "prompt_lookup"}, most=1),
    baseline=Setting(most=1),
    control=Setting({"draft": "prompt_lookup:min_match=4096"}, most=1),
    control_is="never guesses",
    load=loads.answering("copy", n=1),
    exact=True,
    counters=(
        Counter("passes", "tokens - accepted guesses", lambda c: c.work.forwards,
                lambda c: c.work.emitted - c.work.accepted),
    ),
    savings=(Saving("passes per token", passes, "baseline"), Saving("passes per token", passes, "control")),
)  # fmt: skip


def word(lab: Lab, system: System) -> str:
    return reproduce("guessing", system, lab).verdict.word


def test_it_holds_and_each_part_can_spoil_it(lab: Lab) -> None:
    assert word(lab, GUESSING) == "holds"
    wrong = replace(GUESSING.counters[0], predicted=lambda c: c.work.emitted)
    assert word(lab, replace(GUESSING, counters=(wrong,))) == "partly"
    assert word(lab, replace(GUESSING, control=GUESSING.method)) == "partly", "a control as good as the method"
    assert word(lab, replace(GUESSING, method=GUESSING.control)) == "not here", "a method that saves nothing"
    assert word(lab, replace(GUESSING, missing=("more",))) == "partly"


def test_a_quick_run_never_holds(lab: Lab) -> None:
    lab.scale = replace(SMALL, quick=True)
    verdict = reproduce("guessing", GUESSING, lab).verdict
    lab.scale = SMALL
    assert verdict.word == "partly" and len(verdict.reasons) == 1 and "quick run" in verdict.reasons[0]


@pytest.mark.thorough
def test_other_tokens_than_the_baselines_are_seen(lab: Lab) -> None:
    lossy = replace(
        GUESSING, method=Setting({"skip": "unified:weights=none"}), counters=(), load=loads.answering("copy", n=3)
    )
    report = reproduce("guessing", lossy, lab)
    assert report.verdict.word == "not here" and "tokens of the baseline" in report.verdict.reasons[0]


@pytest.mark.parametrize(("bound", "passed"), [("at most", True), ("at least", False)])
def test_bounds(lab: Lab, bound: str, passed: bool) -> None:
    loose = replace(GUESSING.counters[0], predicted=lambda c: c.work.emitted, bound=bound)  # type: ignore[arg-type]
    report = reproduce("guessing", replace(GUESSING, counters=(loose,)), lab)
    (check,) = (c for c in report.checks if c.part == "counter")
    assert check.passed is passed


def test_an_attempt_that_is_refused_has_failed_and_says_why(lab: Lab) -> None:
    def long(lab: Lab) -> AttemptOutcome:
        lab.play(Setting(), loads.lone(3000, 1)(replace(lab.asked("pocket"), quick=False)), "pocket")
        return AttemptOutcome(True, "done")

    system = replace(GUESSING, attempts=(Attempt("claim", "a long text", "done", long),))
    (check,) = (c for c in reproduce("guessing", system, lab).checks if c.name == "a long text")
    assert check.passed is False and "context is 2048" in check.measured


def test_what_cannot_run_is_not_here_and_says_why(lab: Lab) -> None:
    long = replace(GUESSING, load=lambda asked: [LoadEntry(asked.code(2500), 4)])
    report = reproduce("guessing", long, lab)
    assert report.verdict.word == "not here" and "context is 2048" in report.verdict.reasons[0]


LOSSY = replace(
    GUESSING, method=Setting(), control=Setting({"skip": "unified:speedup=4,weights=none"}), exact=False, savings=(),
    counters=(),
    quality=Quality(("json",), allowed=0.5, examples=100),
)  # fmt: skip


def test_quality_is_paired_and_its_control_must_lose(lab: Lab) -> None:
    report = reproduce("lossy", LOSSY, lab)
    assert report.verdict.word == "holds"
    assert {grade.role: grade.row.value for grade in report.grades} == {"method": 1.0, "baseline": 1.0, "control": 0.0}
    assert word(lab, replace(LOSSY, method=LOSSY.control, control=Setting())) == "not here"


def test_the_loss_on_code(lab: Lab) -> None:
    system = replace(LOSSY, quality=Quality(("code",), allowed=0.2, examples=3, window=80))
    report = reproduce("lossy", system, lab)
    values = {grade.role: grade.row.value for grade in report.grades}
    assert values["method"] == values["baseline"] < values["control"] - 1
    assert report.verdict.word == "holds"


@pytest.mark.thorough
def test_time_of_loads_and_of_resident_requests(clocked: Lab) -> None:
    timings = (
        Timing("a load", 0.0, loads.per_token),
        Timing("a resident", 1e9, tokens=64),
        Timing("a price", tokens=64, price=True, settings={"baseline": Setting({"skip": "unified"})}),
    )
    system = replace(GUESSING, timings=timings)
    told: list[str] = []
    report = reproduce("guessing", system, clocked, told.append)
    assert len(told) == stages(system, clocked.scale)
    assert [(s.name, s.faster.n) for s in report.speeds] == [("a load", 2), ("a resident", 2), ("a price", 2)]
    assert all(s.method > 0 and s.other > 0 for s in report.speeds)
    verdicts = {c.name: c.passed for c in report.checks if c.name.startswith("a ")}
    assert verdicts == {"a load, method against baseline": True, "a resident, method against baseline": False}


@pytest.mark.thorough
def test_times_are_taken_later(clocked: Lab) -> None:
    """What was found before stays as it is, even if it could not be found again; times are taken anew."""
    system = replace(LOSSY, timings=(Timing("a resident", 1e9, tokens=64),))
    timed_at_once = reproduce("lossy", system, clocked)
    clocked.scale = SMALL
    before = reproduce("lossy", system, clocked)
    assert settled(before, SMALL) and complete(before, SMALL) and not before.speeds
    clocked.scale = replace(SMALL, time=True, rounds=2)
    assert settled(before, clocked.scale) and not complete(before, clocked.scale)
    broken = replace(system, load=lambda asked: [LoadEntry(asked.code(2500), 4)])
    for report in (before, timed_at_once):
        after = timed(report, broken, clocked)
        assert complete(after, clocked.scale) and [speed.faster.n for speed in after.speeds] == [2]
        assert [c.name for c in after.checks] == [c.name for c in timed_at_once.checks]
        assert [c for c in after.checks if c.passed is not False] == [c for c in before.checks if c.passed is not None]
        assert after.grades == before.grades and after.verdict.word == timed_at_once.verdict.word == "partly"


def test_other_examples_and_what_did_not_run_are_measured_again(lab: Lab) -> None:
    report = reproduce("guessing", GUESSING, lab)
    assert complete(report, SMALL) and not settled(report, replace(SMALL, seed=SMALL.seed + 1))
    long = replace(GUESSING, load=lambda asked: [LoadEntry(asked.code(2500), 4)])
    assert not settled(reproduce("guessing", long, lab), SMALL)


def test_a_report_comes_back_from_json_and_reads_the_same(clocked: Lab) -> None:
    system = replace(LOSSY, timings=(Timing("a resident", tokens=64),), note="a note")
    report = reproduce("lossy", system, clocked)
    again = Report.from_plain(json.loads(json.dumps(report.plain())))
    assert again == report and again.markdown() == report.markdown()
    page = document([report], "phasewise reproduce --all", "On a machine.")
    assert "phasewise reproduce --all" in page and "On a machine." in page
    assert page.count("## Guessing") == 1 and "*Note.* a note" in page


def test_seeds_ask_something_else_and_one_seed_the_same() -> None:
    load = index.system("prompt_lookup").load
    asked = [[entry.prompt for entry in load(PromptSource(4096, seed, quick=True))] for seed in (0, 0, 1)]
    assert asked[0] == asked[1] != asked[2]
