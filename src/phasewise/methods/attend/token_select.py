"""All heads of a layer vote on which rows it reads, each as much as its softmax says (TokenSelect, arXiv 2411.02886).

Promises exact attention over the first rows, the last ones and `k` others per query row, the same for all heads of a
layer; the cache stays whole, so a later query may read any row. Prompts are dense, or choose chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods.attend._chunks import Chunks, Close, Sizes
from phasewise.methods.attend._reuse import Reuse
from phasewise.methods.attend._select import RowScorer, grouped, tally
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom, KernelScores, NamedSlots, Scores, TopK
from phasewise.step.read import Read
from phasewise.step.reference import IN_TEXT, rivals, selected, top_k
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

SOME = 256  # positions whose angles are worked out together


@dataclass(frozen=True)
class TokenSelect(Method):
    """A row reads the first `first` rows, the last `local` ones, itself included, and of those between the `k` that get
    most votes: the softmax of every query head over the rows between, summed over all heads. For the vote, keys are as
    they were before rotation and the query stands `local` positions behind all of them, so that distance says nothing.

    The first `dense_layers` layers read everything: not the paper's, but in the very first one equal tokens have equal
    keys before rotation, and what no vote can tell apart would be left to rounding.

    Keys as they were cost half as much as the KV itself, beside it and within its budget, and all of them are read for
    every choice: it saves values and their share of the arithmetic. Where heads keep different rows, each KV head votes
    for itself.

    With `theta` up to 1 a row uses the list of the row before it once more, while the cosine between its query and that
    of the row which made the list is at least `theta`: of a layer's query heads together, turned as for the vote. First
    and last rows are always its own; what has left these since, and is not on the list, goes unread until the next
    choice. Keys are then read for choices alone, of which the counter `choices` says how many there were. The paper
    takes 0.9; above 1, every row chooses anew. The first row after a prompt that has more to see than it may read makes
    the first list, so lists follow from the text, whatever is drafted, preempted or handed on; where rows were given
    up, those that are left of a list are read. A list and its query are booked beside the KV. Steps with such rows go
    in halves: the cosine is known only between a layer's queries and its attention.

    With a `chunk` above 0 (the paper takes 512) prompts choose as well: a chunk of so many positions by the mean of its
    queries, `k` rows for all of its rows, which read the last `local` rows before the chunk and those of the chunk up
    to themselves. Prompts then come in one piece, and nobody shares their prefixes. With positions "list", too, the
    rows that are read seem to stand one behind the other up to the row's own: texts go on beyond the model's context,
    prompts as well as answers, as long as a list and a chunk fit into it. The first `dense_layers` layers then read the
    first rows and the last ones, as many as a list has. Keys are turned for that after they were chosen, operator by
    operator, so such tokens are no whole native steps; with positions "text" they are.
    """

    k: int = 256
    first: int = 16
    local: int = 64
    dense_layers: int = 1
    theta: float = 2.0
    chunk: int = 0
    positions: Literal["text", "list"] = "text"

    paper: ClassVar[str] = "arXiv 2411.02886"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"k": 1 << 30}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"k": 96, "first": 8, "local": 24})
    tight: ClassVar[dict[str, object]] = {"k": 6, "first": 2, "local": 4}

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("first", 0), ("local", 1), ("dense_layers", 0), ("chunk", 0)):
            if getattr(self, name) < least:
                raise UserError(f"token_select: {name}={getattr(self, name)} must be at least {least}")
        if not self.theta >= -1:
            raise UserError(f"token_select: theta={self.theta} must be at least -1: a cosine, or above 1 for no reuse")
        if self.positions not in ("text", "list"):
            raise UserError(f"token_select: positions={self.positions!r}: choose text or list")
        if self.positions == "list" and not self.chunk:
            raise UserError("token_select: positions=list counts so in prompts, too: add chunk, of 512 in the paper")

    @property
    def traits(self) -> Traits:
        if self.chunk:  # its rows hang on all queries of a chunk
            return Traits("attend", own_attention=True, whole_prompts=True, shares_prefix=False)
        return Traits("attend", own_attention=True, phases=("decode",))

    def bind(self, host: Host) -> _TokenSelect | _Again | _Chunked:
        made = _TokenSelect(self, host.model, host.counters)
        tokens = made if self.theta > 1 else _Again(made)
        return _Chunked(made, tokens) if self.chunk else tokens


class _TokenSelect(RowScorer, Attend):
    name = "token_select"

    def __init__(self, knobs: TokenSelect, model: Model, counters: Counters) -> None:
        self.knobs, self.most, self.model = knobs, knobs.first + knobs.k + knobs.local, model
        self.counters, self.close = counters, Close(model) if knobs.positions == "list" else None
        self.reader = self.close or IN_TEXT
        self.kernel = KernelScores(
            (self.name, 0), joint=True, scaled=False, make=self._make, turned=Turning(model, knobs.local)
        )
        self.keys = TopK(
            self, self.most, self.most + 1, first=knobs.first, local=knobs.local, dense_layers=knobs.dense_layers,
            chose=self._chose,
        )  # fmt: skip
        self._plan = AttentionPlan(self.keys)

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if layer < self.knobs.dense_layers or end <= self.most:
            return 0
        return end * shape.heads * shape.dim * shape.dtype.itemsize

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span) else EVERYTHING

    def acts(self, span: Span) -> bool:
        return span.last + 1 > self.most

    def _chose(self, rows: int, layers: int, heads: int) -> None:
        self.counters.choices += rows * layers

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        return top_k(self.keys, reads, self.reader)

    # ---- how rows are ranked
    def width(self, dim: int) -> int:
        return dim

    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        """Keys as they were before rotation."""
        part = read.part
        at = part.positions[:, start:stop]
        return self.model.rotate(read.layer, part.keys(start, stop), -at)

    def _make(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """The same for rows in slots of their positions."""
        return self.model.rotate(layer, keys, -torch.arange(start, start + keys.shape[1], device=keys.device))

    def turned(self, read: Read) -> Tensor:
        """Queries as they vote, [R, hq, D]."""
        return self.model.rotate(read.layer, read.q, (self.knobs.local - read.q_positions)[:, None])

    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        """Of all heads together, [1, R, N], or by KV head where these do not see the same rows."""
        return self.ranked(self.turned(read), stands, among)

    @staticmethod
    def ranked(turned: Tensor, stands: Tensor, among: Tensor | None) -> Tensor:
        """Likewise, of these queries as they vote."""
        logits = grouped(turned, len(stands)) @ stands.float().mT[:, None]  # [h, G, R, N]
        if among is not None and len(among) > 1:
            return tally(logits, among)
        return tally(logits.flatten(0, 1)[None], among)


class _Again(Attend):
    """The same with lists that are used again. Who makes one is known only within a layer, so a function names them."""

    def __init__(self, made: _TokenSelect) -> None:
        knobs = made.knobs
        self.made, self.acts, self.beside = made, made.acts, made.beside
        self.reuse = Reuse(made.keys, made.name, made.turned, knobs.theta, made.reader)
        self.stayed, self.attend = self.reuse.stayed, self.reuse
        self._plan = AttentionPlan(NamedSlots(self.reuse.slots))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span) else EVERYTHING

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """A list, and the query that made it."""
        if layer < self.made.knobs.dense_layers or room.end <= self.made.most:
            return 0
        return self.made.model.config.heads * shape.dim * shape.dtype.itemsize + self.made.most * shape.heads * 4


class _Chunked(Attend):
    """The same with prompts that choose. `tokens`: what answers do, which say nothing as data where lists are close."""

    def __init__(self, made: _TokenSelect, tokens: _TokenSelect | _Again) -> None:
        knobs = made.knobs
        self.made, self.tokens, self.beside = made, tokens, made.beside
        sizes = Sizes(knobs.first, knobs.k, knobs.local, knobs.chunk)
        self.chunks = Chunks(sizes, made.close, made.turned, made.stand, made.ranked, knobs.dense_layers)
        self._plan = AttentionPlan(Custom(self.attend))

    def plan(self, span: Span) -> AttentionPlan:
        if self._prompts(span):
            return self._plan if self.chunks.acts(span.request.prompt_len) else EVERYTHING
        if self.made.close is None:
            return self.tokens.plan(span)
        return self._plan if self.tokens.acts(span) else EVERYTHING

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        return self.tokens.drawer(layer, shape, room) if isinstance(self.tokens, _Again) else 0

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        if isinstance(self.tokens, _Again):
            self.tokens.reuse.stayed(span, keep)

    def reach(self, context: int) -> int:
        """Rows seem no further apart than a list and a chunk are long."""
        sizes = self.chunks.sizes
        return ENDLESS if self.made.close and sizes.before + sizes.chunk <= context else context

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        late = self.made.close is not None and reads[0].layer < self.made.knobs.dense_layers
        prompts = {i: read for i, read in enumerate(reads) if self._prompts(read.span)}
        others = {i: read for i, read in enumerate(reads) if i not in prompts}
        out = {i: self.chunks(read) for i, read in prompts.items()}
        if reads[0].layer >= self.made.knobs.dense_layers:
            for span in {id(read.span): read.span for read in prompts.values()}.values():
                reads[0].step.count("choices", self.chunks.choices(span.positions[0], span.request.prompt_len))
        if others and late:
            out |= {i: self._last(read) for i, read in others.items()}
        elif others:
            out |= zip(others, self.tokens.attend([*others.values()]))
        return [out[i] for i in range(len(reads))]

    def _last(self, read: Read) -> Tensor | None:
        """The first rows and the last ones, where nothing is chosen."""
        if read.part.size[1] <= self.made.most:
            return None
        rows, votes = rivals(self.made.keys, read), read.part.positions.float()[:, None].expand(-1, len(read.q), -1)
        return self.made.reader.masked(read, selected(self.made.keys, rows, Scores(votes)))

    @staticmethod
    def _prompts(span: Span) -> bool:
        return span.positions[0] < span.request.prompt_len


class Turning:
    """What moves queries from their positions to `to`, for kernels; worked out for some positions at a time."""

    def __init__(self, model: Model, to: int) -> None:
        self.model, self.to = model, to
        self._known: dict[tuple[int | None, int], Tensor | None] = {}

    def __call__(self, layer: int, position: int) -> Tensor | None:
        kind, first = self.model.config.rope_of[layer], position // SOME * SOME
        if (kind, first) not in self._known:
            at = torch.arange(first, first + SOME, device=self.model.device)
            self._known[kind, first] = self.model.turning(layer, self.to - at)
        found = self._known[kind, first]
        return None if found is None else found[position - first]
