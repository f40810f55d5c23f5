"""Two drafters in one tree: the union of theirs, which accepts no less than either and keeps the distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.draft.draft_model import DraftModel
from phasewise.methods.draft.prompt_lookup import PromptLookup
from phasewise.methods.draft.rasd import RASD, Fusion, fuse
from phasewise.methods.draft.retrieval import Retrieval
from phasewise.methods.verify.match import Match
from phasewise.methods.verify.rejection import Rejection
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import ENDLESS
from phasewise.verbs.sample import Dist
from tests import tiny
from tests.speculation.markov import Drafts, Tree, fits, generate, relative, sequences, table

V = 3
PATHS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=5), max_size=5)
TRUTH = st.lists(st.integers(0, V - 1), min_size=6, max_size=6)
BASE, SOURCE = "draft_model:model=tiny-draft,k=3,branches=2", "retrieval:store=random:3,shortest=1,length=4"
PROMPTS = tiny.prompts(30, 7, 55)


def beginnings(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [draft.path(node) for node in range(len(draft.tokens))]


def accepted(draft: Draft, truth: Sequence[int]) -> int:
    """Guesses accepted where the target greedily says `truth`."""
    after = [truth[len(draft.path(node))] for node in range(-1, len(draft.tokens))]
    return len(Match()(draft, Dist(after, V), lambda *_: 0.0)[0])


def beside(base: Draft, source: Draft) -> Draft:
    """A twin that concatenates: both trees below the pending token, nothing merged."""
    own = [parent if parent < 0 else parent + len(base.tokens) for parent in source.parents]
    return Draft(base.tokens + source.tokens, base.parents + own)


def behind(base: Draft, source: Draft) -> Draft:
    """Another: the source's tree below the base's last node."""
    own = [parent + len(base.tokens) for parent in source.parents]
    return Draft(base.tokens + source.tokens, base.parents + own)


@given(PATHS, PATHS)
def test_the_tree_is_the_union(ours: list[list[int]], theirs: list[list[int]]) -> None:
    base, source = Draft.trie(ours), Draft.trie(theirs)
    fused = fuse(base, source)
    found = paths_of(fused)
    assert len(found) == len(set(found)) and set(found) == beginnings(ours) | beginnings(theirs)
    n = len(base.tokens)
    assert (fused.tokens[:n], fused.parents[:n]) == (base.tokens, base.parents), "the base's stay as they are"
    assert found[n:] == [path for path in paths_of(source) if path not in beginnings(ours)], "the rest in its order"
    assert all(parent < node for node, parent in enumerate(fused.parents))


@given(PATHS, PATHS, TRUTH)
def test_no_round_accepts_less_than_either_alone(
    ours: list[list[int]], theirs: list[list[int]], said: list[int]
) -> None:
    base, source = Draft.trie(ours), Draft.trie(theirs)
    assert accepted(fuse(base, source), said) == max(accepted(base, said), accepted(source, said))


@pytest.mark.parametrize("twin", [beside, behind])
def test_a_twin_that_concatenates_does(twin: Callable[[Draft, Draft], Draft]) -> None:
    """Its second copy of a token is never looked at, or stands where it was not guessed."""
    rng, less, more = random.Random(0), 0, 0
    for _ in range(200):
        base, source = (Draft.trie([[rng.randrange(V) for _ in range(4)] for _ in range(2)]) for _ in range(2))
        said = [rng.randrange(V) for _ in range(16)]
        less += accepted(twin(base, source), said) < max(accepted(base, said), accepted(source, said))
        more += len(twin(base, source).tokens) > len(fuse(base, source).tokens)
    assert less > 10 and more > 100


def test_nothing_found_changes_nothing() -> None:
    base = Draft([1, 2, 1], [-1, 0, -1], "iid", torch.rand(3, V))
    assert fuse(base, Draft([], [])) is base
    assert fuse(base, Draft.trie([[1, 2]])) is base, "of equal siblings the first is gone on with"


def test_each_drafter_learns_as_many_likeliest_tokens_as_it_asked_for() -> None:
    """The loop ranks as many as the greedier of the two wants."""
    heard: list[Tensor | None] = []

    def learner() -> Any:
        return SimpleNamespace(
            companion=None,
            first_layers=None,
            drawer=None,
            token_rows=(),
            learn=lambda spans, hidden, outcomes, tops: heard.append(tops),
        )

    tops, nothing = torch.arange(12).view(3, 4), cast(Any, None)
    Fusion(0, learner(), learner(), (2, 4)).learn([], nothing, [], tops)
    Fusion(0, learner(), learner(), (0, 3)).learn([], nothing, [], tops)
    assert heard[2] is None
    for got, wanted in zip((heard[0], heard[1], heard[3]), (2, 4, 3)):
        assert got is not None and torch.equal(got, tops[:, :wanted])


def test_nodes_that_ask_stay_the_last_and_are_as_many() -> None:
    """Lookahead's window, for example, which the verifier must not judge."""
    fused = fuse(Draft([1, 2, 8, 9], [-1, 0, -1, 2], ask=2), Draft.trie([[1, 5], [3]]))
    assert fused.tokens == [1, 2, 5, 3, 8, 9] and fused.parents == [-1, 0, 0, -1, -1, 4]
    assert fused.ask == 2


