"""The transfer: its laws by enumeration, rejection at eta=0, and what greedy requests get."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.rejection import Rejection
from phasewise.methods.verify.transfer import TransferVerifier, moved
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, uniform
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Shown
from tests import seeds, tiny
from tests.speculation.markov import Tree, relative, table, target

VOCAB, N = 4, 24
RAPID = "rapid:k=3,context=24,piece=4,query=8"
SHOWN = Shown(torch.zeros(1, VOCAB))


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """p and q [V, V]: row t = what follows t."""
    gen = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCAB, VOCAB, generator=gen, dtype=torch.float64) * 1.5
    q = p + torch.randn(VOCAB, VOCAB, generator=gen, dtype=torch.float64)
    return p.softmax(-1), q.softmax(-1)


def by_hand(p: Tensor, q: Tensor, eta: float, share: float = 0.1) -> Tensor:
    """p' as the paper writes it, token by token."""
    z = [float(p[x].log()) - (eta * float(p[x] - q[x]) if q[x] >= share * q.max() else 0.0) for x in range(VOCAB)]
    weights = torch.tensor(z, dtype=torch.float64).exp()
    return weights / weights.sum()


def one_step(p: Tensor, q: Tensor, eta: float, law: str) -> Tensor:
    """The law of a token for which a guess was drawn: min(q, p') + (1 - sum of it) x the residual."""
    shifted = by_hand(p, q, eta)
    kept = torch.minimum(q, shifted)
    rest = (torch.maximum(p - q, p - shifted) if law == "paper" else shifted - q).clamp(min=0)
    return kept + (1 - kept.sum()) * rest / rest.sum()


def walk(verify: TransferVerifier, p: Tensor, q: Tensor, tokens: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """What follows token 0 after this chain was drawn, with its chance: every branch that the random numbers can take,
    its share found by looking for the places where the verifier's answer changes."""
    draft = Draft.chain(tokens, "iid", q[[0, *tokens[:-1]]])
    found: dict[tuple[int, ...], float] = {}

    def said(us: dict[tuple[int, int], float]) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        asked: list[tuple[int, int]] = []

        def rng(depth: int, purpose: int, index: int = 0) -> float:
            asked.append((depth, purpose))
            return us.get((depth, purpose), 0.5)

        path, token = verify(draft, target(p, draft, 0), rng, SHOWN)
        return asked, (*(tokens[node] for node in path), token)

    def explore(us: dict[tuple[int, int], float], weight: float) -> None:
        asked, out = said(us)
        free = next((key for key in asked if key not in us), None)
        if free is None:
            found[out] = found.get(out, 0.0) + weight
            return
        for low, high in stretches(lambda u: said({**us, free: u})):
            explore({**us, free: (low + high) / 2}, weight * (high - low))

    explore({}, 1.0)
    return found


def stretches(answer) -> list[tuple[float, float]]:
    """[0, 1) cut where the answer changes: each is given for one stretch, so bisection finds where it ends."""
    edges, last = [0.0], answer(1 - 1e-15)
    while (here := answer(edges[-1])) != last:
        low, high = edges[-1], 1 - 1e-15
        for _ in range(42):
            middle = (low + high) / 2
            low, high = (middle, high) if answer(middle) == here else (low, middle)
        edges.append(high)
    return list(zip(edges, [*edges[1:], 1.0]))


@pytest.mark.parametrize("law", ["paper", "moved"])
@pytest.mark.parametrize(("seed", "eta"), [(2, 8.0)])
def test_two_tokens_by_enumeration(seed: int, eta: float, law: str) -> None:
    """Over all chains of two, the law of the first two tokens; a token without a guess has the model's own."""
    p, q = tables(seed)
    first = one_step(p[0], q[0], eta, law)
    want, got = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    verify = TransferVerifier(eta=eta, law=law)  # type: ignore[arg-type]
    accepted = torch.minimum(q[0], by_hand(p[0], q[0], eta))
    for a in range(VOCAB):
        # a guess accepted is judged on with the chain's second; another ends the round, and the next is the model's.
        # (The paper's residual may hold the guess that was refused: it is a child, and the path goes on.)
        rest = float(first[a] - accepted[a])
        again = rest_of_guess(p[0], q[0], eta, law, a)
        going = float(accepted[a]) + again
        want[a] = going * one_step(p[a], q[a], eta, law) + (rest - again) * p[a]
    for tokens in itertools.product(range(VOCAB), repeat=2):
        chance = float(q[0, tokens[0]] * q[tokens[0], tokens[1]])
        for out, share in walk(verify, p, q, tokens).items():
            if len(out) == 1:  # the next round begins without a guess
                got[out[0]] += chance * share * p[out[0]]
            else:
                got[out[0], out[1]] += chance * share
    assert float(want.sum()) == pytest.approx(1)
    assert float((got - want).abs().max()) < 1e-10
    assert float((got.sum(1) - first).abs().max()) < 1e-10
    if law == "moved":
        assert float((first - by_hand(p[0], q[0], eta)).abs().max()) < 1e-12
    exact = p[0][:, None] * p
    assert float((got - exact).abs().max()) > 1e-3, "a law that is not the model's own: the transfer bites"


def rest_of_guess(p: Tensor, q: Tensor, eta: float, law: str, a: int) -> float:
    """The chance that `a` was guessed, refused, and said after all."""
    shifted = by_hand(p, q, eta)
    rest = (torch.maximum(p - q, p - shifted) if law == "paper" else shifted - q).clamp(min=0)
    return float((q[a] - shifted[a]).clamp(min=0) * rest[a] / rest.sum())


def test_the_share_decides_what_moves() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.01, 0.09, 0.9])
    z = moved(p.log(), p, q, 2.0, 0.1)
    assert z[0] == p[0].log() and z[1] == pytest.approx(float(p[1].log()) - 2 * 0.21)
    assert z[2] == pytest.approx(float(p[2].log()) + 2 * 0.7)


