"""RASD: a small model's guesses and those looked up in the text, fused into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.draft_model import DraftModel
from phasewise.methods.draft.prompt_lookup import PromptLookup
from phasewise.methods.draft.rasd import RASD, Fusion
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

K, COPIED = 4, 8  # tokens of either guess
STORED, AMONG = 16, 10  # a datastore's guesses, and how many first tokens those may have that stay


def base(model: str = "pocket-draft") -> str:
    return f"draft_model:model={model},k={K}"


def fused(model: str = "pocket-draft", source: str = f"prompt_lookup:k={COPIED}", among: int = 0) -> Setting:
    return Setting({"draft": f"rasd:base=({base(model)}),source=({source}),among={among}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Code that nobody was trained on, to go on with."""
    return [LoadEntry(asked.code(asked.size(256, 128)), asked.size(64, 32)) for _ in range(asked.size(16, 6))]


# ---- round by round
@dataclass(frozen=True)
class Round:
    """Accepted guesses of a round, and those that either parent alone, or both side by side, would have had
    accepted."""

    accepted: int
    base: int
    source: int
    beside: int


@dataclass(frozen=True)
class WatchedRasd(Control):
    """draft: RASD, and what its parents guessed held against what came."""

    rounds: list[Round] = field(default_factory=list, compare=False)

    @property
    def traits(self) -> Traits:
        return RASD(DraftModel(k=K), PromptLookup(k=COPIED)).traits

    def bind(self, host: Host) -> _Watched:
        return _Watched(0, host.bind(DraftModel(k=K)), host.bind(PromptLookup(k=COPIED)), self.rounds)


class _Watched(Fusion):
    def __init__(self, among: int, base: Drafter, source: Drafter, rounds: list[Round]) -> None:
        super().__init__(among, base, source)
        self.rounds, self.now = rounds, dict[str, list[Draft]]()

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        guesses = zip(*(its.draft(requests, budgets) for its in self.parts))
        self.now = {r.id: [draft or Draft([], []) for draft in both] for r, both in zip(requests, guesses)}
        return super().draft(requests, budgets)

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            if isinstance(span.note, Draft):
                one, other = self.now[span.request.id]
                told = [_held(draft, outcome.tokens[:-1]) for draft in (one, other, beside(one, other))]
                self.rounds.append(Round(outcome.accepted, *told))
        super().learn(spans, hidden, outcomes, tops)


def beside(one: Draft, other: Draft) -> Draft:
    """Two trees that are concatenated: both below the pending token, nothing merged."""
    own = [parent if parent < 0 else parent + len(one.tokens) for parent in other.parents]
    return Draft(one.tokens + other.tokens, one.parents + own)


def _held(draft: Draft, said: Sequence[int]) -> int:
    """Guesses accepted where the target says this: the first child that carries the next token, and so on."""
    node, held = -1, 0
    for token in said:
        node = next((child for child in draft.children(node) if draft.tokens[child] == token), -2)
        if node < 0:
            break
        held += 1
    return held


def rounds(lab: Lab) -> list[Round]:
    watched = WatchedRasd()
    lab.play(Setting(objects={"decode": Speculative(watched, Match())}, most=1), writing(lab.asked("pocket")), "pocket",
             "float32")  # fmt: skip
    return watched.rounds


def union(lab: Lab) -> AttemptOutcome:
    """Round by round, on the same tokens."""
    found = rounds(lab)
    exact = sum(each.accepted == max(each.base, each.source) for each in found)
    better = [sum(each.base > each.source for each in found), sum(each.source > each.base for each in found)]
    words = f"{exact:,} of {len(found):,}; the draft model the better one in {better[0]:,}, the text in {better[1]:,}"
    return AttemptOutcome(exact == len(found) and all(better), words)


def concatenated(lab: Lab) -> AttemptOutcome:
    """The same guesses without merging."""
    found = rounds(lab)
    less, more = (sum(way * (each.accepted - each.beside) > 0 for each in found) for way in (1, -1))
    return AttemptOutcome(less > 0 and not more, f"less in {less:,} of {len(found):,} rounds, more in {more:,}")


def pruned(lab: Lab) -> AttemptOutcome:
    """A datastore's guesses, all of them and those that the draft model finds likely to begin with."""
    every, likely = (
        lab.play(fused(source=f"retrieval:nodes={STORED}", among=among), writing(lab.asked("pocket")), "pocket").work
        for among in (0, AMONG)
    )
    rows, more = likely.drafted / every.drafted, likely.forwards / every.forwards
    return AttemptOutcome(rows <= 0.75 and more <= 1.05, f"{rows:.0%} of the guesses, {more:.1%} of the passes")


SYSTEM = System(
    title="RASD",
    paper=Paper("RASD: Retrieval-Augmented Speculative Decoding", "2503.03434"),
    claim="a tree of retrieved continuations, pruned by the draft model and fused with its own tree, is accepted "
    "further than the draft model's alone: the fastest on 4 kinds of tasks (questions about documents, summaries, "
    "code, questions in a domain); its abstract has no figures.",
    conditions=("a trained drafter (EAGLE-2) as the base", "retrieval from the prompt or a datastore"),
    method=fused(),
    baseline=Setting({"draft": base()}, most=1),
    control=fused(source=f"retrieval:nodes={COPIED},store=random:0,shortest=1"),
    control_is="as many guesses looked up in random tokens",
    line="a draft model's tree fused with retrieved ones: further than the draft model's alone",
    promises=("cost", "time"),
    load=writing,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guesses verified", f"k + {COPIED} a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: (K + COPIED) * (case.work.forwards - len(case.entries)), bound="at most"),
        Counter("passes of the draft model", f"{K} a pass after the prompts'", lambda case: case.work.draft_forwards,
                lambda case: K * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.05),
        Saving("passes per token", passes, "control", 1.05),
    ),
    attempts=(
        Attempt("mechanism", "rounds that accept what the better parent alone would",
                "all, and either is better in some", union),
        Attempt("control", "both trees side by side, unmerged", "less in some rounds", concatenated, "mechanism"),
        Attempt("cost", f"{STORED} guesses from a datastore, pruned to {AMONG} first tokens",
                "at most 75% of the guesses and 105% of the passes", pruned),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, both models padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide",
               settings={"method": fused("pocket-draft-wide"),
                         "baseline": Setting({"draft": base("pocket-draft-wide")}, most=1)}),
    ),
    note="The baseline drafts with the same model alone. What is timed is not pruned; how the paper prunes is "
    "known from its abstract only. With a datastore, source=(retrieval), passes are saved as well, but twenty rows "
    "a pass cost more on this processor than they save.",
)  # fmt: skip
