"""Token Recycling: the table is what was judged last, and the tree is filled in from it."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft.token_recycling import FIRST, LATER, NAME, Recycler, TokenRecycling, template
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.loop import draft_span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist
from tests import tiny

CYCLE = list(range(10, 30))


def recycler(knobs: TokenRecycling) -> Recycler:
    made = knobs.bind(None)  # type: ignore[arg-type]  # it asks the host for nothing
    assert isinstance(made, Recycler)
    return made


def chance(path: tuple[int, ...]) -> float:
    return FIRST[path[0]] * prod(LATER[rank] for rank in path[1:])


def test_the_template_is_the_likeliest_paths() -> None:
    """Against every path of at most three ranks: what is left out weighs no more than what is in."""
    for k, nodes in ((1, 4), (3, 9), (8, 63)):
        paths = template(k, nodes)
        assert len(set(paths)) == nodes
        assert all(path[:-1] in paths[:i] for i, path in enumerate(paths) if len(path) > 1), "parents come first"
        weight = {path: chance(path) for path in paths}
        others = [p for n in (1, 2, 3) for p in product(range(k), repeat=n) if p not in weight]
        heaviest = max(map(chance, others), default=0.0)
        assert min(weight.values()) >= heaviest * (1 - 1e-9)


def cycled(drafter: Recycler, tokens: int) -> list[int]:
    """New tokens of each pass over a target that goes round a cycle: after a token, the next one is likeliest, then the
    next one but one ..."""
    request = Request([CYCLE[0]], Params(max_tokens=tokens, ignore_eos=True))
    request.computed = 0
    request.kv = object()  # type: ignore[assignment]  # no model looks at it
    passes = []

    def after(token: int) -> list[int]:
        at = CYCLE.index(token) if token in CYCLE else 0
        return [CYCLE[(at + 1 + rank) % len(CYCLE)] for rank in range(drafter.top)]

    while request.known < tokens:
        (draft,) = drafter.draft([request], [drafter.size(request)])
        assert draft is not None
        request.computed = request.known - 1
        span = draft_span(request, draft, None)  # type: ignore[arg-type]
        rows = [after(token) for token in span.tokens]
        path, token = Match()(draft, Dist([row[0] for row in rows], 64), lambda *_: 0.0)
        drafter.learn([span], None, [Outcome(1, [token])], torch.tensor(rows))  # type: ignore[arg-type]
        new = [*(draft.tokens[node] for node in path), token]
        request.tokens += new
        passes.append(len(new))
    assert request.tokens == [CYCLE[i % len(CYCLE)] for i in range(len(request.tokens))]
    return passes


@pytest.mark.parametrize(("k", "nodes"), [(8, 63), (4, 20), (1, 5)])
def test_a_cycle_is_guessed_to_the_depth_of_the_tree(k: int, nodes: int) -> None:
    """Once it has gone round: depth + 1 tokens a pass, all by rank 0."""
    depth = max(map(len, template(k, nodes)))
    passes = cycled(recycler(TokenRecycling(k=k, nodes=nodes)), 200)
    assert passes[0] == 1
    assert set(passes[len(CYCLE) + 1 : -(depth + 1)]) == {depth + 1}


class Watch:
    """What the drafter was told, and the table counted again from it: by every judged row, the last one stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: dict[int, dict[int, list[int]]] = {}
        self.hits: list[bool] = []  # whether rank 0 of the table was the token that followed
        real, heads = Recycler.learn, Model.head
        self.heads = 0

        def learn(drafter: Recycler, spans: Any, hidden: Any, outcomes: Any, tops: Tensor) -> None:
            row = 0
            for span, outcome in zip(spans, outcomes):
                table = self.tables.setdefault(id(span.request), {})
                last = span.positions[-1] + 1 == span.request.known
                rows = list(range(span.rows)) if isinstance(span.note, Draft) else [span.rows - 1] if last else []
                if outcome.tokens:
                    before = table.get(span.tokens[rows[0]])
                    self.hits.append(before is not None and before[0] == outcome.tokens[0])
                for at in rows:
                    table[span.tokens[at]] = tops[row].tolist()
                    row += 1
            assert row == len(tops)
            real(drafter, spans, hidden, outcomes, tops)
            for span in spans:
                assert span.request.state.get(NAME, {}) == self.tables.get(id(span.request), {})

        def head(model: Model, x: Tensor) -> Tensor:
            self.heads += 1
            return heads(model, x)

        monkeypatch.setattr(Recycler, "learn", learn)
        monkeypatch.setattr(Model, "head", head)


