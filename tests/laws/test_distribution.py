"""Law 1 for sampled tokens: speculation draws from the target's distribution, by chi-square against exact enumeration.

Seeds are fixed, so each test gives one p-value for ever. A sound verifier passes p > 1e-3; a lax one must fall below
1e-6 in the very same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Dist, Purpose, pick, uniform
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Verifier
from tests import oracle, tiny
from tests.laws import axes
from tests.laws.settings import spell
from tests.sample import reference
from tests.speculation.markov import Drafts, Tree, fits, generate, relative, sequences, table

PASS, FAIL = 1e-3, 1e-6
VOCAB, LENGTH, RUNS = 5, 3, 900
P = table(VOCAB, seed=1)
Q = relative(P, seed=2)
FAR = table(VOCAB, seed=2)  # a drafter that knows nothing: later siblings matter most
SHAPES = {"chain": (1, 1, 1), "tree": (2, 2), "comb": (3, 1, 1)}
DRAWN = ("point", "iid", "without_replacement", "top_plus_one")
VERIFIERS = [name for name in catalog.names("verify") if catalog.method("verify", name).guarantee != "lossy"]
PURE = [name for name in VERIFIERS if not hasattr(catalog.method("verify", name), "bind")]  # the others need a model
# What does not go together, and what the refusal says: (verifier, how guesses are drawn), (drafter, verifier).
NOT_DRAWN: dict[tuple[str, str], str] = {}
NOT_TOGETHER: dict[tuple[str, str], str] = {}


def p_value(verify: Verifier, drafter: Drafts) -> float:
    drawn = [tuple(generate(verify, drafter, P, LENGTH, seed)) for seed in range(RUNS)]
    return fits(drawn, sequences(P, LENGTH))


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("name", PURE)
def test_verifiers_keep_the_distribution(name: str, drawn: Drawn) -> None:
    """Shapes in turn: whatever the shape, the tokens have the target's distribution."""
    verify = catalog.build("verify", name)
    trees = [Tree(FAR if shape == "comb" else Q, widths, drawn) for shape, widths in SHAPES.items()]

    def p() -> float:
        return p_value(verify, lambda last, seed, at: trees[seed % len(trees)](last, seed, at))

    if (name, drawn) in NOT_DRAWN:
        with pytest.raises(UserError, match=NOT_DRAWN[name, drawn]):
            p()
    else:
        assert p() > PASS


# ---- what a verifier says of drafts that change no token
def plainly(path: Sequence[int], p: Tensor, rng: Random) -> list[int]:
    """What plain decoding draws along an accepted path, from the target's rows after its tokens; then one more."""
    return [pick(p[node + 1], rng(depth, Purpose.SAMPLE)) for depth, node in enumerate([-1, *path])]


def unmatched(verify: Verifier, drawn: Drawn) -> int:
    """In how many of many drafts the tokens are not plain decoding's, random number by random number."""
    differ = 0
    for seed in range(200):
        draft = [Tree(Q, widths, drawn) for widths in SHAPES.values()][seed % len(SHAPES)](seed % VOCAB, seed, 0)
        p = torch.stack([P[token] for token in (seed % VOCAB, *draft.tokens)])

        def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
            return uniform(seed, depth, purpose, index)

        path, token = verify(draft, Dist([-1] * len(p), VOCAB, range(len(p)), p), rng)
        differ += [*(draft.tokens[node] for node in path), token] != plainly(path, p, rng)
    return differ


@pytest.mark.parametrize("name", PURE)
def test_verifiers_match_plain_decoding_where_they_say(name: str) -> None:
    """There, and nowhere else, load may size drafts (see `Speculation`)."""
    verify = catalog.build("verify", name)
    said = {"all": DRAWN, "point": DRAWN[:1], "none": ()}[verify.traits.matches]
    assert [drawn for drawn in DRAWN if not unmatched(verify, drawn)] == list(said)


def test_a_verifier_that_does_not_match_is_caught() -> None:
    assert unmatched(always, "point") > 0


# ---- the same test must catch verifiers that cut corners


