"""Texts that follow a grammar: valid by an independent validator, the same however they were drafted or placed."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.methods.sample import _grammars
from phasewise.methods.sample._grammars import Grammars
from phasewise.methods.sample._words import Words
from phasewise.methods.sample.grammar import GrammarState
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, seeds, tiny
from tests.lazy import lazy
from tests.sample.structured import (
    ARRAY,
    FLAT,
    NESTED,
    SCHEMAS,
    asking,
    engine,
    model,
    prompts,
    text,
    tokenizer,
    valid,
)  # fmt: skip
from tests.sample.vocabularies import END, byte_level

pytest.importorskip("llguidance")
stats: Any = lazy("scipy.stats")
DRAFTERS = ["prompt_lookup:k=4,min_match=1", "token_recycling", "draft_model:model=SELF,k=3", "lookahead", "paced"]
PLACES = ["disaggregated:prefill=1,decode=1", "splitwise", "semi_pd:cores=2"]


def other() -> str:
    """A smaller model with the same vocabulary."""
    return str(tiny.checkpoint(layers=1, vocab=320, seed=4))


@pytest.mark.parametrize(("name", "temperature"), seeds.params(product(SCHEMAS, [0.0, 1.0]), 3, "completed"))
def test_what_is_completed_is_valid(name: str, temperature: float) -> None:
    ask, many = {"json_schema": SCHEMAS[name]}, prompts(*range(5, 17))
    each = [asking(ask=ask, temperature=temperature, seed=i) for i in range(len(many))]
    requests = tiny.run(engine(), many, each)
    assert valid(requests, SCHEMAS[name]) >= 6, "hardly any came to its end: this tests nothing"


@pytest.mark.parametrize(
    ("ask", "pattern"),
    [({"regex": r"(yes|no): [a-z]{2,5}!"}, r"(yes|no): [a-z]{2,5}!"),
     ({"choice": ["the fox", "the", 'a "dog"\n']}, r'the fox|the|a "dog"\n'),
     ({"grammar": 'start: "<" NAME ">"\nNAME: /[a-c]{1,4}/'}, "<[a-c]{1,4}>"),
     ({"grammar": 'root ::= item{2}\nitem ::= "(" [x-z] ")"'}, r"(\([x-z]\)){2}")],
    ids=["regex", "choice", "lark", "gbnf"],
)  # fmt: skip
def test_other_grammars(ask: dict[str, Any], pattern: str) -> None:
    each = [asking(ask=ask, temperature=1.0, seed=i) for i in range(12)]
    requests = tiny.run(engine(), prompts(*[9] * 12), each)
    assert all(re.fullmatch(pattern, text(request)) for request in requests)
    assert len({text(request) for request in requests}) > 1
    assert all(request.left is not None and request.left.reason == "stop" for request in requests)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("draft", DRAFTERS)
def test_drafts_change_no_token(draft: str, how: dict[str, Any]) -> None:
    """Under the verifier that matches, sampled ones too. Guesses that the grammar forbids are among them."""
    params, many = asking(**how), prompts(40, 7, 21)
    want = tiny.outs(tiny.run(engine(), many, params))
    verbs = {"draft": draft.replace("SELF", other()), "verify": "match"}
    drafted = engine(verbs)
    assert tiny.outs(tiny.run(drafted, many, params)) == want
    assert drafted.counters.drafted > drafted.counters.accepted or draft == "paced"


@pytest.mark.parametrize(
    "verify",
    ["rejection", "k_seq", "top_beta:beta=64,tau=100", "transfer:eta=40", "judge:weights=random:0,threshold=0"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_verifier_accepts_what_is_forbidden(verify: str, temperature: float) -> None:
    draft = f"draft_model:model={model().files.path},k=3,branches=2"
    each = [asking(temperature=temperature, seed=i) for i in range(8)]
    assert valid(tiny.run(engine({"draft": draft, "verify": verify}), prompts(*[11] * 8), each), FLAT) == 8


@pytest.mark.parametrize("place", PLACES)
def test_placements_change_no_token(place: str) -> None:
    params, many = asking(ask={"json_schema": NESTED}), prompts(40, 7, 21)
    want = tiny.outs(tiny.run(engine(), many, params))
    there = engine({"place": place}, cluster="inline")
    try:
        assert tiny.outs(tiny.run(there, many, params)) == want
    finally:
        there.close()


def test_preemption_and_siblings_change_no_token() -> None:
    (prompt,) = prompts(33)
    placed, first = engine(), Request(prompt, asking(temperature=1.0, seed=5))
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    while family[1].n_out < 4:
        placed.step()
    for request in family[:2]:
        if request.left is None:
            placed.room.preempt(request)  # type: ignore[attr-defined]
    tiny.finish(placed, family)
    assert [request.out for request in family] == [
        tiny.outs(tiny.run(engine(), [prompt], request.params))[0] for request in family
    ]
    assert valid(family, FLAT) == 3


def test_others_do_not_notice() -> None:
    many = prompts(40, 7, 21)
    plain = [Params(max_tokens=20), Params(max_tokens=20, temperature=0.8, seed=2), Params(max_tokens=20)]
    want = tiny.outs(tiny.run(engine(), many, plain))
    mixed = tiny.run(engine(), [*many, *many], [*plain, *[asking()] * 3])
    assert tiny.outs(mixed[:3]) == want
    assert tiny.outs(mixed[3:]) == tiny.outs(tiny.run(engine(), many, asking()))


def test_recipes_and_chains() -> None:
    many = prompts(30, 8)
    plain = tiny.run(engine({"sample": "grammar"}), many, asking())
    chained = tiny.run(engine({"sample": "grammar+momentum:alpha=2"}), many, asking(ask={"json_schema": ARRAY}))
    turned = tiny.run(engine({"sample": "momentum:alpha=2+grammar"}), many, asking(ask={"json_schema": ARRAY}))
    assert valid(plain, FLAT) == 2 and valid(chained, ARRAY) and tiny.outs(chained) == tiny.outs(turned)
    with pytest.raises(UserError, match="no method of this engine takes json_schema"):
        tiny.run(engine({"sample": "standard"}), many, asking())
    bound = engine({"decode": f"contrastive:amateur={model().files.path},alpha=0.9"})
    assert valid(tiny.run(bound, many, asking()), FLAT) == 2, "what the amateur leaves may all be forbidden"


def test_penalties_and_bias_never_bring_back_what_is_forbidden() -> None:
    heavy = asking(repetition_penalty=5.0, presence_penalty=8.0, frequency_penalty=8.0, logit_bias={7: 1e4})
    assert valid(tiny.run(engine(), prompts(30, 8, 12), heavy), FLAT) == 3


@pytest.mark.parametrize("verbs", [{}, {"draft": "prompt_lookup:k=4,min_match=1"}], ids=str)
def test_masks_are_filled_beside_the_forward(verbs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask of a step is there before it is asked for, but for none of requests that ask for nothing."""
    who: list[str] = []
    real = GrammarState._mask

    def fill(line: GrammarState, *args: Any, **more: Any) -> Any:
        who.append(threading.current_thread().name)
        return real(line, *args, **more)

    monkeypatch.setattr(GrammarState, "_mask", fill)
    tiny.run(engine(verbs), prompts(9), Params(max_tokens=5))
    assert not who
    placed = engine(verbs)
    requests = tiny.run(placed, prompts(40, 9), asking())
    assert valid(requests, FLAT) == 2
    assert len(who) >= sum(request.n_out for request in requests) - placed.counters.accepted
    assert all(name.startswith("masks") for name in who)


