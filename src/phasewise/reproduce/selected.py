"""Selectors that must lose: as many rows as the method reads, drawn at random (see controls.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.methods.attend._select import listing, share
from phasewise.methods.attend.infllm import InfLLM
from phasewise.methods.attend.instinfer import InstInfer, _Index, _InstInfer
from phasewise.methods.attend.tidal import Picker, Tidal
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.ops.native.choice import Rest
from phasewise.reproduce.controls import Control, drawn
from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class RandomPages(Control):
    """attend: as many pages as Quest reads, its own among them, the others drawn at random per head."""

    page: int
    budget: int
    dense_layers: int
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._one(read) for read in reads]

    def _one(self, read: Read) -> Tensor:
        part, most = read.part, max(self.budget, 3 * self.page)
        heads, n = part.size
        if read.layer < self.dense_layers or n <= most:
            return read.attend()
        assert part.plain and part.n == read.span.positions[0] and read.mask() is None, "made for plain decoding"
        own = part.n // self.page * self.page
        gen = drawn(read.span.request.prompt_len, part.n, read.layer)
        pages = torch.rand(heads, own // self.page, generator=gen).topk((most - n + own) // self.page).indices
        old = (pages[:, :, None] * self.page + torch.arange(self.page)).flatten(1)
        return read.attend_rows(torch.cat((old, torch.arange(own, n).expand(heads, -1)), 1))


@dataclass(frozen=True)
class RandomChunks(Control):
    """attend: as TokenSelect with chunks, but the rows that a prompt's chunk chooses are drawn at random."""

    of: TokenSelect
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    shares_prefix: ClassVar[bool] = False

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
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def bind(self, host: Host) -> Picker:
        return _RandomPicks(self.of, self.of.choosing(host.model.config.layers))


class _RandomPicks(Picker):
    def __init__(self, knobs: Tidal, choosing: tuple[int, ...]) -> None:
        super().__init__(knobs, choosing)
        self._plan = AttentionPlan(Custom(self.attend))  # kernels draw nothing

    def weights(self, read: Read) -> Tensor:
        heads, n = read.part.size
        about = read.span.request.prompt_len, read.layer
        rows = [torch.rand(heads, n, generator=drawn(*about, at)) for at in read.q_positions.tolist()]
        return torch.stack(rows, 1)


@dataclass(frozen=True)
class RandomTokens(Control):
    """attend: the first rows, the last ones, and others drawn at random per head, `most` in all (a share up to 1)."""

    first: int
    local: int
    most: float
    dense_layers: int
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._one(read) for read in reads]

    def _one(self, read: Read) -> Tensor:
        part = read.part
        heads, n = part.size
        most = share(self.most, n)
        if read.layer < self.dense_layers or n <= most:
            return read.attend()
        assert part.plain and part.n == read.span.positions[0] and read.mask() is None, "made for plain decoding"
        gen, own = drawn(read.span.request.prompt_len, part.n, read.layer), n - self.local
        votes = torch.rand(heads, own - self.first, generator=gen)
        return read.attend_rows(listing(votes, self.first, most - self.first - self.local, own, n)[:, 0].long())


@dataclass(frozen=True)
class RandomKept(Control):
    """attend: as many rows as InstInfer reads, its own among them, the others drawn at random per head. They count for
    the share of weight that they are thought to have, and the mean of all values stands for the rest, as there."""

    of: InstInfer
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def bind(self, host: Host) -> _InstInfer:
        return _RandomKept(self.of, host)


class _RandomKept(_InstInfer):
    def __init__(self, knobs: InstInfer, host: Host) -> None:
        super().__init__(knobs, host)
        self._plan = AttentionPlan(Custom(self.attend))  # kernels draw nothing

    def _ranked(self, read: Read, votes: Tensor) -> Tensor:
        return torch.rand(votes.shape, generator=drawn(read.span.request.prompt_len, read.part.n, read.layer))

    def _lists(self, alone: Mapping[int, tuple[Read, _Index]]) -> dict[int, tuple[Tensor, Rest | None]]:
        found: dict[int, tuple[Tensor, Rest | None]] = {}
        for i, (read, index) in alone.items():
            read.count_bytes(index.bytes_of(self.most, read.part.n))
            index.add(read.part)
            found[i] = self._list(read, index)
            self._whole_groups(read, found[i][0])
        return found


@dataclass(frozen=True)
class RandomBlocks(InfLLM):
    """attend: as many blocks as InfLLM v2 reads, first and local ones among them, the others drawn at random per head,
    for every row anew."""

    @property
    def choice(self) -> None:  # type: ignore[override]
        """Kernels draw nothing."""

    def _votes(self, read: Read, means: Tensor) -> Tensor:
        heads, blocks = len(means), read.span.last // self.block + 1
        rows = [torch.rand(heads, blocks, generator=drawn(read.layer, at)) for at in read.q_positions.tolist()]
        return torch.stack(rows, 1)
