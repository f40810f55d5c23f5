"""Masked multi-token prediction: mask rows with low-rank weights of their own guess several tokens in the verify pass,
and a sampler makes the guesses of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean

import torch

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.masked_mtp import MaskedDrafter, MaskedMTP
from phasewise.methods.verify.match import Match
from phasewise.reproduce import sampled
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import FREE, LOAD, PASSES, TIMINGS, passes, said
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System
from phasewise.request.request import Request
from phasewise.speculation.heads.masked_mtp import MaskedHeads
from phasewise.speculation.heads.masked_mtp_layout import masked_heads
from phasewise.train.heads import acceptance
from phasewise.train.heads.acceptance import Ranks
from phasewise.train.heads.masked_mtp import MaskedKind
from phasewise.train.heads.target import FrozenTarget
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

DEPTH = 3  # masks that were trained
ROWS = DEPTH * (DEPTH + 2)  # guesses and masks of a pass
MEDUSA = Setting({"draft": f"medusa:nodes={ROWS}"}, most=1)
PROMPTS = Setting({"draft": f"ppd:rows={ROWS}"}, most=1)
NEW, TEXTS = 96, 24


def drafting(heads: str = "auto", knobs: str = "", **verbs: str) -> Setting:
    return Setting({"draft": f"masked_mtp:heads={heads},depth={DEPTH}{knobs and ','}{knobs}", **verbs}, most=1)


# ---- costs
def beside(case: Case) -> int:
    """Guesses and masks: rows that are neither a prompt's nor a pending token's."""
    prompts = sum(len(entry.prompt) for entry in case.entries)
    return case.work.rows - prompts - (case.work.forwards - len(case.entries))


# ---- the gate
@dataclass(frozen=True)
class OpenGate(Control):
    """draft: the same drafts, and real rows run with the masks' low-rank weights as well."""

    of: MaskedMTP

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> MaskedDrafter:
        return _Open(host, masked_heads(host.model, self.of.heads), self.of)


class _Open(MaskedDrafter):
    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        for request in requests:
            request.lora = self.tuned
        return super().draft(requests, budgets)


def gate(lab: Lab) -> AttemptOutcome:
    """How many texts are plain decoding's to the token: with the gate, and with every decoded row behind it."""
    asked = lab.asked("pocket")
    new = asked.size(NEW, 48)
    entries = [LoadEntry(asked.code(64), new) for _ in range(asked.size(TEXTS, 4))]
    plain = lab.play(Setting(most=16), entries, "pocket", "float32")
    same = []
    for method in (MaskedMTP(depth=DEPTH), OpenGate(MaskedMTP(depth=DEPTH))):
        run = lab.play(Setting(objects={"decode": Speculative(method, Match())}, most=1), entries, "pocket", "float32")
        same.append(sum(mine == its for mine, its in zip(run.outs, plain.outs, strict=True)))
    count = len(entries)
    told = f"{same[0]} of {count} texts with the gate, {same[1]} without"
    return AttemptOutcome(same[0] == count and same[1] < count, told)


# ---- accuracy
def _chain(found: Sequence[Ranks]) -> tuple[list[float], float]:
    """How often each guess is right where those before it were, and tokens a pass of the chain."""
    rows = [row for text in found for row in text]
    tree = {(0,) * (depth + 1) for depth in range(DEPTH)}
    return acceptance.conditional(rows, DEPTH), acceptance.tokens_a_pass(found, tree)


def _without_weights(module: MaskedHeads) -> MaskedHeads:
    """The same masks and sampler, with low-rank weights that add nothing."""
    bare = deepcopy(module)
    with torch.no_grad():
        for name, each in bare.low_rank.named_parameters():
            if name.endswith(".b"):
                each.zero_()
    return bare


def _told(name: str, shares: Sequence[float]) -> str:
    return f"{name} " + ", ".join(f"{share:.1%}" for share in shares)


def sampler(lab: Lab) -> AttemptOutcome:
    """How often each guess is right where those before it were: the sampler's, and those of the model's output matrix
    after the same masks, which was trained for them beside the sampler."""
    target, texts = FrozenTarget("pocket"), said(lab)
    module = masked_heads(target.model, "auto")
    mine, plain = (
        _chain(acceptance.ranks(MaskedKind(sampler=each), module, target, texts, 0))[0] for each in (True, False)
    )
    told = f"{_told('sampler', mine)}; {_told('output matrix', plain)}, over {len(texts)} texts"
    return AttemptOutcome(fmean(mine[1:]) > fmean(plain[1:]) and mine[0] >= plain[0], told)


def weights(lab: Lab) -> AttemptOutcome:
    """Tokens a pass of the chain with the masks' low-rank weights, and of the same masks and sampler without them."""
    target, texts = FrozenTarget("pocket"), said(lab)
    module = masked_heads(target.model, "auto")
    mine, bare = (
        _chain(acceptance.ranks(MaskedKind(), each, target, texts, 0))[1] for each in (module, _without_weights(module))
    )
    return AttemptOutcome(mine > bare, f"{mine:.3f} with them, {bare:.3f} without, over {len(texts)} texts")


SYSTEM = System(
    title="Masked MTP",
    paper=Paper("Your LLM Knows the Future: Uncovering Its Multi-Token Prediction Potential", "2507.11851"),
    claim="mask tokens that alone run with low-rank weights, and a sampler that reads the tokens guessed so far, make "
    "an autoregressive model guess 8 tokens a pass without a change of what it writes: 5.2 times as many tokens a pass "
    "for mathematics, 5.35 for code, 3.17 over 13 tasks.",
    conditions=("Tulu3 8B, tuned for 50,000 steps on its own fine-tuning data", "8 masks, rank 128",
                "speed as tokens per pass"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="masks, low-rank weights and a sampler of the same shape with random values, as many rows",
    line="masks with weights of their own and a sampler guess in the verify pass: 3.2 times fewer passes",
    promises=("cost", "time"),
    load=LOAD,
    rivals={"Medusa's heads, as many rows a pass": MEDUSA, "PPD's prompt tokens, as many rows a pass": PROMPTS},
    exact=True,
    counters=(
        PASSES, FREE,
        Counter("guesses and masks", f"{ROWS} a pass after the prompts'", beside,
                lambda case: ROWS * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.3),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token, against masks behind the last guess alone", passes, "baseline", 1.0,
               settings={"baseline": drafting(knobs="masks=linear")}),
        Saving("passes per token, against the model's output matrix in the sampler's place", passes, "baseline", 1.0,
               settings={"baseline": drafting(knobs="sampler=false")}),
        Saving("passes per token at T=0.7", passes, "baseline", 1.02, load=sampled.writing(0.7)),
    ),
    attempts=(
        Attempt("mechanism", "texts that are plain decoding's to the token", "all with the gate, and not all where "
                "real rows run with the low-rank weights, too", gate),
        Attempt("mechanism", "guesses that are right where those before them were", "the sampler's first one as often "
                "as the output matrix's, its later ones more often", sampler),
        Attempt("control", "tokens a pass by masks without their low-rank weights", "fewer than with them", weights,
                of="mechanism"),
    ),
    timings=TIMINGS,
    note="Three masks, rank 8. The paper counts tokens a pass; what the rows cost by the clock stands below.",
)  # fmt: skip
