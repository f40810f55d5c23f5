"""Rows that are looked at in more bits, the others in fewer (ZipCache, arXiv 2405.14256).

Promises that a row is put in a class by how much of the attention of those rows it got that were asked and saw it, that
no number is off by more than half a step of its row (and the rounding of the row's ends to 16 bits), that the newest
rows are read as the model made them, and that what a row reads depends on the prompt and on how many rows it sees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from random import Random
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.methods.store._classed import Classed
from phasewise.methods.store._saliency import BlockSaliency
from phasewise.model.config import ModelConfig
from phasewise.ops.native.weighed import Weighs
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.probe import received
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.step.trail import Trail
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits

SUMS, BLOCK = "zipcache", "zipcache block"  # drawers: of a prompt's slots; of the rows of the last block that is full


@dataclass(frozen=True)
class ZipCache(Method, Storing):
    """The share `important` of rows is kept in `high` bits a number, the rest in `low`: the same rows for all heads of
    a layer, by what a row gets of the attention of probe rows, divided by the number of those that see it: without
    that, early rows would win because more see them. Probes are the last share `probes` of the prompt's rows, and as
    many of those before, drawn without replacement by `seed` and the prompt's length alone.

    Values are rounded row by row: every channel is divided by the root of its largest magnitude in the prompt (`c`,
    fixed then), and each row of all heads is rounded between its own ends, in 32 bits for a row and 16 for a channel.
    Keys are rounded channel by channel (`keys="channel"`), between the ends that a channel has among the rows of one
    class in a block: 64 bits a channel for `gap` rows. With `keys="row"` they are rounded as values are. One bit says a
    row's class, so order is kept. Rows are packed `gap` at a time, counted from the text's first, so that a prompt's
    last rows wait for their block to fill. In a prompt classes are chosen among all its blocks together,
    later in each block, by the attention of its last row.

    A prompt's classes hang on rows all over it, so prompts share no prefix. 16 bits for both = rows as they are. In
    bfloat16, native kernels multiply queries and weights with packed rows as they lie, and find what a block's last row
    attends to on their way; they want heads of 32, 64 .. channels. Elsewhere blocks are opened before rows read them.
    Left out: classes per KV head (a row's ends are those of all its channels).
    """

    high: Literal[2, 4, 8, 16] = 4
    low: Literal[2, 4, 8, 16] = 2
    important: float = 0.6
    gap: int = 100
    probes: float = 0.05
    seed: int = 0
    keys: Literal["channel", "row"] = "channel"

    paper: ClassVar[str] = "arXiv 2405.14256"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"high": 16, "low": 16}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"low": 4}, {}, {"important": 0.3})
    tight: ClassVar[dict[str, object]] = {"gap": 8, "important": 0.5}

    def __post_init__(self) -> None:
        if (self.high == 16) != (self.low == 16) or self.low > self.high:
            raise UserError(
                f"zipcache: high={self.high} and low={self.low}: choose high at least as large as low, and 16 for both "
                "or for neither (rows as they are)"
            )
        if not 0 <= self.important <= 1:
            raise UserError(f"zipcache: important={self.important} must be between 0 and 1, a share of the rows")
        if self.gap < 1:
            raise UserError(f"zipcache: gap={self.gap} must be at least 1 (rows that are packed together)")
        if not 0 < self.probes <= 1:
            raise UserError(f"zipcache: probes={self.probes} must be above 0 and at most 1, a share of the prompt")

    @property
    def raw(self) -> bool:
        return self.high == 16

    def format(self) -> RowFormat:
        if self.raw:
            return Raw()
        return Classed(self.high, self.low, self.gap, round(self.important * self.gap), self.keys == "channel")

    @property
    def traits(self) -> Traits:
        return Traits(
            "store", fills=("evict",), shares_prefix=False, packs_blocks=not self.raw, ranks_rows=not self.raw
        )

    def bind(self, host: Host) -> Saliency:
        return Saliency(self, host.model.config)


class Saliency(BlockSaliency):
    """The evict method beside the store: it says how much rows matter.

    A request's drawers hold, for each slot of a prompt, the sum of what probes gave it; and later, for the rows of a
    block that has just filled, what its last row gave them. Both are noted along the path of rows that stay.
    """

    def __init__(self, knobs: ZipCache, config: ModelConfig) -> None:
        super().__init__(BLOCK, knobs.gap, config)
        self.knobs, self.attention = knobs, config.attention
        self.trail = Trail(SUMS)
        self._plan = AttentionPlan(record=Record(self.take, self.weigh))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        return 0 if self.knobs.raw else 4 * max(room.rows, self.knobs.gap)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span) else EVERYTHING

    def acts(self, span: Span) -> bool:
        return bool(not self.knobs.raw and self._asked(span))

    def _asked(self, span: Span) -> list[int]:
        """The rows of a span that are asked what they attend to."""
        if span.request.prefilling:
            every, first = probed(span.request.prompt_len, self.knobs.probes, self.knobs.seed), span.positions[0]
            mine = slice(bisect_left(every, first), bisect_right(every, span.positions[-1]))
            return [position - first for position in every[mine]]
        return self.lasts(span)

    def take(self, read: Read) -> None:
        """Note what the rows of a read that are asked attend to."""
        span = read.span
        if not span.request.prefilling:
            self.note_lasts(read)
            return
        rows = self._asked(span)
        assert read.rows is None, "all rows run this layer"
        before, state = self.trail.before(read), received(read, rows).sum(0, keepdim=True)
        if before is not None:
            state[:, : before.shape[1]] += before
        self.trail.note(read, [span.rows - 1], state[:, None])

    def weigh(self, span: Span) -> Weighs | None:
        return self.weighs_last(span) if self.acts(span) else None

    def of_prompt(self, span: Span, keep: int | Sequence[int]) -> None:
        self.trail.stayed(span, keep)

    def after_prompt(self, request: Request) -> bool:
        return bool(request.state.pop(SUMS, None))  # its classes have been chosen

    def saliency(self, request: Request, layer: int, start: int, stop: int) -> Tensor:
        if stop > request.prompt_len:
            later: Tensor = request.state[BLOCK][layer]
            return later
        sums = self.trail.layers(request)[layer]
        assert isinstance(sums, Tensor)
        return sums[0, start:stop] / self.seeing(request.prompt_len, layer)[start:stop].to(sums.device)

    def seeing(self, n: int, layer: int) -> Tensor:
        """The number of a prompt's probes that see each of its rows, at least one: a layer's own window may hide
        some."""
        at, rows = torch.tensor(probed(n, self.knobs.probes, self.knobs.seed)), torch.arange(n)
        seeing = len(at) - torch.searchsorted(at, rows)
        if (window := self.attention[layer].window) is not None:
            seeing -= len(at) - torch.searchsorted(at, rows + window)
        return seeing.clamp(min=1)


@lru_cache(maxsize=256)
def probed(n: int, share: float, seed: int) -> tuple[int, ...]:
    """The rows of a prompt of `n` tokens that are asked, increasing: its last ones, and others before them."""
    older = n - ceil(share * n)
    return (*sorted(Random(f"{seed} {n}").sample(range(older), min(older, ceil(share * n)))), *range(older, n))
