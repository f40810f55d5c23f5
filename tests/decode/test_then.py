"""Decode methods for prompts alone that hand on to another one: drafts change no token of theirs, whoever is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.decode._then import Handing, checked
from phasewise.methods.decode.augment import Augment
from phasewise.methods.decode.autoregressive import Autoregressive, _Autoregressive
from phasewise.methods.decode.c2c import C2C
from phasewise.methods.decode.pie import Pie
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import MARGIN, Traits
from tests import tiny

COUNT, N = 5, 32
FIRST = {  # who acts on prompts
    "augment": f"augment:latents={COUNT},weights=random:0",
    "c2c": "c2c:sharer=tiny-draft,weights=random:0,piece=16",
    "kv_prediction": "kv_prediction:model=tiny-draft,weights=random:0,least=2,piece=16",
    "pie": "pie:least=4",
}
DRAFTS = {
    "chain": "prompt_lookup:k=6,min_match=1",
    "tree": "token_recycling:prompts=none",  # judged rows alone leave as many successors as make trees
    "second model": "draft_model:model=tiny,k=3",
    "own KV": "swift:steps=4,confidence=0.1,branches=2,window=6,bayes=3",
    "first layers": "kangaroo:heads=random:0,depth=4,stop=0",
    "pseudo rows": "hidden_transfer:heads=random:0,nodes=4,depth=2",
    "given rows": "ppd:heads=random:0,rows=11,depth=2",
    "tuned rows": "masked_mtp:heads=random:0,depth=2",
}
TEXTS = tiny.prompts(90, 70, 33, seed=2)
SAMPLED = Params(max_tokens=N, ignore_eos=True, temperature=0.7, seed=3)
every = pytest.mark.parametrize("name", FIRST)


def verbs(name: str, draft: str | None = None, verify: str = "rejection", **more: str) -> dict[str, str]:
    then = "" if draft is None else f",then=(speculative:draft=({DRAFTS[draft]}),verify={verify})"
    return {"decode": FIRST[name] + then, **more}


def built(chosen: dict[str, str], **limits: Any) -> Engine:
    engine = tiny.engine(chosen, **limits)
    assert isinstance(engine, Engine)
    return engine


def asking(placed: Any, name: str, texts: Sequence[list[int]], params: Params | None = None) -> list[Request]:
    """Requests for these texts; for pie, as edits of what others have left."""
    params, found = params or tiny.greedy(N), []
    for text in texts:
        ask = None
        if name == "pie":
            placed.add(first := Request(text, tiny.greedy(1)))
            finish(placed, [first])
            text, ask = [*text[:20], *TEXTS[0][:5], *text[20:]], {"after": first.id}
        found.append(Request(text, replace(params, ask=ask)))
    return found


def finish(placed: Any, requests: Sequence[Request]) -> list[list[int]]:
    while any(request.left is None for request in requests):
        placed.step()
    return tiny.outs(requests)


def alone(chosen: dict[str, str], name: str, params: Params | None = None) -> list[list[int]]:
    """What each text gets in an engine of its own."""
    outs = []
    for text in TEXTS:
        engine = built(chosen)
        (request,) = asking(engine, name, [text], params)
        engine.add(request)
        outs += finish(engine, [request])
        assert name == "augment" or request.recalled
    return outs


# ---- the same tokens
@pytest.mark.parametrize("draft", DRAFTS)
@every
def test_drafts_change_no_greedy_token_and_some_are_accepted(name: str, draft: str) -> None:
    engine = built(verbs(name, draft))
    requests = asking(engine, name, TEXTS)
    for request in requests:
        engine.add(request)
    assert finish(engine, requests) == alone(verbs(name), name)
    assert engine.counters.drafted >= engine.counters.accepted > 0


@pytest.mark.parametrize("draft", ["chain", "second model"])
@every
def test_sampled_tokens_are_a_seeds_own(name: str, draft: str) -> None:
    """Under `match` those of plain decoding; under `rejection` the same whoever is there."""
    assert alone(verbs(name, draft, "match"), name, SAMPLED) == alone(verbs(name), name, SAMPLED)
    want = alone(verbs(name, draft), name, SAMPLED)
    engine = built(verbs(name, draft, schedule="sarathi:budget=24"))
    requests = asking(engine, name, TEXTS, SAMPLED)
    tiny.disturb(engine, requests)
    assert finish(engine, requests) == want


@every
def test_where_there_is_little_room_requests_make_way(name: str) -> None:
    runtime = built(verbs(name, "second model")).recipes[""]
    engine = built(verbs(name, "second model", schedule="sarathi:budget=24"), prefix_cache=False,
                   kv_bytes=int(2.2 * runtime.need(90 + 5 + N + runtime.margin)))  # fmt: skip
    requests = asking(engine, name, TEXTS)
    for request in requests:
        engine.add(request)
    outs, want = finish(engine, requests), alone(verbs(name), name)
    for request, out, plain in zip(requests, outs, want):
        assert out == plain or not (name == "augment" or request.recalled), "what was left made way"


# ---- latents, behind which tokens stand further on
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_behind_latents_stand_as_far_on(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = built(verbs("augment", draft)), list[Span]()
    decode: Any = engine.parts.phases[-1].decode
    propose = decode.propose

    def watched(requests: Sequence[Request], budgets: Sequence[int], phase: Any) -> list[Span]:
        spans: list[Span] = propose(requests, budgets, phase)
        seen.extend(span for span in spans if not span.request.prefilling)
        for span in seen[-len(spans) :]:
            if span.request in requests and not span.request.prefilling:
                assert span.positions[0] == span.request.computed + COUNT and span.beyond == COUNT
                assert len(span.positions) == span.rows
                assert (span.sees is None) == isinstance(span.positions, range)
        return spans

    monkeypatch.setattr(decode, "propose", watched)
    tiny.run(engine, TEXTS, tiny.greedy(N))
    if draft == "own KV":
        assert decode.then.drafter.companion.beyond == COUNT
    if draft in ("first layers", "pseudo rows"):
        assert decode.then.drafter.first_layers.beyond == COUNT
    kinds = {span.sees is None for span in seen if span.rows > 1}
    if draft in ("own KV", "pseudo rows", "given rows", "tuned rows"):  # chains and trees
        assert False in kinds
    else:
        assert kinds == ({True} if draft in ("chain", "second model", "first layers") else {False})


@pytest.mark.parametrize("draft", ["chain", "tree"])
def test_log_probabilities_are_those_without_drafts(draft: str) -> None:
    params = replace(tiny.greedy(N), logprobs=1, prompt_logprobs=0, provenance=True)
    (mine,), (plain,) = (tiny.run(built(verbs("augment", each)), TEXTS[:1], params) for each in (draft, None))
    assert mine.out == plain.out and mine.scores.keys() == plain.scores.keys()
    for at, score in mine.scores.items():
        assert score.logprob == pytest.approx(plain.scores[at].logprob, abs=1e-4)
    origins = {score.origin for score in mine.scores.values()}
    assert {"prefill", "decode", "accepted"} <= origins


def test_texts_end_where_positions_do_also_with_a_second_model() -> None:
    engine, context = built(verbs("augment", "second model")), tiny.model().config.max_positions
    assert engine.reach("") == context - COUNT
    (request,) = tiny.run(engine, tiny.prompts(context - COUNT - 9), tiny.greedy(1 << 20))
    assert request.known == context - COUNT


def test_room_is_kept_for_latents_and_drafts() -> None:
    for then, rows in (("", 1), (",then=(speculative:draft=(prompt_lookup),verify=match)", MARGIN),
                       (",then=(speculative:draft=(paced:of=(token_recycling)),verify=match)", MARGIN)):  # fmt: skip
        engine = built({"decode": f"augment:latents=80,weights=random:0{then}"})
        assert engine.parts.recipes[""].traits.margin >= 80 + rows  # type: ignore[attr-defined]


# ---- in bfloat16
@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("draft", ["chain", "tree"])
@every
def test_in_bfloat16_drafts_and_mates_change_nothing(name: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    small = Model.load(tiny.checkpoint(hidden=64, layers=2, seed=1), dtype=torch.bfloat16)
    monkeypatch.setattr(tiny, "load", lambda name: small)
    outs = []
    for chosen, texts in ((verbs(name), TEXTS[:1]), (verbs(name, draft), TEXTS[:1]), (verbs(name, draft), TEXTS)):
        engine = built(chosen, of=model)
        requests = asking(engine, name, texts)
        for request in requests:
            engine.add(request)
        outs.append(finish(engine, requests)[0])
    assert outs[0] == outs[1] == outs[2] and engine.counters.accepted


# ---- what may follow
@pytest.mark.parametrize(("make", "said"), [
    (lambda: C2C(then=Pie()), "c2c: then=pie acts on prompts as well: choose one for what follows the prompt, such as"),
    (lambda: Pie(then=Augment(0)), "pie: then=augment acts on prompts as well: choose one"),
    (lambda: C2C(then="speculative"), "c2c: then='speculative' must be an object, such as Autoregressive"),
    (lambda: C2C(then=Autoregressive), "must be an object"),
])  # fmt: skip
def test_others_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize(("then", "said"), [
    ("block_diffusion", "then=block_diffusion computes prompts in a way of its own: choose one"),
    ("c2c", "then=c2c acts on prompts as well: choose one"), ("pie", "then=pie acts on prompts as well: choose one"),
    ("kv_prediction", "then=kv_prediction acts on prompts as well"), ("augment", "then=augment acts on prompts"),
    ("speculative", "then speculative needs a draft: add draft="), ("nobody", "unknown decode method 'nobody'"),
])  # fmt: skip
def test_by_options_too(name: str, then: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny.engine({"decode": f"{FIRST[name]},then={then}"})


@pytest.mark.parametrize(("traits", "why"), [
    (Traits("decode", injects_kv=True), "takes rows of prompts from elsewhere as well"),
    (Traits("decode", plain_prompts=True, unordered=True), "does not draw one token after another"),
    (Traits("decode", plain_prompts=True, block=4), "does not draw one token after another"),
])  # fmt: skip
def test_methods_that_do_more_are_refused(traits: Traits, why: str) -> None:
    @dataclass(frozen=True)
    class Other(Method):
        traits: ClassVar[Traits]

    Other.traits = traits
    with pytest.raises(UserError, match=f"pie: then=Other {why}.*choose one for what follows the prompt"):
        checked("pie", Other())


def test_what_follows_is_asked_what_it_takes() -> None:
    """And closed, and says for itself how far texts may go."""
    told = list[str]()

    @dataclass(frozen=True)
    class Follows(Autoregressive):
        traits: ClassVar[Traits] = Traits("decode", asks=("tone",))

        def bind(self, host: Any) -> Any:
            return Following(host)

    class Following(_Autoregressive):
        def check(self, params: Params) -> None:
            told.append("check")

        def close(self) -> None:
            told.append("close")

        def reach(self, context: int) -> int:
            return context - 1

    host = Host(None, None, None, None, None)  # type: ignore[arg-type]
    runtime = Handing(host, Follows())
    assert runtime.reach(10) == 9
    runtime.check(Params(ask={"tone": "low"}))
    runtime.check(Params(ask={"other": 1}))
    runtime.close()
    assert told == ["check", "close"]
    checked("pie", Autoregressive())
