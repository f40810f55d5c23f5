"""S2D: every guess leaves where a pass from scratch says it does, whatever came before; costs to the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.draft.s2d import S2D
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import nested
from phasewise.speculation.nested import MOST_WAITING, NestedDraft, Part
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.step.phase import Hidden
from tests import oracle, tiny
from tests.engine.engines import Boom, step_all
from tests.laws.scenario import preempt

PROMPTS, N, LAYERS = tiny.prompts(30, 7, 90), 24, 4
EXITS, TAU = "1+2+4", "0.45+0.55"  # at which guesses of the tiny model's first layers leave by each exit
SAMPLED = [Params(max_tokens=N, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(3)]


def s2d(exits: str = EXITS, tau: str = TAU, weights: str = "none", **knobs: object) -> str:
    return "s2d:" + ",".join(f"{k}={v}" for k, v in {"exits": exits, "tau": tau, "weights": weights, **knobs}.items())


def engine(draft: str, **more: Any) -> Engine:
    placed = tiny.engine({"draft": draft}, **more)
    assert isinstance(placed, Engine)
    return placed


def drafter(placed: Engine) -> Any:
    return placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]


def parts_of(placed: Engine) -> NestedDraft:
    found: NestedDraft = drafter(placed).companion
    return found


class Watch:
    """The shape of a drafter, which notes each text that something was guessed after, and the probabilities of that."""

    def __init__(self, placed: Engine) -> None:
        self.seen: list[tuple[list[int], Tensor]] = []
        self.shape = drafter(placed).shape
        drafter(placed).shape = self

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        ((node, q),) = asked
        self.seen.append(([*tree.request.tokens, *tree.draft.path(node)], q.clone()))
        grown: list[int] = self.shape.grow(tree, asked)
        return grown

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shape, name)


def chances(depth: int, text: Sequence[int]) -> Tensor:
    """Of what follows, float32 [V]: by the first layers of the tiny model, which are those of one with as many."""
    return oracle.logits(tiny.checkpoint(layers=depth), list(text))[-1].softmax(-1)


def expected(text: Sequence[int], exits: str, tau: str) -> tuple[int, Tensor]:
    """The exit of a guess, and its probabilities, from scratch."""
    depths, taus = [int(e) for e in exits.split("+")], [*map(float, tau.split("+")), 0.0]
    for depth, threshold in zip(depths, taus, strict=True):
        q = chances(depth, text)
        if float(q.max()) > threshold or depth == depths[-1]:
            return depth, q
    raise AssertionError


# ---- exactness
@pytest.mark.parametrize("weights", ["none", "random:0"])
@pytest.mark.parametrize("tau", ["0", "0.2", "0.5", "0.8", "1", TAU])
def test_greedy_tokens_are_plain_decodings(weights: str, tau: str) -> None:
    placed = engine(s2d(tau=tau, weights=weights))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > 0


def test_sampled_tokens_under_match_are_plain_decodings() -> None:
    placed = tiny.engine({"draft": s2d(), "verify": "match"})
    assert tiny.outs(tiny.run(placed, PROMPTS, SAMPLED)) == tiny.plain(PROMPTS, SAMPLED)


def test_a_draft_of_all_layers_is_always_right() -> None:
    placed = engine(s2d(tau="1"))
    tiny.run(placed, PROMPTS, tiny.greedy(N))
    assert placed.counters.accepted == placed.counters.drafted > N


# ---- where guesses leave
@pytest.mark.parametrize("exits", [EXITS, "1+2+3"])
def test_every_guess_is_that_of_a_pass_from_scratch(exits: str) -> None:
    """Through rejections, rows that wait, and rows of mates: the logits at each exit are those of its layers alone over
    the whole text, and the exit is the first that is sure."""
    placed = engine(s2d(exits, k=4))
    watch, left = Watch(placed), dict.fromkeys(exits.split("+"), 0)
    tiny.run(placed, PROMPTS, tiny.greedy(N))
    for text, q in watch.seen:
        depth, want = expected(text, exits, TAU)
        torch.testing.assert_close(q, want, atol=2e-4, rtol=1e-3)
        left[str(depth)] += 1
    assert min(left.values()) > 5, f"an exit is hardly used: {left}"
    assert 0 < placed.counters.accepted < placed.counters.drafted


def test_preemption_and_prefix_hits_change_no_guess() -> None:
    placed = engine(s2d(k=4))
    watch = Watch(placed)
    tiny.run(placed, PROMPTS, tiny.greedy(N))
    before = {tuple(text): q for text, q in watch.seen}
    watch.seen = []
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(8):
        placed.step()
        if step in (3, 6):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    shared = [(text, q) for text, q in watch.seen if tuple(text) in before]
    assert len(shared) > 30
    for text, q in shared:
        torch.testing.assert_close(q, before[tuple(text)], atol=2e-4, rtol=1e-3)


# ---- thresholds at both ends, and costs to the layer
@pytest.mark.parametrize(("tau", "depth"), [("0", 1), ("0+1", 1), ("1+0", 2), ("1", 4), ("1+1", 4)])
def test_thresholds_of_0_and_1_are_a_plain_draft_of_that_depth(tau: str, depth: int) -> None:
    """Guesses, tokens and passes are those of `draft_model` with the same layers, and nothing is computed at exits that
    no guess leaves."""
    want = tiny.engine({"draft": f"draft_model:model={tiny.checkpoint(layers=depth)},k=3"})
    assert isinstance(want, Engine)
    found, seen = engine(s2d(tau=tau, k=3)), []
    for placed in (want, found):
        watch = Watch(placed)
        tiny.run(placed, PROMPTS, SAMPLED)
        seen.append(watch.seen)
    assert [text for text, _ in seen[0]] == [text for text, _ in seen[1]]
    for (_, one), (_, other) in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)
    assert len(parts_of(found).parts) == 1
    for counter in ("drafted", "accepted", "draft_forwards", "draft_depth", "forwards"):
        assert getattr(found.counters, counter) == getattr(want.counters, counter), counter
    assert found.counters.draft_depth == depth * found.counters.draft_forwards


def test_of_one_request_a_guess_takes_the_layers_before_its_exit() -> None:
    """Rows that wait take no pass of their own: beside the prompt's, a guess is one pass of each part that it runs."""
    placed = engine(s2d(k=3))
    watch = Watch(placed)
    tiny.run(placed, PROMPTS[:1], tiny.greedy(N))
    exits = [expected(text, EXITS, TAU)[0] for text, _ in watch.seen]
    assert placed.counters.draft_depth == sum(exits) and len(set(exits)) > 1
    assert placed.counters.draft_forwards == sum({1: 1, 2: 2, 4: 3}[depth] for depth in exits)


