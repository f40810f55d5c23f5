"""Hidden Transfer's maps as they are trained: pseudo rows behind the positions of a text, through the model's own
frozen layers (arXiv 2404.12022).

The pseudo rows of position t read the keys and values that the model's layers have of the text up to t, and one
another's, as they do in a draft. Gradients pass through those layers to the maps alone. The paper's abstract names no
loss; as for all heads here, a map learns the model's own distribution where its token stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.speculation.heads.hidden_transfer import TransferMaps
from phasewise.speculation.heads.hidden_transfer_layout import transfer_settings, usual_maps
from phasewise.train.dense import TokenBlock
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
        chosen, model = slice(seen.first, None, seen.every), target.model
        rows = module(seen.taps[module.layer - 1][:, chosen])  # [rows, chosen, maps, d]
        context = _PseudoRows(model, seen, chosen, module.depth)
        x = rows.flatten(0, 2)
        for layer in range(module.layer, module.layers):
            x = model.layer(layer, x, context)
        said, cap = model.norm(x).view(rows.shape), model.config.logit_softcap
        for head in range(module.depth):
            wanted = seen.wanted(head)[:, chosen]
            logits = target.unembed(said[:, : wanted.shape[1], head][wanted])
            yield logits if cap is None else (logits / cap).tanh() * cap

    def config(self, module: TransferMaps, target: FrozenTarget) -> dict[str, Any]:
        return transfer_settings(module, target.model)

    def tensors(self, module: TransferMaps) -> dict[str, Tensor]:
        return module.state_dict()


class _PseudoRows:
    """What the model's layers ask (`LayerContext`) for the pseudo rows of some positions of a text: each reads the text
    up to its position t, and the pseudo rows of t up to itself."""

    def __init__(self, model: Model, seen: SeenBlock, chosen: slice, maps: int) -> None:
        self.model, self.seen, self.maps = model, seen, maps
        positions = seen.block.positions
        places = torch.arange(positions.shape[1], device=positions.device)
        own = positions[:, chosen, None] + 1 + torch.arange(maps, device=positions.device)  # [rows, chosen, maps]
        self.shape, end = own.shape, int(own.max()) + 1
        self.rotary, self.text = model.rotary(own.flatten(), end), model.rotary(positions.flatten(), end)
        self.later = places > places[chosen, None]  # [chosen, length]
        self.distance = places[chosen, None, None] + 1 + torch.arange(maps, device=places.device)[:, None] - places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, H, D] of all pseudo rows -> [T, Hq, D]."""
        spec, groups = self.model.config.attention[layer], q.shape[1] // k.shape[1]
        q, k, v = (each.view(*self.shape, *each.shape[1:]) for each in (q, k, v))
        keys, values = self._of_text(layer)
        keys, values, k, v = (each.repeat_interleave(groups, -2) for each in (keys, values, k, v))
        hidden = self.later[:, None] if spec.window is None else self.later[:, None] | (self.distance >= spec.window)
        later = torch.ones(self.maps, self.maps, dtype=torch.bool, device=q.device).triu_(1)
        unseen = torch.cat((hidden.expand(-1, self.maps, -1), later.expand(len(hidden), -1, -1)), -1)
        before, own = torch.einsum("rtmhd,rshd->rhtms", q, keys), torch.einsum("rtmhd,rtnhd->rhtmn", q, k)
        scores = torch.cat((before, own), -1) * spec.scale
        if spec.softcap is not None:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        scores = scores.masked_fill(unseen, float("-inf"))
        text, pseudo = scores.softmax(-1).split_with_sizes((keys.shape[1], self.maps), -1)
        out = torch.einsum("rhtms,rshd->rtmhd", text, values) + torch.einsum("rhtmn,rtnhd->rtmhd", pseudo, v)
        return out.flatten(0, 2)

    @torch.no_grad()
    def _of_text(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, length, H, D] that a layer has of the text."""
        rows = self.seen.taps[layer - 1]
        _, k, v = self.model.layers[layer].project(rows.flatten(0, 1), self.text)
        return k.view(*rows.shape[:2], *k.shape[1:]), v.reshape(*rows.shape[:2], *v.shape[1:])

    def count(self, counter: str, n: int) -> None:
        """Counts nothing."""
