"""What a step of single rows keeps for the next one: nothing that has moved since, and never another result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.invariants import check
from phasewise.methods.attend.dense import Dense
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.batch import Batch
from phasewise.step.forward import forward
from phasewise.step.fused import KeptStep, Scratch
from phasewise.step.lower import KeptForm
from phasewise.step.plan import AttentionPlan, Window
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

KINDS = [
    "attend=dense", "attend=zero_tuning:gamma=20,weights=none", "evict=streaming:sinks=3,window=40",
    "evict=streaming:sinks=0,window=30,positions=text", "evict=longgen:sinks=3,window=25,weights=none",
    "evict=rlkv:share=0.6,sinks=3,window=25,weights=random:1", "skip=unified:speedup=2.0,weights=none",
    "evict=snapkv:keep=0.5,window=5,heads=ada", "attend=quest:page=4,budget=20,dense_layers=1",
]  # fmt: skip


@cache
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


@cache
def runtime(kind: str) -> Any:
    verb, _, spelled = kind.partition("=")
    host = Host(model(), None, Counters(), None, None)  # type: ignore[arg-type]
    return catalog.build(verb, spelled).bind(host)


class Steps:
    """Some requests that bring a token each to every step. `rows` of all steps, and whether each was a `kept` call."""

    def __init__(self, patch: pytest.MonkeyPatch, keeps: bool) -> None:
        self.keeps, self.room, self.counters = keeps, Scratch(), Counters()
        self.rows: list[Tensor] = []
        self.kept: list[bool] = []
        ends = KeptStep.ends

        def watched(call: KeptStep, batch: Batch, *rest: Any) -> list[int] | None:
            found = ends(call, batch, *rest)
            self.kept[-1] = found is not None
            return found

        patch.setattr(KeptStep, "ends", watched)
        if not keeps:
            patch.setattr(KeptForm, "serves", lambda self, span, flat: False)

    @torch.inference_mode()
    def go(self, walks: Sequence[Walk], times: int = 1) -> list[bool]:
        """-> of each step, whether it was a kept call."""
        for _ in range(times):
            tokens = [(7 * i + one.request.computed) % 50 + 3 for i, one in enumerate(walks)]
            spans = [one.begin([token]) for one, token in zip(walks, tokens)]
            self.kept.append(False)
            x = forward(model(), spans, self.counters, room=self.room if self.keeps else None).x
            self.rows.append(x.clone())
            for one, token in zip(walks, tokens):
                one.commit([token], 1)
        return self.kept[-times:]


def begun(kind: str, length: int, seed: int = 0) -> Walk:
    verb, prompt = kind.partition("=")[0], tiny.prompts(length, seed=seed)[0]
    one = Walk(model(), prompt, **{verb: runtime(kind)})
    one.feed(prompt)
    one.kv.reserve(24)
    return one


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_call_is_the_call_that_would_be_made(kind: str) -> None:
    """Bits and counters of many steps, through growth and evictions, as where everything is made anew."""
    found = []
    for keeps in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, keeps)
            mate = kind if kind.startswith("skip") else "attend=dense"  # a kept call runs one set of layers
            walks = [begun(kind, 34), begun(mate, 70, 1), begun(kind, 21, 2)]
            steps.go(walks, 60)
            found.append((steps.rows, steps.counters, sum(steps.kept)))
    (rows, counters, kept), (others, expected, never) = found
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True)) and counters == expected
    assert never == 0
    choosing = kind.startswith(("attend=quest", "evict=rlkv", "evict=longgen"))  # what they read changes by itself
    assert kept > 30 or choosing, f"only {kept} of 60 steps"


def _grow(walks: list[Walk]) -> None:
    walks[1].kv.reserve(walks[1].kv.spare + 1)


def _fork(walks: list[Walk]) -> None:
    walks.append(walks[0].fork())


def _twin(walks: list[Walk]) -> None:
    """A fork that comes to no step: what both read is copied before the first of them writes."""
    walks[0].twin = walks[0].fork()  # type: ignore[attr-defined]


def _roll_back(walks: list[Walk]) -> None:
    request = walks[1].request
    request.computed -= 3
    del request.tokens[request.computed :]
    walks[1].kv.drop_last(request.computed)


def _tree(walks: list[Walk]) -> None:
    """A draft of which one path stays."""
    tokens = [5, 6, 7, 8]
    walks[1].try_(tokens, [-1, 0, 0, 2])
    walks[1].commit(tokens, [0, 2, 3])


def _preempt(walks: list[Walk]) -> None:
    tokens = list(walks[0].request.tokens)
    walks[0].kv.close()
    walks[0] = Walk(model(), tokens)
    walks[0].feed(tokens)
    walks[0].kv.reserve(24)


def _evict(walks: list[Walk]) -> None:
    for layer in range(len(walks[1].kv.layers)):
        walks[1].kv.keep(layer, torch.arange(4, walks[1].request.computed))


def _plan(walks: list[Walk]) -> None:
    bias = torch.full((model().config.layers, model().config.heads), 2.0)
    plan = AttentionPlan(bias=bias)

    class Biased(Dense):
        def plan(self, span: Span) -> AttentionPlan:
            return plan

    walks[1].phase = replace(walks[1].phase, attend=Biased())


def _prompt(walks: list[Walk]) -> None:
    """The same rows, of another phase."""
    walks[1].phase = replace(walks[1].phase, name="other")


EVENTS: list[Callable[[list[Walk]], object]] = [
    _grow, _fork, _twin, _roll_back, _tree, _preempt, _evict, _plan, _prompt, list.reverse, list.pop,
    lambda walks: walks.append(begun("attend=dense", 15, 5)),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__.strip("_<>"))
def test_nothing_is_kept_of_what_has_changed(event: Callable[[list[Walk]], object]) -> None:
    found = []
    for keeps in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, keeps)
            walks = [begun("attend=dense", length, length) for length in (40, 41, 42)]
            first = steps.go(walks, 4)
            event(walks)
            found.append((first, steps.go(walks, 6), steps.rows, steps.counters))
    (first, then, rows, counters), (_, _, others, expected) = found
    assert first == [False, True, True, True]
    assert not then[0] and then[-1], "the first step after it is made anew, and the later ones follow that"
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True)) and counters == expected


def test_a_window_that_begins_to_hide_rows_ends_a_form() -> None:
    plan = AttentionPlan(window=Window(3, 40))

    class Windowed(Dense):
        def plan(self, span: Span) -> AttentionPlan:
            return plan

    with pytest.MonkeyPatch.context() as patch:
        steps, one = Steps(patch, keeps=True), begun("attend=dense", 36)
        one.phase = replace(one.phase, attend=Windowed())
        kept = steps.go([one], 9)  # the row at position 43 is the first that does not see all
    assert kept == [False, *[True] * 6, False, True]


@pytest.mark.parametrize(
    "other",
    [
        {"positions": range(34, 35)}, {"sees": torch.ones(1, 1, dtype=torch.bool)}, {"layers": (0, 2)}, {"first": 1},
        {"block": 2}, {"tokens": [3, 4], "positions": range(33, 35)}, {"phase": None},
    ],
    ids=lambda other: "+".join(other),
)  # fmt: skip
def test_a_form_serves_rows_that_follow_the_committed_ones_alone(other: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps, one = Steps(patch, keeps=True), begun("attend=dense", 30)
        steps.go([one], 3)
    flat, span = one.kv.layout, one.begin([5])
    assert flat is not None and flat.lowered.serves(span, flat)
    if other == {"phase": None}:
        other = {"phase": replace(one.phase, name="other")}
    assert not flat.lowered.serves(replace(span, **other), flat)
    one.kv.nodes = []
    assert not flat.lowered.serves(span, flat), "prefixes that it shares with others are other ones"


def test_a_kept_call_holds_on_to_no_kv() -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps, one = Steps(patch, keeps=True), begun("attend=dense", 30)
        steps.go([one], 3)
        assert steps.kept[-1] and one.kv.layout is not None
        form = steps.room.kept._forms[0]  # type: ignore[union-attr]
        one.kv.close()
        assert form() is None


@pytest.mark.parametrize("recipe", ["attend=dense", "attend=hydragen:rows=16", "draft=prompt_lookup"])
def test_engines_that_keep_calls_give_the_same_tokens(recipe: str) -> None:
    """Requests that come and go, find prefixes, fork, make way for others, and draft."""
    verb, _, spelled = recipe.partition("=")
    verbs = {verb: spelled} if verb != "draft" else {"decode": "speculative", "draft": spelled}
    found = []
    for keeps in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            kept = _kept(patch, keeps)
            engine = tiny.engine(verbs, of=model(), kv_bytes=1 << 20)
            (head, *tails), every = tiny.prompts(64, 9, 17, 30, 5), list[Request]()
            for i in range(90):
                if i % 12 == 0:
                    for parent in (None, "fork")[: 2 if i == 24 else 1]:
                        every.append(Request(head + tails[i % 4], Params(max_tokens=20 + i, ignore_eos=True)))
                        every[-1].parent = every[-2] if parent else None
                        engine.add(every[-1])
                if i in (31, 50) and engine.running:
                    engine.room.preempt(engine.running[-1])
                engine.step()
                check(engine)
            found.append(([request.out for request in every], engine.counters, sum(kept)))
    (tokens, counters, kept), (others, expected, never) = found
    assert tokens == others and counters == expected
    assert counters.preemptions >= 2 and counters.prefix_hits > 0 and never == 0
    assert kept > 20 or verb == "draft"


def _kept(patch: pytest.MonkeyPatch, keeps: bool) -> list[bool]:
    made, ends = list[bool](), KeptStep.ends

    def watched(call: KeptStep, *rest: Any) -> list[int] | None:
        found = ends(call, *rest) if keeps else None
        made.append(found is not None)
        return found

    patch.setattr(KeptStep, "ends", watched)
    if not keeps:
        patch.setattr(KeptForm, "serves", lambda self, span, flat: False)
    return made