def test_what_was_drawn_stays_drawn_and_the_rest_is_chosen() -> None:
    q = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]])
    base = Draft([2, 0, 2], [-1, -1, 0], "without_replacement", q)
    fused = fuse(base, Draft.trie([[2, 1], [1]]))
    assert (fused.tokens, fused.parents, fused.drawn) == ([2, 0, 2, 1, 1], [-1, -1, 0, 0, -1], "without_replacement")
    assert fused.q is not None and torch.equal(fused.q[:3], q) and not fused.q[3:].any()
    assert fused.children(-1) == [0, 1, 4] and fused.children(0) == [2, 3], "chosen siblings come after drawn ones"


@given(PATHS, PATHS, st.sets(st.integers(0, V - 1)))
def test_pruned_to_likely_first_tokens(ours: list[list[int]], theirs: list[list[int]], likely: set[int]) -> None:
    found = paths_of(fuse(Draft.trie(ours), Draft.trie(theirs), likely))
    assert set(found) == beginnings(ours) | {path for path in beginnings(theirs) if path[0] in likely}
    assert len(found) == len(set(found))


# ---- the target's distribution
P = table(4, seed=1)
Q = relative(P, seed=2)
LOOKED_UP = relative(P, seed=3)


def looked_up(last: int) -> Draft:
    """Two tokens that another table likes, and what it likes after each: always the same after the same token."""
    firsts = LOOKED_UP[last].topk(2).indices.tolist()
    return Draft.trie([[first, int(LOOKED_UP[first].argmax())] for first in firsts])


def fusion(drawn: Any) -> Drafts:
    tree = Tree(Q, (2, 1), drawn)
    return lambda last, seed, at: fuse(tree(last, seed, at), looked_up(last))


def as_if_drawn(last: int, seed: int, at: int) -> Draft:
    """A twin that says of what it looked up that it was drawn like its siblings."""
    draft = fusion("iid")(last, seed, at)
    assert draft.q is not None
    for node, parent in enumerate(draft.parents):
        draft.q[node] = Q[last if parent < 0 else draft.tokens[parent]]
    return draft


def p_value(drafter: Drafts) -> float:
    return fits([tuple(generate(Rejection(), drafter, P, 3, seed)) for seed in range(600)], sequences(P, 3))


@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "top_plus_one"])
def test_the_distribution_stays(drawn: str) -> None:
    assert p_value(fusion(drawn)) > 1e-3


def test_looked_up_guesses_must_not_pass_for_drawn_ones() -> None:
    assert p_value(as_if_drawn) < 1e-6


# ---- in an engine
def reach(draft: Draft | None, said: Sequence[int]) -> int:
    """How many of these tokens in a row a draft has."""
    held = set() if draft is None else set(paths_of(draft))
    return max((n for n in range(1, len(said) + 1) if tuple(said[:n]) in held), default=0)


