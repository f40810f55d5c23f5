"""Trees of every shape keep the target's distribution when they are drawn and judged with the engine's own numbers.

Target and draft model are Markov tables. All else is the engine's: `TreeDrafter` grows the trees, `Speculation`
proposes and judges them, `standard` makes distributions of logits at the request's temperature, and every random number
comes from the request's seed and positions. Trees fill their budget: a guess may be left out for want of room, which
must not depend on the numbers that judge it.

The exact chance of every sequence is enumerated, and a chi-square test compares. Seeds are fixed, so each case gives
one p-value for ever. Five biases are planted, each of which the same test must find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.methods.draft._chain import ChainShape
from phasewise.methods.draft._stopped import StoppedChain, StopRule, by_state, calibrated, own
from phasewise.methods.draft.dyspec import _Worth
from phasewise.methods.draft.rapid import _Chain
from phasewise.methods.draft.rasd import Fusion
from phasewise.methods.draft.rsd import _Beam, _Widths
from phasewise.methods.draft.specdec import CalibratedDrafter
from phasewise.methods.draft.spectr import _Chains
from phasewise.methods.draft.swift import _Confident
from phasewise.methods.sample.standard import Standard
from phasewise.methods.verify import rejection
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import branching, loop
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.loop import Speculation
from phasewise.speculation.tree_drafter import DraftBuilder, TreeDrafter, TreeShape
from phasewise.step.phase import Hidden
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.host import Host
from phasewise.verbs.sample import Coupling, Purpose, pick, uniform
from phasewise.verbs.traits import Traits
from tests.speculation.markov import Table, fits, relative, sequences, table

PASS, FAIL = 1e-3, 1e-6
TOKENS = 2
SEEDS, PLANTED, MOST = 600, 2000, 3000  # of a quick case, of a planted bias, of a thorough case
TEMPERATURES = (0.3, 0.6, 1.0)
COUPLINGS: tuple[Coupling, ...] = get_args(Coupling)


@dataclass(frozen=True)
class World:
    """What the target and the draft model say after each token: logits [V, V]."""

    target: Table
    draft: Table

    def chances(self, temperature: float) -> dict[tuple[int, ...], float]:
        return sequences((self.target.double() / temperature).softmax(-1), TOKENS)


def _probabilities(*rows: Sequence[float]) -> Table:
    return torch.tensor(rows).log()


# Token 0 only begins. After the other two both tables differ as much as can be, so that whoever lets the number of
# guesses hang on draws is far off; in the second world more tokens can follow, so that siblings differ in more.
TWO = World(
    _probabilities([0, 0.5, 0.5], [0, 0.5, 0.5], [0, 0.2, 0.8]),
    _probabilities([0, 0.6, 0.4], [0, 0.2, 0.8], [0, 0.5, 0.5]),
)
P = table(4, seed=11, sharp=0.4)
FOUR = World(P.log(), relative(P, seed=12, noise=1.5).log())


@dataclass(frozen=True)
class Model:
    """A model whose logits hang on the last token alone: a row of its last layer is that token's id."""

    logits: Table
    device = torch.device("cpu")

    @property
    def config(self) -> Any:
        return type("Config", (), {"vocab": len(self.logits)})

    def head(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()]


class Backend:
    """The draft model of `TreeDrafter`."""

    def __init__(self, logits: Table) -> None:
        self.model: Any = Model(logits)
        self.optional: Callable[[Request], bool] = lambda request: False
        self.text: Callable[[Request], list[int]] = lambda request: request.tokens

    def lag(self, request: Request) -> int:
        return 0

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        raise AssertionError("it never lags")

    def reserve(self, request: Request, rows: int) -> bool:
        return True

    def root(self, requests: Sequence[Request]) -> Tensor:
        return torch.tensor([[float(request.tokens[-1])] for request in requests])

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        return torch.tensor([[float(token)] for level in levels for token in level.tokens])

    def logits(self, x: Tensor) -> Tensor:
        said: Tensor = self.model.head(x)
        return said


