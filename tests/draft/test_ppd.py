"""PPD: exact whatever its embeddings are, guesses as its plain forward says, no real row sees a prompt token's, and as
many guesses accepted as its Markov chain says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from phasewise.methods.draft.ppd import PPD, PromptDrafter
from phasewise.ops import native
from phasewise.request.request import Request
from phasewise.speculation import loop
from phasewise.speculation.heads.last_state import RankPath
from phasewise.speculation.loop import Speculation
from phasewise.speculation.prompt_trees import expected_accepted, prompt_trees
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft import trained
from tests.draft.begun import CHAIN, TREE, Begun, Passed
from tests.draft.fitted import PROMPTS, N
from tests.draft.watch import Watch, drafter_of, run_with_few_rows
from tests.speculation.ppd_files import PlainPrompts, tiny_prompts


# ---- guesses
@pytest.mark.parametrize("source", ["trained", "random"])
def test_a_draft_is_what_the_plain_forward_of_the_row_before_says(source: str, tmp_path: Path) -> None:
    """Every guess is the rank of its prompt token that its path in the tree names. The tree is the one for as many
    depths as the last accepted token had prompt tokens."""
    path = trained.PPD.heads() if source == "trained" else tiny_prompts(tmp_path)
    plain, placed = PlainPrompts(path, tiny.checkpoint()), tiny.engine(trained.PPD.verbs("rows=23", path))
    watch, trees = Watch(placed), drafter_of(placed).trees
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text, drawn, states = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]], 0, set[int]()
    before: tuple[int, Draft] | None = None
    for (_, known), draft in watch.drafts.items():
        levels, guesses = len(text) - known - 1, len(draft.tokens) - draft.ask
        state = 0
        if before is not None:
            at, last = before
            state = len(last.asking(next((node for node in range(len(last.tokens) - last.ask)
                                          if last.path(node) == tuple(text[at : known - 1])), -1)))  # fmt: skip
        ranks = plain.logits(text[: known - 1]).topk(10, -1).indices.tolist()
        paths = [path for path in trees[state].paths if len(path) <= levels]
        want = [tuple(ranks[depth][rank] for depth, rank in enumerate(path)) for path in paths]
        assert draft.cut(guesses).paths(guesses) == want
        for node, path in enumerate(((), *paths), -1):
            assert len(draft.asking(node)) == max(0, min(trees[state].prompts[path], levels - len(path) - 1))
        drawn, before = drawn + (guesses > 0), (known, draft)
        states.add(state)
    assert drawn > 3 and len(states) > 1


# ---- real rows beside prompt tokens', to the bit
EACH = {"tree": [3, 3, 0, 1, 2, 3], "chain": [3, 2, 3]}  # prompt tokens of the pending token and of each guess


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("which", ["tree", "chain"])
@pytest.mark.parametrize("mates", [0, 1, 2])
@torch.inference_mode()
def test_real_rows_are_the_same_beside_prompt_tokens(which: str, mates: int) -> None:
    """Rows after the last layer and the KV that stays, in the same batches: with prompt tokens, with others, and with
    none. Where the mask lets real rows see prompt tokens, the same comparison fails. A prompt token stands behind its
    own row, whatever the number of guesses beside it."""
    draft, kept = (TREE, [0, 1, 3]) if which == "tree" else (CHAIN, [0, 1])
    found, real = dict[str, Passed](), 1 + len(draft.tokens)
    for way in ("prompts", "none", "open"):
        mine, others = Begun(tiny.prompts(37)[0]), [Begun(prompt) for prompt in tiny.prompts(20, 51)[:mates]]
        each = [0] * real if way == "none" else EACH[which]
        span = mine.with_given(draft, each)
        if way != "none":
            starts, at = [*span.positions][:real], real
            for start, count in zip(starts, each):
                assert [*span.positions][at : at + count] == [*range(start + 1, start + 1 + count)]
                at += count
        if way == "open":
            assert span.sees is not None
            span.sees[:real, real:] = True
        found[way] = mine.run(span, others, kept)
        assert mine.kv.layers[0].n == 36 + len(kept)
    prompts = found["prompts"]
    assert prompts.same_rows(found["none"], real) and not prompts.same_rows(found["open"], real)
    assert prompts.same_kv(found["none"]) and not prompts.same_kv(found["open"])


# ---- the Markov chain
ACCURACY = ((0.5, 0.15, 0.08, 0.04), (0.4, 0.12, 0.06, 0.05), (0.35, 0.1, 0.05, 0.04))


@pytest.mark.parametrize("rows", [6, 7, 9, 12])
def test_prompt_tokens_stand_where_least_is_lost(rows: int) -> None:
    """Of a small table, against all ways to spread as many over the same guesses. The pending token keeps its own."""
    accuracy = ((0.7, 0.2), (0.6, 0.3))
    trees = prompt_trees(accuracy, rows)
    guesses = max(len(tree.paths) for tree in trees)
    gains = [0.0, *(sum(_chance(accuracy, path) for path in tree.paths) for tree in trees[1:])]
    for state, tree in enumerate(trees):
        assert tree.rows <= rows and tree.prompts[()] == 2 and len(tree.paths) == min(guesses, [0, 2, 9][state])
        last = {path: _chance(accuracy, path) - sum(_chance(accuracy, other) for other in tree.paths
                                                    if other[:-1] == path) for path in tree.paths}  # fmt: skip
        value = sum(last[path] * gains[tree.prompts[path]] for path in tree.paths)
        every = [each for each in product(range(3), repeat=len(tree.paths)) if sum(each) + len(each) + 2 <= rows]
        best = max(sum(last[path] * gains[n] for path, n in zip(tree.paths, each)) for each in every)
        assert value == pytest.approx(best)


def _chance(accuracy: Sequence[Sequence[float]], path: RankPath) -> float:
    found = 1.0
    for depth, rank in enumerate(path):
        found *= accuracy[depth][rank]
    return found


def test_more_rows_accept_more_and_prompt_tokens_go_where_they_are_needed() -> None:
    accepted = [expected_accepted(ACCURACY, prompt_trees(ACCURACY, rows)) for rows in (4, 8, 16, 32, 64)]
    assert accepted == sorted(accepted) and accepted[-1] > 1.5 * accepted[0]
    tree = prompt_trees(ACCURACY, 23)[-1]
    counts = [tree.prompts[path] for path in tree.paths]
    assert tree.rows == 23 and tree.prompts[()] == 3 and min(counts) < 3
    assert tree.prompts[(0,)] >= tree.prompts[tree.paths[-1]]


class Oracle(PromptDrafter):
    """Guesses of which each rank of each depth is right as often as a table says, and that of the text to come."""

    texts: dict[str, list[int]]
    rng: Random

    def ranked(self, asked: Any) -> list[list[list[int]]]:
        found = []
        for request, paths in asked:
            text, ids = self.texts[request.id], list[list[int]]()
            for depth in range(max(map(len, paths))):
                right = text[request.known + depth] if request.known + depth < len(text) else 3
                u, row = self.rng.random(), self.accuracy[depth]
                rank = next((i for i in range(len(row)) if u < sum(row[: i + 1])), len(row))
                wrong = [token for token in range(3, tiny.VOCAB) if token != right]
                ids.append([*wrong[:rank], right, *wrong[rank:]][: len(row)])
            found.append(ids)
        return found


@pytest.mark.parametrize("rows", [8, 23])
def test_the_stationary_prediction_is_what_an_oracle_measures(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that a pass accepts, within 5 %, with guesses as often right as the table says. The share of passes in
    each state as well."""
    new, prompts = 420, tiny.prompts(9, 12, 15, 10, 13, 16)
    texts = [[*prompt, *out] for prompt, out in zip(prompts, tiny.plain(prompts, tiny.greedy(new)))]

    def bind(self: PPD, host: Any) -> Oracle:
        made = Oracle(host, torch.randn(3, host.model.config.hidden), ACCURACY, self)
        made.texts, made.rng = {f"r{i}": text for i, text in enumerate(texts)}, Random(0)
        return made

    monkeypatch.setattr(PPD, "bind", bind)
    placed = tiny.engine({"draft": f"ppd:heads=none,rows={rows}"})
    requests = [Request(prompt, tiny.greedy(new), id=f"r{i}") for i, prompt in enumerate(prompts)]
    spans, accept = Counter[int](), Speculation.accept

    def counted(self: Any, spans_: Sequence[Span], hidden: Any) -> Any:
        outcomes = accept(self, spans_, hidden)
        for span, outcome in zip(spans_, outcomes):
            if span.note is not None and span.request.limit - span.request.known > 8:
                spans[0] += 1
                spans[1] += outcome.accepted
        return outcomes

    monkeypatch.setattr(loop.Speculation, "accept", counted)
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    assert [[*request.tokens] for request in requests] == texts
    assert spans[0] > 800
    assert spans[1] / spans[0] == pytest.approx(expected_accepted(ACCURACY, prompt_trees(ACCURACY, rows)), rel=0.05)


