"""S2D: one draft with several exits, trained at all of them; each guess leaves at the first exit that is sure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import Tensor

from phasewise.bench import acceptance
from phasewise.model.config import ModelConfig
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.drafting_heads import LOAD, PASSES, passes
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.sampled import draft
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Load,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import PromptSource

DEPTHS = (1, 2, 3)  # layers before each exit of the draft that ships
AT = ("0", "1+0", "1+1")  # thresholds with which all guesses leave at the first, the second, the last exit
LENGTHS = (1, 2)  # of chains, of which the best is the rival
FALLING = ("1", "0.8", "0.5", "0.2", "0")

# thresholds and lengths were chosen on prompts of other seeds than are judged
TAU, K = "0.5+0", 1


def leaving(tau: str = TAU, k: int = K, most: int = 1, **knobs: object) -> Setting:
    return Setting({"draft": draft("s2d", tau=tau, k=k, **knobs)}, most=most)


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Code that nobody was trained on, to go on with by chance, one request at a time."""
    return sampled.writing(1.0)(asked)[:16]


RIVALS = {
    f"the same draft, {k} guess{'es' * (k > 1)} of {depth} layer{'s' * (depth > 1)}": leaving(tau, k)
    for depth, tau in zip(DEPTHS, AT)
    for k in LENGTHS
}


