"""Trained drafting heads as systems ask of them: with a path that is another's, and rank by rank over text that the
model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from phasewise.methods.draft.hydra import Hydra
from phasewise.reproduce.controls import Control
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import AttemptOutcome, Setting
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.last_state import LastStateDrafter, LastStateHeads
from phasewise.speculation.heads.medusa import MedusaHeads
from phasewise.train.heads import acceptance
from phasewise.train.heads.acceptance import Ranks
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.heads.text import unlooped
from phasewise.train.written import WrittenText
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

LOADS: dict[str, Callable[[StoredHeads], LastStateHeads]] = {"medusa": MedusaHeads.of, "hydra": HydraHeads.of}


# ---- a control
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


# ---- ranks over text
def said(lab: Lab) -> list[WrittenText]:
    """What pocket writes greedily after held-out code, without its loops, in float32."""
    asked = lab.asked("pocket")
    entries = [LoadEntry(asked.code(64), asked.size(96, 48)) for _ in range(asked.size(96, 8))]
    run = lab.play(Setting(most=16), entries, "pocket", "float32")
    return unlooped([WrittenText(entry.prompt, out) for entry, out in zip(entries, run.outs, strict=True)])


def ranked(target: FrozenTarget, kind: str, texts: Sequence[WrittenText]) -> tuple[list[Ranks], int]:
    """The ranks that pocket's heads of a kind give to the tokens of texts, and how many numbers the heads have."""
    stored = folder.read(folder.locate(target.model, kind, folder.AUTO))
    module = LOADS[kind](stored)
    return acceptance.ranks(KINDS[kind], module, target, texts, 0), sum(each.numel() for each in module.parameters())


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
