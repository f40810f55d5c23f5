"""SuffixDecoding: the likeliest of all that has followed, held against looking everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.methods.draft._automaton import SuffixAutomaton
from phasewise.methods.draft._earlier import Cursor, Earlier
from phasewise.methods.draft.paced import Pacer
from phasewise.methods.draft.suffix_decoding import CHUNK, EARLIER, LATEST, NAME, ONLY, SuffixDecoding, Suffixes
from phasewise.methods.verify.match import Match
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist
from tests import tiny


def bound(**knobs: Any) -> Suffixes:
    return SuffixDecoding(**knobs).bind(None)  # type: ignore[arg-type]


def guess(tokens: Sequence[int], budget: int = 100, most: int = 100, **knobs: Any) -> Draft | None:
    return bound(**knobs).draft([Request(tokens, tiny.greedy(most))], [budget])[0]


def followers(tokens: list[int], path: list[int], branches: int, min_match: int) -> list[tuple[int, float]]:
    """(token, how likely) after `tokens` and `path`, by trying every length and every place."""
    context, found, before = tokens + path, list[tuple[int, float]](), None
    for length in range(len(context), min_match - 1, -1):
        end = context[-length:]
        places = [at for at in range(length, len(tokens) + 1) if tokens[at - length : at] == end]
        if not path:
            places = [at for at in places if at < len(tokens)]
        if not places or places == before:
            continue
        before = places
        latest = {tokens[at]: at for at in places if at < len(tokens)}
        table = ONLY if len(latest) == 1 else LATEST
        for token in sorted(latest, key=lambda token: -latest[token]):
            if token in [other for other, _ in found]:
                continue
            found.append((token, EARLIER[len(found) - 1] if found else table[min(length, len(table) - 1)]))
            if len(found) == branches:
                return found
    return found


def everywhere(tokens: list[int], nodes: int, branches: int, min_match: int, least: float) -> set[tuple[int, ...]]:
    """Paths of the likeliest nodes; only right where no two are equally likely at the edge."""
    reached = {(): 1.0}
    done: dict[tuple[int, ...], float] = {}
    ahead: dict[tuple[int, ...], float] = {}
    path: tuple[int, ...] = ()
    while True:
        for token, chance in followers(tokens, list(path), branches, min_match):
            if reached[path] * chance >= least:
                ahead[(*path, token)] = reached[path] * chance
        if not ahead or len(done) == nodes:
            return set(done)
        path = max(ahead, key=lambda each: ahead[each])
        done[path] = reached[path] = ahead.pop(path)


@pytest.mark.parametrize(("branches", "min_match"), [(1, 1), (2, 2), (3, 1)])
def test_equals_brute_force(branches: int, min_match: int) -> None:
    """The whole tree of random texts over four symbols; no budget cuts it, so that ties do not matter."""
    rng = random.Random(branches)
    for _ in range(400):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 25))]
        draft = guess(tokens, branches=branches, min_match=min_match, least=0.2, nodes=63) or Draft([], [])
        paths = {draft.path(node) for node in range(len(draft.tokens))}
        assert len(paths) == len(draft.tokens), "no guess is made twice"
        if len(paths) < 63:
            assert paths == everywhere(tokens, 99, branches, min_match, 0.2)


def test_it_says_how_likely_its_guesses_are() -> None:
    """By the match's length, by whether something else has followed too, and by place."""
    draft = guess([1, 2, 3, 9, 1, 2, 4, 1, 2], branches=2, nodes=2)
    assert draft is not None
    assert (draft.tokens, draft.likely) == ([4, 1], [LATEST[2], ONLY[3]]), "what goes on after 1, 2, 4 comes first"
    wide = guess([1, 2, 3, 9, 1, 2, 4, 1, 2], branches=2, nodes=63, least=0.03)
    assert wide is not None
    other = wide.children(-1)[1]
    assert (wide.tokens[other], wide.likely[other]) == (3, EARLIER[0])  # type: ignore[index]


