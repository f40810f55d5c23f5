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
    KnobRatio,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import PromptSource

SMALL = Scale(examples=16, rounds=1, time=False)


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
    promises=("cost",),
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
    assert word(lab, replace(GUESSING, control=GUESSING.method)) == "not here", "a control as good as the method"
    assert word(lab, replace(GUESSING, method=GUESSING.control)) == "not here", "a method that saves nothing"
    assert word(lab, replace(GUESSING, missing=("more",))) == "partly"
    assert word(lab, replace(GUESSING, promises=("cost", "time"))) == "partly", "a speed that no clock is judged for"
    price = Timing("a price", tokens=64, price=True)
    assert word(lab, replace(GUESSING, promises=("cost", "time"), timings=(price,))) == "partly", "nor by a price"


def test_rivals_of_equal_cost_must_be_beaten(lab: Lab) -> None:
    """The cheapest of them counts; what follows from the knobs is said, and checks nothing."""
    better = Saving("passes per token", passes, "rivals")
    none, same = Setting(most=1), GUESSING.method
    ahead = replace(GUESSING, rivals={"nobody": none}, savings=(*GUESSING.savings, better))
    assert word(lab, ahead) == "holds"
    beaten = reproduce("guessing", replace(ahead, rivals={"nobody": none, "itself": same}), lab)
    assert beaten.verdict.word == "not here" and "against itself's" in beaten.verdict.reasons[0]
    free = reproduce(
        "guessing", replace(GUESSING, savings=(), arithmetic=(KnobRatio("passes per token", passes),)), lab
    )
    assert free.arithmetic[0].startswith("passes per token: ") and not [c for c in free.checks if c.part == "cost"]
    assert free.verdict.word == "open" and free.arithmetic[0] in free.markdown()


def test_a_saving_on_a_load_and_a_model_of_its_own(lab: Lab) -> None:
    """It is measured there, and counted as a stage of its own for everybody who takes part."""
    elsewhere = Saving(
        "passes per token", passes, "baseline", 1.0, load=loads.answering("json", n=1), model="pocket-draft"
    )
    system, told = replace(GUESSING, savings=(*GUESSING.savings, elsewhere)), list[str]()
    report = reproduce("guessing", system, lab, told.append)
    assert len(told) == stages(system, SMALL) == stages(GUESSING, SMALL) + 2
    (check,) = (c for c in report.checks if c.model == "pocket-draft")
    assert check.part == "cost" and check.name == "passes per token, pocket-draft" and check.name in check.short


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

    system = replace(GUESSING, attempts=(Attempt("mechanism", "a long text", "done", long),))
    (check,) = (c for c in reproduce("guessing", system, lab).checks if c.name == "a long text")
    assert check.passed is False and "context is 2048" in check.measured


def test_what_cannot_run_is_not_here_and_says_why(lab: Lab) -> None:
    long = replace(GUESSING, load=lambda asked: [LoadEntry(asked.code(2500), 4)])
    report = reproduce("guessing", long, lab)
    assert report.verdict.word == "not here" and "context is 2048" in report.verdict.reasons[0]


LOSSY = replace(
    GUESSING, method=Setting(), control=Setting({"skip": "unified:speedup=4,weights=none"}), exact=False, savings=(),
    counters=(), promises=("answers",),
    quality=(Quality(("second",), allowed=0.5, examples=100, temperature=1.5),),
)  # fmt: skip


def test_quality_is_paired_and_its_control_must_lose(lab: Lab) -> None:
    report = reproduce("lossy", LOSSY, lab)
    assert report.verdict.word == "holds"
    values = {grade.role: grade.row.value for grade in report.grades}
    assert 0.2 <= values["method"] == values["baseline"] <= 0.95 and values["control"] == 0.0
    assert word(lab, replace(LOSSY, method=LOSSY.control, control=Setting())) == "not here"


def test_tasks_without_headroom_are_shown_and_not_counted(lab: Lab) -> None:
    """A baseline that is always right examines nothing, whatever the method keeps; with others it is left out."""
    full, room = Quality(("json",), allowed=0.5, examples=100), LOSSY.quality[0]
    report = reproduce("lossy", replace(LOSSY, quality=(full,)), lab)
    assert report.verdict.word == "open" and all(check.passed is None for check in report.checks)
    assert "no task with a baseline of 20% to 95%: json 100%" in report.markdown()
    mixed = replace(room, tasks=("reverse", "second"))
    checks = [check for check in reproduce("lossy", replace(LOSSY, quality=(mixed,)), lab).checks if check.passed]
    assert len(checks) == 2 and all("(second, T=1.5)" in check.name for check in checks)


def test_better_than_a_rival_is_more_than_kept(lab: Lab) -> None:
    """What equals its rival is not better than it; nor is what equals the baseline a gain."""
    (room,) = LOSSY.quality
    worse = replace(room, rivals={"fewer layers": LOSSY.control})
    assert word(lab, replace(LOSSY, quality=(worse,))) == "holds"
    equal = reproduce("lossy", replace(LOSSY, quality=(replace(room, rivals={"itself": Setting()}),)), lab)
    assert equal.verdict.word == "not here" and "method less itself" in equal.verdict.reasons[0]
    assert word(lab, replace(LOSSY, quality=(replace(room, gains=True),))) == "not here"
    only = replace(room, allowed=None, rivals={"fewer layers": LOSSY.control})
    names = [check.name for check in reproduce("lossy", replace(LOSSY, quality=(only,)), lab).checks]
    assert [name.rpartition("less ")[2] for name in names] == ["fewer layers", "control"]


def test_an_attempt_on_kept_answers_needs_headroom_too(lab: Lab) -> None:
    for share, passed in ((0.5, True), (0.97, None), (0.1, None)):
        kept = Attempt(
            "answers", "kept", "kept", lambda lab, share=share: AttemptOutcome(True, "so", share), model="pocket"
        )
        report = reproduce("lossy", replace(LOSSY, attempts=(kept,)), lab)
        (check,) = (check for check in report.checks if check.name == "kept")
        assert check.passed is passed
        assert report.verdict.word == ("holds" if passed else "partly")


def test_attempts_at_the_clock_are_not_made_without_time(lab: Lab) -> None:
    def never(lab: Lab) -> AttemptOutcome:
        raise AssertionError("the clock was started")

    report = reproduce("lossy", replace(LOSSY, attempts=(Attempt("time", "a race", "won", never),)), lab)
    (check,) = (check for check in report.checks if check.part == "time")
    assert check.passed is None and report.verdict.word == "partly"


def test_the_loss_on_code(lab: Lab) -> None:
    system = replace(LOSSY, quality=(Quality(("code",), allowed=0.2, examples=3, window=80),))
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
    assert verdicts == {"a load, against baseline": True, "a resident, against baseline": False}


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
    page = document([report], "phasewise reproduce --all")
    assert "phasewise reproduce --all" in page
    assert page.count("## Guessing") == 1 and "*Note.* a note" in page
    assert "`the defaults`" in report.markdown().partition("times as fast (range)")[2], "what was timed is said"


def test_seeds_ask_something_else_and_one_seed_the_same() -> None:
    load = index.system("prompt_lookup").load
    asked = [[entry.prompt for entry in load(PromptSource(4096, seed, quick=True))] for seed in (0, 0, 1)]
    assert asked[0] == asked[1] != asked[2]