class Tight(TreeDrafter):
    """Trees of so many nodes, however many more their shape would have."""

    room = 0
    full = 0  # trees that took all of it

    def size(self, request: Request) -> int:
        return min(self.room, super().size(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts = super().draft(requests, budgets)
        self.full += sum(draft is not None and len(draft.tokens) == self.room for draft in drafts)
        return drafts


class TightAndCalibrated(Tight, CalibratedDrafter):
    """The same, told of every verdict."""


def says(row: Tensor) -> float:
    """A chance of acceptance that hangs on the token alone."""
    return 0.9 if int(row) % 2 else 0.5


class Fixed(Drafter):
    """Guesses that are chosen, the same for each request: what `rasd` adds to a tree."""

    def size(self, request: Request) -> int:
        return 3

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [Draft([1, 2, 1], [-1, -1, 1]) for _ in requests]


@dataclass(frozen=True)
class Case:
    """Trees of a shape with so many nodes at most, under a verifier; `fused`: with chosen guesses added."""

    shape: TreeShape
    room: int
    verify: str = "rejection"
    world: World = TWO
    fused: bool = False


CASES: dict[str, dict[str, Case]] = {  # by drafter
    "draft_model": {
        "a chain": Case(ChainShape(3, 1, "without_replacement"), 3),
        "siblings": Case(ChainShape(2, 3, "without_replacement"), 6, world=FOUR),
        "siblings drawn apart": Case(ChainShape(2, 2, "iid"), 4),
        "siblings drawn apart, one by one": Case(ChainShape(1, 3, "iid"), 3, world=FOUR),
        "siblings drawn apart, for k_seq": Case(ChainShape(2, 3, "iid"), 6, "k_seq", FOUR),
        "the top and one more": Case(ChainShape(2, 3, "top_plus_one"), 5, world=FOUR),
        "chosen": Case(ChainShape(2, 2, "point"), 4, world=FOUR),
        "chosen, for k_seq": Case(ChainShape(2, 2, "point"), 3, "k_seq", FOUR),
        "matched": Case(ChainShape(2, 2, "without_replacement"), 4, "match"),
    },
    "easyspec": {"a chain": Case(ChainShape(2, 1, "without_replacement"), 2, world=FOUR)},
    "rapid": {"a chain that ends early": Case(_Chain(3, 0.3), 3, world=FOUR)},
    "rsd": {
        "widths": Case(_Widths((2, 2)), 4),
        "one level": Case(_Widths((3,)), 3, world=FOUR),
        "a beam": Case(_Beam(2, 2), 3),
        "a wider beam": Case(_Beam(3, 2), 6, world=FOUR),
        "matched": Case(_Widths((2, 2)), 4, "match", FOUR),
        "for k_seq": Case(_Widths((2, 2)), 6, "k_seq", FOUR),
    },
    "dyspec": {
        "worth": Case(_Worth(4, 2, 0.2), 4),
        "all worth it": Case(_Worth(5, 3, 1e-9), 5),
        "more tokens": Case(_Worth(4, 2, 0.05), 4, world=FOUR),
        "matched": Case(_Worth(4, 2, 0.2), 4, "match"),
    },
    "specdec": {
        "ends by what was drawn": Case(StoppedChain(StopRule(0.8, 1, 3), own), 3, world=FOUR),
        "ends by states": Case(StoppedChain(StopRule(0.4, 1, 3), by_state(cast(Any, says))), 3, world=FOUR),
        "ends by verdicts": Case(StoppedChain(StopRule(0.6, 1, 3), calibrated), 3),
        "matched": Case(StoppedChain(StopRule(0.8, 1, 3), own), 3, "match"),
    },
    "s2d": {"a chain": Case(ChainShape(3, 1, "without_replacement"), 3, world=FOUR)},
    "spectr": {
        "for k_seq": Case(_Chains(3, 2), 5, "k_seq"),
        "one level": Case(_Chains(4, 1), 4, "k_seq", FOUR),
        "one by one": Case(_Chains(3, 2), 5),
    },
    "swift": {"chosen": Case(_Confident(2, 2, 0.1, frozenset()), 4, world=FOUR)},
    "rasd": {
        "over siblings": Case(ChainShape(2, 2, "without_replacement"), 4, world=FOUR, fused=True),
        "over worth": Case(_Worth(4, 2, 0.2), 4, fused=True),
        "for k_seq": Case(_Chains(3, 2), 5, "k_seq", fused=True),
    },
}
ELSEWHERE = {  # the drafter is another's, with a size that hangs on the clock where no token hangs on guesses
    "paced": "laws/test_distribution.py",
}


def grown(case: Case, host: Host) -> tuple[Tight, Drafter]:
    learns = getattr(case.shape, "weigh", None) is calibrated
    made = (TightAndCalibrated if learns else Tight)(host, Backend(case.world.draft), case.shape, 512)
    made.room = case.room
    return made, Fusion(0, made, Fixed()) if case.fused else made


def decoded(decode: Speculation, seeds: int, temperature: float, length: int) -> tuple[list[Request], int]:
    """Requests of at least `length` tokens behind token 0, one a seed, which take their steps together; and the rounds
    that they took, those of each counted. The rows' hidden states are their tokens, as `Model` reads them."""
    requests = [Request([0], Params(max_tokens=99, seed=seed, temperature=temperature)) for seed in range(seeds)]
    for request in requests:
        request.tokens.append(0)
        request.computed, request.kv = 1, cast(Any, True)
    going, rounds = list(requests), 0
    while going:
        rounds += len(going)
        spans = decode.propose(going, [decode.rows(request) for request in going], cast(Any, None))
        rows: list[int] = []
        for span in spans:
            span.start = len(rows)
            rows += span.tokens
        for request, outcome in zip(going, decode.accept(spans, Hidden(torch.tensor(rows)[:, None], len(rows)))):
            request.tokens += outcome.tokens
            request.computed = request.known - 1
        going = [request for request in going if request.n_out <= length]
    return requests, rounds


def drawn(case: Case, temperature: float, seeds: int, coupling: Coupling) -> list[tuple[int, ...]]:
    """The first tokens of so many requests, which take their steps together."""
    host = Host(cast(Any, Model(case.world.target)), Standard(coupling), Counters(), cast(Any, None), cast(Any, None))
    trees, drafter = grown(case, host)
    verifier = catalog.build("verify", case.verify)
    traits = Traits("decode", drawn=True, matches=verifier.traits.matches)
    decode = Speculation(host, drafter, verifier, traits)
    requests, _ = decoded(decode, seeds, temperature, TOKENS)
    assert trees.full > seeds / 10, "hardly a tree is full"
    return [tuple(request.out[1 : TOKENS + 1]) for request in requests]


def p_value(case: Case, temperature: float, seeds: int, coupling: Coupling = "inverse") -> float:
    return fits(drawn(case, temperature, seeds, coupling), case.world.chances(temperature))


EVERY = [(drafter, name) for drafter, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(
    ("drafter", "name", "temperature", "coupling"),
    [(*case, TEMPERATURES[i % len(TEMPERATURES)], COUPLINGS[i % len(COUPLINGS)]) for i, case in enumerate(EVERY)],
)
def test_the_targets_distribution_is_kept(drafter: str, name: str, temperature: float, coupling: Coupling) -> None:
    assert p_value(CASES[drafter][name], temperature, SEEDS, coupling) > PASS


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("drafter", CASES)
def test_with_more_seeds_at_every_temperature(drafter: str, coupling: Coupling, temperature: float) -> None:
    found = {name: p_value(case, temperature, MOST, coupling) for name, case in CASES[drafter].items()}
    assert {name: p for name, p in found.items() if p < PASS} == {}


def test_no_drafter_that_draws_is_left_out() -> None:
    """A new one finds its way here: those that draw, or take the target's number for what they choose."""
    drawing = {name for name in catalog.names("draft") if catalog.method("draft", name)().traits.drawn}
    assert drawing - CASES.keys() - ELSEWHERE.keys() == set()
    exact = {name for name in catalog.names("verify") if catalog.method("verify", name).guarantee != "lossy"}
    assert exact == {case.verify for cases in CASES.values() for case in cases.values()}


# ---- biases that the same test must find
Plant = Callable[[pytest.MonkeyPatch], None]


def shared_numbers(patch: pytest.MonkeyPatch) -> None:
    """All siblings are drawn with the number of the first."""
    own = DraftBuilder.us
    patch.setattr(DraftBuilder, "us", lambda tree, node: lambda i: own(tree, node)(0))


def shared_verdicts(patch: pytest.MonkeyPatch) -> None:
    """All siblings are judged with the number of the first."""
    patch.setattr(loop, "uniform", lambda seed, position, purpose, index=0: uniform(seed, position, purpose))


def dropped_sibling(patch: pytest.MonkeyPatch) -> None:
    """Of siblings drawn apart, one that says what an earlier one said is dropped."""

    def branch(q: Tensor, n: int, drawn: str, us: Callable[[int], float], how: Coupling) -> tuple[list[int], Tensor]:
        tokens = list(dict.fromkeys(pick(q, us(i), how) for i in range(n)))
        return tokens, q.expand(len(tokens), -1)

    patch.setattr("phasewise.methods.draft._chain.branch", branch)


def least_likely_dropped(patch: pytest.MonkeyPatch) -> None:
    """One sibling more is drawn, and the one that the draft model likes least is dropped."""
    real = branching.branch

    def branch(q: Tensor, n: int, *more: Any) -> tuple[list[int], Tensor | None]:
        tokens, rows = real(q, n + 1, *more)
        worst = min(range(len(tokens)), key=lambda i: float(q[tokens[i]]))
        kept = [i for i in range(len(tokens)) if i != worst]
        return [tokens[i] for i in kept], None if rows is None else rows[kept]

    patch.setattr("phasewise.methods.draft.rsd.branch", branch)


def wrong_residual(patch: pytest.MonkeyPatch) -> None:
    """After a refusal a token comes from |p - q|."""
    patch.setattr(rejection, "_residual", lambda p, q: (p - q).abs() / (p - q).abs().sum())


def accept_all(patch: pytest.MonkeyPatch) -> None:
    """Every guess that the target could have said is accepted."""
    patch.setattr(loop, "uniform", lambda *key: 0.0 if key[2] == Purpose.ACCEPT else uniform(*key))


def budget_taken_by_draws(patch: pytest.MonkeyPatch) -> None:
    """Whether a node has a child for want of room hangs on the very numbers that it is judged by."""
    patch.setattr(DraftBuilder, "own", DraftBuilder.us)


PLANTS: dict[str, tuple[Plant, str, str, float]] = {  # who must find it: drafter, case, temperature
    "shared numbers": (shared_numbers, "draft_model", "siblings", 1.0),
    "shared verdicts": (shared_verdicts, "draft_model", "siblings", 0.6),
    "a dropped sibling": (dropped_sibling, "draft_model", "siblings drawn apart, one by one", 0.6),
    "the least likely dropped": (least_likely_dropped, "rsd", "one level", 1.0),
    "a wrong residual": (wrong_residual, "rsd", "one level", 0.3),
    "accept all": (accept_all, "dyspec", "worth", 0.3),
    "a budget taken by draws": (budget_taken_by_draws, "dyspec", "worth", 1.0),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bias_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, drafter, case, temperature = PLANTS[name]
    plant(monkeypatch)
    assert p_value(CASES[drafter][case], temperature, PLANTED) < FAIL
