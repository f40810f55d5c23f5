"""One layer picks the tokens that matter, the layers after it read those alone (TidalDecode, arXiv 2410.05076).

Promises that a decoded row reads everything in the first layers and the two that pick, and at most `k` rows and itself
in every other; and that of what was decoded like that, nothing stays in the cache for longer than `every` tokens: the
rows are computed once more, densely, and then equal those of a dense prefill. Prompts are dense, so the cache is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.lists import PickedChoice
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_listed
from phasewise.step.span import Span
from phasewise.verbs.host import Host

PLACE = 0.4  # of the depth, where the choice is made again: see `Tidal`


@dataclass(frozen=True)
class Tidal:
    """The first `dense` layers read everything. The next one does too, and picks for every row and KV head the `k`
    positions with the largest weight (over the query heads that share it); the row itself is read in any case. Layer
    `second` picks once more, and its choice replaces the first: 0 means two fifths of the depth, -1 never. That finds
    the largest share of what later layers would pick for themselves, of all layers and on both models it was tried on
    (scripts/tidal_layers.py; 64 of 768 rows, of which chance finds 0.08): 0.31 by layer 3 of the pocket model's 8 (0.24
    without a second choice), 0.475 by layer 12 of SmolLM2's 30. But answers may hang on one layer: of 48 needles in
    1,024 tokens the pocket model finds 9 without, 40 with second=3, 33 with 4, 44 with 5 and 15 with 6. So try it on
    each model (--needle).

    Rows that read less than everything leave keys and values that dense attention would not have left. After every
    `every` tokens those of them are computed again in one pass with the next token's row, all of which read everything:
    1 more row per token, counted as `recomputed`. 0 never does. Drafts end where such a pass is due. What a row reads
    follows from its position and the number of known tokens alone. Left out: evict methods that give rows up while
    decoding, and decode methods that finish tokens in blocks (refused, unless every=0).
    """

    k: int = 256
    dense: int = 2
    second: int = 0
    every: int = 32

    paper: ClassVar[str] = "arXiv 2410.05076"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"k": 1 << 30, "dense": 0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"k": 128})
    tight: ClassVar[dict[str, object]] = {"k": 6, "dense": 0, "second": 2, "every": 5}
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("dense", 0), ("second", -1), ("every", 0)):
            if getattr(self, name) < least:
                raise UserError(f"tidal: {name}={getattr(self, name)} must be at least {least}")
        if self.every == 1:
            raise UserError("tidal: every=1 computes each row twice at once: say 2 or more, or 0 for never")
        if 0 < self.second <= self.dense:
            raise UserError(
                f"tidal: second={self.second} must lie behind the layer that picks first, dense={self.dense}; or say 0 "
                "for the default, -1 for none"
            )

    def choosing(self, layers: int) -> tuple[int, ...]:
        """The layers that pick, of a model with so many. Raises UserError where no layer is left to read less."""
        second = max(self.dense + 1, round(PLACE * layers)) if self.second == 0 else self.second
        found = tuple(layer for layer in (self.dense, second) if 0 <= layer < layers)
        if self.second >= layers:
            raise UserError(f"tidal: second={self.second}, but the model has {layers} layers, numbered from 0")
        if self.dense + len(found) >= layers:
            raise UserError(
                f"tidal: of {layers} layers, {self.dense} read everything and {len(found)} pick: none is left to read "
                "less. Lower dense, or say second=-1"
            )
        return found

    def bind(self, host: Host) -> Picker:
        return Picker(self, self.choosing(host.model.config.layers))


@dataclass(slots=True)
class _Picked:
    """What a layer has picked for a span's rows: positions int64 [H, rows, K], -1 for none, of the rows `known`."""

    layer: int
    positions: Tensor
    known: Tensor  # bool [rows]


