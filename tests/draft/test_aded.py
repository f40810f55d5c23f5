"""ADED: the table is a recount of the rule, and the searches find what it holds likely."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import pairwise
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.draft._datastore import Datastore
from phasewise.methods.draft._tree_search import MonteCarlo, best_first
from phasewise.methods.draft._trigrams import Row, Rule, Table, Trigrams, pair, ranked
from phasewise.methods.draft.aded import CAP, NAME, Aded, AdedRun
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from tests import tiny

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=8)
NOTHING = Trigrams.of(Datastore.of([[0]]), 12)
ALL = 1 << 20


# ---- the table
@given(texts=TEXTS, kept=st.integers(1, 4))
def test_shares_are_counted_over_all_texts(texts: list[list[int]], kept: int) -> None:
    counts: dict[int, Counter[int]] = {}
    for text in texts:
        for first, second, token in zip(text, text[1:], text[2:]):
            counts.setdefault(pair(first, second), Counter())[token] += 1
    base = Trigrams.of(Datastore.of(texts), kept) if any(texts) else NOTHING
    for first in range(4):
        for second in range(4):
            found = counts.get(pair(first, second), Counter())
            best = sorted(found, key=lambda token: (-found[token], token))[:kept]
            want = [(token, found[token] / found.total()) for token in best]
            assert ranked(base.row(pair(first, second))) == want
    assert base.row(pair(4, 4)) == {}


@given(texts=TEXTS, rounds=st.lists(st.lists(st.integers(0, 3), max_size=16), max_size=40))
def test_the_table_is_a_recount_of_the_rule(texts: list[list[int]], rounds: list[list[int]]) -> None:
    """Each weight is min(cap, share + step x how often the trigram was in a window), whatever the order."""
    base = Trigrams.of(Datastore.of(texts), ALL) if any(texts) else NOTHING
    table: Table = {}
    for text in rounds:
        Rule(0.25, CAP, ALL, ALL).adapt(table, base, text)
    seen = Counter(gram for text in rounds for gram in zip(text, text[1:], text[2:]))
    assert set(table) == {pair(*gram[:2]) for gram in seen}
    for key, row in table.items():
        want = dict(base.row(key))
        for (first, second, token), times in seen.items():
            if pair(first, second) == key:
                want[token] = min(CAP, want.get(token, 0.0) + 0.25 * times)
        assert row == pytest.approx(want, rel=1e-12)  # one sum is rounded at every step


@given(rounds=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=8), max_size=30))
def test_what_was_adapted_longest_ago_goes(rounds: list[list[int]]) -> None:
    """Held against an ordered dict of the pairs; a row that has gone is the corpus's again."""
    base = Trigrams.of(Datastore.of([[0, 1, 2, 0, 1, 3, 0, 1, 4, 0, 1, 2]]), 2)
    table, order = Table(), OrderedDict[int, None]()
    for text in rounds:
        Rule(0.25, CAP, 2, 3).adapt(table, base, text)
        for first, second in pairwise(text[:-1]):
            order[pair(first, second)] = None
            order.move_to_end(pair(first, second))
        while len(order) > 3:
            order.popitem(last=False)
        assert list(table) == list(order) and all(0 < len(row) <= 2 for row in table.values())
        assert tuple(text[-3:-1]) != (0, 1) or text[-1] in table[pair(0, 1)], "the latest is in"


def test_the_lightest_of_a_full_row_makes_way() -> None:
    base = Trigrams.of(Datastore.of([[0, 1, 2, 0, 1, 2, 0, 1, 4, 0, 1, 3]]), 3)
    table: Table = {}
    Rule(0.25, CAP, 3, 9).adapt(table, base, [0, 1, 9])
    assert table[pair(0, 1)] == {2: 0.5, 3: 0.25, 9: 0.25}, "of equally light ones the larger id"


# ---- the searches
def chain(tokens: list[int]) -> Any:
    after = dict(zip(pairwise(tokens), tokens[2:]))
    return lambda first, second: [(after[first, second], 0.7)] if (first, second) in after else []


def monte_carlo(follows: Any, levels: int, rounds: int, end: tuple[int, int] = (0, 1)) -> MonteCarlo:
    walks = MonteCarlo(follows, end, levels, Random(0).random)
    walks.search(rounds)
    return walks