def test_exits_come_earlier_as_thresholds_fall() -> None:
    """The depth of a guess at the same text never rises, and tokens stay plain decoding's."""
    texts, depths = [PROMPTS[0][:n] for n in range(4, 30)], []
    for tau in ("1+1", "0.8+0.8", "0.6+0.6", "0.4+0.4", "0.2+0.2", "0+0"):
        depths.append([expected(text, EXITS, tau)[0] for text in texts])
    assert all(a >= b for before, after in pairwise(depths) for a, b in zip(before, after))
    assert set(depths[0]) == {4} and set(depths[-1]) == {1}


# ---- rows that wait
@pytest.mark.parametrize("length", [7, 200])
def test_no_more_rows_wait_than_may_and_none_is_lost(length: int) -> None:
    """After every step a part and what waits before it have as many rows as the part before. A part whose exit all
    guesses leave still runs, once too many rows wait."""
    placed = engine(s2d(tau="0.001"))
    first, *deeper = parts_of(placed).parts
    request = Request(tiny.prompts(length)[0], tiny.greedy(90))
    placed.add(request)
    runs = 0
    while request.left is None:
        placed.step()
        if first.rows(request):
            waiting = request.state["s2d waiting"].rows
            rows = [part.rows(request) for part in (first, *deeper)]
            assert [a - b for a, b in pairwise(rows)] == [len(each) for each in waiting]
            assert max(map(len, waiting)) <= MOST_WAITING + 1
            runs = max(runs, rows[1])
    assert runs >= min(64, length) and request.out == tiny.plain([request.prompt], tiny.greedy(90))[0]


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_pass_that_was_broken_off_is_made_again(layers: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first part or a deeper one: only the culprit fails, and the others' guesses are what they would be."""
    left, real = [calls], Part.take

    def broken(self: Part, requests: Sequence[Request], *more: Any) -> list[Tensor]:
        found = real(self, requests, *more)
        if self.model.config.layers == layers and any(request.id == "bad" for request in requests):
            left[0] -= 1
            if left[0] < 0:
                raise Boom("on the way")
        return found

    placed = engine(s2d())
    watch = Watch(placed)
    monkeypatch.setattr(Part, "take", broken)
    requests = [Request(p, tiny.greedy(N), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    want = tiny.plain(PROMPTS, tiny.greedy(N))
    bad = requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: on the way")
    assert [request.out for request in requests] == [want[0], want[2]]
    for text, q in watch.seen[-20:]:
        torch.testing.assert_close(q, expected(text, EXITS, TAU)[1], atol=2e-4, rtol=1e-3)


def test_a_pass_that_fails_in_the_model_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the part are gone then; all parts begin again."""
    left, real = [4], nested.Part._forward

    def broken(self: Part, *more: Any) -> Hidden:
        if self.model.config.layers == 2:
            left[0] -= 1
            if left[0] == 0:
                monkeypatch.setattr("phasewise.speculation.companion.forward", boom)
                try:
                    return real(self, *more)
                finally:
                    monkeypatch.setattr("phasewise.speculation.companion.forward", forward)
        return real(self, *more)

    from phasewise.speculation.companion import forward

    def boom(*_: Any) -> Hidden:
        raise Boom("on the way")

    placed = engine(s2d())
    watch = Watch(placed)
    monkeypatch.setattr(Part, "_forward", broken)
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    assert left[0] < 0
    for text, q in watch.seen[-20:]:
        torch.testing.assert_close(q, expected(text, EXITS, TAU)[1], atol=2e-4, rtol=1e-3)


def test_long_prompts_are_read_in_pieces_by_all_parts() -> None:
    placed = engine(s2d(chunk=16))
    watch = Watch(placed)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    for text, q in watch.seen[-20:]:
        torch.testing.assert_close(q, expected(text, EXITS, TAU)[1], atol=2e-4, rtol=1e-3)


# ---- bad input
@pytest.mark.parametrize(
    ("knobs", "said"),
    [({"exits": "deep"}, "exits=deep: name numbers of layers joined by"), ({"exits": "0+2"}, "exits=0"),
     ({"exits": "2+2"}, r"exits=2\+2: numbers of layers must be at least 1, and increase"),
     ({"exits": "3+2"}, r"exits=3\+2"), ({"tau": "high"}, "tau=high: name numbers from 0 to 1"),
     ({"tau": "1.5"}, "tau=1.5: each threshold must be from 0 to 1"), ({"tau": "nan"}, "tau=nan"),
     ({"tau": "0.1+0.2+0.3"}, r"has 3 thresholds: exits=1\+2\+3 needs one for all, or 2"),
     ({"learned": "first"}, "learned=first must be one of sorted, last"), ({"k": 0}, "k=0 must be from 1 to 63"),
     ({"k": 64}, "k=64"), ({"chunk": 0}, "chunk=0")],
)  # fmt: skip
def test_wrong_knobs_are_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"s2d: .*{said}|s2d: {said}"):
        S2D(**knobs)


def test_more_layers_than_the_model_has_are_refused() -> None:
    for weights in ("none", "random:0"):
        with pytest.raises(UserError, match=r"exits=1\+5, and the model has 4 layers"):
            engine(s2d("1+5", "0.5", weights))


def test_a_model_without_trained_weights_is_told_what_to_do() -> None:
    with pytest.raises(UserError, match=r"train artefact draft\.s2d:exits=1\+2\+3,learned=sorted .*say weights=none"):
        engine("s2d")
