"""Executes any attention plan in torch, for the reads of one layer.

It is the plain twin of what kernels do with the plans that `step/lower.py` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.ops.native.choice import UnlistedRest
from phasewise.ops.native.spans import Common
from phasewise.step.lower import choose
from phasewise.step.plan import (
    AmongTokens,
    AttentionPlan,
    Custom,
    LayerPicks,
    NamedSlots,
    ReadBlocks,
    Rivals,
    Scores,
    SharedPrefix,
    TopK,
    Window,
)
from phasewise.step.read import FEW, Read, View
from phasewise.step.reads import attend_all, attend_listed, attend_lse, with_sinks
from phasewise.step.shared import in_common

ENTRIES = 1 << 27  # of a mask that is made at a time
NEVER = float("-inf")


def look(plan: AttentionPlan, read: Read) -> None:
    """Set what the rows of a read see (`read.view`), and hand the weights that the plan records to who takes them."""
    if plan.window is not None:
        read.view = visible(plan.window, read)
    elif plan.record is not None:
        read.view = plan.record.take(read)


def attend(plan: AttentionPlan, reads: Sequence[Read]) -> Sequence[Tensor | None]:
    """One output [R, hq, D] per read of one layer, all of this plan; None: attention over everything visible."""
    keys, scores = plan.keys, reads[0].step.model.sink_scores(reads[0].layer)
    if scores is not None:
        return with_sinks(plan, reads, scores)
    if isinstance(keys, Custom):
        return keys.attend(reads)
    if isinstance(keys, NamedSlots):
        return attend_named(reads, keys.of(reads))
    if isinstance(keys, AmongTokens):
        return [_among(keys, read) for read in reads]
    if isinstance(keys, TopK):
        return top_k(keys, reads)
    if isinstance(keys, ReadBlocks):
        return attend_named(reads, [_blocks(keys, read) for read in reads])
    if isinstance(keys, LayerPicks):
        return attend_named(reads, [_picked(keys, read) for read in reads])
    if plan.bias is not None:
        return _biased(plan.bias, reads)
    if plan.shared is not None:
        return attend_all(reads, _commons(plan.shared, reads))
    return [None] * len(reads)


def single(read: Read) -> bool:
    """True for one row that sees all before it, none missing, in slots of their positions."""
    part, first = read.part, not read.rows or read.rows[0] == 0  # rows behind one that skips the layer are not
    return first and part.plain and part.n == read.span.positions[0] and len(read.q) == 1 and read.mask() is None


def attend_named(reads: Sequence[Read], chosen: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Reads over what was chosen for them: slots int32 [h, 1, S], or bool [1 | h, R, N] of what they see; None: all."""
    out: list[Tensor | None] = [None] * len(reads)
    lists: dict[int, Tensor] = {}
    for i, (read, mine) in enumerate(zip(reads, chosen)):
        if mine is not None and mine.dtype == torch.bool:
            out[i] = read.attend(mine)
        elif mine is not None:
            lists[i] = mine
    if lists:
        for i, result in zip(lists, attend_listed([reads[i] for i in lists], [*lists.values()])):
            out[i] = result
    return out


# ---- some tokens of a prompt
def _among(keys: AmongTokens, read: Read) -> Tensor | None:
    """Attention of a prompt's rows to the tokens that are named; None: to all that they see."""
    stay = keys.of(read)
    if stay is None:
        return None
    spec, (heads, n) = read.step.model.config.attention[read.layer], read.part.size
    k, v = read.part.take(stay.expand(heads, -1))
    read.count_entries(k.shape[0] * k.shape[1])
    out = torch.zeros_like(read.q)
    if keys.all_rows:
        sees = causal_mask(torch.arange(n, device=stay.device), stay, spec.window)
        rows = sees.any(1).nonzero().flatten()
        out[rows] = ops.attention(read.q[rows], k, v, sees[rows][None], spec.scale, spec.softcap)
    elif spec.window is None and spec.softcap is None:
        out[stay] = ops.causal(read.q[stay], k, v, spec.scale)
    else:
        mask = causal_mask(stay, stay, spec.window)[None]
        out[stay] = ops.attention(read.q[stay], k, v, mask, spec.scale, spec.softcap)
    return out


