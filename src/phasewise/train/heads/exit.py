"""Kangaroo's adapter as it is trained: over all positions of a text at once (arXiv 2404.18911).

The rows that it reads in a draft are those that the model's first layers make of the same tokens, so what it learns of
true text is all that it meets. Later guesses are learned as the first one is: each from its own token's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.layouts import untrained
from phasewise.train.heads.feature import BEGIN, FeatureKind, UnrolledAttention
from phasewise.train.heads.target import FrozenTarget, SeenBlock


@dataclass(frozen=True)
class ExitKind(FeatureKind):
    """An adapter as wide as the model, behind `exit` of its layers; 0: as many as usual. At first it adds nothing: rows
    that leave early meet the model's own norm, scaled down, and its output matrix."""

    kind: str = field(default="kangaroo", init=False)
    exit: int = 0

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = untrained(self.kind, target.model, exit=self.exit)
        made.steps = depth
        begin(made, target)
        return made.to(target.output.device)

    def guesses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        assert isinstance(module, ExitAdapter)
        (tap,) = self.taps(module)
        output = module.layer(0, seen.taps[tap], UnrolledAttention(module, seen.block.positions).attend)
        first = seen.wanted(0)
        said = module.logits(output[:, 1:][first], target.unembed)  # once, for all depths
        place = torch.zeros(first.shape, dtype=torch.int64, device=first.device)
        place[first] = torch.arange(len(said), device=first.device)
        for step in range(module.steps):
            yield said[place[:, step:][seen.wanted(step)]]


@torch.no_grad()
def begin(heads: FeatureHeads, target: FrozenTarget) -> None:
    """Initial weights with which rows that leave early are read, less surely, by the model's own norm and matrix."""
    assert isinstance(heads, ExitAdapter)
    attention = heads.layers[0].get_submodule("self_attn")
    for name, matrix in attention.named_children():
        if isinstance(matrix, nn.Linear) and name != "o_proj":
            matrix.weight.normal_(std=matrix.weight.shape[1] ** -0.5)
    heads.get_parameter("layers.0.self_attn.o_proj.weight").zero_()
    heads.norm.weight.copy_(BEGIN * target.model.norm.weight.float())
