"""What a pass shows to a verifier, and the relaxed verification that wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.methods.verify.top_beta import TopBeta
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Dist
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Shown
from tests import tiny

N = 30
DRAFT = "draft_model:model=tiny-draft,k=3,branches=2"


def judge(verify: TopBeta, logits: Tensor, draft: Draft) -> tuple[list[int], int]:
    return verify(draft, Dist(logits.argmax(-1).tolist(), logits.shape[1]), lambda *_: 0.0, Shown(logits))


@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0, 4))
def test_every_step_of_a_path_is_near_the_best(seed: int, beta: int, tau: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 8, generator=gen)
    draft = Draft(torch.randint(0, 8, (6,), generator=gen).tolist(), [-1, -1, 0, 0, 2, 1])
    path, token = judge(TopBeta(beta, tau), logits, draft)
    for parent, node in zip([-1, *path], path):
        row, guess = logits[parent + 1], draft.tokens[node]
        ranks = row.argsort(descending=True).tolist()
        assert guess in ranks[:beta]
        assert float(row[guess]) >= float(row.max()) - tau
    end = path[-1] if path else -1
    row = logits[end + 1]
    assert token == int(row.argmax())
    for child in draft.children(end):  # none that would do was left
        guess = draft.tokens[child]
        assert int((row >= row[guess]).sum()) > beta or float(row[guess]) < float(row.max()) - tau
    if beta == 1:
        assert (path, token) == Match()(draft, Dist(logits.argmax(-1).tolist(), 8), lambda *_: 0.0)


def test_equally_likely_tokens_are_not_the_likeliest() -> None:
    logits = torch.zeros(2, 4)
    assert judge(TopBeta(beta=1), logits, Draft([2], [-1])) == ([], 0)
    assert judge(TopBeta(beta=4), logits, Draft([2], [-1])) == ([0], 0)


def outs(verify: str, schedule: str = "prefill_first") -> list[list[int]]:
    placed = tiny.engine({"draft": DRAFT, "verify": verify, "schedule": schedule})
    return tiny.outs(tiny.run(placed, tiny.prompts(20, 7, 60), tiny.greedy(N)))


def test_beta_one_is_greedy_and_more_is_not() -> None:
    plain = tiny.plain(tiny.prompts(20, 7, 60), tiny.greedy(N))
    assert outs("top_beta:beta=1") == plain
    assert outs("top_beta:beta=64,tau=0") == plain
    assert outs("top_beta:beta=16,tau=100") != plain


@pytest.mark.parametrize("schedule", ["splitfuse:budget=5"])
def test_no_load_cuts_a_guess(schedule: str) -> None:
    """Law 4: were drafts cut to what is granted, other guesses would be accepted."""
    assert outs("top_beta:beta=16,tau=100", schedule) == outs("top_beta:beta=16,tau=100")


@dataclass(frozen=True)
class Curious(Method):
    """Matches, and keeps what it was shown."""

    wants: frozenset[str]
    seen: ClassVar[list[tuple[Shown, Dist, int]]] = []

    @property
    def traits(self) -> Traits:
        return Traits("verify", wants=self.wants, matches="all")

    def __call__(self, draft: Draft, p: Dist, rng: Random, shown: Shown) -> tuple[list[int], int]:
        self.seen.append((shown, p, len(draft.tokens)))
        return Match()(draft, p, rng)


def curious(*wants: str) -> Placed:
    methods: dict[str, Any] = parse({"draft": DRAFT})
    methods["decode"] = Speculative(methods["draft"], Curious(frozenset(wants)))
    return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()


@pytest.mark.parametrize("wants", [("logits",), ("hidden",), ("logits", "hidden")])
def test_a_verifier_is_shown_what_it_wants(wants: tuple[str, ...]) -> None:
    Curious.seen.clear()
    tiny.run(curious(*wants), tiny.prompts(20, 9), tiny.greedy(N))
    assert Curious.seen
    for shown, p, nodes in Curious.seen:
        assert (shown.logits is not None, shown.hidden is not None) == ("logits" in wants, "hidden" in wants)
        if shown.logits is not None:
            assert shown.logits.shape == (nodes + 1, tiny.VOCAB)
            assert shown.logits.argmax(-1).tolist() == p.top
        if shown.hidden is not None:
            assert tiny.model().head(shown.hidden).argmax(-1).tolist() == p.top


def test_nobody_else_writes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 the head's logits are made for a verifier that wants them, once a step, and for no other."""
    best, target = [0], tiny.model()
    real = Model.best

    def counted(model: Model, x: Tensor, masks: Sequence[Tensor | None] = ()) -> list[int]:
        best[0] += model is target
        return real(model, x, masks)

    monkeypatch.setattr(Model, "best", counted)
    for verify, writes in (("match", False), ("rejection", False), ("top_beta:beta=1", True)):
        best[0] = 0
        placed = tiny.engine({"draft": "prompt_lookup:min_match=1", "verify": verify})
        tiny.run(placed, tiny.prompts(20), tiny.greedy(N))
        assert best[0] == (0 if writes else placed.counters.forwards)


@pytest.mark.parametrize("knob", ["beta=0", "tau=-1"])
def test_wrong_knobs_are_named(knob: str) -> None:
    with pytest.raises(UserError, match=f"top_beta: {knob}"):
        tiny.engine({"draft": DRAFT, "verify": f"top_beta:{knob}"})
