"""Heads as EAGLE's and FSPAD's authors train them: on the model's own states alone, which what they pass on is to meet.

Position t reads the state at t with the token at t + 1. What it passes on is drawn to the state at t + 1 by a smooth L1
loss, and its logits to what the model says after that state by a soft cross-entropy, a tenth as heavy (arXiv
2401.15077). EAGLE passes on the row that its logits are made of; FSPAD has a row for each (arXiv 2408.15562).

Later guesses read what heads pass on, which they have not met in training. So noise on the states makes them used to
some difference. Other than in the papers, states and noise are measured by the states' root mean square: where that is
small, as pocket's 0.2, a smooth L1 loss would hardly count beside a cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.eagle import Eagle1
from phasewise.speculation.heads.layers import plain_layer
from phasewise.train.heads.feature import FeatureKind, UnrolledAttention, begin
from phasewise.train.heads.target import FrozenTarget, SeenBlock

FEATURE, LOGITS = 1.0, 0.1  # weights of the two losses
NOISE = 0.05  # largest difference to a state that is read, over the root mean square of states


@dataclass(frozen=True)
class AlignedKind(FeatureKind):
    """`fspad`, or `eagle1` with an MLP of `inner` numbers; 0: half as many as the model's width."""

    inner: int = 0

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        if not self.inner:
            return super().build(target, depth, vocabulary)
        made = Eagle1(replace(plain_layer(target.model, narrow=True), intermediate=self.inner))
        made.steps = depth
        begin(made, target)
        return made.to(target.output.device)

    def losses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> tuple[Tensor, Tensor, int]:
        """Sums over positions of both losses, of what is passed on and of the logits (nats), and how many positions
        there are: those whose next state is followed by a token that is learned."""
        ids, wanted, size = seen.block.ids, seen.wanted(0), state_size(target)
        embedded = target.embed(F.pad(ids[:, 1:], (0, 1)))  # what is said behind the end is never learned
        attend = UnrolledAttention(module, seen.block.positions).attend
        output = module(embedded, seen.h + size * noise(seen), attend)[:, :-1][wanted]  # [n, ...]
        state = seen.h[:, 1:][wanted]
        passed = F.smooth_l1_loss(module.passed_on(output) / size, state / size, reduction="none").mean(-1).sum()
        said = F.cross_entropy(module.logits(output, target.unembed), target.log_chances(state).exp_(), reduction="sum")
        return passed, said, len(state)


def state_size(target: FrozenTarget) -> float:
    """The root mean square of the model's states after its final norm."""
    return float(target.model.norm.weight.float().square().mean().sqrt())


def noise(seen: SeenBlock) -> Tensor:
    """Uniform numbers from -NOISE to NOISE, as many as states. What the text is decides which, so that a run that goes
    on where it stopped meets the same."""
    drawn = torch.Generator().manual_seed(int(seen.block.ids.sum()))
    return (NOISE * (2 * torch.rand(seen.h.shape, generator=drawn) - 1)).to(seen.h.device)
