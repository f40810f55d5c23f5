"""Rivals of Chimera's heads for the pocket model: as many numbers, trained as long on the same texts, at one rate."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from phasewise.load import model_path
from phasewise.model.artefacts import FOLDER
from phasewise.train.heads.aligned import AlignedKind
from phasewise.train.heads.chimera import ChimeraKind
from phasewise.train.heads.kinds import HeadsKind
from phasewise.train.heads.last_state import HydraKind
from phasewise.train.heads.run import HeadsJob, train

EAGLE = "eagle1"
INNER = 1665  # numbers of EAGLE's MLP: then its heads have exactly as many as Chimera's, 1,574,144
RANK = 171  # of the maps of Hydra's heads: then they have 0.2 % more
LEARNED, QUICKLY = (150_000, 2000), (1500, 64)  # tokens and texts: of the shipped heads, and of a quick run


@dataclass(frozen=True)
class RankedHydra(HydraKind):
    """Hydra's heads whose maps are of a given rank."""

    of: int = RANK

    def rank(self, hidden: int, depth: int) -> int:
        return self.of


RIVALS: dict[str, HeadsKind] = {
    EAGLE: AlignedKind(EAGLE, inner=INNER),
    "hydra": RankedHydra(),
    "chimera": ChimeraKind(ngram=1),  # of one token three times over: no trigram
}
"""Kinds by the folder beside the model."""


def job(kind: str, out: Path, learned: tuple[int, int]) -> HeadsJob:
    """The job of pocket's shipped Chimera heads, of this kind, with so many tokens and texts."""
    tokens, texts = learned
    return HeadsJob(kind, "pocket", out, tokens, depth=4, rate=1e-3, sequences=texts, step=512, dtype="bfloat16")


def rivals_beside_pocket(learned: tuple[int, int], target: Path) -> None:
    """The pocket model as it is, with these heads beside it."""
    for name, kind in RIVALS.items():
        out = target / FOLDER / "heads" / name
        train(job(name, out, learned), lambda what, total: nullcontext(lambda done: None), kind)
    shutil.copytree(model_path("pocket"), target, ignore=shutil.ignore_patterns(FOLDER), dirs_exist_ok=True)
