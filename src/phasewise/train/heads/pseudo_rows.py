"""Pseudo rows behind the positions of a text, through the model's own frozen layers, with gradients.

The pseudo rows of position t read the keys and values that the model's layers have of the text up to t, and one
another's, as they do in a draft. So a drafter that guesses by such rows learns from all beginnings of a text at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phasewise.model.lowrank import Deltas
from phasewise.model.model import Model
from phasewise.train.heads.target import FrozenTarget, SeenBlock


def chosen(seen: SeenBlock) -> slice:
    """The positions of a block behind which there are pseudo rows."""
    return slice(seen.first, None, seen.every)


def pseudo_logits(target: FrozenTarget, seen: SeenBlock, rows: Tensor, layer: int) -> Iterator[Tensor]:
    """Logits [n, V] of the first pseudo row of each position, then of the second and so on, where it is learned.

    `rows` and `layer` are as `pseudo_states` takes them.
    """
    said = pseudo_states(target, seen, rows, layer)
    for head in range(rows.shape[2]):
        yield capped_logits(target, where_learned(seen, said, head))


def pseudo_states(
    target: FrozenTarget, seen: SeenBlock, rows: Tensor, layer: int, deltas: Deltas | None = None
) -> Tensor:
    """The states of all pseudo rows after the final norm [texts, chosen positions, pseudo rows, d].

    rows [texts, chosen positions, pseudo rows, d] enter the model's layer `layer`. The block has the model's rows
    before that layer and before all later ones (`taps`); those before the first are embedded. `deltas`: low-rank
    weights that pseudo rows run with; the text's keys and values are the model's own.
    """
    model = target.model
    context = _PseudoRows(model, seen, chosen(seen), rows.shape[2])
    x = rows.flatten(0, 2)
    for each in range(layer, model.config.layers):
        x = model.layer(each, x, context, deltas)
    return model.norm(x).view(rows.shape)


def where_learned(seen: SeenBlock, states: Tensor, head: int) -> Tensor:
    """Of states as `pseudo_states` gives them, those of one pseudo row of each position where it is learned [n, d]."""
    wanted = seen.wanted(head)[:, chosen(seen)]
    return states[:, : wanted.shape[1], head][wanted]


def capped_logits(target: FrozenTarget, states: Tensor) -> Tensor:
    """What the model says after states [n, d] -> logits [n, V], capped as its own are. Gradients pass to the states."""
    logits, cap = target.unembed(states), target.model.config.logit_softcap
    return logits if cap is None else (logits / cap).tanh() * cap


class _PseudoRows:
    """What the model's layers ask (`LayerContext`) for the pseudo rows of some positions of a text: each reads the text
    up to its position t, and the pseudo rows of t up to itself."""

    def __init__(self, model: Model, seen: SeenBlock, chosen: slice, count: int) -> None:
        self.model, self.seen, self.each = model, seen, count
        positions = seen.block.positions
        places = torch.arange(positions.shape[1], device=positions.device)
        own = positions[:, chosen, None] + 1 + torch.arange(count, device=positions.device)  # [texts, chosen, count]
        self.shape, end = own.shape, int(own.max()) + 1
        self.rotary, self.text = model.rotary(own.flatten(), end), model.rotary(positions.flatten(), end)
        self.later = places > places[chosen, None]  # [chosen, length]
        self.distance = places[chosen, None, None] + 1 + torch.arange(count, device=places.device)[:, None] - places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, H, D] of all pseudo rows -> [T, Hq, D]."""
        spec, groups = self.model.config.attention[layer], q.shape[1] // k.shape[1]
        q, k, v = (each.view(*self.shape, *each.shape[1:]) for each in (q, k, v))
        keys, values = self._of_text(layer)
        keys, values, k, v = (each.repeat_interleave(groups, -2) for each in (keys, values, k, v))
        hidden = self.later[:, None] if spec.window is None else self.later[:, None] | (self.distance >= spec.window)
        later = torch.ones(self.each, self.each, dtype=torch.bool, device=q.device).triu_(1)
        unseen = torch.cat((hidden.expand(-1, self.each, -1), later.expand(len(hidden), -1, -1)), -1)
        before, own = torch.einsum("rtmhd,rshd->rhtms", q, keys), torch.einsum("rtmhd,rtnhd->rhtmn", q, k)
        scores = torch.cat((before, own), -1) * spec.scale
        if spec.softcap is not None:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        scores = scores.masked_fill(unseen, float("-inf"))
        text, pseudo = scores.softmax(-1).split_with_sizes((keys.shape[1], self.each), -1)
        out = torch.einsum("rhtms,rshd->rtmhd", text, values) + torch.einsum("rhtmn,rtnhd->rtmhd", pseudo, v)
        return out.flatten(0, 2)

    @torch.no_grad()
    def _of_text(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [texts, length, H, D] that a layer has of the text."""
        ids = self.seen.block.ids
        rows = self.seen.taps[layer - 1] if layer else self.model.embed(ids.flatten()).view(*ids.shape, -1)
        _, k, v = self.model.layers[layer].project(rows.flatten(0, 1), self.text)
        return k.view(*rows.shape[:2], *k.shape[1:]), v.reshape(*rows.shape[:2], *v.shape[1:])

    def count(self, counter: str, n: int) -> None:
        """Counts nothing."""
