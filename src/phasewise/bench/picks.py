"""Measures how much of a layer's own picks an earlier layer has picked, on which selectors that hand picks from layer
to layer depend (attend.tidal)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.model.model import Model
from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_all
from phasewise.step.span import Span
from phasewise.train.artefacts.attend_zero_tuning import logits_of
from phasewise.verbs.attend import Attend


class Recorder(Attend):
    """Dense attention that notes, for the last `rows` rows of every text, the `k` slots with the largest weight (over
    the query heads of a KV head), each row's own left out: by layer, bool [H, rows, N] per text."""

    def __init__(self, k: int, rows: int) -> None:
        self.k, self.rows = k, rows
        self.picked: dict[int, list[Tensor]] = {}

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        for read in reads:
            self.picked.setdefault(read.layer, []).append(self._picks(read))
        return attend_all(reads)

    def _picks(self, read: Read) -> Tensor:
        n, rows = read.part.size[1], min(self.rows, read.q.shape[0])
        logits = read.scores()[:, :, -rows:]  # [H, G, rows, N]
        mask = read.mask()
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, -rows:], float("-inf"))
        weights = (logits - logits.logsumexp(-1, keepdim=True)).amax(1)
        every = torch.arange(rows, device=weights.device)
        weights[:, every, n - rows + every] = float("-inf")
        best = weights.topk(min(self.k, n - rows), -1).indices  # of at least so many rows before them
        return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, best, True)


def overlaps(model: Model, texts: Sequence[list[int]], k: int, rows: int = 64) -> Tensor:
    """[L, L]: the share of layer b's own picks that layer a has picked, mean over rows and heads."""
    layers = model.config.layers
    total = torch.zeros(layers, layers)
    for text in texts:
        seen = Recorder(k, rows)
        for _ in logits_of(model, [text], seen):
            pass
        flat = torch.stack([seen.picked[layer][0].flatten() for layer in range(layers)]).float()
        total += flat @ flat.T / flat.sum(-1)[None]
    return total / len(texts)


def found(shared: Tensor, dense: int, second: int | None) -> float:
    """The mean share that layers which read less get of their own picks, where layers `dense` and `second` pick."""
    got = []
    for layer in range(dense + 1, len(shared)):
        if layer != second:
            got.append(float(shared[dense if second is None or layer < second else second, layer]))
    return sum(got) / len(got)
