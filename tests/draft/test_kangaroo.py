"""Kangaroo: exact whatever its adapter knows, guesses as its plain forward says, and no row runs a layer twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.methods.draft.kangaroo import Kangaroo
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import first_layers
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import tensors_of
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.exit import ExitKind
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.beside_others import GOES_WITH, REFUSED
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import serve
from tests.engine.engines import Boom, step_all
from tests.laws.scenario import preempt
from tests.speculation.exit_files import PlainAdapter, tiny_adapter

LAYERS, EXIT = 4, 2


@cache
def heads() -> Path:
    """An adapter that has learned what the tiny model writes after `PROMPTS`, by the trainer's own loss."""
    out, target = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), FrozenTarget(str(tiny.checkpoint()))
    kind = ExitKind(exit=EXIT)
    answers = tiny.plain(PROMPTS, tiny.greedy(N))
    block: TokenBlock = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = kind.build(target, 1)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(120):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), tensors_of(module))
    return out


def kangaroo(knobs: str = "depth=4,stop=0.3", source: Path | str = "", **verbs: str) -> dict[str, str]:
    return {"draft": f"kangaroo:heads={source or heads()},{knobs}", **verbs}


def engine(verbs: dict[str, str], **more: Any) -> Engine:
    placed = tiny.engine(verbs, **more)
    assert isinstance(placed, Engine)
    return placed


