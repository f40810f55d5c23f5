"""Lookahead decoding: the window is a Jacobi iteration, its n-grams are guessed, and none of its rows is ever kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.handoff import _encode
from phasewise.methods.draft.lookahead import NAME, Lookahead, LookaheadRun
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.loop import draft_span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import headroom
from phasewise.verbs.sample import Dist
from tests import oracle, tiny
from tests.watched import passes

CYCLE = list(range(10, 30))
Pool = dict[int, "OrderedDict[tuple[int, ...], None]"]


def run_of(knobs: Lookahead) -> LookaheadRun:
    return knobs.bind(None)  # type: ignore[arg-type]  # it asks the host for nothing


class Slow:
    """The paper's window by its definition: for every entry a pass over the text, the first row up to its column, and
    its own column down to it, written out as a sequence."""

    def __init__(self, model: Model, knobs: Lookahead, text: list[int], first: list[int], end: int) -> None:
        self.model, self.knobs, self.text, self.end = model, knobs, text, end
        self.rows = [first]
        self.pool: Pool = {}

    def sequence(self, row: int, column: int) -> list[int]:
        first = self.rows[0][:column]
        return self.text + first + [self.rows[i][column] for i in range(1, row + 1)]

    def entries(self) -> Iterator[tuple[int, int]]:
        for i, row in enumerate(self.rows):
            yield from ((i, j) for j in (range(1, len(row) + 1) if i == 0 else range(len(row))))

    def narrow(self) -> None:
        """No entry stands where no token can: columns go, from the right."""
        room = self.end - len(self.text) - 1
        columns = [j for j in range(self.end) if len(self.rows) - 1 + j <= room]
        self.rows = [[e for j, e in enumerate(row, start=not i) if j in columns] for i, row in enumerate(self.rows)]

    def guessed(self, truth: Sequence[int]) -> int:
        """How many of the next tokens the pool has."""
        best = 0
        for gram in self.pool.get(self.text[-1], ()):
            same = [a == b for a, b in zip(gram, truth)]
            best = max(best, same.index(False) if False in same else len(same))
        return best

    def step(self, truth: Sequence[int]) -> dict[tuple[int, int], Tensor]:
        """A pass of which nothing but the window matters, then the tokens. -> logits of every entry"""
        self.narrow()
        accepted = self.guessed(truth)
        said = {at: oracle.logits(self.model.files.path, self.sequence(*at))[-1] for at in self.entries()}
        if said:
            self.move(said)
        self.text = self.text + list(truth[: accepted + 1])
        return said

    def move(self, said: dict[tuple[int, int], Tensor]) -> None:
        last = len(self.rows) - 1
        new = {j: int(logits.argmax()) for (i, j), logits in said.items() if i == last}
        if last == 0:
            new[0] = int(oracle.logits(self.model.files.path, self.text)[-1].argmax())
        out = [new[j] for j in sorted(new)]
        if len(self.rows) < self.knobs.n - 1:  # another row; all lose their first column
            self.rows = [row[1:] for row in self.rows] + [out[1:]]
            return
        for j, token in enumerate(out):
            key = self.text[-1] if j == 0 else self.rows[0][j - 1]
            grams = self.pool.setdefault(key, OrderedDict())
            gram = (*(row[j] for row in self.rows[1:]), token)
            grams[gram] = None
            grams.move_to_end(gram)
            while len(grams) > self.knobs.guesses:
                grams.popitem(last=False)
        self.rows = [*self.rows[1:], out]
        self.rows[0] = self.rows[0][1:]

    def remember(self, text: Sequence[int]) -> None:
        for start in range(len(text) - self.knobs.n + 1):
            grams = self.pool.setdefault(text[start], OrderedDict())
            gram = tuple(text[start + 1 : start + self.knobs.n])
            grams[gram] = None
            grams.move_to_end(gram)
            if len(grams) > self.knobs.guesses:
                grams.popitem(last=False)


KNOBS = [(4, 4, 2, True), (3, 3, 7, False), (5, 2, 1, True), (1, 5, 3, False)]


@pytest.mark.parametrize(("window", "n", "guesses", "prompt"), KNOBS)
def test_the_window_is_a_jacobi_iteration(
    window: int, n: int, guesses: int, prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, logits and pool of every pass against uncached passes over sequences written out; tokens a pass as well."""
    model, knobs, new = tiny.model(layers=2), Lookahead(window, n, guesses, prompt), 18
    text = tiny.prompts(9)[0]
    text = text * 2
    first = Request(text, tiny.greedy(new))
    slow = Slow(model, knobs, text, run_of(knobs)._state(first)["rows"][0], len(text) + new)
    assert len(slow.rows[0]) == window + n - 3 and set(slow.rows[0]) <= set(text)
    if prompt:
        slow.remember(text)
    truth, _ = oracle.greedy(model.files.path, text, new)
    slow.text = text + truth[:1]
    shown: list[Tensor] = []
    learn = LookaheadRun.learn

    def watched(run: LookaheadRun, spans: Any, hidden: Any, outcomes: Any, tops: Any = None) -> None:
        (span,) = spans
        if span.note is not None and span.note.ask:
            asking = hidden.rows(list(range(span.rows - span.note.ask, span.rows)))
            shown.append(model.head(asking).clone())
        learn(run, spans, hidden, outcomes, tops)

    monkeypatch.setattr(LookaheadRun, "learn", watched)
    placed = tiny.engine({"draft": f"lookahead:window={window},n={n},guesses={guesses},prompt={prompt}"}, of=model)
    request = Request(text, tiny.greedy(new))
    placed.add(request)
    while request.n_out < 1:
        placed.step()
    grams = 0
    while request.left is None:
        shown.clear()
        placed.step()
        said = slow.step(truth[len(slow.text) - len(text) :])
        if said:
            torch.testing.assert_close(shown[0], torch.stack(list(said.values())), atol=2e-4, rtol=1e-4)
        if request.left is None:
            state = request.state[NAME]
            assert state["rows"] == slow.rows
            assert state["pool"] == {key: list(grams) for key, grams in slow.pool.items()}
            assert request.tokens == slow.text
            grams = sum(map(len, slow.pool.values()))
    assert request.out == truth and grams > window
    assert all(len(grams) <= guesses for grams in slow.pool.values())


