"""FastDraft: a small draft model trained in a short time, here pocket-draft, which `phasewise train draft` has made."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from torch import Tensor

from phasewise.bench import acceptance
from phasewise.bench.stats import shares
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.sampled import draft, rounds
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.train import dense
from phasewise.train.agreement import matches
from phasewise.train.draft import DraftJob, TrainedDraft, TunedOn, train
from phasewise.train.written import kept

K, TEMPERATURE = 3, 0.6  # the paper's
LOAD = sampled.writing(TEMPERATURE)
LAYERS, TEXT, CODE, WRITTEN = 2, 400_000, 100_000, 300  # of a small draft; tokens of two stages; texts of the target
REACHED = 0.37  # the share of guesses that the paper's drafts have accepted on its hardest tasks


def drafting(model: str = "pocket-draft") -> Setting:
    return Setting({"draft": draft("draft_model", model=model, k=K)}, most=sampled.MOST)


def forms(p: Tensor, q: Tensor) -> tuple[float, ...]:
    return (acceptance.single(p, q),)


def accepts(lab: Lab) -> AttemptOutcome:
    """First guesses, over the p and q of all rounds: the draft's, and those of one that nobody trained."""
    ours, untrained = (
        sampled.mean(sampled.watch(lab, drafting(model).verbs["draft"], "rejection", forms, LOAD), 0)
        for model in ("pocket-draft", "untrained-draft")
    )
    return AttemptOutcome(ours >= REACHED and ours > untrained, f"{ours:.2%}, untrained {untrained:.2%}")


def stages(lab: Lab) -> AttemptOutcome:
    """A draft pruned from the target goes through all stages twice, the last on the target's text and on other text.

    Both are judged by the same texts that the target wrote greedily: tokens that the draft finds most likely too.
    """
    less = 20 if lab.scale.quick else 1
    with TemporaryDirectory() as room:
        made: dict[TunedOn, TrainedDraft] = {
            on: train(DraftJob("pocket", Path(room) / on, LAYERS, tokens=TEXT // less, sequences=WRITTEN // less,
                               code=CODE // less, start="pruned", tuned_on=on, seed=lab.scale.seed))
            for on in get_args(TunedOn)
        }  # fmt: skip
        ours, theirs = ([float(hit) for text in kept(Path(room) / "target" / "heldout.jsonl")
                         for hit in matches(dense.load(draft.folder), text)]
                        for draft in (made["target"], made["text"]))  # fmt: skip
    lead = shares(ours, theirs)
    path = ", ".join(f"{name} {found.top1:.1%}" for name, found in made["target"].stages.items())
    return AttemptOutcome(lead.low > 0, f"{lead.text(True)} of {lead.n} tokens; {path}")


def verdicts(case: Case) -> int:
    return case.work.emitted - case.work.accepted


SYSTEM = System(
    title="FastDraft",
    paper=Paper("FastDraft: How to Train Your Draft", "2411.11055"),
    claim="a draft of 50M to 150M weights, trained in a day, on code and on what the target writes, has 0.37 to 0.56 "
    "of its guesses accepted: up to 3 times as fast where memory is the limit, on code, 2 times on a laptop's clock.",
    conditions=("Phi-3-mini and Llama-3.1-8B", "three stages: text, code, sequences of the target",
                "chains of 3 guesses at temperature 0.6", "Core Ultra, and 8 Gaudi 2 for the training"),
    method=drafting(),
    baseline=Setting(most=sampled.MOST),
    control=drafting("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="a draft trained in a day has 0.37 to 0.56 of its guesses accepted: up to 2 times as fast on the clock",
    promises=("cost", "time"),
    load=LOAD,
    counters=(
        Counter("passes of the draft model", f"one a guess: {K} a pass of the model at most",
                lambda case: case.work.draft_forwards, lambda case: K * case.work.forwards, bound="at most"),
        Counter("guesses verified", f"{K} a verdict at most", lambda case: case.work.drafted,
                lambda case: K * verdicts(case), bound="at most"),
    ),
    savings=(
        Saving("passes per token of a request", rounds, "baseline", 1.5),
        Saving("passes per token of a request", rounds, "control", 1.2),
    ),
    attempts=(
        Attempt("counter", "first guesses accepted, the sum of min(p, q)", sampled.EXPECTED,
                sampled.expected(drafting().verbs["draft"], "rejection", forms, LOAD)),
        Attempt("mechanism", "first guesses accepted", f"at least {REACHED:.0%}, and more than of an untrained draft",
                accepts),
        Attempt("mechanism", "tokens of the target found, the last stage on its text, less as many steps on other text",
                "all of it above 0", stages),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        sampled.timing(TEMPERATURE, drafting("pocket-draft-wide"), Setting(), "plain decoding"),
    ),
    note="Text is held-out code, drawn at the paper's temperature. The draft has a fifth of the target's weights, the "
    "paper's a sixtieth.",
)  # fmt: skip
