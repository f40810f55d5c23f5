"""SWIFT: exact with any sub-layers left out, all accepted with none, scores as a slow loop says, costs in counters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.methods.draft.swift import Swift, _Confident
from phasewise.model.model import Model
from phasewise.model.thinned import Thinned
from phasewise.ops import native
from phasewise.options import parse
from phasewise.reproduce.workload import examples, pocket_text
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft
from tests import tiny, uncached
from tests.draft.shapes import grown
from tests.model.families import FAMILIES
from tests.model.reference import save_random
from tests.watched import passes

PROMPTS = tiny.prompts(30, 7, 55)
LAYERS = 4
CHAIN = "swift:steps=4,confidence=0,branches=1,proposals=0"


def engine(draft: str = CHAIN, **more: Any) -> Engine:
    verbs = {"draft": draft, **{verb: more.pop(verb) for verb in ("store", "schedule", "verify") if verb in more}}
    placed = tiny.engine(verbs, **more)
    assert isinstance(placed, Engine)
    return placed


def drafter(placed: Engine) -> Any:
    return placed.parts.phases[-1].decode.drafter


@cache
def plain(n: int) -> list[list[int]]:
    return tiny.plain(PROMPTS, tiny.greedy(n))


# ---- tokens
@pytest.mark.parametrize("sites", [(), (0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_greedy_tokens_are_plain_decodings_whatever_is_left_out(sites: Sequence[int]) -> None:
    placed = engine()
    drafter(placed).take(frozenset(sites))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(20))) == plain(20)
    assert placed.counters.drafted > 0


@pytest.mark.parametrize("draft", ["swift", "swift:window=4,bayes=2,enough=1", "swift:ratio=0.8,window=3,enough=1"])
def test_the_search_changes_no_token(draft: str) -> None:
    placed = engine(draft)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(24))) == plain(24)
    assert drafter(placed).search.proposals > 0 or draft == "swift"


def test_with_nothing_left_out_everything_is_accepted() -> None:
    """Five tokens a pass: four guesses and the one after them; the score is 1."""
    n = 41
    placed = engine("swift:ratio=0,steps=4,confidence=0,branches=1")
    assert tiny.outs(tiny.run(placed, PROMPTS[:1], tiny.greedy(n))) == [plain(n)[0]]
    assert placed.counters.forwards == 1 + (n - 1) // 5
    assert placed.counters.accepted == placed.counters.drafted == (n - 1) * 4 // 5
    started, request = running(n=12)
    with torch.inference_mode():
        assert drafter(started).score(request, frozenset()) == 1.0
        assert drafter(started).score(request, frozenset({0, 1, 2, 3})) < 1.0


def test_samples_too_are_all_accepted_then() -> None:
    """The chain takes what the target will draw by the same probabilities."""
    params = Params(max_tokens=41, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True)
    want = tiny.plain(PROMPTS[:1], params)
    for verify in ("match", "rejection"):
        placed = engine("swift:ratio=0,steps=4,confidence=0,branches=1", verify=verify)
        assert tiny.outs(tiny.run(placed, PROMPTS[:1], params)) == want
        assert placed.counters.accepted == placed.counters.drafted == 32


# ---- the score
def running(n: int, window: int = 9, **more: Any) -> tuple[Engine, Request]:
    """A request that has come so far."""
    placed = engine(f"swift:window={window},proposals=0,steps=2", **more)
    request = Request(PROMPTS[0], tiny.greedy(60))
    placed.add(request)
    while request.n_out < n:
        placed.step()
    return placed, request


def slow_score(placed: Engine, request: Request, thin: Thinned, window: int) -> float:
    """One token at each position, by steps of one row on the whole model's KV of the prompt alone."""
    store = placed.recipes[""].store
    kv = store.open(Request(request.prompt), request.prompt_len + window)
    prompt = request.prompt
    forward(placed.model, [Span(request, kv, uncached.PLAIN, prompt, range(len(prompt)))], Counters())
    kv.commit(len(prompt))
    right = 0
    for i in range(window):
        at = request.prompt_len + i
        x = forward(
            thin, [Span(request, kv, uncached.PLAIN, [request.tokens[at]], range(at, at + 1), first=i)], Counters()
        )
        right += int(placed.model.head(x.x).argmax()) == request.tokens[at + 1]
    kv.close()
    return right / window


