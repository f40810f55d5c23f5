"""Trained drafting heads as systems ask of them: what they cost, controls without their idea, and rank by rank over
text that the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

from torch import Tensor, nn

from phasewise.methods.draft._fixed_ranks import FixedRanks
from phasewise.methods.draft.eagle import Eagle
from phasewise.methods.draft.hydra import Hydra
from phasewise.model.model import Model
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import AttemptOutcome, Case, Counter, Setting, Timing
from phasewise.speculation.features import FeatureDrafter
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.last_state import LastStateDrafter, LastStateHeads, tree_of
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.heads.medusa import MedusaHeads
from phasewise.train.heads import acceptance
from phasewise.train.heads.acceptance import Ranks
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import HeadsJob, train
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.heads.text import unlooped
from phasewise.train.written import WrittenText
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

LOADS: dict[str, Callable[[StoredHeads], LastStateHeads]] = {"medusa": MedusaHeads.of, "hydra": HydraHeads.of}


NODES, DEPTH = 7, 4  # guesses of a tree (eight rows cost little more than one on a CPU, sixteen twice as much), and
# guesses in a row that heads one after the other were trained for
UNROLLED, DRAFT_VOCAB = 60_000, 768  # tokens to learn from where two ways are compared, and tokens that are guessed
FLAT, COLLAPSED = 0.9, 0.8  # how often a later guess is right over the first: at least if all are alike, else at most
LOAD = loads.answering("json", "arithmetic", "list", "copy", n=16)


# ---- costs
def passes(case: Case, run: PlayedRun) -> float:
    """Passes of the model per token."""
    return run.work.forwards / run.work.emitted


def _verdicts(case: Case) -> int:
    """Passes that judge guesses: all but the prompts'."""
    return case.work.forwards - len(case.entries)


PASSES = Counter(
    "passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
    lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted,
)  # fmt: skip
FREE = Counter(
    "passes that make the guesses", "none: heads read what the verdict leaves",
    lambda case: case.work.draft_forwards, lambda case: 0,
)  # fmt: skip


def verified(nodes: int) -> Counter:
    return Counter("guesses verified", f"{nodes} a pass after the prompts'", lambda case: case.work.drafted,
                   lambda case: nodes * _verdicts(case), bound="at most")  # fmt: skip


def guessing(depth: int) -> Counter:
    return Counter("passes of the heads", f"{depth} a pass after the prompts'", lambda case: case.work.draft_forwards,
                   lambda case: depth * _verdicts(case), bound="at most")  # fmt: skip


TIMINGS = (
    Timing("time per token", seconds=loads.pace, price=True),
    Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
)


# ---- controls
@dataclass(frozen=True)
class OthersPath(Control):
    """draft: Hydra's heads, trained and asked as ever, that read random tokens in place of those guessed before."""

    of: Hydra
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> LastStateDrafter:
        made = self.of.bind(host)
        return _Misled(host, made, self.seed)


