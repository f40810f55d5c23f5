"""Clover: heads whose state takes in each guess, behind one layer more, and trees of four guesses for large batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft._regressive import RegressiveDrafter
from phasewise.methods.draft.clover import Clover
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import RankShape
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry
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
from phasewise.speculation.heads.last_state import RankPath
from phasewise.train.heads.clover import CloverKind
from phasewise.train.heads.run import HeadsJob, train
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

NODES, DEPTH = 4, 4  # guesses of a request, and heads that are trained
SMALL, LARGE = 16, 48  # requests at once
CARTESIAN = ((4,), (2, 1), (1, 3), (1, 1, 2), (1, 1, 1, 1))  # children of each node, level by level: four guesses
MEDUSA, HYDRA = "Medusa's heads, as many guesses", "Hydra's heads, as many guesses"
LEARNED, DRAWN = 60_000, sampled.writing(1.0)  # tokens to learn from where two ways are compared
CODE = sampled.writing(0.0)


def drafting(heads: str = "auto", most: int = SMALL) -> Setting:
    return Setting({"draft": f"clover:heads={heads},nodes={NODES}"}, most=most)


def at_once(n: int) -> Load:
    """A load of so many requests that go on with code that nobody was trained on, all from the start."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        return [LoadEntry(asked.code(64), asked.size(48, 16)) for _ in range(asked.size(n, 4))]

    return load


# ---- controls
def cartesian(children: tuple[int, ...]) -> tuple[RankPath, ...]:
    """The rank paths of a tree in which every node of a level has as many children."""
    levels = range(1, len(children) + 1)
    return tuple(path for end in levels for path in product(*(range(each) for each in children[:end])))


@dataclass(frozen=True)
class CartesianTree(Control):
    """draft: Clover's heads with the same tree in every pass, in which every node of a level has as many children."""

    of: Clover
    children: tuple[int, ...]

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> RegressiveDrafter:
        made = self.of.bind(host)
        made.shape = RankShape(cartesian(self.children))
        return made


def by_tree(children: tuple[int, ...]) -> Setting:
    control = CartesianTree(Clover(nodes=NODES), children)
    return Setting(objects={"decode": Speculative(control, Match())}, most=SMALL)


def trees(temperature: float) -> Callable[[Lab], AttemptOutcome]:
    """An attempt: whether no Cartesian tree of as many guesses accepts more of code at this temperature."""

    def run(lab: Lab) -> AttemptOutcome:
        asked = {"pruned": drafting()} | {" x ".join(map(str, each)): by_tree(each) for each in CARTESIAN}
        found = dict[str, float]()
        for name, setting in asked.items():
            case = lab.case({"method": setting}, sampled.writing(temperature), "pocket", "float32")
            found[name] = sampled.rounds(case, case.method)
        told = ", ".join(f"{name}: {rounds:.4f}" for name, rounds in found.items())
        return AttemptOutcome(found["pruned"] <= min(found.values()), told)

    return run


# ---- counters
def _verdicts(case: Case) -> int:
    """Times that guesses of a request were judged: of what was emitted, all but accepted guesses and first tokens."""
    return case.work.emitted - case.work.accepted - len(case.entries)


COUNTERS = (
    Counter("rows of the model", "those of prompts, one for each verdict, and one for each guess",
            lambda case: case.work.rows, lambda case: loads.prompt_rows(case) + _verdicts(case) + case.work.drafted),
    Counter("guesses verified", f"{NODES} for each verdict", lambda case: case.work.drafted,
            lambda case: NODES * _verdicts(case), bound="at most"),
    Counter("passes of the augmenting block", "one for each pass of the model", lambda case: case.work.draft_forwards,
            lambda case: case.work.forwards, bound="at most"),
)  # fmt: skip


