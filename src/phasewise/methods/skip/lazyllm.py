"""Tokens that the last one does not look at leave the layers, and come back when a later one does (arXiv 2407.14057).

Promises that no layer runs a token twice over the whole request, so that there are never more (row, layer) pairs than a
dense prompt has, and fewer at the first token; that tokens which come back enter a layer as they left the one before
it; and true positions throughout. At keep=1 all is dense. What a layer holds, rows read, needed just then or not: it
costs a read and nothing else. Left out: the paper's own layers and rates, which it does not print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.model.config import ModelConfig
from phasewise.request.request import Request
from phasewise.step.late import Late
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.probe import probe
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits

NAME = "lazyllm"


@dataclass(frozen=True)
class LazyLLM(Method):
    """After some layers, those tokens go on that the last one attends to most, on average over its heads; the last one
    always does. The layers lie evenly from the share `start` of the depth on, `stages` of them, and the share of all
    tokens known that goes on falls in equal steps to `keep`. The others' rows wait beside the KV for a new token that
    needs them: what it attends to most among all that a layer holds. With `revive` off nothing waits and nothing comes
    back: the static pruning that the method is measured against.

    Which tokens go on depends on the whole prompt, so it is computed in one piece and shares no prefix; decoded tokens
    are computed one at a time, after a preemption as well.
    """

    keep: float = 0.25
    start: float = 0.25
    stages: int = 3
    revive: bool = True

    paper: ClassVar[str] = "arXiv 2407.14057"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"keep": 1.0}
    tight: ClassVar[dict[str, object]] = {"keep": 0.2}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"keep": 0.5}, {"keep": 0.25}, {"keep": 0.125})

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UserError(f"lazyllm: keep={self.keep} must lie above 0 and be at most 1, a share of the tokens")
        if not 0 <= self.start < 1:
            raise UserError(f"lazyllm: start={self.start} must be at least 0 and below 1, a share of the depth")
        if self.stages < 1:
            raise UserError(f"lazyllm: stages={self.stages} must be at least 1: tokens leave somewhere")

    @property
    def traits(self) -> Traits:
        plain = Traits("skip", fills=("evict", "attend"), shares_prefix=False)
        return plain if self.keep == 1 else replace(plain, skips_rows=True, defers_tokens=True, whole_prompts=True)

    def bind(self, host: Host) -> Lazy | None:
        config = host.model.config
        return Lazy(self, config, host.model.dtype) if self.shares(config.layers) else None

    def shares(self, layers: int) -> dict[int, float]:
        """The share of tokens that goes on after a layer, of those layers after which some leave."""
        found: dict[int, float] = {}
        for stage in range(self.stages):
            after = round((self.start + (1 - self.start) * stage / self.stages) * layers)
            found[max(1, min(after, layers - 1)) - 1] = 1 - (1 - self.keep) * (stage + 1) / self.stages
        return {} if layers < 2 or self.keep == 1 else found


def going(share: float, known: int) -> int:
    """The number of tokens that go on, of so many; a millionth of one is none, for shares are rounded."""
    return max(1, ceil(share * known - 1e-6))


@dataclass(slots=True)
class _Walk:
    """The outcome of a step for a request's rows: data, until they are committed."""

    here: Tensor | None = None  # of a prompt: the rows that are still on their way, increasing; None = all
    left: Tensor | None = None  # those that have gone after the layer before
    needed: Tensor | None = None  # of a token: bool, by position, what it needs of the layers to come
    late: Late | None = None  # rows that have come back
    waiting: dict[int, Late | None] = field(default_factory=dict)  # by layer, where that has changed