def test_a_table_without_choice_gives_its_one_chain() -> None:
    """Both searches: four tokens and one more; where the chain ends, so does the guess."""
    for tokens, want in (([0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6]), ([0, 1, 2, 3], [2, 3]), ([0, 1], [])):
        heap = best_first(chain(tokens), (0, 1), 24, 5)
        assert heap == Draft.chain(want)
        assert monte_carlo(chain(tokens), 4, 150).draft(24) == heap


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 16), nodes=st.integers(1, 30), levels=st.integers(1, 4))
def test_best_first_is_the_largest_products(seed: int, nodes: int, levels: int) -> None:
    """Against every path there is."""
    table = random_table(seed)
    draft = best_first(lambda a, b: table[a, b], (0, 1), nodes, levels)
    chances = {(): 1.0}
    for path in (paths := [()]):
        row = table[(0, 1, *path)[-2:]]
        for token, weight in row if len(path) < levels else ():
            chances[*path, token] = chances[path] * weight / sum(w for _, w in row)
            paths.append((*path, token))
    del chances[()]
    got = [chances[draft.path(node)] for node in range(len(draft.tokens))]
    assert got == pytest.approx(sorted(chances.values(), reverse=True)[:nodes])
    assert all(parent < node for node, parent in enumerate(draft.parents))


def random_table(seed: int, vocab: int = 4) -> dict[tuple[int, int], list[tuple[int, float]]]:
    draws = Random(seed)
    rows = {(a, b): {t: draws.random() + 0.01 for t in range(draws.randint(1, vocab))} for a in range(vocab)
            for b in range(vocab)}  # fmt: skip
    return {key: ranked(row) for key, row in rows.items()}


@pytest.mark.parametrize("even", [False, True])
def test_visits_go_where_the_weights_are(even: bool) -> None:
    """Twelve successors, two levels: visits end up in the order of the weights. With even weights, which stand for a
    table that knows nothing, no child stays ahead."""
    weights = [1 / 12] * 12 if even else [prod([0.75] * i) / 4 for i in range(12)]
    row = list(enumerate(weights))
    walks = monte_carlo(lambda a, b: row, 2, 4000)
    visits = [child.visits for child in walks.root.children or ()]
    assert sum(visits) == 4000 and walks.root.visits == 4000
    if even:
        assert max(visits) < 1.5 * min(visits)
    else:
        assert visits == sorted(visits, reverse=True) and visits[0] > 5 * visits[11]
        assert walks.draft(3).path(0) == (0,)


def test_the_searches_agree_on_the_best_and_the_heap_does_less() -> None:
    """What they take beyond these differs: the search of the paper spreads its visits by the sums of weights too."""
    shared, looks = list[float](), Counter[str]()
    for seed in range(20):
        table = {key: [(token, w**3) for token, w in row] for key, row in random_table(seed, 6).items()}
        heap = best_first(counting(table, looks, "heap"), (0, 1), 16, 5)
        draft = monte_carlo(counting(table, looks, "mcts"), 4, 150).draft(16)
        best, found = ({d.path(n) for n in range(k)} for d, k in ((heap, 6), (draft, len(draft.tokens))))
        shared.append(len(best & found) / len(best))
    assert sum(shared) / len(shared) > 0.85
    assert looks["mcts"] > 4 * looks["heap"]


def counting(table: dict[tuple[int, int], list[tuple[int, float]]], looks: Counter[str], name: str) -> Any:
    """What follows, by a table; every look is counted."""

    def follows(first: int, second: int) -> list[tuple[int, float]]:
        looks[name] += 1
        return table[first, second]

    return follows


# ---- in the engine
def run(**knobs: Any) -> AdedRun:
    base = knobs.pop("base", NOTHING)
    return AdedRun(Aded(**knobs), base)


def test_a_guess_keeps_to_budget_and_room() -> None:
    base = Trigrams.of(Datastore.of([[1, 2, 3, 1, 2, 4, 1, 2, 3]]), 12)
    for mode in ("heap", "mcts"):
        drafter = run(base=base, mode=mode)
        for budget, most, want in ((9, 9, 9), (2, 9, 2), (9, 3, 4), (9, 2, 2), (0, 9, 0), (9, 1, 0)):
            request = Request([1, 2], Params(max_tokens=most))
            (draft,) = drafter.draft([request], [budget])
            nodes = 0 if draft is None else len(draft.tokens)
            assert nodes == want and (draft is None or max(map(len, map(draft.path, range(nodes)))) <= most - 1)
        assert drafter.size(Request([1, 2], Params(max_tokens=9))) == 24
        assert drafter.size(Request([2], Params(max_tokens=9))) == 0, "there is no pair yet"
        assert drafter.draft([Request([2], Params(max_tokens=9))], [9]) == [None]


