"""The loop of evictors that score rows as they go: every row's attention changes the scores, and the lowest leaves.

A row at position t reads the rows that are left to it and itself; its weights change their scores; and if more are left
than the budget, the lowest are given up, before the next row. So what a row sees hangs on all rows before it: those of
one span go one after another (siblings of a draft tree together), each on its own path. While a prompt is computed
nothing is given up; when it is complete, all that exceeds the budget is.

Rows that are given up are hidden at once and dropped in lots, since dropping moves a layer's rows: after a step's
commit a head holds fewer than budget + lot rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import ROUND
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods.evict._allot import UNIFORM, Spread, allot
from phasewise.methods.evict._piece import GONE, Ahead, ScorePiece
from phasewise.ops.native.weighed import Ranking, Weighs
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.probe import Shaped, logits, probe
from phasewise.step.read import Read, View
from phasewise.step.span import Span
from phasewise.step.trail import State, Trail, ends
from phasewise.verbs.evict import Evict

if TYPE_CHECKING:
    from phasewise.model.config import ModelConfig

STAYS = float("inf")  # ranks above all that may leave


def share(of: float, rows: int) -> int:
    """Up to 1 a share of so many rows, above a number of its own."""
    return int(of * rows) if of <= 1 else int(of)


class KeptBudget(NamedTuple):
    """Rows that are left to each head on average, of which the `recent` last are never given up."""

    rows: int
    recent: int


@dataclass(frozen=True)
class Way:
    """What tells the methods apart. `sums`: a row's score is what it has got of all queries, else what the last one
    gave it; `together`: it is the mean over all heads, which keep the same rows; `mean`: it counts per query that could
    have seen the row; `shaped`: what is made of the logits before the softmax that scores."""

    name: str
    sums: bool = True
    together: bool = False
    mean: bool = False
    shaped: Shaped | None = None
    lot: int = 32
    spread: Spread = UNIFORM


def check_lot(name: str, lot: int) -> None:
    if lot < 1:
        raise UserError(f"{name}: lot={lot} must be at least 1: rows that are dropped together")


class Running(Evict):
    """A runtime of the verb evict. Its state is a score for every slot that is held (step/trail.py)."""

    observes = 1

    def __init__(self, way: Way, config: ModelConfig, budget: Callable[[int], KeptBudget]) -> None:
        """`budget`: what is left of a text that began with a prompt of so many rows."""
        self.way, self.config, self.layers, self.budget = way, config, config.layers, budget
        self.trail = Trail(way.name)
        self.piece = f"{way.name}.piece"  # the drawer of a Piece
        self.weighable = way.shaped is None or way.shaped.row is not None
        self._plan = AttentionPlan(record=Record(self.take, self.weigh))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Scores; and, for tokens that are weighed, which of them are gone, and what a token attends to."""
        kept, queries = 1 if self.way.together else shape.heads, 0 if layer else self.config.heads
        if room.prompt or not self.weighable:
            return room.rows * 4 * kept
        slack = ROUND if self.way.spread.heads == "ada" else 0  # other layers may need some more to work in
        return room.rows * (5 * kept + 4 * shape.heads) + (room.rows + slack) * 4 * queries

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span) else EVERYTHING

    def acts(self, span: Span) -> bool:
        """Whether rows of this span are scored, or some that they see may have been given up."""
        request = span.request
        if request.limit <= self.budget(request.prompt_len).rows:
            return False
        return self.way.sums or not request.prefilling or span.positions[-1] >= request.prompt_len - 1

    def take(self, read: Read) -> View | None:
        """Score the slots that a read's rows look at. -> what is left to each row, if that is not all"""
        if not read.span.request.prefilling:
            if read.span.trail is not None:
                read.span.trail.pop(self.piece, None)
            return self._decode(read)
        if self.way.sums:
            self.trail.add(read, range(read.q.shape[0]), self.way.shaped)
        else:
            lasts = [stop - 1 for stop in ends(read)]
            self.trail.note(read, lasts, self._got(probe(read, lasts, self.way.shaped)[:, :, :, None]))
        return None

    def _got(self, weights: Tensor) -> Tensor:
        """What slots get from the weights [h, G, U, B, N] of U times B rows that look together: [h | 1, U, N]."""
        weights = weights.sum(3) if self.way.sums else weights[:, :, :, -1]
        return weights.mean((0, 1))[None] if self.way.together else weights.sum(1)

    # ---- rows that come after the prompt
    def _decode(self, read: Read) -> View | None:
        before, rows, n = self.trail.before(read), read.q.shape[0], read.part.n
        assert before is not None, "the prompt's rows have left no scores"
        found = logits(read, range(rows))  # [h, G, R, N]
        if self.way.shaped is not None:
            found = self.way.shaped.of(read, found, range(rows))
        own, limits = read.seen(range(rows)), self._limits(read)
        heads, levels = before.shape[0], _levels(read)
        count = sum(len(level.steps) for level in levels)
        after = before.new_full((heads, count + 1, read.part.size[1]), GONE)  # after no step, and after each
        after[:, 0, :n] = before
        sees = torch.zeros(heads, rows, read.part.size[1], dtype=torch.bool, device=found.device)
        for steps, mine, parents in levels:
            scores = after[:, parents]  # [h', U, N]
            scores.scatter_(2, (n + mine).expand(heads, -1, -1), 0.0)
            alive = scores > GONE
            sees[:, mine] = alive[:, :, None]
            seen = alive[:, None, :, None] if own is None else alive[:, None, :, None] & own[:, None, mine]
            got = self._got(found[:, :, mine].masked_fill(~seen, GONE).softmax(-1))
            scores = scores + got if self.way.sums else got.masked_fill(~alive, GONE)
            after[:, steps] = self._give_up(scores, limits, read, read.q_positions[mine[:, -1]])
        lasts = [row for level in levels for row in level.rows[:, -1].tolist()]
        order = [step for level in levels for step in level.steps.tolist()]
        self.trail.note(read, lasts, after[:, order])
        hidden = ~sees if own is None else own & ~sees
        return View(sees) if bool(hidden.any()) else None

    def _limits(self, read: Read) -> Tensor:
        """Rows that each head of a read may hold on to, [h | 1, 1]."""
        most, heads = self._most(read.span.request, read.layer), read.part.heads
        mine = most if heads is None else [most[head] for head in heads.tolist()]
        return torch.tensor(mine, device=read.q.device)[:, None]

    def _most(self, request: Request, layer: int) -> list[int]:
        """Rows that each head of a layer, or all of them, may hold on to."""
        rows, state = self.rows(request.prompt_len, layer), self.trail.layers(request)[layer]
        if self.way.spread.heads == "ada" and rows < request.prompt_len:
            alive = [int((own > GONE).sum()) for own in state]
            if sum(alive) == rows * len(alive):  # each goes on with what it got when the prompt was complete
                return alive
        return [rows] * len(state)

    def rows(self, prompt: int, layer: int) -> int:
        """Rows that are left to the heads of a layer, on average."""
        rows, recent = self.budget(prompt)
        if rows >= prompt:
            return rows
        return max(1, recent + self.way.spread.of(rows - recent, prompt - recent, layer, self.layers))

    def _give_up(self, scores: Tensor, limits: Tensor, read: Read, at: Tensor) -> Tensor:
        """Scores [h, U, N] without the lowest, until no head has more than its limit, after rows at `at` [U]. Of equal
        ones the later leaves."""
        alive = scores > GONE
        over = alive.sum(-1) > limits  # [h, U]
        if not bool(over.any()):
            return scores
        recent = self.budget(read.span.request.prompt_len).recent
        positions, at = read.part.positions[:, None], at[:, None]
        rivals = alive & (positions <= at - recent)
        ranks = self._ranks(scores, positions, at).masked_fill(~rivals, STAYS)
        return _without_lowest(scores, ranks, alive.sum(-1, keepdim=True) - limits[..., None])

    def _ranks(self, scores: Tensor, positions: Tensor, at: Tensor | int) -> Tensor:
        """What rows are ranked by after a row at `at`."""
        return scores / (at + 1 - positions).clamp_min(1) if self.way.mean else scores

    # ---- a single row, in a native step that finds the weights on its way
    def weigh(self, span: Span) -> Weighs | None:
        """The room in which a native step weighs a span's only row; None: it is taken layer by layer."""
        if not self.weighable or span.request.prefilling:
            return None
        own = self._piece(span.request)
        if own is None or own.full:
            own = self._gather(span)
        if own is None:
            return None
        shaped = self.way.shaped
        doubt = None if shaped is None or shaped.row is None else shaped.row(span)
        return Weighs(own.room, own.n, partial(self._told, span, own), doubt)

    def _piece(self, request: Request) -> ScorePiece | None:
        """What a request's scores lie in, if they still do."""
        own: ScorePiece | None = request.state.get(self.piece)
        return own if own is not None and own.of(self.trail.layers(request)) else None

    def _gather(self, span: Span) -> ScorePiece | None:
        """One that its scores lie in from now on."""
        request, kv = span.request, span.request.kv
        if kv is None or not self.acts(span):
            return None
        states = self.trail.layers(request)
        if any(layer not in states for layer in range(self.layers)):
            return None
        found = {layer: states[layer] for layer in range(self.layers)}
        most = [own for layer in found for own in self._most(request, layer)]
        recent, shared = self.budget(request.prompt_len).recent, self.config.heads if self.way.together else 0
        spare = max(1, min((slab.buffer.cap - slab.n for layer in kv.layers for slab in layer.slabs), default=1))
        idle = max(_held(state) - self.rows(request.prompt_len, layer) for layer, state in found.items())
        settled = all(layer.slabs and layer.slabs[0].positions is not None for layer in kv.layers)
        ahead = Ahead(spare, self.way.lot - idle, settled)
        ranking = Ranking(most, recent, self.way.sums, shared)
        own = ScorePiece(list(found.values()), ranking, (self.config.kv_heads, self.config.heads), ahead)
        request.state[self.trail.name], request.state[self.piece] = found, own
        return own

    def _told(self, span: Span, own: ScorePiece) -> None:
        others = {name: each for name, each in (span.trail or {}).items() if name != self.trail.name}
        span.trail = {**others, self.piece: own}

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        own: ScorePiece | None = (span.trail or {}).pop(self.piece, None)
        if own is None:
            self.trail.stayed(span, keep)
        elif keep:
            places = 0
            if self.way.mean:
                flat = span.kv.flat(span.walk)
                assert flat is not None, "rows of a native step lie as one finds them"
                places = flat.places
            span.request.state[self.trail.name] = own.add(span.positions[0], places)

    # ---- what is really dropped
    def places(self, layer: int, shape: KVShape) -> int:
        return 1 if self.way.together else shape.heads

    def due(self, request: Request) -> bool:
        if request.prefilling:
            return False
        own = self._piece(request)
        if own is not None and own.settled:
            return own.n >= own.due
        alike = self.rows(request.prompt_len, 0) if self.way.spread.layers == "uniform" else None
        for layer, state in self.trail.layers(request).items():
            if self._due(request, layer, state, self.rows(request.prompt_len, layer) if alike is None else alike):
                return True
        return False

    def _due(self, request: Request, layer: int, state: State, rows: int) -> bool:
        assert request.kv is not None
        idle = _held(state) - rows
        if idle <= 0 or idle >= self.way.lot:
            return idle > 0
        slabs = request.kv.layers[layer].slabs
        return self.budget(request.prompt_len).rows < request.prompt_len and bool(slabs) and slabs[0].positions is None

    def keep(self, request: Request, layer: int) -> Tensor | list[Tensor] | None:
        assert request.kv is not None
        if (own := self._piece(request)) is not None and (left := self._stay(request, own, layer)) is not None:
            return left
        state, parts = self.trail.layers(request).get(layer), request.kv.layers[layer].read()
        if state is None or not parts:  # a layer that no row will run again
            self.trail.drop(request, layer)
            return None
        rows = self.rows(request.prompt_len, layer)
        whole = all(bool((own > GONE).all()) for own in state)
        if whole and (not isinstance(state, Tensor) or state.shape[1] <= rows):
            return None
        slots: Tensor | list[Tensor]
        if whole and isinstance(state, Tensor):  # the prompt is complete
            recent, last = self.budget(request.prompt_len).recent, request.computed - 1
            older = int((parts[0].positions[0] <= last - recent).sum())
            ranks = self._ranks(state[:, :older], parts[0].positions[:, :older], last)
            slots = allot(ranks, rows - recent, parts[0].n - older, self.way.spread)
        else:
            slots = [(own > GONE).nonzero()[:, 0] for own in state]
            if len({len(each) for each in slots}) == 1:
                slots = torch.stack(slots)
        if self.way.together:
            slots = slots[0]
        self.trail.kept(request, layer, slots)
        request.state.pop(self.piece, None)
        return slots

    def _stay(self, request: Request, own: ScorePiece, layer: int) -> Tensor | None:
        """`keep`, of all layers at once when the first is asked."""
        if layer == 0 and (scores := own.drop()) is not None:
            request.state[self.trail.name] = scores
        if not own.staying:
            return None
        slots = own.staying[layer]
        if layer == self.layers - 1:
            own.staying = ()
        return slots[0] if self.way.together else slots


