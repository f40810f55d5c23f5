"""Clover's heads as they are trained: over all positions of a text at once, behind the right tokens (arXiv 2405.00263).

A later guess matters only where the earlier ones were right, so behind right tokens heads meet all that they meet in a
draft. Each step reads the state that the step before has made, and gradients pass through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.clover import CloverHeads, token_rows
from phasewise.speculation.heads.clover_layout import begin_as_last_layer
from phasewise.speculation.heads.layouts import untrained
from phasewise.train.heads.feature import BEGIN, FeatureKind, UnrolledAttention
from phasewise.train.heads.target import FrozenTarget, SeenBlock

NOISE = 0.01  # largest number that is added to the identity, of which queries and keys begin


@dataclass(frozen=True)
class CloverKind(FeatureKind):
    """An augmenting block that begins as the model's last layer, an attention decoder that begins by adding nothing,
    and MLPs that begin as the identity. With `regressive` False it never adds anything: a control, whose heads are
    Medusa's behind the block."""

    kind: str = field(default="clover", init=False)
    regressive: bool = True

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = untrained(self.kind, target.model, guesses=depth)
        assert isinstance(made, CloverHeads)
        begin(made, target)
        made.decoder.requires_grad_(self.regressive)
        return made.to(target.output.device)

    def guesses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each step in turn, [n, V], where it is learned."""
        assert isinstance(module, CloverHeads)
        (tap,), ids = self.taps(module), seen.block.ids
        x = seen.taps[tap]
        for i in range(module.config.layers):
            x = module.layer(i, x, UnrolledAttention(module, seen.block.positions).attend)
        state, rows = module.begun(x), token_rows(target.output)
        for step in range(min(module.steps, module.guesses)):
            later = F.pad(ids[:, 1 + step :], (0, 1 + step))  # what is said behind the end is never learned
            state = module.onward(state, F.embedding(later, rows))
            learned = state[:, : ids.shape[1] - 1 - step][seen.wanted(step)]
            yield target.unembed(module.read(step, learned))


@torch.no_grad()
def begin(heads: CloverHeads, target: FrozenTarget) -> None:
    """Initial weights with which all steps say, less surely, what the model would say, had its last layer run twice."""
    begin_as_last_layer(heads, target.model)
    heads.norm.weight.copy_(BEGIN * target.model.norm.weight.float())
    decoder, eye = heads.decoder, torch.eye(target.hidden)
    for linear in (decoder.query, decoder.key):
        nn.init.uniform_(linear.weight, -NOISE, NOISE)
        linear.weight += eye
        nn.init.zeros_(linear.bias)
    for parameter in decoder.value.parameters():
        nn.init.zeros_(parameter)
