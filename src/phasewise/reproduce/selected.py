"""Selectors that must lose: as many rows as the method reads, drawn at random (see controls.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.methods.attend.infllm import BlockMeans, InfLLM
from phasewise.methods.attend.instinfer import InstInfer, SparFRuntime
from phasewise.methods.attend.tidal import Picker, Tidal
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.reproduce.controls import Control, drawn
from phasewise.step.plan import AttentionPlan, Rivals, Scores, TopK
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits


class Drawn:
    """A scorer of single rows that draws its scores, per head."""

    kernel = None

    def index(self, read: Read) -> None:
        """Nothing lies beside the rows."""

    def scores(self, read: Read, index: None, rows: Rivals) -> Scores:
        assert rows.single, "made for plain decoding"
        among = (rows.rivals if rows.number is None else rows.number > 0)[0, 0]  # units that may be chosen
        gen = drawn(read.span.request.prompt_len, read.part.n, read.layer)
        scores = torch.zeros(read.part.size[0], 1, len(among))
        scores[:, 0, among] = torch.rand(len(scores), int(among.sum()), generator=gen)
        return Scores(scores)


@dataclass(frozen=True)
class RandomPages(Control, Attend):
    """attend: as many pages as Quest reads, its own among them, the others drawn at random per head."""

    page: int
    budget: int
    dense_layers: int
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))

    @cached_property
    def _plan(self) -> AttentionPlan:
        most = max(self.budget, 3 * self.page)
        return AttentionPlan(TopK(Drawn(), most, most + 1, unit=self.page, dense_layers=self.dense_layers))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan


@dataclass(frozen=True)
class RandomChunks(Control):
    """attend: as TokenSelect with chunks, but the rows that a prompt's chunk chooses are drawn at random."""

    of: TokenSelect

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Any:
        made: Any = self.of.bind(host)
        made.chunks.ranked = self._votes
        return made

    @staticmethod
    def _votes(turned: Tensor, stands: Tensor, among: Tensor | None) -> Tensor:
        return torch.rand(1, len(turned), stands.shape[1], generator=drawn(stands.shape[1]))


@dataclass(frozen=True)
class RandomPicks(Control):
    """attend: as many rows in the same layers as TidalDecode reads, its own among them, the others drawn at random per
    head; they are computed once more as often."""

    of: Tidal

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Picker:
        of = self.of.chosen(host)
        return Picker(of, of.choosing(host.model.config.layers), _drawn_weights)


def _drawn_weights(read: Read) -> Tensor:
    heads, n = read.part.size
    about = read.span.request.prompt_len, read.layer
    return torch.stack([torch.rand(heads, n, generator=drawn(*about, at)) for at in read.q_positions.tolist()], 1)


@dataclass(frozen=True)
class RandomTokens(Control, Attend):
    """attend: the first rows, the last ones, and others drawn at random per head, `most` in all (a share up to 1)."""

    first: int
    local: int
    most: float
    dense_layers: int
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))

    @cached_property
    def _plan(self) -> AttentionPlan:
        keys = TopK(Drawn(), self.most, 1, first=self.first, local=self.local, dense_layers=self.dense_layers)
        return AttentionPlan(keys)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan


@dataclass(frozen=True)
class RandomKept(Control):
    """attend: as many rows as InstInfer reads, its own among them, the others drawn at random per head. They count for
    the share of weight that they are thought to have, and the mean of all values stands for the rest, as there."""

    of: InstInfer

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> SparFRuntime:
        return SparFRuntime(self.of, host, _drawn_votes)


def _drawn_votes(read: Read, votes: Tensor) -> Tensor:
    return torch.rand(votes.shape, generator=drawn(read.span.request.prompt_len, read.part.n, read.layer))


@dataclass(frozen=True)
class RandomBlocks(InfLLM):
    """attend: as many blocks as InfLLM v2 reads, first and local ones among them, the others drawn at random per head,
    for every row anew."""

    @property
    def scorer(self) -> BlockMeans:
        return _DrawnBlocks(self.block)


class _DrawnBlocks(BlockMeans):
    def __init__(self, block: int) -> None:
        super().__init__(block)
        self.kernel = None  # kernels draw nothing

    def votes(self, read: Read, means: Tensor) -> Tensor:
        heads, blocks = len(means), read.span.last // self.block + 1
        rows = [torch.rand(heads, blocks, generator=drawn(read.layer, at)) for at in read.q_positions.tolist()]
        return torch.stack(rows, 1)