def cycled(run: LookaheadRun, tokens: int) -> list[int]:
    """New tokens of each pass over a target that goes round a cycle."""
    request = Request([CYCLE[3], *CYCLE[:1]], Params(max_tokens=tokens, ignore_eos=True))
    request.kv = object()  # type: ignore[assignment]  # no model looks at it
    new: list[int] = []

    def after(token: int) -> int:
        return CYCLE[(CYCLE.index(token) + 1) % len(CYCLE)]

    while request.known < tokens:
        (draft,) = run.draft([request], [run.size(request)])
        assert draft is not None
        request.computed = request.known - 1
        span = draft_span(request, draft, None)  # type: ignore[arg-type]
        said = [after(token) for token in span.tokens]
        guesses = draft.cut(len(draft.tokens) - draft.ask)
        path, token = Match()(guesses, Dist(said, 64), lambda *_: 0.0)
        if run.knobs.window:
            run.learn([span], None, [Outcome(1, [token])], torch.tensor(said)[:, None])  # type: ignore[arg-type]
        request.tokens += [*(draft.tokens[node] for node in path), token]
        new.append(len(path) + 1)
    assert request.tokens[1:] == [CYCLE[i % len(CYCLE)] for i in range(request.known - 1)]
    return new


@pytest.mark.parametrize(("window", "n"), [(7, 5), (4, 3), (15, 6), (3, 2)])
def test_a_cycle_is_guessed_a_whole_n_gram_a_pass(window: int, n: int) -> None:
    """Once it has gone round: n - 1 guesses and the token after them; without the window, one token for good."""
    new = cycled(run_of(Lookahead(window, n)), 400)
    settled = new[len(CYCLE) + n : -n]
    assert len(settled) > 20 and set(settled) == {n}
    assert set(cycled(run_of(Lookahead(0, n)), 60)) == {1}