def test_what_rules_exclude_is_never_said() -> None:
    """A token that the target's rules have taken out stays out, however sure the drafter is."""
    p, q = torch.tensor([[0.0, 0.6, 0.4, 0.0]]).repeat(5, 1), torch.tensor([[0.9, 0.05, 0.05, 0.0]])
    for law in ("paper", "moved"):
        for seed in range(200):
            draft = Draft([0 if seed % 2 else 1], [-1], "iid", q)
            dist = Dist([1, 1], 4, range(2), p[:2])
            path, token = TransferVerifier(eta=50, law=law)(  # type: ignore[arg-type]
                draft, dist, lambda depth, purpose, index=0, seed=seed: uniform(seed, depth, purpose, index), SHOWN
            )
            assert token in (1, 2) and (not path or draft.tokens[0] == 1)


@pytest.mark.parametrize("drawn", ["point", "iid", "without_replacement", "top_plus_one"])
def test_a_small_eta_is_rejection(drawn: str) -> None:
    """On all trees, number by number: none at 0, and the formulas themselves just above."""
    p = table(6, seed=1)
    for eta in (0.0, 1e-7):
        for law in ("paper", "moved"):
            for seed in range(100):
                draft = Tree(relative(p, seed=2), (3, 2), drawn)(0, seed, 0)  # type: ignore[arg-type]

                def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
                    return uniform(seed, depth, purpose, index)

                dist = target(p, draft, 0)
                got = TransferVerifier(eta=eta, law=law)(draft, dist, rng, SHOWN)  # type: ignore[arg-type]
                assert got == Rejection()(draft, dist, rng)


def test_trees_keep_the_moved_law() -> None:
    """Of siblings drawn without replacement, too, law=moved says p' exactly: by frequency."""
    p, q = (each[0].float() for each in tables(3))
    verify, counts, runs = TransferVerifier(eta=5, law="moved"), torch.zeros(VOCAB), 3000
    for seed in range(runs):
        draft = Tree(q.expand(VOCAB, -1), (3,), "without_replacement")(0, seed, 0)

        def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
            return uniform(seed, depth, purpose, index)

        path, token = verify(draft, target(p.expand(VOCAB, -1), draft, 0), rng, SHOWN)
        counts[draft.tokens[path[0]] if path else token] += 1
    assert float((counts / runs - by_hand(p.double(), q.double(), 5)).abs().max()) < 0.03
    assert float((counts / runs - p).abs().max()) > 0.05


# ---- greedy requests
def greedy(logits: Tensor, draft: Draft, eta: float, top: int | None = None) -> tuple[list[int], int]:
    tops = logits.argmax(-1).tolist()
    dist = Dist(tops if top is None else [top, *tops[1:]], VOCAB)
    return TransferVerifier(eta=eta)(draft, dist, lambda *_: 0.5, Shown(logits))