def test_every_round_accepts_what_the_better_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, three requests at once: both parents' guesses of the round are held against the tokens that followed."""
    rounds: list[tuple[int, int, int]] = []
    draft, learn = Fusion.draft, Fusion.learn
    parents: dict[int, tuple[Draft | None, Draft | None]] = {}

    def drafted(self: Fusion, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        bases, sources = (its.draft(requests, budgets) for its in (self.base, self.source))
        parents.update({r.id: pair for r, *pair in zip(requests, bases, sources)})
        return draft(self, requests, budgets)

    def learned(self: Fusion, spans: Any, hidden: Any, outcomes: Any, *tops: Any) -> None:
        for span, outcome in zip(spans, outcomes):
            if span.note is not None:
                base, source = (reach(each, outcome.tokens[:-1]) for each in parents[span.request.id])
                rounds.append((outcome.accepted, base, source))
        learn(self, spans, hidden, outcomes, *tops)

    monkeypatch.setattr(Fusion, "draft", drafted)
    monkeypatch.setattr(Fusion, "learn", learned)
    placed = tiny.engine({"draft": f"rasd:base=({BASE}),source=({SOURCE})"})
    tiny.run(placed, PROMPTS, tiny.greedy(40))
    assert all(held == max(base, source) for held, base, source in rounds)
    assert any(base > source for _, base, source in rounds) and any(source > base for _, base, source in rounds)


def run(draft: str, params: Params | None = None, **verbs: str) -> tuple[list[list[int]], Any]:
    placed = tiny.engine({"draft": draft, **verbs})
    return tiny.outs(tiny.run(placed, PROMPTS, params or tiny.greedy(40))), placed.counters


def test_it_works_by_its_name_alone_and_nested() -> None:
    assert parse({"draft": "rasd"})["draft"] == RASD(DraftModel(), Retrieval())
    nested = "rasd:base=(rasd:base=(draft_model:k=2),source=(retrieval:nodes=3)),source=(prompt_lookup:k=5)"
    three = parse({"draft": nested})["draft"]
    assert three == RASD(RASD(DraftModel(k=2), Retrieval(nodes=3)), PromptLookup(k=5))


def test_no_second_model_is_needed() -> None:
    """Rows of the head that one of them learns from are its own number; the other one is not told of them."""
    want, plain = run("prompt_lookup:min_match=1")
    got, counters = run("rasd:base=(token_recycling:k=2,nodes=6),source=(prompt_lookup:min_match=1)")
    assert got == want and counters.accepted > plain.accepted > 0 and not counters.draft_forwards
    alone = run("token_recycling:k=2,nodes=6")[1]
    assert counters.accepted > alone.accepted > 0


def test_what_one_says_of_itself_it_says() -> None:
    request = Request(PROMPTS[0], tiny.greedy(40))
    host: Any = tiny.engine({"draft": f"rasd:base=({BASE}),source=({SOURCE})"})
    fused = host.recipes[""].phases[-1].decode.drafter
    traits = parse({"draft": f"rasd:base=({BASE}),source=({SOURCE})"})["draft"].traits
    assert fused.size(request) == 3 * 2 + 16 == traits.max_nodes and fused.companion is fused.base.companion
    assert fused.reach(1024) == 1024 and not fused.draws(request)
    assert traits.drawn and not traits.learns_across and not traits.candidates
    assert fused.draws(Request(PROMPTS[0], Params(temperature=1.0)))
    options = {"draft": "rasd:base=(token_recycling:scope=engine),source=(prompt_lookup:k=9)"}
    copies: Any = tiny.engine(options)
    fused, traits = copies.recipes[""].phases[-1].decode.drafter, parse(options)["draft"].traits
    assert fused.reach(1024) == ENDLESS and fused.companion is None
    assert traits.candidates == 8 and traits.learns_across and not traits.drawn
    with pytest.raises(UserError, match="rasd learns from all requests"):
        tiny.engine({"draft": "rasd:base=(token_recycling:scope=engine),source=(prompt_lookup)", "verify": "top_beta"})


def test_pruned_by_what_the_second_model_thinks() -> None:
    """The fewer first tokens it may begin with, the fewer rows; all of the vocabulary prune nothing."""
    want, every = run(f"rasd:base=({BASE}),source=({SOURCE})")
    for among in (2, tiny.VOCAB):
        tokens, counters = run(f"rasd:base=({BASE}),source=({SOURCE}),among={among}")
        assert tokens == want
        ratio = counters.drafted / counters.forwards / (every.drafted / every.forwards)
        assert ratio == 1 if among == tiny.VOCAB else ratio < 0.9


def test_a_second_model_says_what_it_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next token: what its first guess is chosen, or drawn, from."""
    seen: list[tuple[bool, Draft]] = []
    fused = Fusion._fused

    def kept(self: Fusion, base: Draft | None, source: Draft | None, budget: int) -> Draft | None:
        if base is not None:
            seen.append((base.q is None, base))
        return fused(self, base, source, budget)

    monkeypatch.setattr(Fusion, "_fused", kept)
    for temperature in (0.0, 1.0):
        run(f"rasd:base=({BASE}),source=({SOURCE})", Params(max_tokens=8, temperature=temperature, ignore_eos=True))
    assert {greedy for greedy, _ in seen} == {True, False}
    for greedy, draft in seen:
        assert draft.thoughts is not None
        thought = draft.thoughts[()]
        assert float(thought.sum()) == pytest.approx(1)
        assert greedy or torch.equal(thought, draft.q[0])
        assert not greedy or int(thought.argmax()) == draft.tokens[0]


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("rasd:among=-1", "rasd: among=-1 must be at least 0"),
        ("rasd:base=(retrieval),source=(retrieval:nodes=3)", "base and source both hold retrieval"),
        ("rasd:base=(rasd:source=(prompt_lookup)),source=(prompt_lookup)", "both hold prompt_lookup"),
        (f"rasd:base=(prompt_lookup),source=({BASE})", "source=draft_model may draw its guesses"),
        ("rasd:base=(token_recycling),source=(prompt_lookup),among=4", "base=token_recycling has none"),
        ("rasd:base=(hidden_transfer:heads=random:0),source=(prompt_lookup)", "base=hidden_transfer begins to compute"),
        ("rasd:base=(paced:of=(kangaroo:heads=random:0)),source=(prompt_lookup)", "base=paced begins to compute"),
        ("rasd:base=(draft_model:kk=4)", "draft rasd: base draft_model has no knob 'kk'"),
        ("rasd:source=(nothing)", "unknown draft method 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_refused(draft: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny.engine({"draft": draft})


@pytest.mark.parametrize("held", [
    "base=(suffix_decoding),source=(prompt_lookup)", "base=(paced:of=(suffix_decoding)),source=(prompt_lookup)",
    "base=(suffix_decoding),source=(paced:of=(prompt_lookup))",
])  # fmt: skip
def test_it_is_asked_in_every_step_while_either_of_its_drafters_must_be(held: str) -> None:
    """`paced` need not be asked where its size is 0; a drafter that must be asked would miss those steps."""
    assert catalog.build("draft", "paced:of=(suffix_decoding)").traits.idles
    assert not catalog.build("draft", f"rasd:{held}").traits.idles
