"""The kinds of heads that can be trained, by name: how one is made for a model, and what it guesses of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from phasewise.errors import UserError, near
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.aligned import AlignedKind
from phasewise.train.heads.chimera import ChimeraKind
from phasewise.train.heads.clover import CloverKind
from phasewise.train.heads.dflash import DFlashKind
from phasewise.train.heads.diffuspec import MaskedDraftKind
from phasewise.train.heads.exit import ExitKind
from phasewise.train.heads.falcon import FalconKind
from phasewise.train.heads.feature import FeatureKind
from phasewise.train.heads.hidden_transfer import TransferKind
from phasewise.train.heads.last_state import HydraKind, HydraPlusKind, MedusaKind
from phasewise.train.heads.masked_mtp import MaskedKind
from phasewise.train.heads.ppd import PromptKind
from phasewise.train.heads.target import FrozenTarget, SeenBlock


class HeadsKind(Protocol):
    """One kind. Its torch module is the one that the drafter serves with."""

    @property
    def own_output(self) -> bool:
        """Whether heads have an output matrix of their own, which may know fewer tokens than the model's."""
        ...

    @property
    def every(self) -> int:
        """One position of so many is learned in a step, where each costs much."""
        ...

    def taps(self, module: Any) -> tuple[int, ...]:
        """Layers after which a module reads rows, beside the last state."""
        ...

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> nn.Module:
        """A fresh module of so many heads, or steps of one head, in float32. Seeded by torch.

        `vocabulary`: ids of the tokens that an output matrix of its own knows, ascending; None: all of the model's.
        """
        ...

    def begin(self, module: Any, target: FrozenTarget, texts: TokenBlock) -> None:
        """Choose those initial weights that hang on what the model writes."""
        ...

    def vocabulary(self, module: Any) -> Tensor | None:
        """The ids of the tokens among which a module guesses; None: all of the model's."""
        ...

    def guesses(self, module: Any, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each depth in turn, [n, V], where that depth is learned (`SeenBlock.wanted`). Those of tokens that
        it cannot guess are finite and very low."""
        ...

    def config(self, module: Any, target: FrozenTarget) -> dict[str, Any]:
        """The configuration that is stored with the module's tensors."""
        ...

    def tensors(self, module: Any) -> dict[str, Tensor]:
        """The tensors that are stored."""
        ...


KINDS: dict[str, HeadsKind] = {
    "chimera": ChimeraKind(),
    "clover": CloverKind(),
    "dflash": DFlashKind(),
    "diffuspec": MaskedDraftKind(),
    "eagle1": FeatureKind("eagle1"),
    "eagle3": FeatureKind("eagle3"),
    "falcon": FalconKind(),
    "fspad": AlignedKind("fspad"),
    "hidden_transfer": TransferKind(),
    "hydra": HydraKind(),
    "hydra_plus": HydraPlusKind(),
    "kangaroo": ExitKind(),
    "masked_mtp": MaskedKind(),
    "medusa": MedusaKind(),
    "mtp": FeatureKind("mtp"),
    "ppd": PromptKind(),
}


def kind_of(name: str) -> HeadsKind:
    """The kind of this name. Raises UserError with those that there are."""
    if name not in KINDS:
        raise UserError(f"unknown kind of heads {name!r}. {near(name, KINDS)}")
    return KINDS[name]