# ---- costs
@pytest.mark.parametrize("budget", [0, 2, 3, 6, 15, 40])
def test_a_draft_that_there_are_few_rows_for_fits(budget: int) -> None:
    """It has fewer guesses, the least likely ones first, and then fewer prompt tokens."""
    watch = run_with_few_rows(trained.PPD.verbs(), budget)
    assert (len(watch.drafts) > 3) == (budget > 0)
    assert budget < 3 or any(made.ask >= 3 for made in watch.drafts.values())


def test_rows_that_are_given_go_with_their_nodes() -> None:
    """Whoever cuts a draft cuts them."""
    rows = torch.arange(8.0).view(4, 2)
    draft = Draft([5, 6, 0, 0, 0, 0], [-1, 0, -1, 2, 1, 4], ask=4, given=rows)
    assert [[*draft.asking(node)] for node in (-1, 0, 1)] == [[2, 3], [], [4, 5]]
    few, some = draft.cut(4), draft.only([0, 2, 3])
    assert few.given is not None and torch.equal(few.given, rows[:2]) and few.ask == 2
    assert some.given is not None and torch.equal(some.given, rows[:2]) and some.ask == 2
    near = draft.prune(2)
    assert near.given is not None and near.ask == 2 and torch.equal(near.given, rows[:2])
    assert draft.cut(2).given is not None and not len(draft.cut(2).given)  # type: ignore[arg-type]
