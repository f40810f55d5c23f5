"""Hidden Transfer's maps as they are trained: pseudo rows behind the positions of a text, through the model's own
frozen layers (arXiv 2404.12022).

They run as `pseudo_rows.py` says. Gradients pass through those layers to the maps alone. The paper's abstract names no
loss; as for all heads here, a map learns the model's own distribution where its token stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.heads.hidden_transfer import TransferMaps
from phasewise.speculation.heads.hidden_transfer_layout import transfer_settings, usual_maps
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.pseudo_rows import chosen, pseudo_logits
from phasewise.train.heads.target import FrozenTarget, SeenBlock


@dataclass(frozen=True)
class TransferKind:
    """Maps as wide as the model, behind `layer` of its layers; 0: half of them."""

    layer: int = 0
    every: int = 2  # a position costs as many rows of the later layers as there are maps, forth and back

    @property
    def own_output(self) -> bool:
        return False

    def taps(self, module: TransferMaps) -> tuple[int, ...]:
        return tuple(range(module.layer - 1, module.layers - 1))

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> TransferMaps:
        if target.model.dtype != torch.float32:
            raise UserError("hidden_transfer learns through the model's own layers, which is done in float32 alone: "
                            "leave out --dtype")  # fmt: skip
        return usual_maps(target.model, depth, self.layer).to(target.output.device)

    def begin(self, module: TransferMaps, target: FrozenTarget, texts: TokenBlock) -> None:
        """Does nothing: no initial weight hangs on the text."""

    def vocabulary(self, module: TransferMaps) -> Tensor | None:
        return None

    def guesses(self, module: TransferMaps, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each map in turn, [n, V], where it is learned."""
        rows = module(seen.taps[module.layer - 1][:, chosen(seen)])  # [texts, chosen, maps, d]
        return pseudo_logits(target, seen, rows, module.layer)

    def config(self, module: TransferMaps, target: FrozenTarget) -> dict[str, Any]:
        return transfer_settings(module, target.model)

    def tensors(self, module: TransferMaps) -> dict[str, Tensor]:
        return module.state_dict()