@pytest.mark.parametrize("store", ["slab", "int8"])
def test_the_score_is_that_of_a_slow_loop(store: str) -> None:
    """One pass for all positions; what the whole model computed after the prompt is not seen."""
    placed, request = running(14, store=store)
    its, scores = drafter(placed), []
    for sites in [(), (0,), (1,), (2,), (3,), (0, 2), (1, 3), (0, 1, 2, 3)]:
        with torch.inference_mode():
            scores.append(its.score(request, frozenset(sites)))
            thin = Thinned(placed.model, its.search.route(frozenset(sites)))
            assert scores[-1] == slow_score(placed, request, thin, its.window)
    assert len(set(scores)) > 3


def test_the_search_on_a_trained_model() -> None:
    """Two hundred proposals, a pass each: no worse than every second layer, and than half of what was tried."""
    model, text = Model.load(model_path("pocket"), dtype=torch.float32), pocket_text()
    methods = parse({"draft": "swift:ratio=0.75,window=16,enough=1,patience=200,proposals=0"})
    placed = Builder(model, methods, Limits(), load=lambda name: model).build()
    assert isinstance(placed, Engine)
    (item,) = examples("json", 1, 0)
    request = Request(text.chat(item.messages), tiny.greedy(60))
    placed.add(request)
    while request.n_out < 17:
        placed.step()
    its = drafter(placed)
    first, its.search.done = its.search.best, False
    with torch.inference_mode():
        for _ in range(200):
            its._look([request])
    scores = [score + its.search._base for _, score in its.search.tried]
    assert len(scores) == 200 and its.search.score == pytest.approx(max(scores))
    with torch.inference_mode():
        assert its.score(request, its.search.best) == its.search.score >= its.score(request, first)
    assert its.search.score > median(scores[1:])
    assert its.companion.model.route == its.search.route(its.search.best), "the best one drafts"


