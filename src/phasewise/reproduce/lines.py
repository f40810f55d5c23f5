"""A control for LoopServe: as many lines and as many rows, but any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.methods.attend._lines import AttentionLines
from phasewise.methods.attend.loopserve import Looping, LoopServe
from phasewise.reproduce.controls import Control, drawn
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class RandomLines(Control):
    """attend: as many lines of a prompt as LoopServe reads, columns and diagonals, and as many rows for a token, chosen
    as often; the first column, own blocks and last rows among them, the others drawn at random per head."""

    of: LoopServe

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Looping:
        return _RandomLines(self.of, host.model.config)


class _RandomLines(Looping):
    ranks = False

    def lines(self, read: Read) -> AttentionLines:
        found, about = super().lines(read), (read.span.request.prompt[-8:], read.layer)
        return AttentionLines(*(self._drawn(kind, drawn(*about, i)) for i, kind in enumerate(found)))

    @staticmethod
    def _drawn(kind: Tensor, gen: torch.Generator) -> Tensor:
        """Draws as many in each head, the first among them."""
        ranks = torch.rand(kind.shape, generator=gen)
        ranks[:, 0] = 2.0
        order = ranks.argsort(1, descending=True).argsort(1)
        return order < kind.sum(1, keepdim=True)

    def votes(self, logits: Tensor, among: Tensor, about: tuple[Read, int]) -> Tensor:
        read, border = about
        return torch.rand(
            len(logits), logits.shape[-1], generator=drawn(read.span.request.prompt_len, read.layer, border)
        )
