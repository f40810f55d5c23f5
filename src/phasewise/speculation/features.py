"""The feature lane: states of the target model, kept for each token of a request, for drafters that read them.

A feature drafter (arXiv 2401.15077, 2412.19437) reads pairs. Pair p is the target's state at token p, called its
feature, with the embedding of token p + 1, and foretells token p + 2. `Features` notes the features as the target's
steps go by and keeps them in the request's drawer as plain tensors. So they follow it through forks and hand-offs,
come again after a preemption as the rows are computed once more, and lie beside cached prefixes.
`FeatureCompanion` is a companion that reads such pairs: its keys and values count in the request's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from phasewise.kv.buffer import rounded
from phasewise.speculation.companion import Companion, NewNodes, SecondModelKV
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.tree_drafter import TreeDrafter, TreeShape
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host

if TYPE_CHECKING:
    from phasewise.kv.drawers import Room
    from phasewise.kv.format import KVShape
    from phasewise.request.request import Request

ReadFeatures = Callable[[Hidden, list[int]], Tensor]
"""(what a step leaves behind, numbers of rows) -> their features [n, width], not the step's own memory."""


class Features:
    """The features of requests' tokens, one method's. They lie in `request.state[name]`:

    {"first": int, "count": int, "rows": [capacity, width]}, of tokens `first` to `first + count - 1`. `first` is 0
    unless rows came from elsewhere without features (KV of another request, say): then the lane begins behind them.
    """

    def __init__(self, name: str, key: str, width: int, dtype: torch.dtype, read: ReadFeatures) -> None:
        """`key` names the features' source: heads with other weights may make others (see `TokenRows`)."""
        self.name, self.key, self.width, self.read = name, key, width, read
        self.row_bytes = width * dtype.itemsize

    # ---- noting
    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> list[Request]:
        """Keeps the features of all rows that stay. Called once a step, before its rows are committed; a step that is
        tried again overwrites them. Returns the requests whose features begin anew, behind a gap."""
        index: list[int] = []
        noted: list[tuple[Request, int, int]] = []
        for span, outcome in zip(spans, outcomes):
            if span.kv is not span.request.kv:
                continue  # of a sibling, which gets a copy as it forks
            kept = range(outcome.keep) if isinstance(outcome.keep, int) else outcome.keep
            index += [span.start + row for row in kept]
            noted.append((span.request, span.positions[0] - span.beyond, len(kept)))
        anew: list[Request] = []
        if index:
            rows, at = self.read(hidden, index), 0
            for request, start, count in noted:
                anew += [request] * self.put(request, start, rows[at : at + count])
                at += count
        return anew

    def put(self, request: Request, start: int, rows: Tensor) -> bool:
        """Keeps the features of tokens from the number `start` on, as the last ones. Returns True if they are the
        first."""
        drawer: dict[str, Any] | None = request.state.get(self.name)
        anew = drawer is None or not drawer["first"] <= start <= drawer["first"] + drawer["count"]
        if drawer is None or anew:
            drawer = request.state[self.name] = {"first": start, "count": 0, "rows": rows[:0]}
        at = start - drawer["first"]
        end = at + len(rows)
        if end > len(drawer["rows"]):
            larger = rows.new_empty((rounded(end), self.width))
            larger[:at] = drawer["rows"][:at]
            drawer["rows"] = larger
        drawer["rows"][at:end] = rows
        drawer["count"] = end
        return anew

    # ---- asking
    def first(self, request: Request) -> int:
        """The first token that has a feature with all after it; its prompt's length where none has."""
        drawer = request.state.get(self.name)
        return int(request.known if drawer is None else drawer["first"])

    def end(self, request: Request) -> int:
        """The number of tokens up to the last that has a feature; 0: none has."""
        drawer = request.state.get(self.name)
        return 0 if drawer is None else int(drawer["first"] + drawer["count"])

    def between(self, request: Request, start: int, stop: int) -> Tensor:
        """Features [stop - start, width], counted from the first that is there."""
        drawer = request.state[self.name]
        assert stop <= drawer["count"], "a feature is asked for that no step has left"
        rows: Tensor = drawer["rows"][start:stop]
        return rows

    # ---- TokenRows: beside cached prefixes
    def held(self, request: Request, upto: int) -> Tensor | None:
        if self.first(request) or self.end(request) < upto:
            return None
        return self.between(request, 0, upto)

    def give(self, request: Request, rows: Tensor) -> None:
        request.state[self.name] = {"first": 0, "count": len(rows), "rows": rows}

    # ---- memory
    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Bytes at most in a request's drawer, which are booked with the rows of the first layer."""
        return 0 if layer else rounded(room.end) * self.row_bytes


