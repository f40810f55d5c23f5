"""Evictors with running scores, by their papers, one row after another in Python over a cache that loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phasewise.request.request import Request
from phasewise.step.plan import AttentionPlan, Record
from phasewise.step.read import Read, View
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk

LOW = 0xFFFFFFFF


def bound(method: Any, model: Any = None) -> Any:
    return method.bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


def left(one: Walk, runtime: Any) -> list[list[list[int]]]:
    """The positions that layers and heads have not given up, dropped or not."""
    heads = one.model.config.kv_heads
    found = []
    for layer in range(len(one.kv.layers)):
        state = runtime.trail.layers(one.request)[layer]
        alive = [(own > float("-inf")).tolist() for own in state]
        alive = alive * (heads // len(alive))
        held = [one.positions(layer, head) for head in range(heads)]
        found.append([[at for at, stays in zip(held[h], alive[h], strict=True) if stays] for h in range(heads)])
    return found


def held(one: Walk) -> list[list[int]]:
    """Rows that layers and heads hold."""
    return [[len(one.positions(layer, h)) for h in range(one.model.config.kv_heads)] for layer in range(4)]


# ---- one number at a time
def scalar_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ left, q & LOW, p >> 32 ^ d ^ right, p & LOW
        left, right = left + 0x9E3779B9 & LOW, right + 0xBB67AE85 & LOW
    return [a, b, c, d]


def scalar_gumbel(seed: int, row: int, key: int, head: int, g: int, group: int, layer: int) -> float:
    """Of query head `g` of the `group` that share the KV head `head`."""
    words = scalar_philox([key, row, head * -(-group // 4) + g // 4, layer], [seed & LOW, seed >> 32])
    return -math.log(-math.log(((words[g % 4] >> 9) + 0.5) / 2**23))


@dataclass
class Slow(Evict):
    """`rows` stay, the last `recent` among them in any case; of a layer, if `by_layer` has them."""

    rows: int
    recent: int = 0
    sums: bool = True
    together: bool = False
    mean: bool = False
    noise: bool = False
    tau: float = 1.0
    step: float = 0.0
    ada: float | None = None  # heads compete, above this share
    by_layer: Sequence[int] = ()
    sizes: dict[int, list[int]] = field(default_factory=dict)  # of layers' heads, once they have competed
    scores: dict[int, list[dict[int, float]]] = field(default_factory=dict)  # by layer and head: {position: score}

    observes = 0

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=Record(self.take))

    def take(self, read: Read) -> View | None:
        heads, length = read.part.size[0], read.span.request.prompt_len
        at = read.q_positions.tolist()
        if read.span.request.prefilling:
            assert at == list(range(length)), "in one piece"
            self.scores[read.layer] = [{} for _ in range(heads)]
            for r, position in enumerate(at):
                self._row(read, r, position, [set(range(position)) for _ in range(heads)])
            self._cut(read.layer, length)
            return None
        (position,) = at
        before = [set(own) for own in self.scores[read.layer]]
        self._row(read, 0, position, before)
        while self._drop(read.layer, position):
            pass
        sees = torch.zeros(heads, 1, read.part.size[1], dtype=torch.bool)
        for h in range(heads):
            sees[h, 0, sorted(before[h] | {position})] = True
        return View(sees)

    def _row(self, read: Read, r: int, position: int, before: list[set[int]]) -> None:
        """One row looks at what each head has left to it, and itself."""
        heads, scores = read.part.size[0], self.scores[read.layer]
        group = read.q.shape[1] // heads
        got: list[dict[int, float]] = []
        for h in range(heads):
            slots = sorted(before[h] | {position})
            window = read.step.model.config.attention[read.layer].window
            seen = [at for at in slots if window is None or position - at < window]
            mine = dict.fromkeys(slots, 0.0)
            for g in range(group):
                found = (read.part.k[h, seen] @ read.q[r, h * group + g] * read.scale).double()
                for at, weight in zip(seen, self._weights(read, found, position, seen, (h, g, group)).tolist()):
                    mine[at] += weight
            got.append(mine)
        if self.together:
            got = [{at: sum(one[at] for one in got) / (heads * group) for at in got[0]}] * heads
        for h in range(heads):
            scores[h] = {at: w + (scores[h].get(at, 0.0) if self.sums else 0.0) for at, w in got[h].items()}

    def _weights(self, read: Read, found: Tensor, row: int, seen: list[int], which: tuple[int, int, int]) -> Tensor:
        request = read.span.request
        beyond = max(0, row - request.prompt_len + 1)
        if self.noise:
            seed = request.params.seed if beyond else 0
            h, g, group = which
            found = (
                found + torch.tensor([scalar_gumbel(seed, row, key, h, g, group, read.layer) for key in seen]).double()
            )
        return (found / (self.tau + self.step * beyond)).softmax(0)

    def _rank(self, score: float, at: int, now: int) -> float:
        return score / (now - at + 1) if self.mean else score

    def _budget(self, layer: int) -> int:
        return self.by_layer[layer] if self.by_layer else self.rows

    def _cut(self, layer: int, length: int) -> None:
        rows, now = self._budget(layer), length - 1
        if rows >= length:
            return
        older = range(length - self.recent)
        ranked = [sorted(older, key=lambda at: (-self._rank(own[at], at, now), at)) for own in self.scores[layer]]
        count, heads = rows - self.recent, len(ranked)
        sizes = [count] * heads
        if self.ada is not None:
            sure = math.floor(self.ada * count + 1e-9)
            rivals = [(-self._rank(self.scores[layer][h][at], at, now), place, h)
                      for h in range(heads) for place, at in enumerate(ranked[h]) if place >= sure]  # fmt: skip
            sizes = [sure] * heads
            for _, _, h in sorted(rivals)[: heads * (count - sure)]:
                sizes[h] += 1
        self.sizes[layer] = [size + self.recent for size in sizes]
        for h, own in enumerate(self.scores[layer]):
            stay = {*ranked[h][: sizes[h]], *range(length - self.recent, length)}
            self.scores[layer][h] = {at: score for at, score in own.items() if at in stay}

    def _drop(self, layer: int, now: int) -> bool:
        """Give up the lowest row of each head that has too many."""
        dropped = False
        for h, own in enumerate(self.scores[layer]):
            if len(own) > (self.sizes[layer][h] if layer in self.sizes else self._budget(layer)):
                rivals = [at for at in own if at <= now - self.recent]
                lowest = min(rivals, key=lambda at: (self._rank(own[at], at, now), -at))
                self.scores[layer][h] = {at: score for at, score in own.items() if at != lowest}
                dropped = True
        return dropped

    def due(self, request: Request) -> bool:
        return False

    def keep(self, request: Request, layer: int) -> None:
        return None

    @property
    def left(self) -> list[list[list[int]]]:
        return [[sorted(own) for own in self.scores[layer]] for layer in sorted(self.scores)]