def causal_mask(rows: Tensor, tokens: Tensor, window: int | None) -> Tensor:
    """Bool [r, n]: which tokens rows at these positions see, causally and within a layer's window."""
    distance = rows[:, None] - tokens
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


# ---- top-k KV selection
class SelectedReader(Protocol):
    """Attention of rows over the slots that were chosen for them."""

    def listed(
        self, reads: Sequence[Read], slots: Sequence[Tensor], rests: Sequence[UnlistedRest] = ()
    ) -> Sequence[Tensor]:
        """Single rows, over the slots int32 [h, 1, S] of each, increasing."""
        ...

    def masked(self, read: Read, select: Tensor) -> Tensor:
        """Any rows, over bool [1 | h, R, N] of what they see."""
        ...


class InText:
    """At their places in the text."""

    @staticmethod
    def listed(reads: Sequence[Read], slots: Sequence[Tensor], rests: Sequence[UnlistedRest] = ()) -> list[Tensor]:
        return attend_listed(reads, slots, rests)

    @staticmethod
    def masked(read: Read, select: Tensor) -> Tensor:
        return read.attend(select)


IN_TEXT = InText()


def _indexed(
    keys: TopK, reads: Sequence[Read]
) -> tuple[dict[int, tuple[Read, Any]], dict[int, tuple[Read, Any]]]:  # fmt: skip
    """The reads that choose, by their place, each with what its scorer keeps: those of single rows, and the others."""
    singles, several = dict[int, tuple[Read, Any]](), dict[int, tuple[Read, Any]]()
    for i, read in enumerate(reads):
        if chooses(keys, read):
            index = keys.scorer.index(read)
            _told(keys, read)
            (singles if single(read) else several)[i] = read, index
    return singles, several


def top_k(keys: TopK, reads: Sequence[Read], reader: SelectedReader = IN_TEXT) -> list[Tensor | None]:
    """Attention of one layer over what rows read by top-k selection. Single rows take one call, with lists that kernels
    make where they can."""
    out: list[Tensor | None] = [None] * len(reads)
    singles, several = _indexed(keys, reads)
    for i, (read, index) in several.items():
        pieces = [_masked(keys, piece, index, reader) for piece in read.slices(ENTRIES)]
        out[i] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    lists = slots_of(keys, singles)
    if lists:
        rests = [rest for _, rest in lists.values() if rest is not None]
        some = [reads[i] for i in lists]
        for i, result in zip(lists, reader.listed(some, [slots for slots, _ in lists.values()], rests)):
            out[i] = result
    return out


def named(keys: TopK, reads: Sequence[Read]) -> list[Tensor | None]:
    """What rows read by top-k selection, as `NamedSlots` has it."""
    out: list[Tensor | None] = [None] * len(reads)
    singles, several = _indexed(keys, reads)
    for i, (read, index) in several.items():
        rows = rivals(keys, read)
        out[i] = selected(keys, rows, keys.scorer.scores(read, index, rows))
    for i, (slots, _) in slots_of(keys, singles).items():
        out[i] = slots
    return out


def chooses(keys: TopK, read: Read) -> bool:
    """True if rows of a read may read less than they see."""
    n = read.part.size[1]
    fits = keys.units is None and keys.rows(n) >= n
    return read.layer >= keys.dense_layers and not fits and read.span.last + 1 >= keys.least


def _told(keys: TopK, read: Read) -> None:
    """Tell whoever counts choices; a layer counts once for all groups of heads."""
    if keys.chose is None:
        return
    noted = read.step.notes.setdefault((keys, "chose", id(read.span)), set())
    keys.chose(read.q.shape[0], int(read.layer not in noted), read.part.size[0])
    noted.add(read.layer)