def test_the_likeliest_come_first_and_parents_before_children() -> None:
    draft = guess([5, 1, 2, 3, 5, 1, 2, 4, 5, 1, 2, 3, 5, 1], nodes=12, least=0.001)
    assert draft is not None and draft.likely is not None
    reached = list[float]()
    for parent, chance in zip(draft.parents, draft.likely):
        reached.append(chance if parent < 0 else chance * reached[parent])
    assert reached == sorted(reached, reverse=True)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert draft.only([0, 1]).likely == draft.likely[:2] == draft.cut(2).likely  # type: ignore[union-attr]


def test_one_branch_is_a_chain() -> None:
    draft = guess([1, 2, 3, 4, 5, 6, 1, 2], branches=1)
    assert draft is not None
    assert draft.parents == list(range(-1, len(draft.tokens) - 1))
    assert draft.tokens[:6] == [3, 4, 5, 6, 1, 2], "the end of the text goes on with what it repeats"


def test_a_chain_is_the_tree_of_one_branch() -> None:
    """The short way for chains against the way of all trees: guesses and how likely they are."""
    rng = random.Random(4)
    for _ in range(400):
        tokens = [rng.randrange(rng.choice((2, 4, 12))) for _ in range(rng.randrange(1, 60))]
        knobs = {"branches": 1, "min_match": rng.choice((1, 1, 2, 3)), "least": rng.choice((0.001, 0.05, 0.4))}
        nodes, text = rng.randrange(1, 25), SuffixAutomaton()
        for token in tokens:
            text.extend(token)
        drafter = bound(**knobs)
        found, likely = text.chain(nodes, drafter.knobs.min_match, drafter.least, drafter.odds)
        chain = Draft(found, list(range(-1, len(found) - 1)), likely=likely) if found else None
        assert chain == drafter._grown([(text, text.end)], nodes, nodes)


def test_budget_room_and_least_bound_it() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert len(guess(text, budget=2).tokens) == 2  # type: ignore[union-attr]
    assert guess(text, budget=0) is None
    assert len(guess(text, most=3, branches=1).tokens) == 2, "one token is left for the model"  # type: ignore[union-attr]
    assert guess([1, 2, 3, 4]) is None
    assert guess([1, 2, 3, 4, 1], min_match=2) is None
    drafter, request = bound(branches=1), Request(text, tiny.greedy(100))
    long = drafter.draft([request], [100])[0]
    drafter.least = 0.6
    short = drafter.draft([request], [100])[0]
    assert long is not None and short is not None
    assert len(short.tokens) == 1 < len(long.tokens), "who sizes guesses says which are not worth a look"