def _held(state: State) -> int:
    """Slots of a head, on average."""
    return state.shape[1] if isinstance(state, Tensor) else sum(len(own) for own in state) // len(state)


def _without_lowest(scores: Tensor, ranks: Tensor, surplus: Tensor) -> Tensor:
    """Scores [.., N] without those that rank lowest, as many as the `surplus` [.., 1] says; of equal ones the later
    leaves. Of what ranks [.., up to N] at STAYS nothing leaves. Both are written into."""
    order = torch.arange(ranks.shape[-1], dtype=torch.int32, device=scores.device)
    while ranks.shape[-1]:  # once, but where rows of a block have come together
        least = ranks.amin(-1, keepdim=True)
        last = torch.where(ranks == least, order, -1).amax(-1, keepdim=True).long()
        leaves = (surplus > 0) & (least < STAYS)  # who has no rival left keeps what it has
        scores.scatter_(-1, last, torch.where(leaves, GONE, scores.gather(-1, last)))
        surplus = (surplus - 1) * leaves
        if not bool((surplus > 0).any()):
            break
        ranks.scatter_(-1, last, STAYS)
    return scores


class _Level(NamedTuple):
    """Steps of which none follows another: their numbers from 1 on [U], their rows [U, B], what they follow [U]."""

    steps: Tensor
    rows: Tensor
    parents: Tensor