@dataclass(frozen=True)
class LaterTokens(Sequence[int]):
    """A list of tokens from the number `start` on, without a copy of them."""

    tokens: list[int]
    start: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - self.start)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            return self.tokens[self.start + start : self.start + stop : step]
        return self.tokens[self.start + range(len(self))[at]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens[self.start :])


class FeatureCompanion(Companion):
    """A companion whose rows are pairs: row p is of the p-th feature that is there and the token after it.

    While it drafts, a node's feature is what its parent's row came out as. Such rows never stay: once the target has
    judged, pairs of its true features take their place.
    """

    model: FeatureModel
    features: Features

    def follow(self, features: Features) -> FeatureCompanion:
        """Reads these features from now on."""
        self.features, self.calibrated = features, True
        self.text = lambda request: LaterTokens(request.tokens, features.first(request) + 1)
        self._outputs: dict[str, Tensor] = {}  # by request, of the draft that grows: [1 + nodes, d], the root's first
        return self

    def ready(self, request: Request) -> bool:
        """True if all its tokens but the last have features, or all from some token on."""
        return self.features.end(request) == request.known - 1

    def root(self, requests: Sequence[Request]) -> Tensor:
        x = super().root(requests)
        self._outputs = {request.id: row[None] for request, row in zip(requests, x)}
        return x

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        x, at = super().grow(levels), 0
        for level in levels:
            mine = x[at : at + len(level.tokens)]
            self._outputs[level.request.id] = torch.cat((self._outputs[level.request.id], mine))
            at += len(level.tokens)
        return x

    def _below(self, level: NewNodes) -> Span:
        span, outputs = super()._below(level), self._outputs[level.request.id]
        above = outputs[[parent + 1 for parent in level.parents]]
        span.given = span.hidden = self.model.inputs(level.tokens, self.model.heads.passed_on(above))
        return span

    def _span(self, request: Request, follower: SecondModelKV, start: int, tokens: Sequence[int]) -> Span:
        span = super()._span(request, follower, start, tokens)
        features = self.features.between(request, start, start + len(tokens))
        span.given = span.hidden = self.model.inputs(tokens, features)
        return span


C = TypeVar("C", bound=FeatureCompanion)


class FeatureDrafter(TreeDrafter):
    """The runtime of drafters that grow trees of a feature drafter's guesses."""

    companion: FeatureCompanion

    def __init__(self, host: Host, companion: FeatureCompanion, shape: TreeShape, chunk: int) -> None:
        super().__init__(host, companion, shape, chunk)
        self.drawer, self.token_rows = companion.features.drawer, (companion.features,)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        ready = [self.companion.ready(request) for request in requests]
        return super().draft(requests, [budget if able else 0 for budget, able in zip(budgets, ready)])

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for request in self.companion.features.learn(spans, hidden, outcomes):
            self.companion.forget(request)


def follower(host: Host, name: str, model: FeatureModel, kind: type[C]) -> C:
    """The companion of a kind that follows requests with a feature model, under the name of its drafter."""
    companion = host.companion(name, model, kind)
    assert isinstance(companion, kind)
    host.taps |= model.layers_tapped
    companion.follow(Features(f"{name} features", model.key, model.width, model.dtype, model.features))
    return companion


def feature_drafter(host: Host, name: str, model: FeatureModel, shape: TreeShape, chunk: int) -> FeatureDrafter:
    """Makes the runtime of a drafter called `name` whose guesses are a feature model's."""
    return FeatureDrafter(host, follower(host, name, model, FeatureCompanion), shape, chunk)