class _Misled(LastStateDrafter):
    def __init__(self, host: Host, made: LastStateDrafter, seed: int) -> None:
        super().__init__(host, made.heads, made.tree)
        self.seed, self.vocab = seed, host.model.config.vocab

    def embedded(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """The root as it is, and any tokens after it, the same for the same path."""
        drawn = [Random(f"{self.seed} {list(path)}") for path in paths]
        return super().embedded(
            [[path[0], *(rng.randrange(self.vocab) for _ in path[1:])] for rng, path in zip(drawn, paths)]
        )


RankShape = FixedRanks  # what entries call a tree like that of EAGLE's first version


@dataclass(frozen=True)
class FixedTree(Control):
    """draft: EAGLE's heads with a fixed tree of as many nodes: the ranks that were right most often in training."""

    of: Eagle

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> FeatureDrafter:
        made = self.of.bind(host)
        stored = folder.read(folder.locate(host.model, self.of.kinds, self.of.heads))
        made.shape = RankShape(tree_of(stored, self.of.depth, self.of.nodes))
        return made


# ---- ranks over text
def said(lab: Lab) -> list[WrittenText]:
    """What pocket writes greedily after held-out code, without its loops, in float32."""
    asked = lab.asked("pocket")
    entries = [LoadEntry(asked.code(64), asked.size(96, 48)) for _ in range(asked.size(96, 8))]
    run = lab.play(Setting(most=16), entries, "pocket", "float32")
    return unlooped([WrittenText(entry.prompt, out) for entry, out in zip(entries, run.outs, strict=True)])


def ranked(target: FrozenTarget, kind: str, texts: Sequence[WrittenText]) -> tuple[list[Ranks], int]:
    """The ranks that pocket's heads of a kind give to the tokens of texts, and how many numbers the heads have."""
    module = shipped(target.model, kind)
    return acceptance.ranks(KINDS[kind], module, target, texts, 0), sum(each.numel() for each in module.parameters())


def shipped(model: Model, kind: str) -> nn.Module:
    """The heads of a kind that ship for a model, in float32, of as many guesses as they were trained for."""
    if kind in LOADS:
        return LOADS[kind](folder.read(folder.locate(model, (kind,), folder.AUTO)))
    heads, _ = feature_heads(model, (kind,), folder.AUTO)
    heads.steps = heads.parallel or DEPTH
    return heads.float()


def depths(lab: Lab, kind: str) -> tuple[list[float], int]:
    """How often each guess of the heads that ship is right where those before it were, and over how many texts."""
    target, texts = FrozenTarget("pocket"), said(lab)
    found, _ = ranked(target, kind, texts)
    rows = [row for text in found for row in text]
    return acceptance.conditional(rows, len(rows[0])), len(texts)


def flat(lab: Lab) -> AttemptOutcome:
    """Whether later guesses of EAGLE-3's heads, which read the heads' own outputs, are right as often as the first."""
    shares, texts = depths(lab, "eagle3")
    told = ", ".join(f"{share:.1%}" for share in shares)
    return AttemptOutcome(min(shares[1:]) >= FLAT * shares[0], f"{told}, over {texts} texts")


def second_heads(lab: Lab) -> AttemptOutcome:
    """How often the second guess is right where the first was: Hydra's, which knows the first, and Medusa's, trained on
    the same text for as many steps; Hydra's heads have no more numbers."""
    target, texts = FrozenTarget("pocket"), said(lab)
    shares, sizes = list[float](), list[int]()
    for kind in ("hydra", "medusa"):
        found, size = ranked(target, kind, texts)
        rows = [row for text in found for row in text]
        shares.append(acceptance.conditional(rows, 2)[1])
        sizes.append(size)
    told = " and ".join(f"{share:.1%} of {size:,} numbers" for share, size in zip(shares, sizes))
    return AttemptOutcome(shares[0] > shares[1] and sizes[0] <= sizes[1], f"{told}, over {len(texts)} texts")


# ---- how heads are trained
def unrolled_and_not(lab: Lab) -> AttemptOutcome:
    """How often each guess is right where those before it were, of EAGLE-3's heads that learned over their own outputs,
    and of heads that learned from true features alone, on the same text for as many tokens."""
    shares = list[tuple[float, ...]]()
    sizes = (UNROLLED // 40, 64) if lab.scale.quick else (UNROLLED, 320)
    for unroll in (0, 1):
        out = lab.shelf.room / f"unroll-{unroll}"
        job = HeadsJob("eagle3", "pocket", out, sizes[0], rate=2e-3, sequences=sizes[1], unroll=unroll, step=512,
                       draft_vocab=DRAFT_VOCAB)  # fmt: skip
        shares.append(train(job, lambda what, total: nullcontext(lambda done: None)).conditional)
    unrolled, single = shares
    told = " and ".join(", ".join(f"{share:.1%}" for share in each) for each in shares)
    flat = min(unrolled[1:]) >= FLAT * unrolled[0]
    return AttemptOutcome(flat and single[1] < COLLAPSED * single[0], told)
