"""PPD: trained embeddings stand for the next tokens behind every token of a pass, and guess them in the verify pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.ppd import PPD, PromptDrafter
from phasewise.methods.verify.match import Match
from phasewise.reproduce import sampled
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import FREE, LOAD, PASSES, TIMINGS, passes, ranked, said
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System
from phasewise.request.request import Request
from phasewise.speculation.heads.last_state import RankPath
from phasewise.speculation.heads.ppd_layout import prompt_tokens
from phasewise.speculation.prompt_trees import Accuracy, expected_accepted, prompt_trees
from phasewise.train.heads import acceptance
from phasewise.train.heads.acceptance import BEYOND, Ranks
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

ROWS = 63
LAYERS, MAPPED = 8, 4  # of pocket, and those that Hidden Transfer's pseudo rows run
EQUAL = (ROWS + 1) * LAYERS // (LAYERS - MAPPED + 4 * MAPPED) - 1  # Hidden Transfer's guesses; each has three such rows
MEDUSA = Setting({"draft": f"medusa:nodes={ROWS}"}, most=1)
MAPS = Setting({"draft": f"hidden_transfer:nodes={EQUAL}"}, most=1)
NEW, TEXTS, NEAR = 160, 24, 0.05


def drafting(heads: str = "auto", **verbs: str) -> Setting:
    return Setting({"draft": f"ppd:heads={heads},rows={ROWS}", **verbs}, most=1)


# ---- costs
def beside(case: Case) -> int:
    """Guesses and prompt tokens: rows that are neither a prompt's nor a pending token's."""
    prompts = sum(len(entry.prompt) for entry in case.entries)
    return case.work.rows - prompts - (case.work.forwards - len(case.entries))


# ---- the Markov chain
@dataclass(frozen=True)
class TableOracle(Control):
    """draft: PPD's trees and passes with other guesses: each rank is right as often as the table says that the trees
    are made of, whatever the text."""

    of: PPD
    answers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # what plain decoding writes after each prompt

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> PromptDrafter:
        prompts, accuracy = prompt_tokens(host.model, self.of.heads)
        made = _Told(host, prompts().detach(), tuple(map(tuple, accuracy)), self.of)
        made.answers, made.rng = dict(self.answers), Random(0)
        return made


class _Told(PromptDrafter):
    answers: dict[tuple[int, ...], tuple[int, ...]]
    rng: Random

    def ranked(self, asked: Sequence[tuple[Request, Sequence[RankPath]]]) -> list[list[list[int]]]:
        return [[self._depth(request, depth) for depth in range(max(map(len, paths)))] for request, paths in asked]

    def _depth(self, request: Request, depth: int) -> list[int]:
        """As many tokens as the table has ranks; the right one at a rank that is drawn, or none of them."""
        row, at = self.accuracy[depth], request.known - request.prompt_len + depth
        text = self.answers[tuple(request.prompt)]
        right = text[at] if at < len(text) else -1
        u = self.rng.random()
        rank = next((i for i in range(len(row)) if u < sum(row[: i + 1])), len(row))
        wrong = [token for token in range(len(row) + 1) if token != right]
        return [*wrong[:rank], right, *wrong[rank:]][: len(row)]


def predicted(lab: Lab) -> AttemptOutcome:
    """Guesses accepted in a pass: as the chain of states predicts from the table of accuracies, as measured with
    guesses that are right as often as that table says, and as measured with the guesses that prompt tokens make."""
    asked = lab.asked("pocket")
    new = asked.size(NEW, 64)
    entries = [LoadEntry(asked.code(64), new) for _ in range(asked.size(TEXTS, 4))]
    plain = lab.play(Setting(most=16), entries, "pocket", "float32")
    answers = tuple((tuple(entry.prompt), tuple(out)) for entry, out in zip(entries, plain.outs, strict=True))
    method = PPD(rows=ROWS)
    runs = [
        lab.play(Setting(objects={"decode": Speculative(each, Match())}, most=1), entries, "pocket", "float32")
        for each in (TableOracle(method, answers), method)
    ]
    if any(run.outs != plain.outs for run in runs):
        return AttemptOutcome(False, "other tokens than plain decoding's")
    _, rows = prompt_tokens(lab.model("pocket", "float32"), method.heads)
    accuracy: Accuracy = tuple(map(tuple, rows[: method.depth]))
    wanted = expected_accepted(accuracy, prompt_trees(accuracy, ROWS))
    shares = [run.work.accepted / (run.work.forwards - len(entries)) for run in runs]
    told = (f"{wanted:.3f} predicted; {shares[0]:.3f} with guesses as often right, {shares[1]:.3f} with prompt tokens' "
            f"own, over {runs[0].work.forwards - len(entries):,} passes")  # fmt: skip
    return AttemptOutcome(abs(shares[0] - wanted) <= NEAR * wanted, told)


# ---- accuracy
def _right(found: Sequence[Ranks]) -> list[float]:
    """How often each of the first three guesses is right."""
    rows = [row for text in found for row in text if BEYOND not in row[:3]]
    return [sum(row[head] == 0 for row in rows) / max(1, len(rows)) for head in range(3)]


def later(lab: Lab) -> AttemptOutcome:
    """How often the third guess is the model's own token there, whatever the guesses before: of prompt tokens, and of
    Medusa's third head."""
    target, texts = FrozenTarget("pocket"), said(lab)
    module, _ = prompt_tokens(target.model, "auto")
    mine = acceptance.ranks(KINDS["ppd"], module, target, texts, 0)
    shares = {"PPD": _right(mine), "Medusa": _right(ranked(target, "medusa", texts)[0])}
    told = "; ".join(f"{name} " + ", ".join(f"{share:.1%}" for share in each) for name, each in shares.items())
    return AttemptOutcome(shares["PPD"][2] > shares["Medusa"][2], f"{told}, over {len(texts)} texts")


SYSTEM = System(
    title="PPD",
    paper=Paper("Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference",
                "2405.18628"),
    claim="trained prompt tokens behind every node of a tree approximate the next tokens in the verify pass itself, "
    "with trees that follow from accuracies: up to 2.49 times as fast, with 0.0002 % of the weights to train, and up "
    "to 28 % more acceptance of far guesses.",
    conditions=("MobileLLaMA 1.4B and Vicuna 7B, 13B in fp16", "three prompt tokens, 60 to 105 rows a pass by the "
                "device", "one request at a time, on an A100 and an RTX 4090"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="embeddings of the same size with random values, as many rows",
    line="trained embeddings stand for later tokens and guess in no pass: up to 2.49 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals={"Medusa's heads, as many rows a pass": MEDUSA, "Hidden Transfer, as many rows of all layers a pass": MAPS},
    exact=True,
    missing=(
        "beside another speculative method, where the paper gains up to 1.22 times more",
        "rows a pass chosen by what they take on the device",
    ),
    counters=(
        PASSES, FREE,
        Counter("guesses and prompt tokens", f"{ROWS} a pass after the prompts'", beside,
                lambda case: ROWS * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.3),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token at T=0.7", passes, "baseline", 1.02, load=sampled.writing(0.7)),
    ),
    attempts=(
        Attempt("mechanism", "guesses accepted in a pass, from the table of accuracies alone",
                "within 5 % with guesses that are right as often as the table says", predicted),
        Attempt("mechanism", "first, second and third guesses that are the model's own token", "third guesses more "
                "often than Medusa's third head", later),
    ),
    timings=TIMINGS,
    note="Three embeddings of 256 numbers, trained on the model's own greedy continuations. Medusa has 256 times as "
    "many numbers for each guess, and Hidden Transfer too.",
)  # fmt: skip
