"""Lists of rows that are used again while queries are alike, along a request's own path.

A row goes by the list of the row before it while the cosine between its query and that of the row which made the list,
over all query heads of the layer, is at least `theta`; else it makes one, which takes the other's place. What it reads
in any case (the first rows, the last ones) is always its own. Rows that see no more than may be read choose nothing and
change nothing. So lists follow from the text alone, and a request that is computed again comes to the same ones: what
the rows of a step make of them waits with the span until it is known which rows stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasewise.step.plan import Rivals, TopK
from phasewise.step.read import Read
from phasewise.step.reference import SelectedReader, rivals, selected, single, slots_of
from phasewise.step.span import Span

NONE, HELD = -2, -1  # in the place of a row's number: nobody, and who made the request's list

Made = tuple[Tensor, Tensor]
"""A list: the queries [H, G, D] of the row that made it, and what it chose, positions int32 [H, K] (-1: none)."""


class _Note(NamedTuple):
    """Of a step's rows at a layer: their numbers in the span, who made the list that each goes by, and, by row that
    made one, what every group of heads chose: positions int32 [h, K], or which of the rows at `positions` [h, N]."""

    rows: Sequence[int]
    makers: Sequence[int]
    q: Tensor
    made: Mapping[int, Sequence[Tensor]]
    heads: Sequence[Tensor | None]
    positions: Sequence[Tensor]

    def list(self, row: int) -> Made:
        """What a row has made."""
        lists = self.made[row]
        if self.positions:
            lists = [_positions(chosen, at) for chosen, at in zip(lists, self.positions)]
        return self.q[row].clone(), _of_heads(self.heads, lists)


@dataclass(slots=True)
class _Layer:
    """A span at a layer: its reads, one for each group of heads that keep the same rows, and their numbers `at`."""

    reads: Sequence[Read]
    at: Sequence[int]
    q: Tensor  # of all heads, as they are compared, [R, H, G, D]
    held: Made | None  # the request's list
    sorted: Sequence[Rivals]  # of each read; none: it is one row that sees all before it
    makers: Sequence[int]  # by row
    made: dict[int, list[Tensor]]  # as `_Note` has it

    def chosen(self, read: Read) -> Tensor:
        """What is on the request's list for the heads of a read, [h, K]."""
        assert self.held is not None
        return self.held[1] if read.part.heads is None else self.held[1][read.part.heads]


