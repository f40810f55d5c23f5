"""Heads on the last state that read, in its place, what a layer over all states makes of it (arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phasewise.request.request import Request
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, follower
from phasewise.speculation.heads.last_state import LastStateDrafter, LastStateHeads, RankPath
from phasewise.speculation.tree_drafter import lags
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host

CHUNK = 512  # prompt tokens that the layer reads per step while it lags behind


class PrefixedDrafter(LastStateDrafter):
    """A drafter with a prefix layer, which follows each request with keys and values of its own and runs once a draft.
    None of its rows is a guess's, so all of them stay."""

    companion: FeatureCompanion

    def __init__(self, host: Host, heads: LastStateHeads, tree: Sequence[RankPath], prefix: FeatureModel) -> None:
        super().__init__(host, heads, tree)
        self.companion = follower(host, f"{self.name} prefix", prefix, FeatureCompanion)
        self.drawer, self.token_rows = self.companion.features.drawer, (self.companion.features,)
        self._able: set[str] = set()  # requests that may be drafted for in this step

    def reach(self, context: int) -> int:
        return context

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for request in self.companion.features.learn(spans, hidden, outcomes):
            self.companion.forget(request)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        late = [request for request in requests if lags(self.companion, request, CHUNK)]
        behind = {request.id for request in late}
        there = [request for request in requests if request.id not in behind and self.companion.ready(request)]
        self._able = {request.id for request in there if self.companion.reserve(request, request.known)}
        drafts = super().draft(requests, budgets)
        waiting = [request for request in late if self.companion.reserve(request, request.known)]
        if waiting:
            self.companion.catch_up(waiting, CHUNK)
        return drafts

    def ready(self, request: Request) -> bool:
        return request.id in self._able

    def states(self, requests: Sequence[Request]) -> Tensor:
        return self.companion.model.heads.final(self.companion.root(requests)).to(self.dtype)
