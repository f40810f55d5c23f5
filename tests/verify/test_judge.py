"""Judge Decoding: its rule against an obvious twin, its ends, and the state that it reads, in a running engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.verify.judge import JudgeDecoding, JudgeVerifier, odds
from phasewise.methods.verify.rejection import Rejection
from phasewise.model import artefacts
from phasewise.options import parse, refuse_lossy
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist, uniform
from phasewise.verbs.verify import Random, Shown
from tests import oracle, tiny
from tests.laws.engines import preempt

WIDTH, WORDS = 5, 6
DRAFT = "draft_model:model=tiny-draft,k=4"
TREE = "draft_model:model=tiny-draft,k=3,branches=2"
HALF = "judge:weights=random:0,threshold=0.3"
SAMPLED = Params(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)


def rng(seed: int) -> Random:
    return lambda depth, purpose, index=0: uniform(seed, depth, purpose, index)


class Case:
    """Random logits, states and guesses; the judge reads states as they are."""

    def __init__(self, seed: int, parents: list[int], greedy: bool, drawn: bool) -> None:
        gen, nodes = torch.Generator().manual_seed(seed), len(parents)
        self.seed, self.greedy = seed, greedy
        self.logits = torch.randn(nodes + 1, WORDS, generator=gen) * 2
        self.logits[torch.rand(nodes + 1, WORDS, generator=gen) < 0.15] = -math.inf  # a grammar's, say
        self.logits[:, 0] = 0.0  # something is left
        self.hidden = torch.randn(nodes + 1, WIDTH, generator=gen)
        self.weight = torch.randn(WIDTH, generator=gen, dtype=torch.float64)
        q = torch.randn(nodes, WORDS, generator=gen).softmax(-1) if drawn else None
        tokens = torch.randint(0, WORDS, (nodes,), generator=gen).tolist()
        self.draft = Draft(tokens, parents, "iid" if drawn else "point", q)
        rows = [] if greedy else range(nodes + 1)
        self.p = Dist(self.logits.argmax(-1).tolist(), WORDS, rows, None if greedy else self.logits.softmax(-1))

    def judged(self, threshold: float, bias: float = 0.2) -> tuple[list[int], int]:
        verify = JudgeVerifier(lambda x: x, self.weight, bias, odds(threshold))
        return verify(self.draft, self.p, rng(self.seed), Shown(self.logits, self.hidden))

    def good(self, node: int, threshold: float, bias: float = 0.2) -> bool:
        """By the probability itself."""
        score = float(self.hidden[node + 1].double() @ self.weight) + bias
        chance = 1 / (1 + math.exp(-score))
        return chance > threshold and bool(self.logits[self.draft.parents[node] + 1, self.draft.tokens[node]] > -1e9)


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.2, 0.5, 0.8]), st.booleans(), st.booleans())
def test_the_longest_beginning_of_accepted_guesses_stays(
    seed: int, nodes: int, threshold: float, greedy: bool, drawn: bool
) -> None:
    """A chain, guess by guess: which of them would `rejection` accept by themselves, which the judge?"""
    drawn = drawn and not greedy
    case = Case(seed, list(range(-1, nodes - 1)), greedy, drawn)
    want: list[int] = []
    for node in range(nodes + 1):
        dist = case.p.part(node, node + 1).longer()
        q = None if case.draft.q is None else case.draft.q[node : node + 1]
        one = Draft(case.draft.tokens[node : node + 1], [-1] * (node < nodes), case.draft.drawn, q)
        path, token = Rejection()(one, dist, lambda depth, purpose, index=0: uniform(seed, len(want), purpose, index))
        if not (node < nodes and (path or case.good(node, threshold))):
            break
        want.append(node)
    assert case.judged(threshold) == (want, token)


@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.8]))
def test_of_siblings_the_models_own_choice_or_the_best_score(seed: int, threshold: float) -> None:
    """A tree, greedily, along the path that is taken: no node of it could be another one."""
    case = Case(seed, [-1, -1, 0, 0, 2, 1, 1], True, False)
    path, token = case.judged(threshold)
    for parent, node in zip([-1, *path], [*path, None]):
        children, own = case.draft.children(parent), case.p.top[parent + 1]
        right = [child for child in children if case.draft.tokens[child] == own]
        good = [child for child in children if case.good(child, threshold)]
        best = max(good, key=lambda child: float(case.hidden[child + 1].double() @ case.weight), default=None)
        assert node == (right[0] if right else best)
    assert token == case.p.top[(path[-1] if path else -1) + 1]


@given(st.integers(0, 10_000), st.booleans())
def test_the_ends_of_the_threshold(seed: int, greedy: bool) -> None:
    """1 accepts what `rejection` accepts, whatever the score; 0 every guess that the request allows."""
    case = Case(seed, [-1, 0, 1, 2], greedy, False)
    assert case.judged(1.0, bias=1e6) == Rejection()(case.draft, case.p, rng(seed))
    allowed = [bool(case.logits[i, case.draft.tokens[i]] > -math.inf) for i in range(4)]
    path, _ = case.judged(0.0, bias=-1e6)
    assert path == list(range([*allowed, False].index(False)))


def outs(verify: str, params: Params, draft: str = DRAFT, **more: str) -> list[list[int]]:
    placed = tiny.engine({"draft": draft, "verify": verify, **more})
    return tiny.outs(tiny.run(placed, tiny.prompts(20, 7, 60), params))


@pytest.mark.parametrize("params", [tiny.greedy(30), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [DRAFT, TREE], ids=["chain", "tree"])
def test_threshold_one_is_rejection_token_for_token(params: Params, draft: str) -> None:
    """It needs no weights, and a running engine with the judge at work gives other tokens."""
    assert outs("judge:threshold=1", params, draft) == outs("rejection", params, draft)
    assert outs("judge:weights=random:0,threshold=0.999999", params, draft) == outs("rejection", params, draft)
    assert outs(HALF, params, draft) != outs("rejection", params, draft)


@pytest.mark.parametrize("params", [tiny.greedy(30), SAMPLED], ids=["greedy", "sampled"])
def test_threshold_zero_accepts_every_guess(params: Params) -> None:
    requests = tiny.run(
        placed := tiny.engine({"draft": DRAFT, "verify": "judge:weights=random:0,threshold=0"}),
        tiny.prompts(20, 7, 60), params,
    )  # fmt: skip
    assert placed.counters.drafted == placed.counters.accepted > 0
    assert all(len(request.out) == 30 for request in requests)


def accepted(events: tuple[str, ...] = (), **more: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens, and how many came at a time, of three requests while things happen."""
    placed = tiny.engine({"draft": DRAFT, "verify": HALF, **more})
    prompts = tiny.prompts(20, 7, 60)
    if "prefix" in events:
        tiny.run(placed, [[*prompt, 3] for prompt in prompts], tiny.greedy(2))
    groups = [prompts] if "mixed" in events else [[prompt] for prompt in prompts]
    found = []
    for group in groups:
        found += tiny.run(placed, group, tiny.greedy(30))
    return [(request.out, list(request.trace.counts)) for request in found]