def test_a_copying_target_needs_few_passes() -> None:
    """200 random tokens to be repeated: a pass for every nine or so, after a few for the beginning."""
    rng = random.Random(2)
    text = [rng.randrange(3, 4000) for _ in range(200)]
    request, drafter, passes = Request([*text, 1], tiny.greedy(220)), bound(branches=1), 0
    while request.n_out < 200:
        draft = drafter.draft([request], [200])[0] or Draft([], [])
        done, passes = request.n_out, passes + 1
        after = [text[(done + depth) % 200] for depth in range(len(draft.tokens) + 1)]
        path, token = Match()(draft, Dist(after, 4000), lambda *_: 0.0)
        request.tokens += [*(draft.tokens[node] for node in path), token]
    assert request.out[:200] == text
    assert passes <= -(-200 // 24) + 5


def test_a_very_long_prompt_is_read_in_pieces() -> None:
    request, drafter = Request([4, 5] * CHUNK), bound()
    assert drafter.draft([request], [9]) == [None]
    assert request.state[NAME].own.n == CHUNK
    assert drafter.draft([request], [9])[0] is not None


def test_paced_makes_the_threshold_its_own() -> None:
    """The more share a step, and the more a row costs, the likelier a guess must be to be looked for at all."""
    found = list[float]()
    for requests, row in ((1, 0.04), (4, 0.04), (8, 0.04), (8, 0.08)):
        inner = bound(branches=1)
        pacer = Pacer(inner)
        pacer.sized = lambda request: True
        for i in range(80):
            rows = requests + i % 8
            pacer.costs.note(requests, rows, 6e-3 * (1 + row * (rows - 1)))
        pacer.draft([Request([1, 2, 3], tiny.greedy(100)) for _ in range(requests)], [24] * requests)
        found.append(inner.least)
    assert found == sorted(set(found)) and found[0] < 0.05 < found[-1]


def test_paced_over_it_changes_no_token() -> None:
    plain = tiny.run(tiny.engine({}), tiny.prompts(40, 50, 60, 70), tiny.greedy(24))
    engine = tiny.engine({"draft": "paced"})
    paced = tiny.run(engine, tiny.prompts(40, 50, 60, 70), tiny.greedy(24))
    assert [request.out for request in paced] == [request.out for request in plain]


# ---- what others were answered


def test_a_cursor_is_the_longest_end_that_occurs() -> None:
    """However both texts grow in turn: against trying every length. A generation that is new is looked at from the end
    of the text on."""
    rng = random.Random(4)
    for _ in range(200):
        text, tokens, others = SuffixAutomaton(), list[int](), list[int]()
        cursor = Cursor(text, 0)
        for _ in range(30):
            if rng.random() < 0.5:
                others.append(rng.randrange(3))
                text.extend(others[-1])
                continue
            tokens.append(rng.randrange(3))
            before = cursor.place[1]
            cursor.move(tokens)
            ends = [tokens[len(tokens) - n :] for n in range(before + 2)]
            found = [len(end) for end in ends if any(others[i : i + len(end)] == end for i in range(len(others)))]
            assert cursor.place[1] == max(found, default=0)
    fresh = Earlier()
    fresh.add([1, 2, 3, 4])
    assert [cursor.place[1] for cursor in fresh.cursors([], [9, 2, 3])] == [2]


def test_the_memory_of_answers_is_bounded() -> None:
    earlier = Earlier(most=10)
    for at in range(8):
        earlier.add([at] * 7)
        assert sum(text.n for text in earlier.texts) <= 22
    assert [text.n for text in earlier.texts] == [8, 8], "the newest answer and the one before"
    earlier.add(list(range(100)))
    assert [text.n for text in earlier.texts] == [11, 8], "of a long one its beginning"


def test_an_answer_given_before_is_guessed_from_then_on() -> None:
    """The second to ask the same needs a pass for every twenty-five tokens; without scope=engine it needs as many as
    the first, and nobody's tokens change."""
    prompt, made = tiny.prompts(40), dict[str, list[int]]()
    for scope in ("request", "engine"):
        engine = tiny.engine({"draft": f"suffix_decoding:branches=1,scope={scope}"})
        first = tiny.run(engine, prompt, tiny.greedy(60))[0]
        before = engine.counters.forwards
        again = tiny.run(engine, prompt, tiny.greedy(60))[0]
        assert again.out == first.out
        made[scope] = [before, engine.counters.forwards - before]
    assert made["request"][1] >= 0.8 * made["request"][0]
    assert made["engine"][1] <= 2 + 60 // 25 + 4


def test_a_break_is_never_guessed() -> None:
    """What follows the end of an answer is no token."""
    for scores in ("recency", "frequency"):
        drafter = bound(scope="engine", branches=3, scores=scores)
        drafter.earlier.add([5, 6, 7])
        drafter.earlier.add([8, 6, 7])
        assert drafter.draft([Request([1, 6, 7], tiny.greedy(100))], [100]) == [None]


# ---- by frequency
def occurrences(tokens: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(tokens[i : i + len(part)]) == list(part) for i in range(len(tokens) - len(part) + 1))


def counted(tokens: list[int], length: int, nodes: int, branches: int, least: float) -> dict[tuple[int, ...], float]:
    """The chances of the likeliest paths behind the last `length` tokens, by counting."""
    done, ahead, at = dict[tuple[int, ...], float](), dict[tuple[int, ...], float](), ()
    reached = {(): 1.0}
    while len(done) < nodes:
        counts = {token: occurrences(tokens, [*tokens[-length:], *at, token]) for token in range(4)}
        total = sum(counts.values())
        for token in sorted(counts, key=lambda token: -counts[token])[:branches]:
            if counts[token] and reached[at] * counts[token] / total >= least:
                ahead[(*at, token)] = reached[at] * counts[token] / total
        if not ahead:
            break
        at = max(ahead, key=lambda path: ahead[path])
        done[at] = reached[at] = ahead.pop(at)
    return done


def chances(draft: Draft) -> dict[tuple[int, ...], float]:
    """Of each path in a draft, by what it says of its nodes."""
    assert draft.likely is not None
    found = list[float]()
    for parent, likely in zip(draft.parents, draft.likely):
        found.append(likely * (1.0 if parent < 0 else found[parent]))
    return {draft.path(node): chance for node, chance in enumerate(found)}


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_tree_of_the_most_expected_tokens_is_taken(factor: float) -> None:
    """Over all lengths of a match, against counting; all followers are guessed, so that ties do not matter."""
    rng, cut = random.Random(int(factor)), 0
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(2, 30))]
        trees = [
            counted(tokens, length, min(24, int(factor * length)), 4, 0.05)
            for length in range(1, len(tokens))
            if occurrences(tokens[:-1], tokens[-length:])
        ]
        want = max((sum(tree.values()) for tree in trees), default=0.0)
        drafter = bound(scores="frequency", factor=factor, branches=3, nodes=24)
        object.__setattr__(drafter.knobs, "branches", 4)
        draft = drafter.draft([Request(tokens, tiny.greedy(100))], [100])[0]
        if draft is None:
            assert want == 0.0
            continue
        found = chances(draft)
        assert sum(found.values()) == pytest.approx(want)
        every = {path: chance for length in range(1, len(tokens)) if occurrences(tokens[:-1], tokens[-length:])
                 for path, chance in counted(tokens, length, 999, 4, 0.05).items() if path in found
                 and chance == pytest.approx(found[path])}  # fmt: skip
        assert every.keys() == found.keys(), "each chance is what was counted"
        cut += len(found) >= factor
    assert cut > 100