def test_one_set_is_scored_a_round_on_the_first_request_that_is_ready() -> None:
    placed = engine("swift:window=6,enough=1,steps=2")
    seen: list[tuple[str, int]] = []
    its = drafter(placed)
    score = its.score
    its.score = lambda request, sites: seen.append((request.id, len(placed.running))) or score(request, sites)
    requests = [Request(p, tiny.greedy(50 - 15 * i), id=f"r{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    steps = 0
    while any(request.left is None for request in requests):
        placed.step()
        steps += 1
        assert len(seen) <= steps
    names = [name for name, _ in seen]
    changes = 1 + sum(one != other for one, other in pairwise(names))
    assert 2 <= changes == len(set(names)), "the same one until it has left"
    assert its.search.proposals == len(seen) - changes, "of each text the best set was scored first"


def test_the_best_set_stays_for_later_requests() -> None:
    placed = engine("swift:window=4,bayes=2,enough=1")
    tiny.run(placed, PROMPTS, tiny.greedy(20))
    its, before = drafter(placed), drafter(placed).search.best
    request = Request(PROMPTS[1], tiny.greedy(20))
    placed.add(request)
    placed.step()
    placed.step()
    assert its.search.best is before and its.companion.model.route == its.search.route(before)
    placed.cancel(request)


# ---- what it costs
@pytest.mark.parametrize("count", [1, 3])
def test_passes_and_pairs_of_a_round(count: int) -> None:
    """All requests' levels in one pass; a row takes half a pair for every sub-layer that runs."""
    rounds, steps = 4, 4
    placed = engine()
    requests = [Request(prompt, tiny.greedy(200)) for prompt in PROMPTS[:count]]
    for request in requests:
        placed.add(request)
    placed.step()
    before = placed.counters.as_dict()
    for _ in range(rounds):
        placed.step()
    spent = {name: value - before[name] for name, value in placed.counters.as_dict().items()}
    route, own = drafter(placed).companion.model.route, rounds * steps * count
    assert route.sublayers == 2 * LAYERS - 1
    assert spent["draft_forwards"] == rounds * steps and spent["forwards"] == rounds
    assert spent["draft_depth"] == rounds * steps * len(route.mixing)
    verified = rounds * (1 + steps) * count
    assert spent["rows"] == own + verified == spent["head_rows"]
    assert spent["row_layers"] == verified * LAYERS + own * route.sublayers // 2
    row = placed.store.row_bytes // LAYERS
    assert spent["kv_bytes_written"] == (verified * LAYERS + own * len(route.mixing)) * row


def test_on_the_pocket_model_a_token_takes_less_than_a_pass_through_the_layers() -> None:
    """Weights that are read, in layers per token: whole passes, and thinned ones of one row each. (Of copies: in JSON
    every layer of this model is needed, two guesses of three are right, and nothing is gained.)"""
    model, text = Model.load(model_path("pocket"), dtype=torch.float32), pocket_text()
    placed = Builder(
        model, parse({"draft": "swift:branches=1"}), Limits(max_running=1), load=lambda name: model
    ).build()
    asked = [(text.chat(item.messages), len(text.encode(item.answer))) for item in examples("copy", 4, 0)]
    tiny.outs(
        [
            request
            for prompt, n in asked
            for request in tiny.run(placed, [prompt], Params(max_tokens=n, ignore_eos=True))
        ]
    )
    work, layers = placed.counters, model.config.layers
    thinned = drafter(placed).companion.model.route.sublayers / 2  # type: ignore[arg-type]
    decoded = (work.forwards - len(asked)) * layers + work.draft_forwards * thinned
    assert work.accepted > 0.9 * work.drafted
    assert decoded < 0.85 * (work.emitted - len(asked)) * layers


# ---- shapes
def chain(**more: Any) -> _Confident:
    return _Confident(**{"levels": 6, "branches": 10, "confidence": 0.8, "eos": frozenset(), **more})


def table(*sure: float, vocab: int = 32) -> torch.Tensor:
    """Token t is followed by t + 1 with this probability, by the others alike."""
    rows = torch.zeros(vocab, vocab)
    for token in range(vocab):
        best = sure[min(token, len(sure) - 1)]
        rows[token] = (1 - best) / (vocab - 1)
        rows[token, (token + 1) % vocab] = best
    return rows


@pytest.mark.parametrize(
    ("sure", "width"), [(0.3, 10), (0.5, 10), (0.51, 8), (0.79, 8), (0.81, 5), (0.94, 5), (0.96, 3), (1.0, 1)]
)
def test_the_less_sure_the_more_siblings(sure: float, width: int) -> None:
    """At 1.0 nothing else has any weight."""
    tree = grown(chain(levels=1), table(sure), greedy=True)
    assert len(tree.draft.tokens) == width and tree.draft.tokens[0] == 1 and len(set(tree.draft.tokens)) == width


def test_it_stops_after_an_unlikely_guess() -> None:
    tree = grown(chain(branches=1), table(0.9, 0.85, 0.7, 0.99), greedy=True)
    assert tree.draft.tokens == [1, 2, 3] and tree.draft.parents == [-1, 0, 1]
    assert len(grown(chain(branches=1), table(0.9), greedy=True).draft.tokens) == 6
    assert len(grown(chain(branches=1, confidence=0.0), table(0.04), greedy=True).draft.tokens) == 6


def test_nothing_follows_the_end_of_the_text() -> None:
    assert grown(chain(branches=1, eos=frozenset({3})), table(0.9), greedy=True).draft.tokens == [1, 2, 3]


def test_siblings_stand_beside_the_chain_and_the_tree_keeps_to_its_room() -> None:
    tree = grown(chain(branches=3), table(0.9), greedy=True)
    assert tree.draft.parents == [-1, -1, -1, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12]
    full = grown(chain(levels=25, confidence=0.0), table(0.3), greedy=True)
    assert len(full.draft.tokens) == 63, "with the pending token 64 rows"
    assert grown(chain(), table(0.9), greedy=True, room=7).draft.parents == [-1] * 5 + [0, 0]


def test_sampled_chains_take_the_targets_own_draw() -> None:
    firsts = {grown(chain(levels=1, branches=2), table(0.5), seed=seed).draft.tokens[0] for seed in range(40)}
    assert len(firsts) > 10 and 1 in firsts
    for seed in range(40):
        tree = grown(chain(levels=1, branches=2), table(0.5), seed=seed)
        assert len(set(tree.draft.tokens)) == 2 and 1 in tree.draft.tokens, "the likeliest stands beside it"


# ---- with everything else
def test_small_budgets_cut_the_chain() -> None:
    placed = engine("swift:steps=9,confidence=0,branches=1,proposals=0", schedule="sarathi:budget=11")
    drafts: list[Draft] = []
    its = drafter(placed)
    propose = its.draft
    its.draft = lambda *given: [drafts.append(made) or made for made in propose(*given)]
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(20))) == plain(20)
    assert {len(made.tokens) for made in drafts if made is not None} >= {1, 2}


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_in_16_bits_verdicts_and_guesses_are_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a chain has the bits of plain decoding; only scores go operator by operator."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    want = tiny.outs(tiny.run(tiny.engine(of=model), PROMPTS, tiny.greedy(24)))
    made = passes(monkeypatch)
    placed = engine("swift:branches=1,window=6,enough=1,confidence=0.3", of=model)
    scored: list[str] = []
    its = drafter(placed)
    score = its.score
    its.score = lambda request, sites: scored.append(request.id) or score(request, sites)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(24))) == want
    assert len(made) == placed.counters.forwards + placed.counters.draft_forwards - len(scored)
    assert all(each.whole for each in made)
    assert placed.counters.accepted > 0 and scored


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2", "gemma3", "qwen3_moe"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Windows, caps, norms after halves, experts. With nothing left out all is accepted, and the score is 1: tails and
    replays see no further than the layer does."""
    save_random(FAMILIES[family](), tmp_path)
    model, prompt, n = Model.load(tmp_path, dtype=torch.float32), tiny.prompts(20, vocab=50)[0], 21
    want = tiny.outs(tiny.run(tiny.engine(of=model), [prompt], tiny.greedy(n)))
    for ratio, more in (("0", "proposals=0"), ("0.5", "proposals=9")):
        placed = engine(f"swift:ratio={ratio},{more},steps=4,confidence=0,branches=1,window=9", of=model)
        request = Request(prompt, tiny.greedy(n))
        placed.add(request)
        while request.n_out < 11:
            placed.step()
        with torch.inference_mode():
            assert drafter(placed).score(request, frozenset()) == 1.0
        tiny.finish(placed, [request])
        assert [request.out] == want
        assert ratio != "0" or placed.counters.accepted == placed.counters.drafted == 16


def test_lossy_verifiers_are_refused() -> None:
    with pytest.raises(UserError, match="swift learns from all requests, and under the verifier top_beta"):
        engine(verify="top_beta")


@pytest.mark.parametrize(
    "knobs",
    [{"steps": 0}, {"steps": 64}, {"branches": 11}, {"window": 64}, {"ratio": 1.5}, {"confidence": -0.1},
     {"enough": 2}, {"bayes": 0}, {"patience": 0}, {"proposals": -1}],
)  # fmt: skip
def test_knobs_that_make_no_sense(knobs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"swift: {next(iter(knobs))}="):
        Swift(**knobs)
