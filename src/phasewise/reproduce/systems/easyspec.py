"""EasySpec: the draft model's attentions wait for each other only between groups of layers."""

from __future__ import annotations

import math

from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System, Timing

K, GROUP = 4, 4
LOAD = loads.answering("json", "arithmetic", "list", n=8)
METHOD = Setting({"draft": f"easyspec:model=pocket,k={K},group={GROUP}"}, most=1)
EXACT = Setting({"draft": f"draft_model:model=pocket,k={K}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def refused(case: Case, run: PlayedRun) -> float:
    """The share of guesses."""
    return 1 - run.work.accepted / run.work.drafted


def levels(case: Case) -> list[int]:
    """The number of guesses in a row that every round made."""
    found = []
    for request in case.method.requests:
        known = 1  # after the prompt's pass
        for count in request.trace.counts[1:]:
            found.append(min(K, request.params.max_tokens - known - 1))
            known += count
    return [each for each in found if each > 0]


def waiting(case: Case) -> int:
    layers, rounds = case.config.layers, levels(case)
    return layers * len(rounds) + (2 + math.ceil((layers - 2) / GROUP)) * (sum(rounds) - len(rounds))


def shallower(lab: Lab) -> AttemptOutcome:
    """Against the same draft model as it is: attentions in a row, and accepted guesses."""
    entries = LOAD(lab.asked("pocket"))
    ours, theirs = (lab.play(setting, entries, "pocket", "float32").work for setting in (METHOD, EXACT))
    depth, exact = ours.draft_depth / ours.drafted, theirs.draft_depth / theirs.drafted
    lost = 1 - (ours.accepted / ours.drafted) / (theirs.accepted / theirs.drafted)
    measured = f"{depth:.3g} instead of {exact:.3g} ({exact / depth:.2f} times less), {lost:.1%} fewer accepted"
    return AttemptOutcome(exact >= 1.5 * depth and lost <= 0.07, measured)


SYSTEM = System(
    title="EasySpec",
    paper=Paper("EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization", "2502.02493"),
    claim="attention layers of the draft model that run at once, on the same input, and one exact pass that repairs "
    "its KV after every verdict, make drafting up to 1.62 times as fast at a loss of at most 7 % of its accuracy; in "
    "all up to 4.17 times the speed of plain decoding.",
    conditions=("models such as Llama-3-70B and Qwen2-72B, each with a smaller one of its family",
                "groups of four layers, on eight A100"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting({"draft": f"easyspec:model=pocket,k={K},group={GROUP},calibrate=false"}, most=1),
    control_is="the same guesses without calibration: what the rough passes wrote stays",
    line="the draft's attentions in parallel: drafting 1.62 times as fast, at most 7 % fewer guesses accepted",
    promises=("cost", "time"),
    load=LOAD,
    exact=True,
    missing=("attentions of a group at the same time, on devices that idle",),
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("passes of the draft model", "one per guess: the exact pass makes the first of a round",
                lambda case: case.work.draft_forwards, lambda case: case.work.drafted),
        Counter("attentions in a row, all passes of the draft model",
                f"layers once a round, and 2 + ceil((layers - 2) / {GROUP}) per further guess",
                lambda case: case.work.draft_depth, waiting),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("guesses refused", refused, "control", 1.5),
    ),
    attempts=(
        Attempt("cost", "attentions in a row per guess, against the draft model as it is",
                "1.5 times less, at most 7 % fewer accepted", shallower),
    ),
    timings=(
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        Timing("time per token, the model padded to sixteen times the weights, against the draft model as it is", 1.0,
               loads.pace, model="pocket-wide", settings={"baseline": EXACT}),
    ),
    note="The pocket model guesses for itself, or for itself padded, so that only the grouping costs guesses; eight "
    "layers are few to group. What the paper gains it gains on idle devices: on one CPU the attentions of a group run "
    "in turn, operator by operator, and a guess takes longer than the draft model's own.",
)  # fmt: skip