class Watch:
    """Drafts and accepted guesses of every pass, by request and by the tokens it had then."""

    def __init__(self, placed: Engine) -> None:
        self.drafts: dict[tuple[str, int], Draft] = {}
        self.accepted: dict[tuple[str, int], int] = {}
        drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
        learn, draft = drafter.learn, drafter.draft

        def learning(spans: Any, hidden: Any, outcomes: Any, tops: Any = None) -> None:
            for span, outcome in zip(spans, outcomes):
                if span.note is not None:
                    self.accepted[repr(span.request.prompt), span.request.known] = outcome.accepted
            learn(spans, hidden, outcomes, tops)

        def drafting(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
            drafts: list[Draft | None] = draft(requests, budgets)
            self.drafts |= {(repr(r.prompt), r.known): d for r, d in zip(requests, drafts) if d is not None}
            return drafts

        drafter.learn, drafter.draft = learning, drafting


# ---- tokens
@pytest.mark.parametrize("source", ["trained", "random:0", "random:1"])
@pytest.mark.parametrize("knobs", ["depth=4,stop=0", "depth=6,stop=0.3", "depth=3,stop=1", "depth=1"])
def test_greedy_tokens_are_plain_decodings(source: str, knobs: str) -> None:
    placed = engine(kangaroo(knobs, heads() if source == "trained" else source))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    c = placed.counters
    assert c.drafted > 0 and (c.accepted > c.drafted / 3) == (source == "trained")


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_sampled_tokens_are_plain_decodings_too(verify: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = engine(kangaroo(verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize("knobs", ["depth=4,stop=0", "depth=4,stop=0.3"])
def test_a_chain_is_what_the_plain_forward_says_and_ends_behind_an_unlikely_guess(knobs: str) -> None:
    plain, placed = PlainAdapter(heads(), tiny.checkpoint()), engine(kangaroo(knobs))
    watch, stop = Watch(placed), float(knobs.rpartition("=")[2])
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert len(watch.drafts) > 3
    for (_, known), draft in watch.drafts.items():
        guesses, most = list[int](), min(4, len(text) - known - 1)
        while len(guesses) < most:
            chances = plain.logits([*text[:known], *guesses])[-1].softmax(-1)
            guesses.append(int(chances.argmax()))
            if float(chances.max()) < stop:
                break
        assert draft.tokens == guesses and draft.parents == list(range(-1, len(guesses) - 1))


@pytest.mark.skipif(not native.load(native.TARGETS[0]) and not native.load("avx2"), reason="no native kernels here")
@pytest.mark.parametrize("store", ["slab", "int8"])
def test_in_bfloat16_tokens_are_those_of_whole_passes(store: str) -> None:
    """By native calls of some layers, one row at a time and then several, as by those of all layers."""
    model = Model.load(model_path("pocket"))
    prompts, params = tiny.prompts(40, 9, 90, vocab=model.config.vocab), tiny.greedy(32)
    outs = []
    for verbs in ({"store": store}, kangaroo("stop=0.05", "random:0", store=store)):
        placed = Builder(model, parse(verbs), Limits(kv_bytes=64 << 20), load=tiny.load).build()
        outs.append(tiny.outs(tiny.run(placed, prompts, params)))
    assert outs[0] == outs[1]


# ---- costs, to the row
def layers_run(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Rows that run each of the target's layers, as the layers see them."""
    found, real, target = Counter[int](), Model.layer, tiny.model()

    def counted(self: Model, i: int, x: torch.Tensor, *more: Any) -> torch.Tensor:
        if self is target:
            found[i] += len(x)
        return real(self, i, x, *more)

    monkeypatch.setattr(Model, "layer", counted)
    return found


@pytest.mark.parametrize("knobs", ["depth=4,stop=0", "depth=4,stop=0.3", "depth=4,stop=1"])
def test_every_row_runs_every_layer_once(knobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of prompts, a pending token a round and its guesses, and all layers have run as many."""
    ran = layers_run(monkeypatch)
    placed = engine(kangaroo(knobs))
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    c, rounds = placed.counters, placed.counters.forwards - 1
    assert request.n_out == N and c.emitted == c.forwards + c.accepted
    assert c.rows == len(PROMPTS[1]) + rounds + c.drafted
    assert ran == dict.fromkeys(range(LAYERS), c.rows) and c.row_layers == LAYERS * c.rows


@pytest.mark.parametrize(("stop", "each"), [("0", 4), ("1", 1)])
def test_a_round_of_s_guesses_is_s_and_one_pass_of_the_first_layers_and_one_of_the_others(stop: str, each: int) -> None:
    """With stop=0 all that fit are made, and with stop=1 one. The adapter runs once a guess."""
    placed = engine(kangaroo(f"depth=4,stop={stop}"))
    (request,) = tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))
    known, guesses = 1, list[int]()
    for count in request.trace.counts[1:]:
        guesses.append(max(0, min(each, N - known - 1)))
        known += count
    c, made = placed.counters, [n for n in guesses if n]
    assert known == N and c.drafted == sum(guesses)
    assert c.draft_forwards == sum(2 * n + 1 for n in made)
    assert c.draft_depth == sum((n + 1) * EXIT + n for n in made)
    assert c.forwards == 1 + len(guesses)


def test_where_first_rows_were_computed_anew_the_count_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form fails for a drafter that drops what it has begun; its tokens are the same."""

    def dropped(self: Any, span: Any) -> None:
        self.drop(span.request)

    monkeypatch.setattr(first_layers.FirstLayers, "hand_over", dropped)
    placed = engine(kangaroo())
    assert tiny.outs(tiny.run(placed, PROMPTS[1:2], tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))[1:2]
    c = placed.counters
    begun = (c.draft_depth - c.draft_forwards) // (EXIT - 1)  # passes of the first layers, of a row each
    whole = c.rows - begun
    assert whole == len(PROMPTS[1]) + c.forwards - 1 + c.drafted
    assert c.row_layers == LAYERS * whole + EXIT * begun and begun > 0


# ---- whatever happens
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted() -> None:
    placed = engine(kangaroo())
    watch = Watch(placed)
    cold = [serve(placed, prompt) for prompt in PROMPTS]
    alone, watch.accepted = watch.accepted, {}
    warm = [serve(placed, prompt) for prompt in PROMPTS]
    assert [request.cached for request in warm] == [32, 64, 0]
    assert watch.accepted == alone and sum(alone.values()) > N / 2
    assert [request.out for request in warm] == [request.out for request in cold]
    assert all(request.state == {} for request in warm)
    watch.accepted = {}
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N))
    shared = watch.accepted.keys() & alone.keys()
    assert {key: watch.accepted[key] for key in shared} == {key: alone[key] for key in shared} and len(shared) > 5


@pytest.mark.parametrize("schedule", ["layered:rows_per_group=8", "sarathi:budget=24", "prefill_first"])
def test_mates_and_slices_change_nothing(schedule: str) -> None:
    """Prompts that cross the model in pieces, and rows of other recipes, share steps with rows that begin late. The KV
    of all layers is level after every step."""
    limits, recipes = Limits(kv_bytes=64 << 20), parse_recipes({}, {"hop": kangaroo(), "plain": {}})
    placed = Builder(tiny.model(), parse({"schedule": schedule}), limits, load=tiny.load, recipes=recipes).build()
    assert isinstance(placed, Engine)
    requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in ("hop", "plain")]
    later = requests[3:]
    for request in requests[:3]:
        placed.add(request)

    def level() -> None:
        if later:
            placed.add(later.pop(0))
        for request in placed.running:
            if request.kv is not None and request.slice is None:
                assert len({layer.n for layer in request.kv.layers}) == 1

    for _ in range(4):
        placed.step()
        level()
    step_all(placed, requests, level)
    want = [out for out in tiny.plain(PROMPTS, tiny.greedy(N)) for _ in range(2)]
    assert tiny.outs(requests) == want and placed.counters.accepted > 0


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("where", ["first", "others"])
def test_whoever_raises_leaves_no_rows_behind(where: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layers, or in those behind: only the culprit fails, and nothing is left uncommitted."""
    left, real = [calls], first_layers.forward

    def broken(model: Model, spans: Any, counters: Counters, *more: Any) -> Any:
        found = real(model, spans, counters, *more)
        if any(span.request.id == "bad" for span in spans):
            left[0] -= 1
            if left[0] < 0:
                raise Boom("on the way")
        return found

    def broken_head(self: Any, spans: Any, hidden: Any) -> Any:
        if any(span.request.id == "bad" and span.note is not None for span in spans):
            left[0] -= 1
            if left[0] < 0:
                raise Boom("on the way")
        return accept(self, spans, hidden)

    placed = engine(kangaroo())
    decode = placed.recipes[""].phases[-1].decode
    accept = type(decode).accept
    if where == "first":
        monkeypatch.setattr(first_layers, "forward", broken)
    else:
        monkeypatch.setattr(type(decode), "accept", broken_head)
    requests = [Request(p, tiny.greedy(N), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    want = tiny.plain(PROMPTS, tiny.greedy(N))
    bad = requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: on the way")
    assert [request.out for request in requests] == [want[0], want[2]]


def test_what_is_proposed_otherwise_runs_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other tokens come of it than were begun, rows of the first layers are dropped."""
    placed = engine(kangaroo("depth=4,stop=0"))
    drafter: Any = placed.recipes[""].phases[-1].decode.drafter  # type: ignore[attr-defined]
    draft = drafter.draft

    def other(requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = draft(requests, budgets)
        return [d and Draft([*d.tokens[:-1], (d.tokens[-1] + 1) % tiny.VOCAB], d.parents) for d in drafts]

    drafter.draft = other
    requests = [Request(p, tiny.greedy(N)) for p in PROMPTS]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N)) and placed.counters.accepted > 0


# ---- with other methods
@GOES_WITH
def test_over_methods_that_leave_decode_rows_alone_it_changes_nothing(verbs: dict[str, str]) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(N), verbs)
    placed = engine(kangaroo(**verbs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == want and placed.counters.accepted > 0


@REFUSED
def test_methods_that_choose_among_rows_or_layers_are_refused(verbs: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        engine(kangaroo(**verbs))


# ---- bad input
@pytest.mark.parametrize(("change", "why"), [
    ({"exit": 0}, "exit_layer=0, and the model has 4 layers: it must be from 1 to 3"),
    ({"exit": 4}, "exit_layer=4"),
    ({"exit": "deep"}, "exit_layer='deep' must be a whole number"),
])  # fmt: skip
def test_an_exit_that_the_model_has_not_is_named(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        engine(kangaroo(source=tiny_adapter(tmp_path, **change)))


def test_heads_of_another_kind_or_width_are_named(tmp_path: Path) -> None:
    path = tiny_adapter(tmp_path)
    with pytest.raises(UserError, match="--draft kangaroo:heads="):
        engine({"draft": f"eagle:heads={path}"})
    wide = tiny.model(hidden=32)
    with pytest.raises(UserError, match="hidden_size=48"):
        Builder(wide, parse(kangaroo(source=path)), Limits(kv_bytes=64 << 20), load=tiny.load).build()


@pytest.mark.parametrize(("knobs", "why"), [({"depth": 0}, "depth=0"), ({"depth": 64}, "depth=64"),
                                            ({"stop": 1.5}, "stop=1.5"), ({"chunk": 0}, "chunk=0")])  # fmt: skip
def test_knobs_out_of_range_are_named(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Kangaroo(**knobs)