# ---- the distribution
TEXTS = ["a", "b", "ab", "ba"]


def test_sampled_tokens_have_the_constrained_distribution() -> None:
    """Exact chances: the model's own for each token, over those that some choice still begins with."""
    (prompt,) = prompts(12)
    params = asking(ask={"choice": TEXTS}, temperature=1.0)
    chances = _chances(prompt, ())
    assert sum(chances.values()) == pytest.approx(1.0) and len(chances) >= 4
    drafts = {"draft": f"draft_model:model={other()},k=2"}
    for verbs in ({}, drafts):
        requests = tiny.run(
            engine(verbs, max_running=1000), [prompt] * 400, [replace(params, seed=seed) for seed in range(400)]
        )
        drawn = [tuple(request.out) for request in requests]
        assert set(drawn) <= set(chances)
        cells = [cell for cell, chance in chances.items() if chance * 400 >= 5]
        rest = 1 - sum(chances[cell] for cell in cells)
        observed = [drawn.count(cell) for cell in cells]
        expected = [400 * chances[cell] for cell in cells]
        if rest > 1e-9:
            observed.append(400 - sum(observed))
            expected.append(400 * rest)
        assert stats.chisquare(observed, expected).pvalue > 1e-3


def _chances(prompt: list[int], out: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    logits = oracle.logits(model().files.path, [*prompt, *out])[-1]
    said, end = tokenizer().decode(out), model().config.eos[0]
    texts = {token: tokenizer().decode([token]) for token in range(4, tokenizer().size)}
    going_on = [token for token, more in texts.items() if more and any(c.startswith(said + more) for c in TEXTS)]
    open_ = [*going_on, end] if said in TEXTS else going_on
    probs = logits[open_].double().softmax(-1).tolist()
    found: dict[tuple[int, ...], float] = {}
    for token, p in zip(open_, probs):
        inner = {(*out, end): 1.0} if token == end else _chances(prompt, (*out, token))
        found |= {cell: p * chance for cell, chance in inner.items()}
    return found


# ---- what cannot be honoured
def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


@pytest.mark.parametrize(
    ("ask", "why"),
    [({"json_schema": {"not": {"type": "null"}}}, r"json_schema cannot be honoured: .*not"),
     ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
     ({"json_schema": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
     ({"json_schema": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
     ({"json_schema": {"$ref": "https://example.com/s.json"}}, "json_schema cannot be honoured"),
     ({"json_schema": {"enum": list(range(10**6))}}, "enum has 1,000,000 values"),
     ({"json_schema": {"type": "array", "minItems": 10**9}}, "minItems=1000000000 is more than"),
     ({"json_schema": {"const": "x" * 10**5}}, "const has 100,000 characters"),
     ({"json_schema": nested(80)}, "items is nested deeper than 64"),
     ({"json_schema": {"$ref": "#"}}, "json_schema cannot be honoured: no text follows it"),
     ({"json_schema": {"type": "integer", "multipleOf": 10**9, "minimum": 1, "maximum": 10**15}}, "multipleOf=100"),
     ({"json_schema": "text"}, "json_schema must be a JSON Schema"),
     ({"regex": "(?=a)b"}, "regex cannot be honoured: .*look-around"),
     ({"regex": "(a)\\1"}, "backreferences"),
     ({"regex": "a" * 20000}, "regex has 20,000 characters"),
     ({"regex": "[^\\s\\S]"}, "no text follows it"),
     ({"regex": 7}, "regex must be a text"),
     ({"choice": []}, "choice must be a list of texts"),
     ({"choice": ["a"] * 5000}, "choice has 5,000 texts"),
     ({"grammar": "start: missing"}, "grammar cannot be honoured: .*missing"),
     ({"grammar": "root ::= missing"}, "grammar cannot be honoured: .*missing"),
     ({"grammar": "root ::= " + "(" * 3000}, "grammar cannot be honoured"),
     ({"regex": "a", "choice": ["a"]}, "regex and choice are given")],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(ask: dict[str, Any], why: str) -> None:
    placed = engine()
    with pytest.raises(UserError, match=why):
        placed.add(Request([5], Params(ask=ask)))
    assert placed.idle


def test_texts_without_an_end_are_refused() -> None:
    with pytest.raises(UserError, match="ignore_eos cannot go with a grammar"):
        engine().add(Request([5], asking(ignore_eos=True)))
    with pytest.raises(UserError, match="tokenizer"):
        tiny.engine().add(Request([5], asking()))  # a model that has none
    with pytest.raises(UserError, match="needs a model with an end token"):
        from phasewise.methods.sample._words import _words

        _words(model().files.path, (), 320, ())


def test_a_dead_end_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary without the byte that the grammar needs next."""
    words = Words(byte_level([bytes([b]) for b in b"ab"]), model().config.vocab, [END])
    monkeypatch.setattr("phasewise.methods.sample.grammar.words_of", lambda model: words)
    placed, (a, b) = engine(), prompts(9, 12)
    stuck, well = Request(a, asking(ask={"regex": "abc"})), Request(b, asking(ask={"regex": "ab"}))
    for request in (stuck, well):
        placed.add(request)
    tiny.finish(placed, [stuck, well])
    assert stuck.left is not None and stuck.left.how == "failed" and "leaves no token after 2" in stuck.left.reason
    assert well.out == [3, 4, END]


def test_compiled_grammars_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_grammars, "KEPT", 2)
    made: list[str] = []
    real = _grammars.compiled

    def compile(ask: dict[str, Any], tokenizer: Any) -> Any:
        made.append(ask["regex"])
        return real(ask, tokenizer)

    monkeypatch.setattr(_grammars, "compiled", compile)
    grammars = Grammars(Words(byte_level([b"a", b"b"]), 8, [END]))
    for regex in ("a", "b", "a", "ab", "a", "b"):
        grammars.get({"regex": regex})
    assert made == ["a", "b", "ab", "b"]


def test_smollm2_writes_what_is_asked() -> None:
    """Where the model is here."""
    from phasewise.known import shelf
    from phasewise.known.models import KNOWN

    if not shelf.place(KNOWN["smollm2"]).exists():
        pytest.skip("smollm2 has not been fetched")
    from phasewise.llm import LLM

    llm = LLM(model_path("smollm2"), dtype="bfloat16")
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
              "required": ["city", "country"], "additionalProperties": False}  # fmt: skip
    output = llm.chat(
        [{"role": "user", "content": "Which is the capital of France? Answer as JSON."}], json_schema=schema
    )
    assert output.left.reason == "stop" and json.loads(output.text).keys() == {"city", "country"}
