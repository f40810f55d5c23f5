"""LUD: several tokens a step where the model is sure of them, and nobody verifies."""

from __future__ import annotations

from dataclasses import replace

from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import SHORT, short_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)

PADS, BETA = 3, 0.9
ON = Setting({"decode": f"lud:pads={PADS},beta={BETA}"}, model="pocket-units")
UNTAUGHT = Setting({"decode": f"lud:pads={PADS},beta={BETA}"})
BETAS = (1.1, 0.99, 0.9, 0.7, 0.5)
TASKS = loads.answering(*SHORT, n=4)


def passes(case: Case | None, run: PlayedRun) -> float:
    """Passes in which a request decodes, for each token of its output."""
    return steps(run) / run.work.emitted


def steps(run: PlayedRun) -> int:
    """Passes in which a request decodes, of all requests together."""
    return sum(step.streams for step in run.steps)


def falling(lab: Lab) -> AttemptOutcome:
    """Passes per token as the threshold falls."""
    found = []
    for beta in BETAS:
        who = Setting({"decode": f"lud:pads={PADS},beta={beta}"}, model="pocket-units")
        found.append(passes(None, lab.play(who, TASKS(lab.asked("pocket")), "pocket")))
    words = ", ".join(f"{each:.2f} at {beta:g}" for each, beta in zip(found, BETAS))
    return AttemptOutcome(found[-1] < found[0] and found == sorted(found, reverse=True), words)


SYSTEM = System(
    title="LUD",
    paper=Paper(
        "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs", "2405.15208"
    ),
    claim="a model that was tuned to say the tokens of a lexical unit at once writes text 33 % faster without a loss "
    "of quality, and code 30 % faster with a loss of 3 %; two thirds to three quarters of what it accepts are single "
    "tokens.",
    conditions=("LLaMA-13B", "continually trained, with pads in the place of a unit's tokens"),
    method=ON,
    baseline=Setting(),
    control=UNTAUGHT,
    control_is="the same rule with the model as it was before: pads mean nothing to it",
    line="units of sure tokens at once, unverified: a third faster at the same quality",
    promises=("answers", "cost", "time"),
    load=TASKS,
    missing=("a model all weights of which are tuned: low-rank weights are",),
    counters=(
        Counter("tokens", "one after each prompt, one for each pass in which a request decodes, those accepted of pads",
                lambda case: case.work.emitted,
                lambda case: len(case.entries) + steps(case.method) + case.work.accepted),
    ),
    savings=(
        Saving("passes per token of short tasks", passes, "baseline", 1.33),
        Saving("passes per token of short tasks, against the untaught model", passes, "control", 1.02),
    ),
    quality=tuple(replace(each, alone=True) for each in short_texts()),
    attempts=(Attempt("mechanism", "passes per token as beta falls", "never more", falling, None, "pocket"),),
    timings=(
        Timing("time per token of short tasks, one by one", 1.0, seconds=loads.pace, load=TASKS,
               settings={"method": replace(ON, most=1), "baseline": Setting(most=1)}),
    ),
)  # fmt: skip