class Told:
    """The windows of every request, by its own tokens alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.windows: dict[int, list[list[int]]] = {}
        self.bases: list[AdedRun] = []
        real = AdedRun.learn

        def learn(drafter: AdedRun, spans: Any, hidden: Any, outcomes: Any) -> None:
            real(drafter, spans, hidden, outcomes)
            for span, outcome in zip(spans, outcomes):
                windows = self.windows.setdefault(id(span.request), [])
                if outcome.tokens:
                    windows.append([*span.request.tokens, *outcome.tokens][-16:])
                self.check(drafter, span.request.state.get(NAME, {}), windows)

        monkeypatch.setattr(AdedRun, "learn", learn)

    def check(self, drafter: AdedRun, table: Table, windows: list[list[int]]) -> None:
        counts = Counter(gram for text in windows for gram in zip(text, text[1:], text[2:]))
        assert sum(len(row) for row in table.values()) >= len({gram[:2] for gram in counts})
        for (first, second, token), times in counts.items():
            row: Row = table[pair(first, second)]
            start = drafter.base.row(pair(first, second)).get(token, 0.0)
            assert row[token] == pytest.approx(min(CAP, start + 0.04 * times))


def test_every_round_adapts_the_table_to_the_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    placed = tiny.engine({"draft": "aded:store=random:0,nodes=8,kept=1000"})
    tiny.run(placed, tiny.prompts(20, 7, 33), tiny.greedy(40))
    assert placed.counters.accepted > 0 and all(told.windows.values())


def test_repetitive_text_is_guessed_better_with_every_round() -> None:
    """A text that goes round a cycle, known to no corpus: first nothing, then up to the whole tree's depth."""
    cycle, drafter = list(range(10, 22)), run()
    request, passes = Request([10], Params(max_tokens=200)), list[int]()
    while request.known < 120:
        (draft,) = drafter.draft([request], [24])
        node, new = -1, list[int]()
        while draft is not None and node is not None:
            follows = cycle[(request.known + len(new)) % 12]
            node = next((n for n in draft.children(node) if draft.tokens[n] == follows), None)
            new += [follows] if node is not None else []
        new.append(cycle[(request.known + len(new)) % 12])
        drafter.rule.adapt(drafter._table(request), NOTHING, [*request.tokens, *new][-16:])
        request.tokens += new
        passes.append(len(new))
    assert passes[:12] == [1] * 12, "nothing has come twice"
    assert set(passes[13:]) == {6}
    assert request.tokens[:120] == [cycle[i % 12] for i in range(120)]


@pytest.mark.parametrize("mode", ["heap", "mcts"])
def test_tokens_are_those_of_plain_decoding(mode: str) -> None:
    """Greedy ones and, under both verifiers, drawn ones; with a table that all share, too, which remembers."""
    prompts = tiny.prompts(20, 33)
    for params in (tiny.greedy(20), Params(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)):
        want = tiny.plain(prompts, params)
        for scope, verify in (("engine", "match"), ("request", "rejection")):
            draft = f"aded:mode={mode},rounds=30,store=random:3,scope={scope}"
            placed = tiny.engine({"draft": draft, "verify": verify})
            assert tiny.outs(tiny.run(placed, prompts, params)) == want
            first = placed.counters.accepted
            assert tiny.outs(tiny.run(placed, prompts, params)) == want
            assert (placed.counters.accepted > 2 * first) == (scope == "engine") and first > 0


def test_a_shared_table_is_refused_where_tokens_would_hang_on_it() -> None:
    with pytest.raises(UserError, match=r"aded learns from all requests.*verifier top_beta.*scope=request"):
        tiny.engine({"draft": "aded:scope=engine,store=random:0", "verify": "top_beta"})
    tiny.engine({"draft": "aded:store=random:0", "verify": "top_beta"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=0", "nodes=0 must be at least 1"),
        ("window=2", "window=2 must be at least 3"),
        ("step=4", "step=4.0 must be from 0"),
        ("store=random:x", "store=random:x: the seed must be a whole number"),
    ],
)
def test_wrong_knobs_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"aded: {message}"):
        tiny.engine({"draft": f"aded:{text}"})
    with pytest.raises(UserError, match="aded: mode=beam must be heap or mcts"):
        Aded(mode="beam")  # type: ignore[arg-type]
