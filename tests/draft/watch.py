"""What a drafter proposes in every pass, and how much of it is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.place import Placed
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.laws.engines import engines, preempt

Says = Callable[[Sequence[int], int], list[int]]  # a known text, and how many tokens are guessed in a row -> these
Moment = tuple[str, int]  # a request's prompt, and how many tokens were known


def drafters(placed: Placed, recipe: str = "") -> Iterator[Any]:
    """The drafter of each phase of a recipe, in every engine of a placement."""
    for engine in engines(placed):
        for phase in engine.recipes[recipe].phases:
            decode: Any = phase.decode
            yield decode.drafter


def drafter_of(placed: Placed) -> Any:
    """The drafter of the last phase."""
    return [*drafters(placed)][-1]


class Watch:
    """Drafts and accepted guesses of every pass, by request and by the tokens it had then."""

    def __init__(self, placed: Placed) -> None:
        self.accepted: dict[Moment, int] = {}
        self.drafts: dict[Moment, Draft] = {}
        for drafter in {id(each): each for each in drafters(placed)}.values():
            self._watch(drafter)

    def _watch(self, drafter: Any) -> None:
        learn, draft = drafter.learn, drafter.draft

        def learning(spans: Any, hidden: Any, outcomes: Any, tops: Any = None) -> None:
            for span, outcome in zip(spans, outcomes):
                if span.note is not None:
                    self.accepted[self.moment(span.request)] = outcome.accepted
            learn(spans, hidden, outcomes, tops)

        def drafting(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
            drafts: list[Draft | None] = draft(requests, budgets)
            self.drafts |= {self.moment(r): d for r, d in zip(requests, drafts) if d is not None}
            return drafts

        drafter.learn, drafter.draft = learning, drafting

    @staticmethod
    def moment(request: Request) -> Moment:
        return repr(request.prompt), request.known

    def forget(self) -> None:
        self.accepted, self.drafts = {}, {}


def watched(verbs: dict[str, str], prompts: Sequence[Sequence[int]] = PROMPTS, n: int = N) -> Watch:
    """Run these alone, one after the other, and look on."""
    placed = tiny.engine(verbs)
    watch = Watch(placed)
    for prompt in prompts:
        tiny.outs(tiny.run(placed, [prompt], tiny.greedy(n)))
    return watch


def check_chains(watch: Watch, says: Says) -> None:
    """Every draft of the last of `PROMPTS` is the chain that follows the known text."""
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        n = len(draft.tokens)
        assert draft.tokens == says(text[:known], n) and draft.parents == list(range(-1, n - 1))


def serve(placed: Any, prompt: Sequence[int], recipe: str = "") -> Request:
    """One request until it leaves. The prefix cache stays."""
    request = Request(prompt, tiny.greedy(N), recipe=recipe)
    placed.add(request)
    while request.left is None:
        placed.step()
    return request


def run_disturbed(placed: Placed, requests: Sequence[Request]) -> None:
    """All at once to their ends; in the third and in the fifth step all that run are preempted."""
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)


def limit_budgets(placed: Placed, most: int) -> None:
    """From now on no draft may have more rows."""
    drafter = drafter_of(placed)
    draft = drafter.draft
    drafter.draft = lambda requests, budgets: draft(requests, [min(each, most) for each in budgets])


def run_with_few_rows(verbs: dict[str, str], most: int) -> Watch:
    """The first prompt, greedily and as plain decoding, where no draft may have more rows than `most`."""
    placed = tiny.engine(verbs)
    limit_budgets(placed, most)
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS[:1], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[:1]
    assert max((len(draft.tokens) for draft in watch.drafts.values()), default=0) <= most
    return watch


def layers_run(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Rows that run each of the target's layers, as the layers see them."""
    found, real, target = Counter[int](), Model.layer, tiny.model()

    def counted(self: Model, i: int, x: torch.Tensor, *more: Any) -> torch.Tensor:
        if self is target:
            found[i] += len(x)
        return real(self, i, x, *more)

    monkeypatch.setattr(Model, "layer", counted)
    return found
