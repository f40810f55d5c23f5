"""Rows that ask: what the model says there is the drafter's, and nobody else can tell that they were there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.decode.speculative import Speculative
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.span import Span, depths
from phasewise.verbs.draft import Draft, Drafter, judged
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.traits import Traits
from tests import oracle, tiny
from tests.laws.settings import spell

N, PROMPTS = 20, tiny.prompts(21, 6, 40)
SAMPLED = Params(max_tokens=N, temperature=0.9, top_p=0.95, seed=4, ignore_eos=True)
PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6)
Script = dict[tuple[int, ...], list[int]]


class Asking(Method, Drafter):
    """Two guesses, the first of them right; then the right continuation, which asks, and a wrong branch that does.

    Every row's state, likeliest token and outcome is kept.
    """

    traits: ClassVar[Traits] = Traits("draft", drawn=False, candidates=1)

    def __init__(self, script: Script, ask: bool, guess: bool = True) -> None:
        self.script, self.ask, self.guess = script, ask, guess
        self.seen: list[tuple[tuple[int, ...], list[int], list[int], Any]] = []  # text, path, likeliest, Outcome
        self.x: list[Tensor] = []  # of the judged rows
        self.asked = 0

    def size(self, request: Request) -> int:
        return 9

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Draft:
        truth = self.script[tuple(request.prompt)][request.n_out :]
        draft = Draft([], [])
        if self.guess:
            draft = Draft([truth[0], 3 + (truth[0] - 2) % 40], [-1, -1])
        if self.ask:
            start = len(draft.tokens)
            right = truth[:4]
            draft.tokens += [*right, 5, 6]
            draft.parents += [-1, *range(start, start + len(right) - 1), -1, start + len(right)]
            draft.ask = len(right) + 2
        return draft

    def learn(self, spans: Sequence[Span], hidden: Any, outcomes: Sequence[Any], tops: Tensor | None = None) -> None:
        assert tops is not None
        ids, row = tops[:, 0].tolist(), 0
        asking = sum(len(judged(span)) for span in spans)
        for span, outcome in zip(spans, outcomes):
            text = tuple(span.request.tokens)
            rows = judged(span)
            if span.note is not None:
                self.x.append(hidden.rows([span.start + r for r in rows]).clone())
                own = list(range(row, row + len(rows))) + list(range(asking, asking + span.note.ask))
                for at, node in zip(own, range(-1, len(span.note.tokens))):
                    self.seen.append((text, list(span.note.path(node)), [ids[at]], outcome))
                asking += span.note.ask
                self.asked += span.note.ask
            row += len(rows)
        assert asking == len(tops)


def asking(
    drafter: Asking, verify: str = "match", model: Model | None = None, attend: str = "dense", **limits: Any
) -> Placed:
    methods = parse({"schedule": "prefill_first", "attend": attend})
    methods["decode"] = Speculative(drafter, catalog.build("verify", spell("verify", verify)))
    bounds = Limits(**{"kv_bytes": 64 << 20, "prefix_cache": False, **limits})
    return Builder(model or tiny.model(), methods, bounds, load=tiny.load).build()


def script(params: Params, model: Model | None = None) -> Script:
    outs = tiny.outs(tiny.run(tiny.engine(of=model), PROMPTS, params))
    return {tuple(prompt): out for prompt, out in zip(PROMPTS, outs)}


@pytest.mark.parametrize("params", [tiny.greedy(N), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verify", catalog.names("verify"))
@pytest.mark.parametrize("guess", [True, False])
def test_they_are_never_judged_and_never_kept(verify: str, params: Params, guess: bool) -> None:
    """They are what comes next, and nothing of them is accepted, counted as a guess or left in the KV."""
    truth = script(params)
    drafter = Asking(truth, ask=True, guess=guess)
    placed = asking(drafter, verify)
    requests = [Request(prompt, params) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    while any(request.left is None for request in requests):
        placed.step()
        for request in requests:
            if request.kv is not None:
                assert {layer.n for layer in request.kv.layers} == {request.computed}
                assert request.computed <= request.known
    work = placed.counters
    assert drafter.asked > N
    assert (
        work.rows == sum(map(len, PROMPTS)) + work.drafted + drafter.asked + work.emitted - len(PROMPTS) - work.accepted
    )
    assert work.head_rows == work.rows - sum(map(len, PROMPTS)) + len(PROMPTS)
    if not guess:
        assert work.drafted == work.accepted == 0
    if catalog.method("verify", verify).guarantee != "lossy":
        assert tiny.outs(requests) == list(truth.values())


def test_as_guesses_they_would_be_kept() -> None:
    """The control: the same nodes, which do not ask."""
    truth = script(tiny.greedy(N))
    drafter = Asking(truth, ask=True, guess=False)
    one = drafter._one
    drafter._one = lambda request: Draft(one(request).tokens, one(request).parents)  # type: ignore[method-assign]
    placed = asking(drafter)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == list(truth.values())
    assert placed.counters.accepted > N


def test_the_drafter_is_told_what_the_model_says_there() -> None:
    truth = script(tiny.greedy(N))
    drafter = Asking(truth, ask=True)
    tiny.run(asking(drafter), PROMPTS[:2], tiny.greedy(N))
    for text, path, likeliest, _ in drafter.seen[:60]:
        assert int(oracle.logits(tiny.checkpoint(), [*text, *path])[-1].argmax()) == likeliest[0]


def test_one_pass_of_the_head_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []
    real = Model.head

    def head(model: Model, x: Tensor) -> Tensor:
        heads.append(len(x))
        return real(model, x)

    monkeypatch.setattr(Model, "head", head)
    placed = asking(Asking(script(tiny.greedy(N)), ask=True))
    heads.clear()
    tiny.run(placed, PROMPTS, tiny.greedy(N))
    assert len(heads) == placed.counters.forwards and sum(heads) == placed.counters.head_rows


@pytest.mark.parametrize("attend", ["dense", "quest:page=4,budget=12,dense_layers=1"])
def test_other_rows_are_the_same_to_rounding(attend: str) -> None:
    """In float32 torch rounds by the number of rows; no more than that may differ."""
    truth = script(tiny.greedy(N))
    told = [drafter.x for drafter in both(truth, tiny.model(), attend)]
    for ours, theirs in zip(*told, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_other_rows_are_the_same_to_the_bit_natively() -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    with_them, without = both(script(tiny.greedy(N), model), model, "dense")
    assert len(with_them.x) > N and with_them.asked > N and without.asked == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(with_them.x, without.x, strict=True))


def both(truth: Script, model: Model, attend: str) -> list[Asking]:
    made = []
    for ask in (True, False):
        made.append(Asking(truth, ask))
        tiny.run(asking(made[-1], model=model, attend=attend), PROMPTS, tiny.greedy(N))
    return made


@given(PATHS, st.integers(0, 12), st.integers(0, 6), st.integers(1, 12))
def test_what_is_cut_or_pruned_still_knows_who_asks(paths: list[list[int]], ask: int, levels: int, nodes: int) -> None:
    whole = Draft.trie(paths)
    whole.tokens = list(range(len(whole.tokens)))  # told apart
    whole.ask = min(ask, len(whole.tokens))
    asks = set(whole.tokens[len(whole.tokens) - whole.ask :])
    for less in (whole.cut(nodes), whole.prune(levels), whole.prune(levels).cut(nodes)):
        assert set(less.tokens[len(less.tokens) - less.ask :]) == asks & set(less.tokens)
    assert max(depths(whole.prune(levels).parents), default=0) <= max(levels - 1, 0)