class Reuse:
    """Top-k selection `keys` with lists that are used again. `turned`: the queries of a read as they are compared,
    [R, hq, D]. A request's drawer `name` has what was made last, by layer."""

    def __init__(
        self, keys: TopK, name: str, turned: Callable[[Read], Tensor], theta: float, reader: SelectedReader
    ) -> None:  # fmt: skip
        self.keys, self.name, self.turned, self.theta, self.reader = keys, name, turned, theta, reader
        self.first, self.local, self.most = keys.first, keys.local, int(keys.most)

    def __call__(self, reads: Sequence[Read]) -> list[Tensor | None]:
        """Attention over what rows read, where the reader moves keys."""
        chosen = self.slots(reads)
        out: list[Tensor | None] = [None] * len(reads)
        lists = {i: mine for i, mine in enumerate(chosen) if mine is not None and mine.dtype != torch.bool}
        if lists:
            for i, result in zip(lists, self.reader.listed([reads[i] for i in lists], [*lists.values()])):
                out[i] = result
        for i, mine in enumerate(chosen):
            if mine is not None and i not in lists:
                out[i] = self.reader.masked(reads[i], mine)
        return out

    def slots(self, reads: Sequence[Read]) -> list[Tensor | None]:
        """What rows read, as `NamedSlots` has it."""
        out: list[Tensor | None] = [None] * len(reads)
        spans: dict[int, list[int]] = {}
        for i, read in enumerate(reads):
            spans.setdefault(id(read.span), []).append(i)
        found = [self._layer([reads[i] for i in at], at) for at in spans.values()]
        layers = [layer for layer in found if layer is not None]
        for i, slots in self._singles([layer for layer in layers if not layer.sorted]).items():
            out[i] = slots
        for layer in layers:
            for n, i in enumerate(layer.at if layer.sorted else ()):
                out[i] = self._select(layer, n)
            if layer.made:
                reads[layer.at[0]].step.count("choices", len(layer.made))
            self._note(layer)
        return out

    # ---- who makes a list
    def _layer(self, reads: Sequence[Read], at: Sequence[int]) -> _Layer | None:
        """None where no row of a span chooses."""
        sizes, layer = [read.part.size[1] for read in reads], reads[0].layer
        if layer < self.keys.dense_layers or max(sizes) <= self.most:
            return None
        held: Made | None = reads[0].state.get(self.name, {}).get(layer)  # type: ignore[attr-defined]
        ways, acts = list[Rivals](), [True]
        whole = min(sizes) > self.most and (held is None or not bool((held[1] < 0).any()))
        if not (whole and all(single(read) for read in reads)):
            ways = [rivals(self.keys, read) for read in reads]
            more = [(each.seen.sum(-1) > self.most).any(0) for each in ways]
            acts = torch.stack(more).any(0).tolist()
            if not any(acts):
                return None
        q = _together(reads, [self.turned(read) for read in reads])
        makers = self._makers(q.flatten(1), _before(reads[0]), acts, held)
        made: dict[int, list[Tensor]] = {row: [] for row, maker in enumerate(makers) if row == maker}
        return _Layer(reads, at, q, held, ways, makers, made)

    def _makers(self, q: Tensor, before: Sequence[int], acts: Sequence[bool], held: Made | None) -> list[int]:
        """Who made the list that each row goes by; `q` [R, all numbers of a row]. In double precision, so that it
        hardly matters how many rows come together."""
        q = q.double()
        last = None if held is None else held[0].flatten().double()
        makers: list[int] = []
        for row, one in enumerate(q):
            maker = makers[before[row]] if before[row] >= 0 else NONE if held is None else HELD
            if acts[row]:
                other = last if maker < 0 else q[maker]
                if other is None or not _alike(one, other, self.theta):
                    maker = row
            makers.append(maker)
        return makers

    # ---- what is read
    def _singles(self, layers: Sequence[_Layer]) -> dict[int, Tensor]:
        """For rows that come alone and see all before them, the slots that they read, int32 [h, 1, S]."""
        alone: dict[int, tuple[Read, Any]] = {}
        for layer in layers:
            if layer.made:
                alone |= {i: (read, self.keys.scorer.index(read)) for i, read in zip(layer.at, layer.reads)}
        lists = {i: slots for i, (slots, _) in slots_of(self.keys, alone).items()}
        for layer in layers:
            if layer.made:
                layer.made[0] = [lists[i][:, 0, self.first : self.most - self.local] for i in layer.at]
            else:
                lists |= {i: self._again(read, layer.chosen(read)) for i, read in zip(layer.at, layer.reads)}
        return lists

    def _again(self, read: Read, chosen: Tensor) -> Tensor:
        """The list of a single row, [h, 1, S], of which this was chosen before."""
        heads, n = read.part.size
        every = torch.arange(n, dtype=torch.int32, device=chosen.device).expand(heads, -1)
        return torch.cat((every[:, : self.first], chosen, every[:, n - self.local :]), 1)[:, None]

    def _select(self, layer: _Layer, number: int) -> Tensor:
        """What the rows of a read see, bool [h, R, N]; what they choose is put down."""
        read, ways = layer.reads[number], layer.sorted[number]
        heads, n = read.part.size
        positions = read.part.positions.expand(heads, -1)
        lists = [torch.zeros(heads, n, dtype=torch.bool, device=positions.device)]
        if layer.held is not None:
            lists[0] = _listed(layer.chosen(read), positions)
        place = {HELD: 0, NONE: 0}
        if layer.made:
            choice = self._choose(read, ways)
            for row in layer.made:
                place[row] = len(lists)
                lists.append(choice[:, row].expand(heads, -1))
                layer.made[row].append(lists[-1])
        mine = torch.stack(lists, 1)[:, [place[maker] for maker in layer.makers]]  # [h, R, N]
        few = ways.seen.sum(-1, keepdim=True) <= self.most  # they read all that they see
        return ways.must | (ways.seen & (mine | few))

    def _choose(self, read: Read, ways: Rivals) -> Tensor:
        """What every row chooses of what it need not read, bool [1 | h, R, N]."""
        if read.part.size[1] <= self.most:
            return ways.rivals
        scores = self.keys.scorer.scores(read, self.keys.scorer.index(read), ways)
        return selected(self.keys, ways, scores) & ways.rivals

    # ---- what stays
    def _note(self, layer: _Layer) -> None:
        read, parts = layer.reads[0], [read.part for read in layer.reads]
        rows = range(read.span.rows) if read.rows is None else read.rows
        positions = [part.positions.expand(part.size[0], -1) for part in parts] if layer.sorted and layer.made else []
        q = layer.q.clone() if layer.made else layer.q  # queries are overwritten
        note = _Note(rows, layer.makers, q, layer.made, [part.heads for part in parts], positions)
        if read.span.trail is None:
            read.span.trail = {}
        read.span.trail.setdefault(self.name, {})[read.layer] = note

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        """The list that the last row which stays goes by is the request's."""
        notes: dict[int, _Note] = (span.trail or {}).pop(self.name, {})
        kept = set(range(keep) if isinstance(keep, int) else keep)
        for layer, note in notes.items():
            makers = [maker for row, maker in zip(note.rows, note.makers) if row in kept]
            if makers and makers[-1] in note.made:
                span.request.state.setdefault(self.name, {})[layer] = note.list(makers[-1])


