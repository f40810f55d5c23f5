"""Selectors by the book: every row by itself, everything from scratch, one row of the cache after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.step.read import Read
from tests.asking import Asking


class Slow(Asking):
    """What each row reads is noted in `selected`: (layer, head, position) -> positions. A subclass says `always`,
    `choose`, and perhaps `finish`."""

    dense_layers = 0

    def __init__(self) -> None:
        self.selected: dict[tuple[int, int, int], list[int]] = {}

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [read.attend() if read.layer < self.dense_layers else self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        (heads, n), rows = read.part.size, read.q.shape[0]
        mask = read.mask()
        seen = torch.ones(heads, rows, n, dtype=torch.bool) if mask is None else mask.expand(heads, rows, n)
        positions = read.part.positions.expand(heads, n)
        out = []
        for r, at in enumerate(read.q_positions.tolist()):
            row = Row(self, read, r, at, positions, seen[:, r])
            select = torch.zeros(heads, 1, n, dtype=torch.bool)
            for h in range(heads):
                select[h, 0, self.choose(row, h)] = True
                head = h if read.part.heads is None else int(read.part.heads[h])
                self.selected[read.layer, head, at] = sorted(positions[h, select[h, 0]].tolist())
            exact = ops.reference(row.q[None], row.k, read.part.v, select, read.scale)[0]
            out.append(self.finish(row, select[:, 0], exact))
        return torch.cat(out)

    def choose(self, row: Row, h: int) -> list[int]:
        """The slots that one head of a row reads."""
        raise NotImplementedError

    def finish(self, row: Row, select: Tensor, exact: Tensor) -> Tensor:
        return exact


class Row:
    """One query row at position `at`: q [hq, D], and keys [h, N, D] as it meets them."""

    def __init__(self, slow: Slow, read: Read, r: int, at: int, positions: Tensor, seen: Tensor) -> None:
        self.read, self.r, self.at, self.positions, self.seen = read, r, at, positions, seen
        self.q, self.k, self.moved = read.q[r], read.part.k.clone(), list[int]()
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            if int(delta[r]):
                self.moved = slots.tolist()
                self.k[:, slots] = read.step.model.rotate(read.layer, self.k[:, slots], delta[r])

    def visible(self, h: int) -> list[int]:
        return torch.nonzero(self.seen[h])[:, 0].tolist()

    def group(self, h: int) -> Tensor:
        """The queries of one KV head, [G, D]."""
        return self.q.view(self.k.shape[0], -1, self.q.shape[1])[h]

    def split(self, h: int, first: int, local: int) -> tuple[list[int], list[int]]:
        """Slots read in any case, and the others."""
        always, rivals = [], []
        for slot in self.visible(h):
            position = int(self.positions[h, slot])
            near = position < first or position > self.at - local or slot in self.moved
            (always if near else rivals).append(slot)
        return always, rivals


def top(slots: list[int], votes: Tensor, count: int) -> list[int]:
    """Of these slots, with a vote each, the `count` best."""
    order = sorted(range(len(slots)), key=lambda i: -float(votes[i]))
    return [slots[i] for i in order[: max(count, 0)]]


class SlowSparsity(Slow):
    """Double Sparsity with these channels by layer and head."""

    def __init__(self, channels: list[list[list[int]]], k: int, dense_layers: int) -> None:
        super().__init__()
        self.channels, self.k, self.dense_layers = channels, k, dense_layers

    def choose(self, row: Row, h: int) -> list[int]:
        always, rivals = row.split(h, 0, 1)
        head = h if row.read.part.heads is None else int(row.read.part.heads[h])
        channels = self.channels[row.read.layer][head]
        logits = [row.k[h][rivals][:, channels] @ q * row.read.scale for q in row.group(h)[:, channels]]
        votes = torch.stack(logits).double().log_softmax(1).logsumexp(0)
        return always + top(rivals, votes, self.k - len(always))


class SlowTokens(Slow):
    """TokenSelect, whose heads vote together unless they do not see the same rows."""

    def __init__(self, k: int, first: int, local: int, dense_layers: int = 0) -> None:
        super().__init__()
        self.k, self.first, self.local, self.dense_layers = k, first, local, dense_layers

    def choose(self, row: Row, h: int) -> list[int]:
        always, rivals = row.split(h, self.first, self.local)
        rotate, layer, heads = row.read.step.model.rotate, row.read.layer, range(len(row.k))
        ragged = row.read.part.committed is not None and len(row.read.part.committed) > 1
        each = []  # logarithms, in which nothing is too small to be ranked
        for head in [h] if ragged else heads:
            raw = row.read.part.k[head][rivals]
            raw = rotate(layer, raw, -row.positions[head, rivals])
            each += [(raw @ q).double().log_softmax(0) for q in rotate(layer, row.group(head), self.local - row.at)]
        votes = torch.stack(each).logsumexp(0)
        return always + top(rivals, votes, self.first + self.k + self.local - len(always))


class SlowChunks(SlowTokens):
    """TokenSelect whose prompts choose in chunks; `close`: what a row reads stands right before it, one by one."""

    def __init__(self, k: int, first: int, local: int, chunk: int, close: bool, dense_layers: int = 0) -> None:
        super().__init__(k, first, local, dense_layers)
        self.chunk, self.close, self.total = chunk, close, first + k + local

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self.one(read) if self.close or read.layer >= self.dense_layers else read.attend() for read in reads]

    def choose(self, row: Row, h: int) -> list[int]:
        visible = row.visible(h)
        if row.at < row.read.span.request.prompt_len:
            few = row.at // self.chunk * self.chunk <= self.total
            chosen = visible if few else self.of_chunk(row, h, visible)
        else:
            few = len(visible) <= self.total
            chosen = visible if few else self.of_token(row, h)
        if self.close and not few:  # all stand up to the row's own place
            chosen = sorted(chosen, key=lambda slot: int(row.positions[h, slot]))
            seems = torch.arange(row.at + 1 - len(chosen), row.at + 1)
            row.k[h, chosen] = row.read.step.model.rotate(
                row.read.layer, row.read.part.k[h, chosen], seems - row.positions[h, chosen]
            )
        return chosen

    def latest(self, row: Row, h: int, slots: list[int], count: int) -> list[int]:
        return sorted(slots, key=lambda slot: -int(row.positions[h, slot]))[: max(count, 0)]

    def of_token(self, row: Row, h: int) -> list[int]:
        if row.read.layer >= self.dense_layers:
            return super().choose(row, h)
        always, rivals = row.split(h, self.first, self.local)
        return always + self.latest(row, h, rivals, self.total - len(always))

    def of_chunk(self, row: Row, h: int, visible: list[int]) -> list[int]:
        chunk, at = row.at // self.chunk * self.chunk, row.positions[h].tolist()
        always = [s for s in visible if at[s] < self.first or at[s] >= chunk - self.local or s in row.moved]
        rivals = [s for s in visible if s not in always]
        if row.read.layer < self.dense_layers:
            return always + self.latest(row, h, rivals, self.k)
        rotate, layer, heads = row.read.step.model.rotate, row.read.layer, range(len(row.k))
        places = row.read.q_positions
        mates = torch.nonzero(places // self.chunk * self.chunk == chunk)[:, 0]
        turned = rotate(layer, row.read.q[mates], (self.local - places[mates])[:, None]).mean(0)
        groups = turned.unflatten(0, (len(heads), -1))
        ragged = row.read.part.committed is not None and len(row.read.part.committed) > 1
        each = []
        for head in [h] if ragged else heads:
            raw = rotate(layer, row.read.part.k[head][rivals], -row.positions[head, rivals])
            each += [(raw @ q).double().log_softmax(0) for q in groups[head]]
        return always + top(rivals, torch.stack(each).logsumexp(0), self.k)


class SlowAgain(SlowTokens):
    """TokenSelect with lists that are used again: who made the list of a row is remembered by the text up to that row.
    For one request at a time."""

    def __init__(self, k: int, first: int, local: int, dense_layers: int, theta: float) -> None:
        super().__init__(k, first, local, dense_layers)
        self.theta, self.total = theta, first + k + local
        self.made: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # queries of rows that made a list, by layer and text
        self.lists: dict[tuple[int, tuple[int, ...], int], set[int]] = {}  # what each chose, by head too: positions
        self.maker: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        """Who makes a list is found out of all heads, before any head reads."""
        span, layer, by_head = reads[0].span, reads[0].layer, dict[int, Tensor]()
        counts = []
        for read in reads:
            heads = range(read.part.size[0]) if read.part.heads is None else read.part.heads.tolist()
            turned = read.step.model.rotate(layer, read.q, (self.local - read.q_positions)[:, None])
            by_head |= dict(zip(heads, turned.view(len(turned), len(heads), -1).unbind(1)))
            mask, (h, n) = read.mask(), read.part.size
            seen = torch.ones(h, len(turned), n) if mask is None else mask.expand(h, -1, -1)
            counts.append(seen.sum(2).amax(0))
        q = torch.cat([by_head[head] for head in sorted(by_head)], 1).double()
        for r in range(span.rows) if layer >= self.dense_layers else ():
            text = self.text(reads[0], r)
            before = self.maker.get((layer, text[:-1]))
            if max(int(count[r]) for count in counts) <= self.total:
                if before is not None:
                    self.maker[layer, text] = before
                continue
            alike = (
                before is not None and float(torch.cosine_similarity(q[r], self.made[layer, before], 0)) >= self.theta
            )
            self.maker[layer, text] = before if alike and before is not None else text
            if not alike:
                self.made[layer, text] = q[r]
        return super().__call__(reads)

    @staticmethod
    def text(read: Read, r: int) -> tuple[int, ...]:
        """All tokens up to a row, on its own path."""
        span = read.span
        path = range(r + 1) if span.sees is None else torch.nonzero(span.sees[r])[:, 0].tolist()
        return (*span.request.tokens[: span.positions[0]], *(span.tokens[row] for row in path))

    def choose(self, row: Row, h: int) -> list[int]:
        always, rivals = row.split(h, self.first, self.local)
        layer, text = row.read.layer, self.text(row.read, row.r)
        head = h if row.read.part.heads is None else int(row.read.part.heads[h])
        at = row.positions[h].tolist()
        maker = self.maker.get((layer, text))
        if maker == text:
            chosen = set(super().choose(row, h)) - set(always)
            self.lists[layer, text, head] = {at[slot] for slot in chosen}
        if maker is None or len(always) + len(rivals) <= self.total:
            return always + rivals
        return always + [slot for slot in rivals if at[slot] in self.lists[layer, maker, head]]


class SlowSparF(Slow):
    """InstInfer's SparF with r numbers and k rows."""

    def __init__(self, r: int, k: int, mean: bool = True) -> None:
        super().__init__()
        self.r, self.k, self.mean = r, k, mean

    def weights(self, row: Row, h: int) -> Tensor:
        """[G, visible]."""
        q, visible = row.group(h), row.visible(h)
        numbers = q.abs().sum(0).argsort(descending=True)[: self.r].tolist()
        every = []
        for each in q:
            logits = row.k[h][visible][:, numbers] @ each[numbers]
            moved = [i for i, slot in enumerate(visible) if slot in row.moved]
            if moved:  # those meet the query turned back
                turned = row.read.step.model.rotate(row.read.layer, each, -self.shift(row))
                logits[moved] = row.read.part.k[h, [visible[i] for i in moved]][:, numbers] @ turned[numbers]
            share = each[numbers].abs().sum() / each.abs().sum()
            every.append((logits * row.read.scale / share.sqrt()).softmax(0))
        return torch.stack(every)

    @staticmethod
    def shift(row: Row) -> int:
        r = row.read.q_positions.tolist().index(row.at)
        return int(row.read.view.moved[1][r])  # type: ignore[union-attr, index]

    def choose(self, row: Row, h: int) -> list[int]:
        always, rivals = row.split(h, 0, 1)
        if self.k >= len(always) + len(rivals):
            return always + rivals
        votes = dict(zip(row.visible(h), self.weights(row, h).sum(0)))
        chosen = top(rivals, torch.stack([votes[slot] for slot in rivals]) if rivals else torch.empty(0),
                     min(self.k, len(votes)) - len(always))  # fmt: skip
        return always + chosen

    def finish(self, row: Row, select: Tensor, exact: Tensor) -> Tensor:
        if not self.mean:
            return exact
        out = exact.clone()
        for h in range(len(row.k)):
            visible = row.visible(h)
            if self.k >= len(visible):
                continue
            weights = self.weights(row, h)
            held = weights[:, select[h, visible]].sum(1)[:, None]  # [G, 1]
            mean = row.read.part.v[h, visible].mean(0)
            group = held.shape[0]
            at = slice(h * group, (h + 1) * group)
            out[0, at] = held * exact[0, at] + (1 - held) * mean
        return out