def slots_of(keys: TopK, singles: Mapping[int, tuple[Read, Any]]) -> dict[int, tuple[Tensor, UnlistedRest | None]]:
    """The slots int32 [h, 1, S] that single rows read, increasing, and what stands for the rest; each has its index."""
    lists = choose(keys, singles)
    for i in singles.keys() - lists.keys():
        read, index = singles[i]
        rows = rivals(keys, read)
        scores = keys.scorer.scores(read, index, rows)
        select = selected(keys, rows, scores)
        heads, n = read.part.size
        most = n - (keys.between(n) - keys.chosen(n)) * keys.unit
        slots = select.expand(heads, -1, -1).byte().topk(most, -1, sorted=False).indices.sort(-1).values.int()
        rest = None
        if scores.weights is not None and scores.mean is not None:
            rest = UnlistedRest((scores.weights * select[:, None]).sum(-1).flatten(), scores.mean[:, 0])
        lists[i] = slots, rest
    if keys.fetch:
        for i, (slots, _) in lists.items():
            _count_groups(singles[i][0], slots, keys.fetch)
    return lists


def _count_groups(read: Read, slots: Tensor, size: int) -> None:
    """Rows that are fetched only because they lie in the groups of others."""
    n = read.part.size[1]
    groups = slots[:, 0] // size  # [h, S], increasing
    fresh = torch.ones_like(groups, dtype=torch.bool)
    fresh[:, 1:] = groups[:, 1:] != groups[:, :-1]
    rows = ((groups + 1) * size).clamp_max(n) - groups * size
    read.count_entries(int((rows * fresh).sum()) - slots.numel())


def _masked(keys: TopK, read: Read, index: Any, reader: SelectedReader) -> Tensor:
    """Any rows: with structure, windows or caches with gaps."""
    rows = rivals(keys, read)
    scores = keys.scorer.scores(read, index, rows)
    select = selected(keys, rows, scores)
    exact = reader.masked(read, select)
    if scores.weights is None or scores.mean is None:
        return exact
    held = (scores.weights * select[:, None]).sum(-1)  # [h, G, R]
    weight = held.flatten(0, 1).T[..., None]
    mean = scores.mean.transpose(0, 1).repeat_interleave(held.shape[1], 1)
    return (weight * exact.float() + (1 - weight) * mean).to(exact.dtype)


def rivals(keys: TopK, read: Read) -> Rivals:
    """The slots that the rows of a read see and may choose; the same for all layers in which rows lie and are seen
    alike."""
    part, mask = read.part, read.mask()
    if not part.plain or read.rows is not None or read.view is not None:
        return _rivals(keys, read, mask)
    key = keys, id(read.span), id(mask), part.size  # such a mask is kept for all layers
    if key not in read.step.notes:
        read.step.notes[key] = _rivals(keys, read, mask)
    found: Rivals = read.step.notes[key]
    return found


def _rivals(keys: TopK, read: Read, mask: Tensor | None) -> Rivals:
    at, positions = read.q_positions, read.part.positions
    seen = torch.ones(1, len(at), read.part.size[1], dtype=torch.bool, device=at.device) if mask is None else mask
    alone = keys.between(positions.shape[1]) * keys.unit if single(read) else 0
    rows = rivals_of(keys, at, positions, seen, read.span.last, alone)
    if read.view is None or read.view.moved is None:
        return rows
    slots, delta = read.view.moved  # rows that a window re-bases are read in any case
    moved = torch.zeros_like(rows.rivals)
    moved[:, :, slots] = rows.rivals[:, :, slots] & (delta != 0)[:, None]
    return by_unit(
        rows._replace(must=rows.must | moved, rivals=rows.rivals & ~moved), rows.unit, read.span.last // keys.unit
    )


