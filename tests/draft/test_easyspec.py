"""EasySpec: exact KV after every verdict, counted depth, the plain draft model where nothing is grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.load import model_path
from phasewise.methods.draft.easyspec import EasySpec
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse
from phasewise.reproduce.play import finish
from phasewise.reproduce.workload import examples, pocket_text
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion
from phasewise.step.forward import forward
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft
from phasewise.verbs.place import Placed
from tests import tiny, uncached
from tests.laws import test_distribution as law
from tests.speculation.markov import fits
from tests.watched import passes

PROMPTS = tiny.prompts(30, 7, 55)
LAYERS, K = 4, 3
EASY = f"easyspec:model=tiny,k={K},group=4,ends=0"


def sampled(n: int) -> list[Params]:
    return [Params(max_tokens=n, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(3)]


def drafter(placed: Placed) -> Any:
    return placed.parts.phases[-1].decode.drafter


def companion(placed: Placed) -> Companion:
    second: Companion = drafter(placed).companion
    return second


# ---- what is guessed
def guesses(
    draft: str, params: Sequence[Params], verify: str = "rejection"
) -> tuple[list[list[int]], list[Draft], Any]:
    """Tokens, everything that was proposed, and the engine's counters."""
    placed, made = tiny.engine({"draft": draft}), list[Draft]()
    propose = drafter(placed).draft

    def watched(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        made.extend(drafts := propose(requests, budgets))
        return drafts

    drafter(placed).draft = watched
    outs = tiny.outs(tiny.run(placed, PROMPTS, params))
    return outs, [draft for draft in made if draft is not None], placed.counters


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_groups_of_one_are_the_plain_draft_model_to_the_bit(how: str) -> None:
    """Tokens, every guess, what it was drawn from, and all counters; not so with larger groups."""
    params = [tiny.greedy(12)] * 3 if how == "greedy" else sampled(12)
    for model, all_ends in (("tiny", ("group=1", "group=4,ends=2")), ("tiny-draft", ("group=4",))):
        plain, drafts, counters = guesses(f"draft_model:model={model},k={K}", params)
        for knobs in all_ends:
            outs, made, counted = guesses(f"easyspec:model={model},k={K},{knobs}", params)
            assert outs == plain and counted == counters
            assert [(d.tokens, d.parents) for d in made] == [(d.tokens, d.parents) for d in drafts]
            assert all(torch.equal(a.q, b.q) for a, b in zip(made, drafts) if a.q is not None)
        _, rough, _ = guesses(f"easyspec:model={model},k={K},group=4,ends=0", params)
        assert [d.tokens for d in rough] != [d.tokens for d in drafts]


@pytest.mark.parametrize(
    "knobs", ["group=4,ends=0", "group=4,ends=0,calibrate=false", "group=2", "group=4,ends=0,k=1", "group=3,ends=0,k=9"]
)
def test_greedy_tokens_are_plain_decodings(knobs: str) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(20))
    placed = tiny.engine({"draft": f"easyspec:model=tiny,{knobs}"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(20))) == want
    assert placed.counters.drafted > 0


def test_samples_have_the_targets_distribution() -> None:
    """Guesses are drawn from what the rough pass said, and say so."""
    deep = tiny.checkpoint(**law.SMALL | {"layers": 3}, seed=1)
    placed = law.engine({"draft": f"easyspec:model={deep},k=3,group=3,ends=0"})
    assert fits(law.through_the_engine(placed, "temperature", runs=250), law.chances("temperature")) > law.PASS
    assert 120 < placed.counters.accepted < placed.counters.drafted


# ---- what the draft model holds
def fresh(model: Model, tokens: Sequence[int]) -> KV:
    """The KV of one exact pass over them."""
    request = Request(tokens)
    kv = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters()).open(request, len(tokens))
    with torch.inference_mode():
        forward(model, [Span(request, kv, uncached.PLAIN, tokens, range(len(tokens)))], Counters())
    kv.commit(len(tokens))
    return kv


def off(kv: KV, other: KV) -> float:
    """The largest difference of any key or value."""
    found = 0.0
    for a, b in zip(kv.layers, other.layers):
        (ours,), (theirs,) = a.read(), b.read()
        assert ours.size == theirs.size
        found = max(found, float((ours.k - theirs.k).abs().max()), float((ours.v - theirs.v).abs().max()))
    return found


def worst(draft: str, n: int = 24) -> tuple[float, int]:
    """How far the draft model's KV was from a fresh exact one after any step, and how many steps were looked at."""
    placed = tiny.engine({"draft": draft})
    requests, found, seen = [Request(p, q) for p, q in zip(PROMPTS, sampled(n))], 0.0, 0
    for request in requests:
        placed.add(request)
    while any(request.left is None for request in requests):
        placed.step()
        for request in requests:
            if request.left is None and "easyspec" in request.state:
                second = companion(placed)
                lag = second.lag(request)  # it settles what was grown
                follower = request.state["easyspec"]
                assert not len(follower.uncommitted) and follower.rows == request.known - lag
                found = max(found, off(follower.kv, fresh(second.model, request.tokens[: follower.rows])))
                seen += 1
    assert placed.counters.accepted > 10, "nothing had to be repaired"
    return found, seen


def test_after_every_round_the_kv_is_that_of_an_exact_pass() -> None:
    """And not, if accepted guesses keep what the rough pass wrote."""
    found, seen = worst(EASY)
    assert found < 1e-4 and seen > 15
    assert worst(EASY + ",calibrate=false")[0] > 0.1
    assert worst(f"easyspec:model=tiny,k={K},group=1,calibrate=false")[0] < 1e-4