def always(draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
    """Accepts every first child unseen."""
    path: list[int] = []
    while children := draft.children(path[-1] if path else -1):
        path.append(children[0])
    return path, p.draw(path[-1] + 1 if path else 0, rng(len(path), 0))


def likeliest(last: int, seed: int, position: int) -> Draft:
    """An argmax chain that claims to have been drawn from q."""
    tokens = [int(Q[last].argmax())]
    tokens.append(int(Q[tokens[0]].argmax()))
    return Draft.chain(tokens, "iid", Q[[last, tokens[0]]])


def sorted_siblings(last: int, seed: int, position: int) -> Draft:
    """Siblings drawn without replacement, then put in order of probability: the law of the draw is lost."""
    draft = Tree(Q, (3,), "without_replacement")(last, seed, position)
    order = sorted(range(3), key=lambda i: -float(Q[last, draft.tokens[i]]))
    rows, rest = [], Q[last].clone()
    for i in order:
        rows.append(rest / rest.sum())
        rest = rest.clone()
        rest[draft.tokens[i]] = 0.0
    return Draft([draft.tokens[i] for i in order], [-1] * 3, "without_replacement", torch.stack(rows))


def best_two_of_three(last: int, seed: int, position: int) -> Draft:
    """Three siblings drawn, the least likely thrown away: whether a sibling exists depends on which it is (law 8)."""
    draft = Tree(Q, (3,), "without_replacement")(last, seed, position)
    worst = min(range(3), key=lambda i: float(Q[last, draft.tokens[i]]))
    keep = [i for i in range(3) if i != worst]
    assert draft.q is not None
    return Draft([draft.tokens[i] for i in keep], [-1, -1], "without_replacement", draft.q[keep])


@dataclass(frozen=True)
class Always(Method):
    traits: ClassVar[Traits] = Traits("verify")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        return always(draft, p, rng)


def test_a_verifier_that_always_accepts_is_caught() -> None:
    assert p_value(always, Tree(Q, SHAPES["chain"], "iid")) < FAIL


@pytest.mark.parametrize("drafter", [likeliest, sorted_siblings, best_two_of_three], ids=lambda f: f.__name__)
def test_drafts_that_lie_about_their_draw_are_caught(drafter: Drafts) -> None:
    assert p_value(catalog.build("verify", "rejection"), drafter) < FAIL


# ---- through the engine, every drafter with every verifier

SMALL = {"vocab": 8, "layers": 1, "hidden": 32, "sharp": 3.0}
PROMPT = [3, 0, 5, 1, 6, 2, 4, 7, 3, 6, 0, 4, 1, 5, 7, 2]  # whatever comes, it has come before
PARAMS = {
    "temperature": Params(max_tokens=LENGTH + 3, temperature=1.0, ignore_eos=True),
    "every rule": Params(
        max_tokens=LENGTH + 3, temperature=1.3, top_p=0.93, top_k=6, repetition_penalty=1.2, presence_penalty=0.7,
        frequency_penalty=0.3, ignore_eos=True,
    ),
}  # fmt: skip
ALL = "sarathi:budget=100000"
PAIRS = list(itertools.product(catalog.names("draft"), VERIFIERS))
UNPAID = {("paced", "match")}  # the clock may say that no guess pays where none can change a token
KNOBS = {
    "prompt_lookup": {"min_match": 1, "branches": 2},
    "draft_model": {"k": 3},
    "rsd": {"beam": 3, "depth": LENGTH},
    "dyspec": {"nodes": 8, "depth": LENGTH + 1},
    "specdec": {"stop": "head", "most": 4, "threshold": 0.6},
    "s2d": {"exits": "1+2", "tau": 0.5, "weights": "none"},
    "spectr": {"chains": 3, "k": LENGTH},
    "rasd": {
        "base": "(draft_model:model=tiny-draft,k=2)",
        "source": "(retrieval:store=random:0,nodes=4,length=2,hits=9)",
    },
    "paced": {"of": "(draft_model:model=tiny-draft,k=3)"},
    "aded": {"nodes": 6, "kept": 4},
    "aggressive": {"source": "marks", "opens": 6},  # what follows it has every token once
}


def target(layers: int = 1) -> Model:
    return tiny.model(**{**SMALL, "layers": layers})


def layers_for(draft: str) -> int:
    """Those of the target: a drafter that begins rows in the first ones needs others behind them, and one that leaves
    behind some of them has to have several."""
    return 1 + (draft == "s2d" or parse({"draft": spelled(draft)})["draft"].traits.begins_rows)


@cache
def chances(how: str, layers: int = 1) -> dict[tuple[int, ...], float]:
    """Exact chances of the first tokens, from uncached passes and the slow sampling rules."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for out, chance in found.items():
            logits = oracle.logits(tiny.checkpoint(**{**SMALL, "layers": layers}), [*PROMPT, *out])[-1].double().numpy()
            probs = reference.distribution(logits, PROMPT, out, PARAMS[how])
            longer |= {(*out, token): chance * float(p) for token, p in enumerate(probs)}
        found = longer
    return found


def through_the_engine(placed: Placed, how: str, runs: int = 800) -> list[tuple[int, ...]]:
    """What each of `runs` requests says first. Then they are dropped: they may say more, that drafts are not cut."""
    requests = [Request(PROMPT, replace(PARAMS[how], seed=seed)) for seed in range(runs)]
    for request in requests:
        placed.add(request)
    while any(request.left is None and request.n_out < LENGTH for request in requests):
        placed.step()
    assert all(request.left is None or request.left.how == "finished" for request in requests)
    drawn = [tuple(request.out[:LENGTH]) for request in requests]
    for request in requests:
        placed.cancel(request)
    tiny.finish(placed, requests)
    return drawn


def engine(verbs: dict[str, str], layers: int = 1) -> Placed:
    """All requests at once: prompts in one step, then drafts of all in each."""
    return tiny.engine({"schedule": ALL} | verbs, of=target(layers), max_running=1000)


def spelled(draft: str) -> str:
    """A drafter for the small vocabulary."""
    text = spell("draft", draft, KNOBS.get(draft))
    return text.replace("tiny-draft", str(tiny.checkpoint(**SMALL, seed=1)))


def meetings(whole: bool) -> list[tuple[str, str, str]]:
    """All pairs by all rules; or every drafter under rejection by every rule, other verifiers by one rule in turn."""
    every = [(*pair, how) for pair in PAIRS for how in PARAMS]
    turns = [pair for pair in PAIRS if pair[1] != "rejection" or pair[0] == "draft_model"]
    few = [(*pair, list(PARAMS)[i % len(PARAMS)]) for i, pair in enumerate(turns)]
    return every if whole else [case for case in every if case[1] == "rejection" or case in few]


@axes.over(meetings, "-".join, most=16)
def test_speculation_keeps_the_distribution(case: tuple[str, str, str]) -> None:
    draft, verify, how = case
    layers = layers_for(draft)
    if (draft, verify) in NOT_TOGETHER:
        with pytest.raises(UserError, match=NOT_TOGETHER[draft, verify]):
            engine({"draft": spelled(draft), "verify": verify}, layers)
        return
    placed = engine({"draft": spelled(draft), "verify": verify}, layers)
    assert fits(through_the_engine(placed, how), chances(how, layers)) > PASS
    assert placed.counters.drafted > 200 or (draft, verify) in UNPAID, (
        "hardly anything was drafted: this test tests nothing"
    )


OTHER_WAYS = [pytest.param(way, marks=pytest.mark.thorough) for way in ("iid:1", "top_plus_one:3", "point:2")]


@pytest.mark.parametrize("drawn", ["iid:2", *OTHER_WAYS])
def test_every_way_of_drawing_keeps_the_distribution(drawn: str) -> None:
    kind, branches = drawn.split(":")
    placed = engine({"draft": f"{spelled('draft_model')},drawn={kind},branches={branches}"})
    assert fits(through_the_engine(placed, "temperature"), chances("temperature")) > PASS


def test_a_lax_verifier_is_caught_through_the_engine() -> None:
    methods = parse({"draft": spelled("draft_model")})
    methods["decode"] = Speculative(methods["draft"], Always())
    placed = Builder(target(), methods, Limits(kv_bytes=64 << 20, max_running=1000), load=tiny.load).build()
    assert fits(through_the_engine(placed, "temperature"), chances("temperature")) < FAIL


def test_plain_decoding_and_its_failure() -> None:
    """The reference itself fits, and not with the chances of another temperature."""
    drawn = through_the_engine(engine({}), "temperature")
    assert fits(drawn, chances("temperature")) > PASS
    hotter = {cell: chance**0.7 for cell, chance in chances("temperature").items()}
    total = sum(hotter.values())
    assert fits(drawn, {cell: chance / total for cell, chance in hotter.items()}) < FAIL