def test_the_table_is_a_recount_of_all_judged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    placed = tiny.engine({"draft": "token_recycling:k=4,nodes=20,prompts=none"})
    tiny.run(placed, tiny.prompts(20, 7, 33), tiny.greedy(60))
    assert placed.counters.accepted > 0
    assert all(len(row) == 4 for table in watch.tables.values() for row in table.values())
    half = len(watch.hits) // 2
    assert sum(watch.hits[half:]) > sum(watch.hits[:half]), "what has been said is guessed better"


def test_one_pass_of_the_head_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned comes from the pass that judges: one per step in which a row is judged."""
    watch = Watch(monkeypatch)
    placed = tiny.engine({"draft": "token_recycling"})
    tiny.run(placed, tiny.prompts(12), tiny.greedy(40))
    assert watch.heads == placed.counters.forwards
    assert placed.counters.head_rows == placed.counters.drafted + placed.counters.forwards


def test_a_shared_table_changes_no_token() -> None:
    """Neither greedy ones nor, under both verifiers, drawn ones; what one request said is guessed for the next."""
    prompts = tiny.prompts(20, 33)
    for params in (tiny.greedy(16), Params(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True)):
        want = tiny.plain(prompts, params)
        for verify in ("rejection", "match"):
            placed = tiny.engine({"draft": "token_recycling:scope=engine", "verify": verify})
            assert tiny.outs(tiny.run(placed, prompts, params)) == want
            assert tiny.outs(tiny.run(placed, prompts, params)) == want
    for scope, remembers in (("engine", True), ("request", False)):
        placed = tiny.engine({"draft": f"token_recycling:scope={scope},prompts=none"})
        tiny.run(placed, prompts[:1], tiny.greedy(3))
        first = placed.counters.drafted
        tiny.run(placed, prompts[:1], tiny.greedy(3))
        assert (placed.counters.drafted - first > first) == remembers


def test_a_shared_table_is_refused_where_tokens_would_hang_on_it() -> None:
    with pytest.raises(UserError, match=r"token_recycling learns from all requests.*verifier top_beta"):
        tiny.engine({"draft": "token_recycling:scope=engine", "verify": "top_beta"})
    tiny.engine({"draft": "token_recycling", "verify": "top_beta"})


def test_a_prompt_is_read_once_and_its_last_word_comes_first() -> None:
    request = Request([3, 4, 5, 3, 6, 3, 4, 7], Params(max_tokens=9))
    drafter = recycler(TokenRecycling(k=3, nodes=3))
    assert drafter.draft([request], [9]) == [Draft([], [])]
    assert request.state[NAME] == {3: [4, 6], 4: [7, 5], 5: [3], 6: [3]}
    request.tokens += [3, 4]
    (draft,) = drafter.draft([request], [9])
    assert draft is not None and draft.tokens[0] == 7, "what is said is learned from verdicts alone"
    silent = recycler(TokenRecycling(prompts="none"))
    request.state.clear()
    silent.draft([request], [9])
    assert request.state[NAME] == {}


def test_a_shared_table_is_read_into_once_a_request() -> None:
    drafter = recycler(TokenRecycling(k=2, scope="engine"))
    requests = [Request([3, after, 5], Params(max_tokens=9)) for after in (4, 6)]
    for _ in range(2):
        drafter.draft(requests, [9, 9])
        assert drafter.table == {3: [6, 4], 4: [5], 6: [5]}
    drafter.table[3] = [9]
    drafter.draft(requests, [9, 9])
    assert drafter.table[3] == [9]


def test_a_guess_goes_as_far_as_the_table() -> None:
    request = Request([3, 4], Params(max_tokens=9))
    drafter = recycler(TokenRecycling(k=1, nodes=3))
    request.state[NAME] = {4: [5], 5: [6]}
    (draft,) = drafter.draft([request], [9])
    assert draft == Draft([5, 6], [-1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=0", "k=0 must be from 1 to 8"),
        ("nodes=64", "nodes=64 must be from 1 to 63"),
        ("k=9", "k=9 must be"),
    ],
)
def test_wrong_knobs_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"token_recycling: {message}"):
        tiny.engine({"draft": f"token_recycling:{text}"})