def _alike(one: Tensor, other: Tensor, theta: float) -> bool:
    """Whether their cosine is at least `theta`."""
    return bool((one * other).sum() >= theta * ((one * one).sum() * (other * other).sum()).sqrt())


def _before(read: Read) -> Sequence[int]:
    """The row of the read that comes before each on its own path; -1: none."""
    span, count = read.span, read.q.shape[0]
    if span.sees is None or read.late:
        return range(-1, count - 1)
    assert not span.first, "rows that come in pieces are nobody's text yet"
    rows = torch.arange(span.rows) if read.rows is None else torch.tensor(read.rows)
    sees = span.seen(rows, rows).tril(-1)
    return (sees * torch.arange(1, count + 1)).amax(1).sub(1).tolist()


def _together(reads: Sequence[Read], queries: Sequence[Tensor]) -> Tensor:
    """The queries of all heads, [R, H, G, D], of those [R, hq, D] of each read."""
    heads = reads[0].span.kv.layers[reads[0].layer].shape.heads
    apart = [q.view(q.shape[0], read.part.size[0], -1, q.shape[2]) for read, q in zip(reads, queries)]
    if len(apart) == 1:
        return apart[0]
    every = apart[0].new_empty((apart[0].shape[0], heads, *apart[0].shape[2:]))
    for read, q in zip(reads, apart):
        every[:, read.part.heads] = q
    return every


def _of_heads(heads: Sequence[Tensor | None], lists: Sequence[Tensor]) -> Tensor:
    """The list of all heads, [H, K], of those [h, K] of each group."""
    if len(lists) == 1:
        return lists[0].clone()
    wide = max(chosen.shape[1] for chosen in lists)
    every = lists[0].new_full((sum(len(chosen) for chosen in lists), wide), -1)
    for group, chosen in zip(heads, lists):
        every[group, : chosen.shape[1]] = chosen
    return every


def _listed(chosen: Tensor, positions: Tensor) -> Tensor:
    """Which of the rows at `positions` [h, N] are on a list [h, K], bool [h, N]."""
    end = int(positions.max()) + 1
    table = torch.zeros(len(chosen), end + 1, dtype=torch.bool, device=chosen.device)
    table.scatter_(1, chosen.long().masked_fill((chosen < 0) | (chosen > end), end), True)
    return table[:, :end].gather(1, positions)


def _positions(chosen: Tensor, positions: Tensor) -> Tensor:
    """The list int32 [h, K] of the rows `chosen`, bool [h, N], at `positions` [h, N], increasing."""
    slots = chosen.byte().topk(int(chosen.sum(1).max()), -1).indices
    return positions.gather(1, slots).masked_fill(~chosen.gather(1, slots), -1).sort(-1).values.int()