class SlowBlocks(Slow):
    """InfLLM v2, means and scores of blocks from single rows."""

    def __init__(self, block: int, init: int, window: int, topk: int, dense_len: int) -> None:
        super().__init__()
        self.block, self.init, self.topk, self.dense_len = block, init, topk, dense_len
        self.local = -(-window // block) + 1

    def choose(self, row: Row, h: int) -> list[int]:
        visible, seen = row.visible(h), row.at + 1
        own = row.at // self.block
        if seen < self.dense_len or own + 1 <= self.init + self.local + self.topk:
            return visible
        always, rivals = [], dict[int, list[int]]()
        for slot in visible:
            block = int(row.positions[h, slot]) // self.block
            if slot in row.moved or block < self.init or block > own - self.local:
                always.append(slot)
            else:
                rivals.setdefault(block, []).append(slot)
        score = self.scores(row, h)
        best = sorted(rivals, key=lambda block: (-score.get(block, float("-inf")), block))[: self.topk]
        return always + [slot for block in best for slot in rivals[block]]

    def scores(self, row: Row, h: int) -> dict[int, float]:
        stride, windows = self.block // 4, dict[int, Tensor]()
        where = {int(row.positions[h, slot]): slot for slot in row.visible(h) if slot not in row.moved}
        for w in range(row.at // stride + 1):
            inside = [where[p] for p in range(w * stride, (w + 2) * stride) if p in where]
            if (w + 2) * stride - 1 <= row.at and inside:
                windows[w] = row.k[h][inside].mean(0)
        if not windows:
            return {}
        means = torch.stack([*windows.values()])
        total = sum((means @ q * row.read.scale).double().softmax(0) for q in row.group(h))
        votes = dict(zip(windows, total.tolist()))  # type: ignore[union-attr]
        found: dict[int, float] = {}
        for block in range(row.at // self.block + 1):
            low, high = block * self.block, (block + 1) * self.block
            overlapping = [v for w, v in votes.items() if w * stride < high and (w + 2) * stride > low]
            if overlapping:
                found[block] = max(overlapping)
        return found


class SlowMeans(Slow):
    """MoBA: the row's own block, and the best others by the product of a query and the mean of a block's keys."""

    def __init__(self, block: int, blocks: int) -> None:
        super().__init__()
        self.block, self.blocks = block, blocks

    def choose(self, row: Row, h: int) -> list[int]:
        if row.at < self.block * self.blocks:
            return row.visible(h)
        groups: dict[int, list[int]] = {}
        for slot in row.visible(h):
            groups.setdefault(-1 if slot in row.moved else int(row.positions[h, slot]) // self.block, []).append(slot)
        own = row.at // self.block
        always = [slot for block, slots in groups.items() if block in (-1, own) for slot in slots]
        others = {block: slots for block, slots in groups.items() if -1 < block < own}
        ranked = sorted(others.values(), key=lambda slots: -float((row.group(h) @ row.k[h][slots].mean(0)).max()))
        return always + [slot for slots in ranked[: self.blocks - 1] for slot in slots]