def _levels(read: Read) -> list[_Level]:
    """The rows of a read in the order in which they look: one after another, block after block, or down a tree."""
    found = _chain(read) if read.span.sees is None else _tree(read)
    return [_Level(*(torch.tensor(each, device=read.q.device) for each in level)) for level in found]


def _chain(read: Read) -> Iterator[tuple[list[int], list[list[int]], list[int]]]:
    rows, step = range(read.span.rows) if read.rows is None else read.rows, 0
    blocks: dict[int, list[int]] = {}
    for slot, row in enumerate(rows):
        blocks.setdefault(row // read.span.block, []).append(slot)
    for step, mine in enumerate(blocks.values(), 1):
        yield [step], [mine], [step - 1]


def _tree(read: Read) -> Iterator[tuple[list[int], list[list[int]], list[int]]]:
    rows = torch.arange(read.span.rows) if read.rows is None else torch.tensor(read.rows)
    order = torch.arange(1, len(rows) + 1)
    above = read.span.seen(rows, rows).cpu().tril(-1)  # ancestors, of which the last is the parent
    parents = (above * order).amax(1).tolist()
    depths = above.sum(1).tolist()
    for depth in sorted(set(depths)):
        mine = [slot for slot, own in enumerate(depths) if own == depth]
        yield [slot + 1 for slot in mine], [[slot] for slot in mine], [parents[slot] for slot in mine]