def test_without_a_window_nothing_asks() -> None:
    """The pool holds the prompt's n-grams and no others."""
    text = tiny.prompts(9)[0] * 3
    placed = tiny.engine({"draft": "lookahead:window=0,n=4"})
    request = Request(text, tiny.greedy(30))
    placed.add(request)
    while request.n_out < 29:
        placed.step()
    grams = {tuple(text[i : i + 4]) for i in range(len(text) - 3)}
    assert {(key, *gram) for key, found in request.state[NAME]["pool"].items() for gram in found} == grams
    tiny.finish(placed, [request])
    work = placed.counters
    assert work.rows == len(text) + work.drafted + work.forwards - 1
    assert work.head_rows == work.drafted + work.forwards


def test_what_it_remembers_goes_where_its_request_goes() -> None:
    run, request = run_of(Lookahead()), Request(tiny.prompts(40)[0], tiny.greedy(9))
    run.draft([request], [99])
    _encode(request.state[NAME], [])  # plain data, or it raises
    assert len(request.state[NAME]["rows"][0]) == 8, "of nine, those that fit before the end"


@pytest.mark.parametrize("left", range(1, 14))
def test_no_row_stands_beyond_the_end(left: int) -> None:
    run = run_of(Lookahead(window=5, n=4))
    request = Request(tiny.prompts(20)[0], tiny.greedy(left))
    request.state[NAME] = {"rows": [[3] * 4, [4] * 5, [5] * 5], "asked": [], "pool": {request.tokens[-1]: [(6, 7, 8)]}}
    bound = run.size(request)
    (draft,) = run.draft([request], [99])
    assert draft is not None and len(draft.tokens) <= bound
    whole = draft.prune(headroom(request))
    assert whole.tokens == draft.tokens and draft.ask == max(0, 3 * min(5, headroom(request) - 1) - 1)


@pytest.mark.parametrize("budget", range(32))
def test_a_window_asks_whole_or_not_at_all(budget: int) -> None:
    """Guesses come first; what asks in part would be no row of a Jacobi iteration."""
    run, request = run_of(Lookahead(window=5, n=4)), Request(tiny.prompts(20)[0], tiny.greedy(99))
    rows, pool = [[3] * 4, [4] * 5, [5] * 5], {request.tokens[-1]: [(6, 7, 8), (6, 7, 9)]}
    request.state[NAME] = {"rows": rows, "asked": [], "pool": pool}
    (draft,) = run.draft([request], [budget])
    assert draft is not None
    assert len(draft.tokens) - draft.ask == min(budget, 4) and draft.ask == (14 if budget >= 18 else 0)
    assert request.state[NAME]["rows"] == rows


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_large_windows_are_whole_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's W = G = 15: as many as 119 nodes, and every pass is one call; the KV budget knows of them."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    made = passes(monkeypatch)
    assert Lookahead(15, 5, 15).traits.max_nodes == 15 * 4 + 4 * 15 - 1
    placed = tiny.engine({"draft": "lookahead:window=15,n=5,guesses=15"}, of=model)
    tiny.run(placed, tiny.prompts(33, 5), tiny.greedy(40))
    assert all(each.whole for each in made) and max(each.rows for each in made) > 120


@pytest.mark.parametrize(
    ("text", "message"),
    [("window=-1", "window=-1 must be at least 0"), ("n=1", "n=1 must"), ("guesses=0", "guesses=0")],
)
def test_wrong_knobs_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"lookahead: {message}"):
        tiny.engine({"draft": f"lookahead:{text}"})


@pytest.mark.parametrize(("base", "source"), [("lookahead", "prompt_lookup"), ("prompt_lookup", "lookahead")])
def test_fused_with_another_drafter_only_the_base_asks(base: str, source: str) -> None:
    text = tiny.prompts(12)[0] * 3
    placed = tiny.engine({"draft": f"rasd:base=({base}),source=({source})"})
    request = Request(text, tiny.greedy(40))
    placed.add(request)
    while request.n_out < 30:
        placed.step()
    pool = request.state[NAME]["pool"]
    grams = {(key, *gram) for key, found in pool.items() for gram in found}
    assert bool(grams - {tuple(text[i : i + 5]) for i in range(len(text))}) == (base == "lookahead")
    tiny.finish(placed, [request])
    assert request.out == tiny.plain([text], tiny.greedy(40))[0]