def test_a_sure_drafter_is_believed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]])
    sure, unsure = torch.tensor([0.02, 0.96, 0.01, 0.01]), torch.tensor([0.45, 0.46, 0.05, 0.04])
    for q, eta, path in ((sure, 0.5, []), (sure, 5.0, [0]), (unsure, 1.0, []), (None, 50.0, [])):
        draft = Draft([1], [-1], thoughts=None if q is None else {(): q})
        assert greedy(logits, draft, eta) == (path, 2 if path else 0)
    p = logits[0].softmax(-1)
    edge = float((logits[0, 0] - logits[0, 1]) / (sure[1] - p[1]))  # the drafter thinks little of token 0: it stays
    assert greedy(logits, Draft([1], [-1], thoughts={(): sure}), edge - 1e-3)[0] == []
    assert greedy(logits, Draft([1], [-1], thoughts={(): sure}), edge + 1e-3)[0] == [0]


def test_the_models_own_choice_comes_first_and_rules_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
    q = torch.tensor([0.02, 0.96, 0.01, 0.01])
    both = Draft([1, 0], [-1, -1], thoughts={(): q})
    assert greedy(logits, both, 10.0) == ([1], 3)
    alone = Draft([1], [-1], thoughts={(): q})
    assert greedy(logits, alone, 10.0)[0] == [0]
    assert greedy(logits, alone, 10.0, top=3) == ([], 3), "the request's rules chose: nobody else does"


# ---- through the engine
def outs(draft: str, verify: str, params: Params | list[Params], schedule: str = "prefill_first") -> list[list[int]]:
    placed = tiny.engine({"draft": draft, "verify": verify, "schedule": schedule})
    return tiny.outs(tiny.run(placed, tiny.prompts(60, 7), params))


@pytest.mark.parametrize("draft", seeds.params([RAPID, "draft_model:model=tiny-draft,k=3,branches=2"], 1, "eta"))
def test_eta_zero_gives_rejections_tokens(draft: str) -> None:
    sampled = [Params(max_tokens=N, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(2)]
    for params in (sampled, tiny.greedy(N)):
        want = outs(draft, "rejection", params)
        assert outs(draft, "transfer:eta=0", params) == want
        assert params is sampled or outs(draft, "transfer:eta=30", params) != want
        assert outs(draft, "transfer:eta=30", params) == outs(draft, "transfer:eta=30", params, "sarathi:budget=7")


def test_thoughts_are_kept_for_those_who_want_them() -> None:
    seen: list[Draft] = []

    class Curious(Method):
        def __init__(self, *wants: str) -> None:
            self.wants = frozenset(wants)

        @property
        def traits(self) -> Traits:
            return Traits("verify", wants=self.wants)

        def __call__(self, draft: Draft, p: Dist, rng, *shown: Shown) -> tuple[list[int], int]:
            seen.append(draft)
            return Rejection()(draft, p, rng)

    for wants in ((), ("thoughts",)):
        seen.clear()
        methods = parse({"draft": RAPID})
        methods["decode"] = Speculative(methods["draft"], Curious(*wants))
        placed = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
        params = [tiny.greedy(N), Params(max_tokens=N, temperature=0.9, ignore_eos=True)]
        tiny.run(placed, tiny.prompts(60, 41), params)
        assert seen and all(bool(wants) or list(draft.thoughts or ()) == [()] for draft in seen)
        for draft in seen if wants else ():
            assert draft.cut(1).thoughts is draft.prune(1).thoughts is draft.thoughts
            for node, parent in enumerate(draft.parents):
                thought = draft.thoughts[draft.path(parent)]
                if draft.q is None:
                    assert int(thought.argmax()) == draft.tokens[node]
                else:
                    assert torch.equal(thought, draft.q[node])


def test_no_lossy_verdict_over_tables_that_all_share() -> None:
    with pytest.raises(UserError, match="token_recycling learns from all requests, and under the verifier transfer"):
        tiny.engine({"draft": "token_recycling:scope=engine", "verify": "transfer"})


@pytest.mark.parametrize("knob", ["eta=-1", "share=0", "share=1.5"])
def test_wrong_knobs_are_named(knob: str) -> None:
    with pytest.raises(UserError, match=f"transfer: {knob}"):
        tiny.engine({"draft": "prompt_lookup", "verify": f"transfer:{knob}"})
    with pytest.raises(UserError, match="transfer: eta=inf"):
        TransferVerifier(eta=float("inf"))
    with pytest.raises(UserError, match="transfer: law=other must be paper or moved"):
        TransferVerifier(law="other")  # type: ignore[arg-type]
