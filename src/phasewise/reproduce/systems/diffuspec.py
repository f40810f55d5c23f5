"""DiffuSpec: a small masked model fills a block in one pass, and a search finds the path through it; with it GAD, the
same model without search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial

from phasewise.load import config_of
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft._masked_block import MaskedBlockDrafter
from phasewise.methods.draft.diffuspec import DiffuSpec
from phasewise.methods.verify.match import Match
from phasewise.model.config import ModelConfig
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import LOAD, PASSES, guessing, passes
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.sampled import draft, rounds
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
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

DRAFT = "pocket-draft"  # the masked model began as this one, and has its shape
MOST = DiffuSpec().most
HOT = sampled.writing(1.0)
CHAINS = (1, 2, 4)
SHIFT = 977  # of tokens, by which trigrams become those of other words


def drafting(heads: str = "auto", **knobs: object) -> Setting:
    return Setting({"draft": draft("diffuspec", heads=heads, **knobs)}, most=1)


def chain(k: int) -> Setting:
    return Setting({"draft": draft("draft_model", k=k)}, most=1)


def code(asked: PromptSource) -> list[LoadEntry]:
    """Code that nobody was trained on, to go on with greedily."""
    return [LoadEntry(asked.code(64), asked.size(48, 16)) for _ in range(asked.size(24, 4))]


# ---- costs
def numbers(config: ModelConfig) -> tuple[int, int]:
    """Numbers of a layer's matrices, and of the output matrix."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return attention + 3 * config.hidden * config.intermediate, config.vocab * config.hidden


@cache
def _small() -> tuple[int, int]:
    return numbers(config_of(DRAFT))


def weights(case: Case, run: PlayedRun) -> float:
    """Weights read per token, in passes of the model: its own, and those of the draft model."""
    (layer, head), (small_layer, small_head), work = numbers(case.config), _small(), run.work
    whole = case.config.layers * layer + head
    read = work.forwards * whole + work.draft_depth * small_layer + work.draft_forwards * small_head
    return read / whole / work.emitted


# ---- what must lose, or need not win
@dataclass(frozen=True)
class OtherWords(Control):
    """draft: the same search, whose trigrams are those of other words: the next token's number is shifted."""

    of: DiffuSpec

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> MaskedBlockDrafter:
        made, vocab = self.of.bind(host), host.model.config.vocab
        true = made.chance
        assert true is not None
        made.chance = lambda first, second, token: true(first, second, (token + SHIFT) % vocab)
        return made


def played(lab: Lab, load: Load, contenders: Mapping[str, Setting], dtype: str | None = None) -> dict[str, PlayedRun]:
    return {name: lab.play(who, load(lab.asked("pocket")), "pocket", dtype) for name, who in contenders.items()}


def with_and_without(load: Load, lab: Lab) -> AttemptOutcome:
    """Accepted guesses a verdict with the search, with trigrams of other words, and by the likeliest tokens; blocks are
    as long."""
    fixed = DiffuSpec(least=MOST, most=MOST)
    others = Setting(objects={"decode": Speculative(OtherWords(fixed), Match())}, most=1)
    runs = played(lab, load, {
        "search": drafting(least=MOST), "other words": others, "likeliest": drafting(least=MOST, path="argmax"),
    })  # fmt: skip
    found = {name: run.work.accepted / (run.work.emitted - run.work.accepted) for name, run in runs.items()}
    told = ", ".join(f"{value:.3f} by {name}" for name, value in found.items())
    return AttemptOutcome(found["search"] >= found["likeliest"] and found["search"] > found["other words"], told)


def lengths(lab: Lab) -> AttemptOutcome:
    """Guesses verified for each that is accepted, and accepted ones a verdict, with the controller and without."""
    runs = played(lab, LOAD, {"adaptive": drafting(), "fixed": drafting(least=MOST)})
    costs = [run.work.drafted / max(1, run.work.accepted) for run in runs.values()]
    taken = [run.work.accepted / (run.work.emitted - run.work.accepted) for run in runs.values()]
    told = " and ".join(f"{cost:.2f} guesses for {each:.3f} a verdict" for cost, each in zip(costs, taken))
    return AttemptOutcome(costs[0] < costs[1], f"{told} (adaptive and fixed length)")