@pytest.mark.parametrize("events", [("mixed",), ("prefix",), ("mixed", "prefix")], ids="-".join)
def test_mates_and_cached_prefixes_change_no_acceptance(events: tuple[str, ...]) -> None:
    assert accepted(events) == accepted()


def test_preemption_changes_no_acceptance() -> None:
    placed = tiny.engine({"draft": DRAFT, "verify": HALF})
    request = Request(tiny.prompts(20)[0], tiny.greedy(30))
    placed.add(request)
    for _ in range(4):
        placed.step()
    assert preempt(placed, lambda index, who: True) == 1
    tiny.finish(placed, [request])
    assert (request.out, list(request.trace.counts)) == accepted()[0]


class Watched(JudgeVerifier):
    """Keeps what it was asked, and what it said."""

    seen: list[tuple[Draft, list[float], list[int]]] = []

    def __call__(self, draft: Draft, p: Dist, rng: Random, shown: Shown) -> tuple[list[int], int]:
        path, token = super().__call__(draft, p, rng, shown)
        if draft.tokens:
            assert shown.hidden is not None
            self.seen.append((draft, self.scores(shown.hidden[1:]), path))
        return path, token


def test_scores_are_those_of_the_guesses_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each score against the state after the guess in a forward written elsewhere; the state that predicts it, one
    position earlier, would be another."""
    import phasewise.methods.verify.judge as module

    Watched.seen = []
    monkeypatch.setattr(module, "JudgeVerifier", Watched)
    prompt = tiny.prompts(20)[0]
    placed = tiny.engine({"draft": DRAFT, "verify": HALF})
    (request,) = tiny.run(placed, [prompt], tiny.greedy(20))
    weights = artefacts.load(tiny.model(), JudgeDecoding(weights="random:0").artefact(tiny.model().config), "random:0")
    known, judged = [*prompt, request.out[0]], 0
    for draft, scores, path in Watched.seen:
        for node, score in enumerate(scores):
            states = normed_states([*known, *draft.tokens[: node + 1]])
            own, before = (float(states[at].double() @ weights["weight"].double() + weights["bias"].double().sum())
                           for at in (-1, -2))  # fmt: skip
            assert score == pytest.approx(own, abs=1e-4)
            assert abs(score - before) > 1e-3
            judged += 1
        known = [*prompt, *request.out[: len(known) - len(prompt) + len(path) + 1]]
    assert judged > 12


def normed_states(tokens: list[int]) -> Tensor:
    path = tiny.checkpoint()
    return oracle.last(path, oracle.states(path, tokens)[-1])


def test_it_is_lossy_and_exact_refuses_it() -> None:
    with pytest.raises(UserError, match=r"leave out --verify judge \(or say judge:threshold=1\.0\)"):
        refuse_lossy({"": parse({"draft": DRAFT, "verify": HALF})})
    refuse_lossy({"": parse({"draft": DRAFT, "verify": "judge:threshold=1"})})


def test_what_is_missing_or_wrong_is_named(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="judge: threshold=1.5"):
        tiny.engine({"draft": DRAFT, "verify": "judge:threshold=1.5"})
    with pytest.raises(UserError, match="phasewise train artefact verify.judge.*threshold=1"):
        tiny.engine({"draft": DRAFT, "verify": "judge"})
    judge, other = JudgeDecoding(), tmp_path / "other.safetensors"
    made = judge.artefact(tiny.model().config)
    artefacts.save(other, made, artefacts.random(made, "0"), "of another model", "")
    with pytest.raises(UserError, match="another base model"):
        tiny.engine({"draft": DRAFT, "verify": f"judge:weights={other}"})


def test_drafters_that_learn_from_all_requests_are_refused() -> None:
    with pytest.raises(UserError, match="learns from all requests"):
        tiny.engine({"draft": "suffix_decoding:scope=engine", "verify": HALF})