def test_what_followed_often_comes_before_what_followed_last() -> None:
    text = [1, 2, 1, 2, 1, 2, 1, 3, 9, 1]
    often, last = (guess(text, scores=scores, nodes=1, branches=1) for scores in ("frequency", "recency"))
    assert often is not None and last is not None
    assert (often.tokens, often.likely) == ([2], [0.75]) and last.tokens == [3]


def test_by_frequency_no_token_changes() -> None:
    prompts = tiny.prompts(20, 33)
    for params in (tiny.greedy(40), Params(max_tokens=40, temperature=0.3, seed=5, ignore_eos=True)):
        for scope in ("request", "engine"):
            placed = tiny.engine({"draft": f"suffix_decoding:scores=frequency,scope={scope}"})
            for _ in range(2):
                assert tiny.outs(tiny.run(placed, prompts, params)) == tiny.plain(prompts, params)
            assert placed.counters.accepted > 0


def test_lossy_verifiers_may_not_let_tokens_depend_on_others() -> None:
    with pytest.raises(UserError, match="learns from all requests"):
        tiny.engine({"draft": "suffix_decoding:scope=engine", "verify": "top_beta"})


@pytest.mark.parametrize(("knob", "value"), [("nodes", 0), ("nodes", 64), ("branches", 4), ("min_match", 0)])
def test_knobs_out_of_range_are_refused(knob: str, value: int) -> None:
    with pytest.raises(UserError, match=f"suffix_decoding: {knob}={value} must be from 1 to"):
        SuffixDecoding(**{knob: value})


def test_a_chance_is_no_certainty() -> None:
    with pytest.raises(UserError, match="least=1 must lie between 0 and 1"):
        SuffixDecoding(least=1.0)
    with pytest.raises(UserError, match="factor=0 must be above 0"):
        SuffixDecoding(factor=0)
