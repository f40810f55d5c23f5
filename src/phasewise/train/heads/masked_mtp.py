"""Masked multi-token prediction as it is trained: mask rows behind the positions of a text, through the model's own
frozen layers, beside which they alone have low-rank weights (arXiv 2507.11851).

Mask i of position t learns what the model says of the token at t + 2 + i in two ways: by the model's own output matrix,
and by the sampler, which reads the right token before that one as well. So a sampler's guess is learned behind right
guesses, as it counts; it learns from the model's own states as well. A third loss draws the mask's state to the one
that the model itself has there. The paper sums the three; here the third is a mean square over that of the model's
states, which in pocket are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.model.lowrank import Deltas
from phasewise.speculation.heads.masked_mtp import MaskedHeads
from phasewise.speculation.heads.masked_mtp_layout import RANK, masked_settings, usual_masked
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.aligned import state_size
from phasewise.train.heads.pseudo_rows import capped_logits, chosen, pseudo_states, where_learned
from phasewise.train.heads.target import FrozenTarget, SeenBlock


class MaskLosses(NamedTuple):
    """Of one mask, summed over its `n` positions: cross-entropies of its own logits and of the sampler's (nats),
    and the square of its state's distance to the model's own, over the mean square of such states."""

    plain: Tensor
    sampled: Tensor
    distance: Tensor
    n: int


@dataclass(frozen=True)
class MaskedKind:
    """Masks, as many as depths, with low-rank weights of `rank` and a sampler. `sampler`: whether it makes the guesses;
    otherwise they are those of the model's output matrix alone, which it would improve."""

    rank: int = RANK
    sampler: bool = True
    every: int = 3  # a position costs as many rows of all layers as there are masks, forth and back

    @property
    def own_output(self) -> bool:
        return False

    def taps(self, module: MaskedHeads) -> tuple[int, ...]:
        return tuple(range(module.layers - 1))

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> MaskedHeads:
        if target.model.dtype != torch.float32:
            raise UserError("masked_mtp learns through the model's own layers, which is done in float32 alone: leave "
                            "out --dtype")  # fmt: skip
        made = usual_masked(target.model, depth, self.rank)
        torch.nn.init.constant_(made.sampler.scale, state_size(target))  # logits begin as large as the model's
        return made.to(target.output.device)

    @torch.no_grad()
    def begin(self, module: MaskedHeads, target: FrozenTarget, texts: TokenBlock) -> None:
        """Masks begin as embeddings of the tokens that the texts have most often."""
        said = texts.targets[texts.targets >= 0].bincount(minlength=target.vocab)
        frequent = said.argsort(descending=True, stable=True)[: module.depth]
        module.masks[: len(frequent)] = target.embed(frequent)

    def vocabulary(self, module: MaskedHeads) -> Tensor | None:
        return None

    def guesses(self, module: MaskedHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits after each mask in turn, [n, V], where it is learned."""
        said = self.states(module, target, seen)
        for head in range(module.depth):
            state = where_learned(seen, said, head)
            yield capped_logits(target, self.sampled(module, target, seen, head, state) if self.sampler else state)

    def states(self, module: MaskedHeads, target: FrozenTarget, seen: SeenBlock) -> Tensor:
        """The model's states after all masks of the positions that are learned, [texts, chosen, masks, d]."""
        places = torch.arange(seen.h.shape[1])[chosen(seen)]
        rows = module.masks.expand(len(seen.h), len(places), -1, -1)
        return pseudo_states(target, seen, rows, 0, Deltas([(module.low_rank, None)]))

    def sampled(
        self, module: MaskedHeads, target: FrozenTarget, seen: SeenBlock, head: int, state: Tensor
    ) -> Tensor:  # fmt: skip
        """What the sampler makes of a mask's states [n, d] behind the right tokens, [n, d]."""
        sampled: Tensor = module.sampler(target.embed(seen.path(head)[:, -1]), state)
        return sampled

    def losses(
        self, module: MaskedHeads, target: FrozenTarget, seen: SeenBlock, head: int, said: Tensor, wanted: Tensor
    ) -> MaskLosses:
        """The losses of one mask. said: see `states`; wanted [n, V]: the model's own probabilities there."""
        state = where_learned(seen, said, head)
        own = seen.h[:, head + 1 :][seen.wanted(head)]
        plain, sampled = (
            F.cross_entropy(capped_logits(target, each), wanted, reduction="sum")
            for each in (state, self.sampled(module, target, seen, head, state))
        )
        distance = (state - own).square().mean(-1).sum() / state_size(target) ** 2
        return MaskLosses(plain, sampled, distance, len(state))

    def at_real_rows(self, module: MaskedHeads, target: FrozenTarget, seen: SeenBlock) -> tuple[Tensor, int]:
        """The sampler's cross-entropy behind the model's own states (nats), summed over all positions, and their
        number. It reads a row's token and its state, and says what the model says."""
        known = seen.block.targets >= 0
        state = seen.h[known]
        sampled = capped_logits(target, module.sampler(target.embed(seen.block.ids[known]), state))
        return F.cross_entropy(sampled, target.log_chances(state).exp_(), reduction="sum"), len(state)

    def config(self, module: MaskedHeads, target: FrozenTarget) -> dict[str, Any]:
        return masked_settings(module, target.model)

    def tensors(self, module: MaskedHeads) -> dict[str, Tensor]:
        return module.state_dict()