# ---- how heads are trained
def with_and_without(lab: Lab) -> AttemptOutcome:
    """The share of right guesses where those before were right, of heads with the attention decoder and of heads
    without, trained on the same text for as many tokens."""
    shares = list[tuple[float, ...]]()
    tokens, texts = (LEARNED // 40, 64) if lab.scale.quick else (LEARNED, 320)
    for regressive in (True, False):
        out = lab.shelf.room / f"clover-{regressive}"
        job = HeadsJob("clover", "pocket", out, tokens, depth=DEPTH, rate=2e-3, sequences=texts, step=512)
        kind = CloverKind(regressive=regressive)
        shares.append(train(job, lambda what, total: nullcontext(lambda done: None), kind).conditional)
    told = " and ".join(", ".join(f"{share:.1%}" for share in each) for each in shares)
    later = all(ours > theirs for ours, theirs in zip(shares[0][1:], shares[1][1:]))
    return AttemptOutcome(later, told)


SYSTEM = System(
    title="Clover",
    paper=Paper("Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge", "2405.00263"),
    claim="heads whose state takes in the guesses before theirs, behind one decoder layer more, have with trees of "
    "four guesses up to 1.91 times (7B) and 2.46 times (100B) the throughput of plain decoding, and up to 1.37 and "
    "1.57 times Medusa's, in batches.",
    conditions=("Baichuan, a small model of 7B and a large one of over 100B", "three heads, four guesses a request",
                "batches of up to 48; the small model is slower than plain decoding at 48",
                "one epoch of 0.15B tokens, the model frozen"),
    method=drafting(),
    baseline=Setting(most=SMALL),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="a state that takes in each guess, and trees of four: 1.9 times plain decoding, 1.4 times Medusa",
    promises=("cost", "time"),
    load=loads.answering("json", "arithmetic", "list", "copy", n=12),
    rivals={
        MEDUSA: Setting({"draft": f"medusa:nodes={NODES}"}, most=SMALL),
        HYDRA: Setting({"draft": f"hydra:nodes={NODES}"}, most=SMALL),
    },
    exact=True,
    counters=COUNTERS,
    savings=(
        Saving("verdicts per token", sampled.rounds, "baseline", 1.2),
        Saving("verdicts per token", sampled.rounds, "rivals", 1.0),
        Saving("verdicts per token", sampled.rounds, "control", 1.2),
        Saving("verdicts per token of code", sampled.rounds, "rivals", 1.0, load=CODE),
        Saving("verdicts per token of code at T=1", sampled.rounds, "rivals", 1.0, load=DRAWN),
        Saving("verdicts per token of code at T=1", sampled.rounds, "baseline", 1.1, load=DRAWN),
    ),
    attempts=(
        *(
            Attempt("mechanism", f"verdicts per token of code{where}, of the pruned tree and of Cartesian trees of as "
                    "many guesses, by children of a node level by level", "no more than of any", trees(temperature))
            for temperature, where in ((0.0, ""), (1.0, " at T=1"))
        ),
        Attempt("mechanism", "guesses that are right where those before them were, by depth, of heads with the "
                "attention decoder and of heads without, trained alike", "of the former the second and later ones more "
                "often", with_and_without),
    ),
    timings=(
        Timing(f"time per token, {SMALL} requests at once", seconds=loads.pace, load=at_once(SMALL), price=True),
        Timing(f"time per token, {SMALL} requests at once, the model padded to sixteen times the weights", 1.0,
               loads.pace, load=at_once(SMALL), model="pocket-wide"),
        Timing(f"time per token, {SMALL} requests at once, the model padded to sixteen times the weights, against "
               "Medusa's heads", 1.0, loads.pace, MEDUSA, at_once(SMALL), "pocket-wide"),
        Timing(f"time per token, {LARGE} requests at once, the model padded to sixteen times the weights",
               seconds=loads.pace, load=at_once(LARGE), model="pocket-wide", price=True,
               settings={"method": drafting(most=LARGE), "baseline": Setting(most=LARGE)}),
    ),
    note="Four heads, as Medusa and Hydra have here, trained as long on the same texts. A verdict is one pass for one "
    "request, so it does not hang on how many share a pass. What the model says is compared with single greedy "
    f"tokens in float32. At {LARGE} requests the paper's small model is 21 to 39 % slower than plain decoding, so that "
    "clock judges nothing.",
)  # fmt: skip
