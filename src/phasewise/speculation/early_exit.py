"""Drafters that leave the model early: an adapter behind its first layers guesses, and the verdict goes on from there.

The adapter reads one row a token: what the first layers make of it, its feature. The features of a text come with the
model's own steps (`Features`), those of guesses from `FirstLayers`. Both are the same numbers, so the adapter's keys
and values of guesses that were right stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phasewise.request.request import Request
from phasewise.speculation.companion import Companion, NewNodes, SecondModelKV
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import Features, LaterTokens
from phasewise.speculation.first_layers import FirstLayers
from phasewise.speculation.tree_drafter import TreeDrafter, TreeShape
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host


class ExitCompanion(Companion):
    """A companion whose row p is the p-th feature that is there. Drafts are chains: each guess runs the model's first
    layers, and then the adapter."""

    model: FeatureModel
    features: Features
    first_layers: FirstLayers

    def follow(self, features: Features, first_layers: FirstLayers) -> ExitCompanion:
        """Reads these features from now on."""
        self.features, self.first_layers = features, first_layers
        self.text = lambda request: LaterTokens(request.tokens, features.first(request))
        return self

    def ready(self, request: Request) -> bool:
        """True if all its tokens but the last have features, or all from some token on."""
        return self.features.end(request) == request.known - 1

    def begin(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Run the first layers on one more token of each request, and keep what they make of it as its feature."""
        rows = self.first_layers.run(requests, tokens)
        for request, row in zip(requests, rows.unbind()):
            self.features.put(request, self.features.end(request), row[None])

    def root(self, requests: Sequence[Request]) -> Tensor:
        self.begin(requests, [request.tokens[-1] for request in requests])
        return super().root(requests)

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        self.begin([level.request for level in levels], [token for level in levels for token in level.tokens])
        return super().grow(levels)

    def _below(self, level: NewNodes) -> Span:
        span = super()._below(level)
        assert span.sees is None and span.rows == 1, "drafts are chains"
        return self._read_by(span)

    def _span(self, request: Request, follower: SecondModelKV, start: int, tokens: Sequence[int]) -> Span:
        return self._read_by(super()._span(request, follower, start, tokens))

    def _read_by(self, span: Span) -> Span:
        """The span, whose rows are features."""
        start = span.positions[0]
        features = self.features.between(span.request, start, start + span.rows)
        span.given = span.hidden = self.model.inputs(span.tokens, features)
        return span


class ExitDrafter(TreeDrafter):
    """The runtime of such a drafter. All of a draft has run the first layers when it is proposed, its last guess as
    well."""

    companion: ExitCompanion

    def __init__(self, host: Host, companion: ExitCompanion, shape: TreeShape, chunk: int) -> None:
        super().__init__(host, companion, shape, chunk)
        self.first_layers: FirstLayers = companion.first_layers
        self.drawer, self.token_rows = companion.features.drawer, (companion.features,)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        ready = [self.companion.ready(request) for request in requests]
        most = [
            min(budget, self.first_layers.room(request) - 1) if able else 0
            for request, budget, able in zip(requests, budgets, ready)
        ]
        drafts = super().draft(requests, most)
        last = [(r, draft.tokens[-1]) for r, draft in zip(requests, drafts) if draft is not None and draft.tokens]
        if last:
            self.companion.begin([request for request, _ in last], [token for _, token in last])
        return drafts

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for request in self.companion.features.learn(spans, hidden, outcomes):
            self.companion.forget(request)


def exit_drafter(host: Host, name: str, model: FeatureModel, exit: int, shape: TreeShape, chunk: int) -> ExitDrafter:
    """Makes the runtime of a drafter called `name`, whose adapter stands behind the first `exit` layers."""
    companion = host.companion(name, model, ExitCompanion)
    assert isinstance(companion, ExitCompanion)
    host.taps |= model.layers_tapped
    features = Features(f"{name} features", model.key, model.width, model.dtype, model.features)
    first = FirstLayers(host.model, exit, host.counters)
    return ExitDrafter(host, companion.follow(features, first), shape, chunk)