def test_accepted_tokens_and_the_next_are_one_exact_pass() -> None:
    """Every token is read exactly once, but the last ones, which nobody goes on from; what was grown is rough."""
    n, prompt, placed = 40, PROMPTS[0], tiny.engine({"draft": EASY})
    (request,) = tiny.run(placed, [prompt], tiny.greedy(n))
    known, passes, grown, read = 1, 0, 0, 0
    for count in request.trace.counts[1:]:  # of every pass after the prompt's
        levels = min(K, n - known - 1)
        if levels > 0:
            passes, grown, read = passes + 1, grown + levels - 1, len(prompt) + known
        known += count
    own, counters = companion(placed).own, placed.counters
    assert own.rows == read + grown and counters.draft_forwards == passes + grown
    assert counters.draft_depth == LAYERS * passes + grown
    assert 0 < counters.accepted < counters.drafted


@pytest.mark.parametrize(("group", "ends"), [(1, 1), (2, 1), (4, 1), (2, 0), (3, 0), (4, 0)])
def test_the_depth_of_a_round(group: int, ends: int) -> None:
    """One exact pass, then k - 1 rough ones: for all requests together."""
    rounds, model = 4, tiny.model(layers=LAYERS)
    draft = f"easyspec:model={tiny.checkpoint(layers=LAYERS)},k={K},group={group},ends={ends}"
    placed = tiny.engine({"draft": draft})
    requests = [Request(prompt, tiny.greedy(200)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    placed.step()
    for _ in range(rounds):
        placed.step()
    rough = 2 * ends + math.ceil((model.depth - 2 * ends) / group)
    assert placed.counters.draft_forwards == rounds * K
    assert placed.counters.draft_depth == rounds * (model.depth + (K - 1) * rough)
    assert companion(placed).own.row_layers == companion(placed).own.rows * model.depth, "no layer is left out"


# ---- with everything else
def test_drafts_do_not_depend_on_batch_mates() -> None:
    params, alone, drafted = sampled(15), [], 0
    for prompt, param in zip(PROMPTS, params):
        placed = tiny.engine({"draft": EASY})
        alone += tiny.outs(tiny.run(placed, [prompt], param))
        drafted += placed.counters.drafted
    together = tiny.engine({"draft": EASY, "schedule": "sarathi:budget=11"})
    assert tiny.outs(tiny.run(together, PROMPTS, params)) == alone and together.counters.drafted == drafted


def test_a_fork_in_mid_flight_goes_on_with_the_same_guesses() -> None:
    placed = tiny.engine({"draft": EASY})
    request = Request(PROMPTS[0], sampled(30)[0])
    placed.add(request)
    while request.n_out < 10:
        placed.step()
    twin = Request(request.prompt, request.params)
    twin.adopt(request)
    placed.resume(twin)
    tiny.finish(placed, [request, twin])
    assert twin.out == request.out


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_in_16_bits_what_is_exact_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's passes and the repairing ones; the rough ones are not. And no request's tokens hang on its mates."""
    path = tiny.checkpoint(hidden=64)
    model = Model.load(path, dtype=torch.bfloat16)
    monkeypatch.setattr(tiny, "load", lambda name: model)
    want = tiny.outs(tiny.run(tiny.engine(of=model), PROMPTS, tiny.greedy(24)))
    made = passes(monkeypatch)
    placed = tiny.engine({"draft": EASY, "verify": "match"}, of=model)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(24))) == want
    counters = placed.counters
    roots = (counters.draft_depth - counters.draft_forwards) // (model.depth - 1)  # the rough ones are 1 deep
    assert len(made) == counters.forwards + roots and all(each.whole for each in made)
    assert 0 < roots < counters.draft_forwards


def test_calibration_keeps_the_acceptance_of_a_trained_model() -> None:
    """The pocket model guesses for itself: in groups of four it is nearly always right, and less often if errors stay
    in its KV."""
    model, text = Model.load(model_path("pocket"), dtype=torch.float32), pocket_text()
    asked = [(text.chat(item.messages), len(text.encode(item.answer))) for item in examples("arithmetic", 4, 0)]
    shares = []
    for knobs in ("calibrate=true", "calibrate=false"):
        methods = parse({"draft": f"easyspec:model=pocket,{knobs}"})
        placed = Builder(model, methods, Limits(), load=lambda name: model).build()
        finish(placed, [Request(prompt, tiny.greedy(length)) for prompt, length in asked])
        shares.append(placed.counters.accepted / placed.counters.drafted)
    repaired, left = shares
    assert repaired >= 0.93 and left < repaired - 0.02


# ---- knobs
def test_two_layers_leave_nothing_to_group() -> None:
    shallow = tiny.engine({"draft": "easyspec:model=tiny-draft"})
    assert companion(shallow).rough is None and not companion(shallow).calibrated
    grouped = companion(tiny.engine({"draft": "easyspec:model=tiny-draft,ends=0"}))
    assert grouped.rough is not None and grouped.rough.depth == 1 and grouped.calibrated


def test_vocabularies_must_agree() -> None:
    with pytest.raises(UserError, match=r"easyspec: .* 32 tokens in its vocabulary, the model has 64"):
        tiny.engine({"draft": f"easyspec:model={tiny.checkpoint(vocab=32, layers=1)}"})


@pytest.mark.parametrize("knobs", [{"k": 0}, {"group": 0}, {"ends": -1}, {"chunk": 4}])
def test_knobs_that_make_no_sense(knobs: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"easyspec: {next(iter(knobs))}="):
        EasySpec(**knobs)