def rivals_of(keys: TopK, at: Tensor, positions: Tensor, seen: Tensor, last: int, alone: int = 0) -> Rivals:
    """The rivals of rows at positions `at` [R], the last of them `last`, that see some of the rows at `positions`
    [1 | h, N].
    `alone`: `Rivals.single`."""
    unit, at = positions // keys.unit, at[:, None]
    mine = unit[:, None]
    must = (mine < keys.first) | (mine > at // keys.unit - keys.local) | (at + 1 < keys.least)  # [1 | h, R, N]
    rows = Rivals(seen, seen & must, seen & ~must, alone)
    return rows if keys.unit == 1 else by_unit(rows, unit, last // keys.unit)


def by_unit(rows: Rivals, unit: Tensor | None, most: int) -> Rivals:
    """With the number of rivals in each unit up to `most`, the units of slots being `unit` [1 | h, N]."""
    if unit is None:
        return rows
    unit = unit.clamp_max(most)  # what lies behind all rows is seen by none
    wide, (_, length, _) = max(len(rows.rivals), len(unit)), rows.rivals.shape
    number = torch.zeros(wide, length, most + 1, dtype=torch.int32, device=unit.device)
    number.scatter_add_(2, unit[:, None].expand(wide, length, -1), rows.rivals.expand(wide, -1, -1).int())
    return rows._replace(unit=unit, number=number)


def selected(keys: TopK, rows: Rivals, scores: Scores) -> Tensor:
    """The slots that every row reads, bool [1 | h, R, N]."""
    left = _budget(keys, rows.seen.sum(-1, keepdim=True)) - rows.must.sum(-1, keepdim=True)  # [1 | h, R, 1]
    if rows.unit is None or rows.number is None:
        wide = max(len(scores.units), len(rows.rivals))
        among = rows.rivals.expand(wide, -1, -1)
        if keys.units is not None:
            left = torch.full_like(left, keys.units)
        return rows.must | best(scores.units.expand(wide, -1, -1), among, left)
    wide = max(len(scores.units), len(rows.number))
    number = rows.number.expand(wide, -1, -1)
    order = _order(scores.units.expand(wide, -1, -1), number > 0)
    if keys.units is None:
        fits = number.gather(2, order).cumsum(-1) <= left
    else:
        fits = (torch.arange(order.shape[2], device=order.device) < keys.units).expand_as(order)
    taken = torch.zeros_like(fits).scatter(2, order, fits)
    unit = rows.unit[:, None].expand(wide, rows.rivals.shape[1], -1)
    return rows.must | (rows.rivals & taken.gather(2, unit))


def _budget(keys: TopK, seen: Tensor) -> Tensor:
    """`TopK.rows` of many numbers of seen rows."""
    if keys.most > 1:
        return seen.clamp_max(min(int(keys.most), 1 << 62))
    return torch.minimum((-(-keys.most * seen.double() // 1)).clamp_min(1), seen).long()


def best(scores: Tensor, rivals: Tensor, left: Tensor) -> Tensor:
    """The `left` [1 | h, R, 1] rivals of the highest score [1 | h, R, N], of equal ones the earlier: bool."""
    order = _order(scores, rivals)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return rivals & (torch.empty_like(order).scatter_(-1, order, place) < left)


def _order(scores: Tensor, rivals: Tensor) -> Tensor:
    return scores.masked_fill(~rivals, NEVER).sort(dim=-1, descending=True, stable=True).indices


# ---- blocks by position
def _blocks(keys: ReadBlocks, read: Read) -> Tensor:
    """The slots that the rows of a read attend to, as `attend_named` takes them; the same in all layers, if slots are
    positions."""
    alone, part, notes = single(read), read.part, read.step.notes
    if not (part.plain and read.rows is None and read.view is None):
        select = _block_mask(keys, read)
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            select[:, :, slots] |= (delta != 0)[:, None]
        return select
    key = keys, id(read.span), part.size[1], alone
    if key not in notes:
        notes[key] = _block_slots(keys, read) if alone else _block_mask(keys, read)
    found: Tensor = notes[key]
    return found.expand(part.size[0], -1, -1) if alone else found


def _block_slots(keys: ReadBlocks, read: Read) -> Tensor:
    """The slots of a single row's blocks, int32 [1, 1, S], increasing."""
    size, at = keys.block, read.span.positions[0]
    blocks = torch.tensor(keys.of(at // size), dtype=torch.int32, device=read.q.device)
    slots = (blocks[:, None] * size + torch.arange(size, dtype=torch.int32, device=read.q.device)).flatten()
    return slots[: len(slots) - size + at % size + 1][None, None]  # the last block is its own


def _block_mask(keys: ReadBlocks, read: Read) -> Tensor:
    """The same for any rows, bool [1 | h, R, N]. It is worked out block by block: pairs of a long prompt's rows would
    fill the memory."""
    own, others = read.q_positions // keys.block, read.part.positions // keys.block  # [R], [1 | h, N]
    distinct, place = torch.unique(own, return_inverse=True)
    read_by = torch.zeros(len(distinct), int(max(own.max(), others.max())) + 1, dtype=torch.bool, device=own.device)
    for row, block in zip(read_by, distinct.tolist()):
        row[torch.tensor(keys.of(block), device=own.device)] = True
    near = read_by[place]  # [R, B]
    return torch.stack([near.index_select(1, each) for each in others])


# ---- what a layer picks for those behind it
@dataclass(slots=True)
class _Picks:
    """The latest picks for a span's rows: positions int64 [H, rows, K], -1 for none, of the rows `known`."""

    positions: Tensor
    known: Tensor  # bool [rows]


def _picked(keys: LayerPicks, read: Read) -> Tensor | None:
    """The slots that the rows of a read attend to, as `attend_named` takes them; where its layer picks, that is noted
    for those behind it."""
    if read.layer < min(keys.picking):
        return None
    if read.layer in keys.picking:
        _pick(keys, read)
        return None
    picks: _Picks | None = read.step.notes.get((keys, id(read.span)))
    if picks is None:  # the layers that pick are skipped
        return None
    part, mine = read.part, picks.positions
    if part.heads is not None:
        mine = mine[part.heads]
    if single(read) and bool((mine[:, :1] >= 0).all()):
        own = mine.new_full((len(mine), 1, 1), part.n)
        return torch.cat((mine[:, :1, : part.n], own), -1).int()
    sparse = torch.tensor(list(read.span.positions), device=read.q.device) >= keys.since
    return _pick_mask(read, mine, sparse & picks.known)


def _pick(keys: LayerPicks, read: Read) -> None:
    """Note the positions that are worth most to each row, its own left out."""
    part = read.part
    heads, n = part.size
    read.count_keys(heads * n)  # once more than attention, which reads them for itself
    weights = (keys.weights or largest_weights)(read)
    rows = torch.arange(weights.shape[1], device=weights.device)
    weights[:, rows, n - len(rows) + rows] = NEVER
    top = weights.topk(min(keys.k, n), -1)
    found = part.positions.expand(heads, -1)[:, None].expand(-1, len(rows), -1).gather(2, top.indices)
    found = found.masked_fill(top.values == NEVER, -1)
    mine = rows if read.rows is None else torch.tensor(read.rows, device=rows.device)
    of_heads = torch.arange(heads, device=rows.device) if part.heads is None else part.heads
    picks = _noted(keys, read)
    width = min(found.shape[2], picks.positions.shape[2])
    picks.positions[of_heads[:, None], mine] = -1
    picks.positions[of_heads[:, None], mine, :width] = found[..., :width]
    picks.known[mine] = True


def largest_weights(read: Read) -> Tensor:
    """The worth of each slot to each row, [h, R, N]: the logarithm of its largest weight over the query heads."""
    logits = read.scores()  # [h, G, R, N]
    mask = read.mask()
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], NEVER)
    return (logits - logits.logsumexp(-1, keepdim=True)).amax(1)


def _noted(keys: LayerPicks, read: Read) -> _Picks:
    """The picks of a span's rows. A row that passes a picking layer by keeps what an earlier one has picked for it."""
    span, notes, key = read.span, read.step.notes, (keys, id(read.span))
    heads = span.kv.layers[read.layer].shape.heads
    picks: _Picks | None = notes.get(key)
    if picks is None or len(picks.positions) != heads:
        none = torch.full((heads, span.rows, min(keys.k, span.last)), -1, device=read.q.device)
        picks = notes[key] = _Picks(none, torch.zeros(span.rows, dtype=torch.bool, device=none.device))
    return picks


def _pick_mask(read: Read, mine: Tensor, sparse: Tensor) -> Tensor:
    """The slots that are read, bool [h, R, N]: by rows `sparse` what was picked for them and themselves, by others
    all."""
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


# ---- attention windows
def visible(window: Window, read: Read) -> View | None:
    """The view that an attention window gives the rows of a read; None: they see everything."""
    if not window.hides(read.span):
        return None
    part, at = read.part, read.q_positions
    rows = part.positions[:, None]  # [1 | h, 1, N]
    heads = None
    if window.heads is not None:
        if not any(window.heads[read.layer]):
            return None
        heads = torch.tensor(window.heads[read.layer], device=at.device)
        if part.heads is not None:
            heads = heads[part.heads]
            if not bool(heads.any()):
                return None
    mask = window.seen(at[:, None], rows)  # [1 | h, R, N]; no span has rows of a prompt and later ones
    if heads is not None:
        return View(mask if bool(heads.all()) else mask | ~heads[:, None, None])
    if not window.rebased:
        return View(mask)
    lost = (at - (window.rows - 1)).clamp_min(0)  # [R]: rows given up before this one
    return View(mask, (torch.nonzero(rows[0, 0] < window.sinks)[:, 0], lost))


# ---- a number added to the score of the first token
def _biased(bias: Tensor, reads: Sequence[Read]) -> list[Tensor | None]:
    """Attention with `bias` float32 [layers, Hq] on the score of position 0: the outputs of attention without it,
    corrected by their log-sum-exp, for which that row is read once more."""
    added, out = bias[reads[0].layer], list[Tensor | None]([None] * len(reads))
    if not bool(added.any()):
        return out
    able = [i for i, read in enumerate(reads) if bool(_holds_first(read).any())]
    if able:
        for i, (rows, lse) in zip(able, attend_lse([reads[i] for i in able])):
            out[i] = _corrected(added.expm1(), reads[i], rows, lse)
    return out


def _corrected(more: Tensor, read: Read, out: Tensor, lse: Tensor) -> Tensor:
    """(out + more a0 v0) / (1 + more a0), where a0 is the weight of slot 0 and `more` [Hq] = e^bias - 1."""
    heads = read.part.size[0]
    if read.part.heads is not None:
        more = more.view(-1, len(more) // read.span.kv.layers[read.layer].shape.heads)[read.part.heads].flatten()
    read.count(1)
    extra = more * first_weight(read, lse)  # [R, hq]
    first = read.part.between(0, 1)[1][:, 0].float()  # [h, D]
    every = first.repeat_interleave(extra.shape[1] // heads, 0)
    return ((out.float() + extra[..., None] * every) / (1 + extra)[..., None]).to(out.dtype)


def first_weight(read: Read, lse: Tensor) -> Tensor:
    """The weight of position 0 in attention with this log-sum-exp, [R, hq]; 0 for rows that do not see it."""
    weight = (read.score(0) - lse).exp().clamp_max(1.0)
    seen = _holds_first(read)[None] & _sees_first(read)  # [R | 1, 1 | h]
    heads = read.part.size[0]
    return weight * seen.expand(-1, heads).repeat_interleave(weight.shape[1] // heads, 1)


def _holds_first(read: Read) -> Tensor:
    """True where the first slot is that of position 0, bool [1 | h]."""
    if read.part.plain and read.part.n:
        return torch.ones(1, dtype=torch.bool, device=read.q.device)
    return read.part.positions[:, 0] == 0


def _sees_first(read: Read) -> Tensor:
    """True where a row sees the first slot, bool [R | 1, 1 | h]."""
    window = read.step.model.config.attention[read.layer].window
    mask = None if window is None and read.view is None and read.span.sees is None else read.mask()
    if mask is None:
        return torch.ones(1, 1, dtype=torch.bool, device=read.q.device)
    return mask[:, :, 0].T


# ---- prefixes that several requests share
def _commons(how: SharedPrefix, reads: Sequence[Read]) -> list[Common]:
    """The prefixes that reads, by their numbers, have in common; most layers ask the same."""
    able = tuple((i, id(read.span)) for i, read in enumerate(reads) if _in_order(read))
    notes, key = reads[0].step.notes, (how, able)
    if key not in notes:
        found = in_common([reads[i].span for i, _ in able], how)
        notes[key] = [c._replace(members=tuple(able[m][0] for m in c.members)) for c in found]
    commons: list[Common] = notes[key]
    return commons


def _in_order(read: Read) -> bool:
    """True if the read's rows see all that its request has computed, each row at the slot of its position."""
    part, window = read.part, read.step.model.config.attention[read.layer].window
    return (
        part.plain
        and part.heads is None
        and part.ids is None
        and read.rows is None
        and read.view is None
        and read.q.shape[0] <= FEW
        and (window is None or read.span.last < window)
    )