# ---- costs, of one request at a time: then a pass of the draft is a guess's own
def sizes(config: ModelConfig) -> tuple[int, int]:
    """Numbers of a layer's matrices, and of the output matrix."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return attention + 3 * config.hidden * config.intermediate, config.vocab * config.hidden


def weights(case: Case, run: PlayedRun) -> float:
    """Weights that are read per token, in passes of the model: its own, the draft's layers, and the output matrix once
    at each exit that was asked."""
    layer, head = sizes(case.config)
    whole, work = case.config.layers * layer + head, run.work
    return (work.forwards * whole + work.draft_depth * layer + work.draft_forwards * head) / whole / work.emitted


def layers(case: Case, run: PlayedRun) -> float:
    """Layers that are read per token, the model's and the draft's; output matrices are left out."""
    return (run.work.forwards * case.config.layers + run.work.draft_depth) / run.work.emitted


def depth(run: PlayedRun) -> float:
    """Layers of the draft for each guess, those of prompts among them."""
    return run.work.draft_depth / max(1, run.work.drafted)


def forms(p: Tensor, q: Tensor) -> tuple[float, ...]:
    return (acceptance.single(p, q),)


def played(lab: Lab, load: Load, contenders: Mapping[str, Setting], dtype: str | None = None) -> dict[str, PlayedRun]:
    return {name: lab.play(who, load(lab.asked("pocket")), "pocket", dtype) for name, who in contenders.items()}


def falling(load: Load, lab: Lab) -> AttemptOutcome:
    """The mean depth of guesses at falling thresholds, and whether tokens stay those of plain decoding."""
    contenders = {"plain": Setting(most=1), **{tau: leaving(tau) for tau in FALLING}}
    runs = played(lab, load, contenders, "float32")
    plain = runs.pop("plain")
    same = all(run.outs == plain.outs for run in runs.values())
    found = {tau: depth(run) for tau, run in runs.items()}
    told = ", ".join(f"{value:.2f} at {tau}" for tau, value in found.items())
    falls = all(a > b for a, b in pairwise(found.values()))
    return AttemptOutcome(falls and same, f"{told}; tokens {'are' if same else 'are not'} plain decoding's")


def by_depth(load: Load, lab: Lab) -> AttemptOutcome:
    """The share of guesses that are accepted, of a draft of so many layers."""
    runs = played(lab, load, {str(d): leaving(tau) for d, tau in zip(DEPTHS, AT)})
    found = {d: run.work.accepted / run.work.drafted for d, run in runs.items()}
    told = ", ".join(f"{share:.1%} with {d}" for d, share in found.items())
    return AttemptOutcome(all(a < b for a, b in pairwise(found.values())), told)


def same_layers(load: Load, lab: Lab) -> AttemptOutcome:
    """Accepted guesses of sorted training over those of training at the last exit alone, at every fixed exit."""
    shares = []
    for learned in ("sorted", "last"):
        contenders = {str(d): leaving(tau, learned=learned) for d, tau in zip(DEPTHS, AT)}
        runs = played(lab, load, contenders)
        shares.append([run.work.accepted / run.work.drafted for run in runs.values()])
    told = ", ".join(f"{d}: {a:.1%} and {b:.1%}" for d, a, b in zip(DEPTHS, *shares))
    early = all(a > b for a, b in list(zip(*shares))[:-1])
    return AttemptOutcome(early, f"{told} (layers: sorted and last exit alone)")


def faster(who: Setting, other: Setting, against: str, most: int) -> Timing:
    """Greedy answers, the model padded to sixteen times the weights."""
    settings = {"method": replace(who, most=most), "baseline": replace(other, most=most)}
    what = f"time per token, {'one by one' if most == 1 else f'{most} at once'}, padded, against {against}"
    return Timing(what, 1.0, loads.pace, model="pocket-wide", settings=settings)


BEST = leaving("0", 2)  # of drafts with a fixed exit the one that reads least, on the prompts thresholds were chosen on

SYSTEM = System(
    title="S2D",
    paper=Paper("S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large Language Models",
                "2407.01955"),
    claim="the first layers of a model, trained at several exits alike, are one draft for several targets; each guess "
    "leaves at the first exit that is sure of it: 1.55 times as fast as plain decoding on average, where the same "
    "draft with a fixed exit and without sorted training is 1.22 times as fast.",
    conditions=("a draft of the first 12 of Vicuna 7B's 32 layers, all weights trained", "exits behind 6, 9 and 12",
                "targets of 7B, 13B and 70B", "trees of up to 60 guesses"),
    method=leaving(),
    baseline=Setting(most=1),
    control=leaving(learned="last"),
    control_is="the same exits, thresholds and length of training, of which the last exit alone was trained",
    line="a draft with several exits, each guess leaves at the first that is sure: 1.55 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals=RIVALS,
    exact=True,
    missing=("one draft for targets of several sizes: pocket is the one model with such a draft",
             "trees, for which exits are decided level by level"),
    counters=(
        PASSES,
        Counter("guesses verified", f"{K} a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: K * (case.work.forwards - len(case.entries)), bound="at most"),
        Counter("layers of the draft, thresholds of 0", "one for each of its passes",
                lambda case: case.work.draft_depth, lambda case: case.work.draft_forwards, load=LOAD,
                who=leaving("0")),
        Counter("layers of the draft, thresholds of 1", f"{DEPTHS[-1]} for each of its passes",
                lambda case: case.work.draft_depth, lambda case: DEPTHS[-1] * case.work.draft_forwards,
                load=LOAD, who=leaving("1")),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.2),
        Saving("passes per token", passes, "control", sampled.BETTER),
        Saving("weights read per token", weights, "baseline", sampled.BETTER),
        Saving("weights read per token", weights, "rivals", sampled.BETTER),
        Saving("layers read per token", layers, "rivals", sampled.BETTER),
        Saving("weights read per token", weights, "control", sampled.BETTER),
        Saving("weights read per token at T=1", weights, "rivals", sampled.BETTER, load=writing),
        Saving("layers read per token at T=1", layers, "rivals", sampled.BETTER, load=writing),
    ),
    attempts=(
        Attempt("counter", "first guesses accepted, the sum of min(p, q)", sampled.EXPECTED,
                sampled.expected(leaving().verbs["draft"], "rejection", forms, sampled.writing(1.0))),
        Attempt("mechanism", "layers of the draft for each guess, as thresholds fall",
                "fewer at each, and plain decoding's tokens in float32", partial(falling, LOAD)),
        Attempt("mechanism", "guesses accepted at a fixed exit", "more of them, the deeper", partial(by_depth, LOAD)),
        Attempt("control", "guesses accepted at a fixed exit, sorted training and that of the last exit alone",
                "sorted training's are more at all exits but the last", partial(same_layers, LOAD), of="mechanism"),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        faster(leaving(), Setting(), "plain decoding", 1),
        faster(leaving(), BEST, "the best fixed exit", 1),
        faster(leaving(), Setting(), "plain decoding", 8),
        faster(leaving(), BEST, "the best fixed exit", 8),
    ),
    note="The draft has pocket's first three of eight layers, with low-rank weights that learned from what pocket "
    "writes. Its output matrix has more numbers than a layer, and is read at each exit that a guess meets; the paper's "
    "has two thirds of a layer's. So weights are counted with it, and layers without.",
)  # fmt: skip