class Picker:
    """Runtime of Tidal. Nothing is remembered of a request: within a step, layers hand the picks on in its notes."""

    def __init__(self, knobs: Tidal, choosing: tuple[int, ...]) -> None:
        self.k, self.dense, self.every = knobs.k, knobs.dense, knobs.every
        self.choosing = choosing
        self.again = self._again if knobs.every else None
        self.until = self._until if knobs.every else None
        self._plan = AttentionPlan(Custom(self.attend, PickedChoice(knobs.k, choosing)))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self._acts(span) else EVERYTHING

    # ---- which rows read less
    def _acts(self, span: Span) -> bool:
        return span.last >= self._first(span.request)

    def _first(self, request: Request) -> int:
        """The first position whose row may read less: not that of a row which comes with those computed again."""
        settled = self._settled(request)
        return max(settled + (settled > request.prompt_len), self.k + 1)

    def _settled(self, request: Request) -> int:
        """Rows below this position are those of dense attention for good, when the last known token's row comes."""
        if not self.every:
            return 0
        decoded = request.known - 1 - request.prompt_len
        return request.prompt_len + decoded // self.every * self.every

    def _again(self, request: Request, computed: int) -> int:
        """How many of the rows below `computed` are to be computed once more, now that these are there."""
        before = self._settled(request)
        decoded = computed - request.prompt_len
        border = request.prompt_len + decoded // self.every * self.every
        return computed - before if border > before and border - 1 > self.k else 0

    def _until(self, request: Request) -> int | None:
        """The position that rows of the next step must not reach: those before it are computed again first."""
        border = self._settled(request) + self.every
        return border if border - 1 > self.k else None

    # ---- attention
    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        layer = reads[0].layer
        out: list[Tensor | None] = [None] * len(reads)
        if layer < self.dense:
            return out
        single: dict[int, Tensor] = {}  # of rows that see all before them, none missing
        for i, read in enumerate(reads):
            sparse = self._sparse(read)
            if sparse is None:
                continue
            if layer in self.choosing:
                self._choose(read)
                continue
            picked: _Picked | None = read.step.notes.get(self._key(read.span))
            if picked is None:  # the layers that pick are skipped
                continue
            part, mine = read.part, picked.positions
            if part.heads is not None:
                mine = mine[part.heads]
            alone = part.plain and part.n == read.span.positions[0] and read.mask() is None
            if alone and bool((mine >= 0).all()):
                own = mine.new_full((len(mine), 1, 1), part.n)
                single[i] = torch.cat((mine[:, :, : part.n], own), -1).int()
            else:
                out[i] = read.attend(self._select(read, mine, sparse & picked.known))
        if single:
            for i, result in zip(single, attend_listed([reads[i] for i in single], [*single.values()])):
                out[i] = result
        return out

    def _key(self, span: Span) -> tuple[int, int]:
        return id(self), id(span)

    def _sparse(self, read: Read) -> Tensor | None:
        """Which of the span's rows read less, bool [rows]; None: none of them does."""
        span, key = read.span, (id(self), id(read.span), "sparse")
        if key not in read.step.notes:
            least = self._first(span.request)
            positions = torch.tensor(list(span.positions), device=read.q.device)
            read.step.notes[key] = positions >= least if self._acts(span) else None
        found: Tensor | None = read.step.notes[key]
        return found

    def weights(self, read: Read) -> Tensor:
        """What each slot is worth to each row, [h, R, N]: the logarithm of its largest weight over the query heads."""
        logits = read.scores()  # [h, G, R, N]
        mask = read.mask()
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None], float("-inf"))
        return (logits - logits.logsumexp(-1, keepdim=True)).amax(1)

    def _choose(self, read: Read) -> None:
        """Note the positions that are worth most to each row, its own left out."""
        part = read.part
        heads, n = part.size
        read.count_keys(heads * n)  # once more than attention, which reads them for itself
        weights = self.weights(read)
        rows = torch.arange(weights.shape[1], device=weights.device)
        weights[:, rows, n - len(rows) + rows] = float("-inf")
        best = weights.topk(min(self.k, n), -1)
        found = part.positions.expand(heads, -1)[:, None].expand(-1, len(rows), -1).gather(2, best.indices)
        found = found.masked_fill(best.values == float("-inf"), -1)
        mine = rows if read.rows is None else torch.tensor(read.rows, device=rows.device)
        of_heads = torch.arange(heads, device=rows.device) if part.heads is None else part.heads
        picked = self._picked(read)
        width = min(found.shape[2], picked.positions.shape[2])
        picked.positions[of_heads[:, None], mine, :width] = found[..., :width]
        picked.known[mine] = True

    def _picked(self, read: Read) -> _Picked:
        """Where this layer notes what it picks; empty at first."""
        span, notes = read.span, read.step.notes
        picked: _Picked | None = notes.get(self._key(span))
        if picked is None or picked.layer != read.layer:
            heads = span.kv.layers[read.layer].shape.heads
            none = torch.full((heads, span.rows, min(self.k, max(span.positions))), -1, device=read.q.device)
            picked = _Picked(read.layer, none, torch.zeros(span.rows, dtype=torch.bool, device=none.device))
            notes[self._key(span)] = picked
        return picked

    def _select(self, read: Read, mine: Tensor, sparse: Tensor) -> Tensor:
        """What is read, bool [h, R, N]: by rows `sparse` what was picked for them and themselves, by others all."""
        part = read.part
        heads, n = part.size
        if read.rows is not None:
            mine, sparse = mine[:, read.rows], sparse[read.rows]
        rows = mine.shape[1]
        end = int(part.positions.max()) + 1
        listed = torch.zeros(heads, rows, end + 1, dtype=torch.bool, device=mine.device)
        listed.scatter_(2, torch.where((mine < 0) | (mine > end), end, mine), True)  # `end`: of none
        select = listed.gather(2, part.positions.expand(heads, -1)[:, None].expand(-1, rows, -1))
        every = torch.arange(rows, device=mine.device)
        select[:, every, n - rows + every] = True
        return select | ~sparse[None, :, None]
