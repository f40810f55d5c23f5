"""Chimera: the last three tokens stand for states that are missing, and one layer fuses them with the true ones."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType

from torch import Tensor

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.chimera import Chimera
from phasewise.methods.draft.eagle import Eagle
from phasewise.methods.verify.match import Match
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import (
    DEPTH,
    LOAD,
    NODES,
    PASSES,
    TIMINGS,
    guessing,
    passes,
    said,
    shipped,
    verified,
)
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Paper, Saving, Setting, System
from phasewise.reproduce.systems.fspad import HOT, BesideTheModel, code
from phasewise.speculation.features import FeatureDrafter
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.train.heads import acceptance
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

WIDTH = 4
TREE = f"depth={DEPTH},width={WIDTH},nodes={NODES}"
RIVALS = "pocket-trigram-rivals"  # the model with heads of others beside it
DRAWN = code(HOT)


@dataclass(frozen=True)
class WithoutTrigram(Control):
    """draft: Chimera's guesses, whose trigrams are zeros."""

    of: Chimera

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> FeatureDrafter:
        made = self.of.bind(host)
        blind(made.companion.model.heads)
        return made


def blind(heads: FeatureHeads) -> None:
    """Lets heads of Chimera's see zeros in place of trigrams."""
    heads.trigram = MethodType(_nothing, heads)  # type: ignore[method-assign,assignment]


def _nothing(heads: FeatureHeads, embedded: Tensor) -> Tensor:
    return embedded.new_zeros((*embedded.shape[:-2], heads.config.hidden))


def drafting(heads: str = "auto", model: str = "") -> Setting:
    return Setting({"draft": f"chimera:heads={heads},{TREE}"}, most=1, model=model)


def by_trees(control: Control, model: str = "") -> Setting:
    return Setting(objects={"decode": Speculative(control, Match())}, most=1, model=model)


def first_guesses(lab: Lab) -> AttemptOutcome:
    """The share of first guesses of the heads that ship that are right, with trigrams and with zeros in their place."""
    target, texts, shares = FrozenTarget("pocket"), said(lab), list[float]()
    for blinded in (False, True):
        module = shipped(target.model, "chimera")
        assert isinstance(module, FeatureHeads)
        if blinded:
            blind(module)
        found = acceptance.ranks(KINDS["chimera"], module, target, texts, 0)
        shares.append(acceptance.conditional([row for text in found for row in text], 1)[0])
    told = " and ".join(f"{share:.1%}" for share in shares)
    return AttemptOutcome(shares[1] < shares[0], f"{told}, over {len(texts)} texts")


SYSTEM = System(
    title="Chimera",
    paper=Paper("Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all "
                "Tokens", "2402.15758"),
    claim="a trigram encoder for the newest tokens and one layer that fuses them with all true states guess better "
    "than Medusa's heads, which see the last state alone: 2.7 times the speed of plain decoding on average.",
    conditions=("Vicuna 7B and 13B, LLaMA-2 7B and 13B, one request at a time", "MT-Bench, greedy",
                "trained on ShareGPT, two epochs", "top-k trees"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="the last three tokens stand for states that are missing, fused with all true ones: 2.7 times plain decoding",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        "Medusa's heads, a sixth of the numbers, trained twice as long":
            Setting({"draft": f"medusa:nodes={NODES}"}, most=1),
        "Hydra's heads, as many numbers, trained as long on the same texts":
            Setting({"draft": f"hydra:nodes={NODES}"}, most=1, model=RIVALS),
        "EAGLE's block, as many numbers, trained as long on the same texts":
            by_trees(BesideTheModel(Eagle(depth=DEPTH, width=WIDTH, nodes=NODES)), RIVALS),
        "Chimera's heads of one token three times over, trained as long on the same texts": drafting(model=RIVALS),
    },
    exact=True,
    counters=(PASSES, verified(NODES), guessing(DEPTH)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token of code, against zeros in place of trigrams", passes, "control", 1.05,
               load=code(0.0),
               settings={"control": by_trees(WithoutTrigram(Chimera(depth=DEPTH, width=WIDTH, nodes=NODES)))}),
        Saving("passes per token of code at T=1", passes, "rivals", 1.0, load=DRAWN),
        Saving("passes per token of code at T=1", passes, "baseline", 1.1, load=DRAWN),
    ),
    attempts=(
        Attempt("mechanism", "first guesses that are right, with trigrams and with zeros in their place",
                "less often without", first_guesses),
    ),
    timings=TIMINGS,
    note="All but Medusa's learned 150,000 tokens that pocket wrote and was asked, at one rate: Chimera's and Hydra's "
    "the model's own distributions, EAGLE's the model's states as well. Output heads are maps of 512 numbers to 256 "
    "that the model's output matrix reads, where the paper's give logits. A tree of 7 guesses, 4 in a row: rows cost "
    "time on a CPU.",
)  # fmt: skip