class Lazy(Attend, Evict, Skip):
    """One runtime for three slots: which rows run a layer, what the last one attends to, and nothing of its own about
    what is read. A request's drawer holds the waiting rows, by the layer that they have run last: their positions
    int64 [r], increasing, and what that layer has made of them [r, d]."""

    everything = True

    def __init__(self, knobs: LazyLLM, config: ModelConfig, dtype: torch.dtype) -> None:
        self.knobs, self.row_bytes = knobs, config.hidden * dtype.itemsize + 8
        self.shares = knobs.shares(config.layers)
        self._plan = AttentionPlan(record=Record(self.look))

    # ---- attend and evict
    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.request.prefilling or self.knobs.revive else EVERYTHING

    # ---- skip
    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        walk = self._walk(span)
        if not span.request.prefilling or walk.here is None:
            return None
        if walk.left is not None and self.knobs.revive:
            walk.waiting[layer - 1] = Late(walk.left.tolist(), x[walk.left])
        walk.left = None
        return walk.here

    def late(self, layer: int, span: Span) -> Late | None:
        if layer == 0:  # also where a step is tried again
            span.trail = {**(span.trail or {}), NAME: _Walk()}
        walk, last = self._walk(span), layer - 1
        if span.request.prefilling or not self.knobs.revive or last not in self.shares:
            return walk.late
        assert walk.needed is not None, "a token was not seen on its way"
        pool = _merged(self._waiting(span.request, last), walk.late)
        walk.late = None
        if pool is not None:
            needed = walk.needed[torch.tensor(pool.positions, device=pool.x.device)]
            walk.late, walk.waiting[last] = _some(pool, needed), _some(pool, ~needed)
        return walk.late

    def ran(self, layer: int, span: Span, x: Tensor) -> None:
        walk = self._walk(span)
        assert walk.late is not None
        walk.late = walk.late._replace(x=x)

    # ---- evict: nothing is given up, but these are asked before rows are read and when they stay
    def look(self, read: Read) -> None:
        """Find which tokens go on after a layer, by what the read's last row attends to."""
        share, walk = self.shares.get(read.layer), self._walk(read.span)
        prompt = read.span.request.prefilling
        if share is None:
            return
        known, slots = read.span.positions[-1] + 1, read.part.size[1]
        best = self.best(read, min(going(share, known), slots))
        if prompt:
            assert read.span.rows == known == read.span.request.prompt_len, "prompts come in one piece"
            here = torch.arange(known, device=best.device) if walk.here is None else walk.here
            leaves = torch.ones(slots, dtype=torch.bool, device=best.device)
            leaves[best] = False
            walk.here, walk.left = here[best], here[leaves]
        else:
            walk.needed = torch.zeros(known, dtype=torch.bool, device=best.device)
            walk.needed[read.part.positions[0, best]] = True

    def best(self, read: Read, count: int) -> Tensor:
        """The `count` slots that go on, increasing: the last one, and those it attends to most; of equal ones the
        earliest tokens."""
        scores, order = self.scores(read), read.part.positions[0].argsort()
        scores[-1] = torch.inf
        return order[scores[order].sort(stable=True, descending=True).indices[:count]].sort().values

    def scores(self, read: Read) -> Tensor:
        """The weights of the read's last row, averaged over its heads, float32 [N]."""
        return probe(read, [read.q.shape[0] - 1])[:, :, 0].mean((0, 1))

    def places(self, layer: int, shape: KVShape) -> int:
        return int(bool(self.shares) and layer >= min(self.shares))  # none goes, but some come late

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        walk: _Walk | None = (span.trail or {}).pop(NAME, None)
        if walk is None or not keep:
            return
        drawer = span.request.state.setdefault(NAME, {})
        for layer, waiting in walk.waiting.items():
            drawer.pop(layer, None)
            if waiting is not None and len(waiting.positions):
                drawer[layer] = [torch.tensor(waiting.positions), waiting.x]
        if self.shares and (walk.waiting or span.request.prefilling):  # no later token makes others wait
            held = sum(len(positions) for positions, _ in drawer.values())
            span.kv.limit(min(self.shares), held * self.row_bytes)

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Every token waits in one place at most, and those that reach the last layer in none: booked where the first
        leave."""
        if not self.knobs.revive or not self.shares or layer != min(self.shares):
            return 0
        return (room.rows - going(min(self.shares.values()), room.rows)) * self.row_bytes

    # ---- what is known
    @staticmethod
    def _walk(span: Span) -> _Walk:
        assert span.trail is not None
        walk: _Walk = span.trail[NAME]
        return walk

    @staticmethod
    def _waiting(request: Request, layer: int) -> Late | None:
        held = request.state.get(NAME, {}).get(layer)
        return None if held is None else Late(held[0].tolist(), held[1])


def _merged(one: Late | None, other: Late | None) -> Late | None:
    """Both, by position."""
    if one is None or other is None:
        return one or other
    positions = torch.tensor([*one.positions, *other.positions])
    order = positions.argsort()
    return Late(positions[order].tolist(), torch.cat((one.x, other.x))[order.to(one.x.device)])


def _some(of: Late, which: Tensor) -> Late | None:
    """Those that a mask names, [r]."""
    index = which.nonzero()[:, 0]
    return None if not len(index) else Late([of.positions[i] for i in index.tolist()], of.x[index])
