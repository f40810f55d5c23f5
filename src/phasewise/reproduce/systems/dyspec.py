"""DySpec: a tree that grows where a guess is likely to be accepted."""

from __future__ import annotations

from dataclasses import replace

from phasewise.reproduce import loads
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

NODES, DEPTH, WIDTHS = 30, 8, "2x2x2x2"
TEMPERATURE = 0.6
THETA = 1e-6  # worth of a guess, below which it is left out: as good as none is


def growing(model: str = "pocket-draft", theta: float = THETA) -> Setting:
    return Setting({"draft": f"dyspec:model={model},nodes={NODES},depth={DEPTH},theta={theta}"}, most=1)


def fixed(model: str = "pocket-draft") -> Setting:
    return Setting({"draft": f"rsd:model={model},beam=0,widths={WIDTHS}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def hot(asked: PromptSource) -> list[LoadEntry]:
    """The same, drawn at a temperature."""
    return [replace(entry, temperature=TEMPERATURE) for entry in writing(asked)]


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Code that nobody was trained on, to go on with."""
    return [LoadEntry(asked.code(64), asked.size(64, 24)) for _ in range(asked.size(16, 3))]


SYSTEM = System(
    title="DySpec",
    paper=Paper("DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", "2410.11744"),
    claim="trees that grow greedily by the draft's probabilities are accepted further than fixed ones of the same "
    "size: up to 9.1 times the throughput at low temperature, 6.21 times at a high one.",
    conditions=("Llama 2 70B, whose passes are slow", "trees of up to 768 nodes"),
    method=growing(),
    baseline=fixed(),
    control=growing("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="trees grown by the draft's probabilities beat fixed ones: 9.1 times the throughput cold, 6.21 times hot",
    promises=("cost", "time"),
    load=writing,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guesses verified", f"{NODES} a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: NODES * (case.work.forwards - len(case.entries)), bound="at most"),
        Counter("passes of the draft model", f"one a level: {DEPTH} a pass after the prompts'",
                lambda case: case.work.draft_forwards,
                lambda case: DEPTH * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.02),
        Saving(f"passes per token, T={TEMPERATURE}", passes, "baseline", 1.02, load=hot),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, both models padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide",
               settings={"method": growing("pocket-draft-wide"), "baseline": fixed("pocket-draft-wide")}),
        Timing(f"time per token at T={TEMPERATURE}, both models padded to sixteen times the weights", 1.0, loads.pace,
               model="pocket-wide", load=hot,
               settings={"method": growing("pocket-draft-wide"), "baseline": fixed("pocket-draft-wide")}),
        Timing("time per token with the default theta, both models padded", seconds=loads.pace,
               model="pocket-wide", price=True,
               settings={"method": growing("pocket-draft-wide", 0.0), "baseline": fixed("pocket-draft-wide")}),
    ),
    note="The baseline is a fixed tree of as many nodes, two children of each. A level of them is one pass of the "
    "draft model. What is judged is what is timed. By default theta leaves out what is worth less than a node's "
    "share, and far fewer guesses are verified.",
)  # fmt: skip