def relaxed(lab: Lab) -> AttemptOutcome:
    """GAD's acceptance of one and of three likeliest tokens: whether texts are plain decoding's, and verdicts a
    token."""
    who = {"plain": Setting(most=1)}
    who |= {str(beta): Setting({"draft": "gad", "verify": f"top_beta:beta={beta}"}, most=1) for beta in (1, 3)}
    runs = played(lab, code, who, "float32")
    plain = runs.pop("plain")
    same = [sum(a == b for a, b in zip(run.outs, plain.outs)) for run in runs.values()]
    case = Case(runs, lab.model("pocket").config, 0)
    cost = [rounds(case, run) for run in runs.values()]
    told = " and ".join(f"{n} of {len(plain.outs)} texts in {each:.3f} verdicts a token" for n, each in zip(same, cost))
    passed = same[0] == len(plain.outs) and same[1] < same[0] and cost[1] < cost[0]
    return AttemptOutcome(passed, f"{told} (beta 1 and 3)")


def faster(other: Setting, against: str) -> Timing:
    """Greedy answers one by one, the model padded to sixteen times the weights, the draft as it is."""
    return Timing(f"time per token, padded, against {against}", 1.0, loads.pace, model="pocket-wide",
                  settings={"method": drafting(), "baseline": other})  # fmt: skip


SYSTEM = System(
    title="DiffuSpec",
    paper=Paper("DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding", "2510.02358"),
    claim="a pretrained diffusion model drafts a whole chain in one pass; a search for a path that a 3-gram model "
    "finds likely as well, and a length that adapts, make greedy answers 3.08 times as fast as plain decoding on "
    "average, where a draft model of as many weights that guesses one token after the other is 1.67 times as fast.",
    conditions=("Qwen2.5 32B, drafted for by Dream 7B, greedy, one request at a time, on an A100",
                "20 to 30 masks, beams of 3, lam 0.5", "Spec-Bench"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="a draft model with random weights and trigrams, as many guesses",
    line="a masked model drafts a chain in one pass, a search finds the path: 3.08 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        "pocket-draft, one guess: as many passes of a model of this shape": chain(1),
        "DFlash's heads, as many guesses in one pass": Setting({"draft": "dflash:depth=7"}, most=1),
    },
    exact=True,
    missing=("a pretrained diffusion model: pocket's began as its draft model, and learned masks on a few hundred "
             "thousand tokens", "several denoising passes, which the paper found slower"),
    counters=(
        PASSES, guessing(1),
        Counter("guesses verified", f"{MOST} a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: MOST * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token", passes, "rivals", sampled.BETTER),
        Saving("passes per token of code", passes, "rivals", sampled.BETTER, load=code),
        *(Saving(f"weights read per token, against {k} guess{'es' * (k > 1)} of pocket-draft", weights, "baseline",
                 sampled.BETTER, settings={"baseline": chain(k)}) for k in CHAINS),
        Saving("passes per token at T=1", passes, "baseline", 1.1, load=HOT),
        Saving("passes per token at T=1", passes, "rivals", sampled.BETTER, load=HOT),
    ),
    attempts=(
        Attempt("mechanism", "guesses accepted a verdict, answers to tasks, with the search and without",
                "at least as many, and more than with trigrams of other words", partial(with_and_without, LOAD)),
        Attempt("mechanism", "guesses accepted a verdict, code, with the search and without",
                "at least as many, and more than with trigrams of other words", partial(with_and_without, code)),
        Attempt("mechanism", "guesses verified for each that is accepted", "fewer with a length that adapts", lengths),
        Attempt("mechanism", "texts by GAD's acceptance", "plain decoding's where the likeliest token alone is "
                "accepted; others, and in fewer passes, where it may be one of three", relaxed),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        faster(Setting(most=1), "plain decoding"),
        faster(chain(2), "two guesses of pocket-draft"),
    ),
    note="The masked model has the shape of pocket-draft, sees the text causally, and keeps its keys and values; the "
    "paper's computes the whole text anew in every pass. lam and the lengths were chosen on pocket.",
)  # fmt: skip
