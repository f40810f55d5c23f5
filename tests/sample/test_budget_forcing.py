"""Thinking budgets: reasoning has as many tokens as were asked for, then its end, however its tokens come about."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.methods.sample._words import Words
from phasewise.methods.sample.budget_forcing import ASK, Spent, ThinkingBudget, within_character
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.serve.tools.final import around
from phasewise.serve.tools.reasoning import TAGS
from phasewise.serve.tools.spelling import Spelling
from tests import tiny
from tests.sample.structured import asking, engine, model, prompts, text, tokenizer
from tests.sample.vocabularies import END, byte_level

pytest.importorskip("llguidance")  # its vocabulary of bytes
CLOSE = "</think>"
SAMPLED = {"temperature": 1.0, "seed": 3}


def thinking(tokens: int, n: int = 40, opened: bool = True, **more: Any) -> Params:
    asked = {"open": "<think>", "close": CLOSE, "opened": opened, "tokens": tokens}
    return Params(max_tokens=n, ignore_eos=True, ask={ASK: asked}, **more)


def thought(request: Request) -> list[int]:
    """The tokens before the closing tag, which is looked for token by token in all of the text."""
    raw = tokenizer().raw
    for count in range(request.n_out):
        if b"".join(raw(token) for token in request.out[count:]).startswith(CLOSE.encode()):
            return request.out[:count]
    raise AssertionError(f"no end of the reasoning in {text(request)!r}")


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_it_ends_with_its_budget_and_the_answer_follows(how: dict[str, Any]) -> None:
    many, budgets = prompts(12, 30, 7), (0, 5, 17)
    there = engine()
    plain = tiny.run(engine(), many, [Params(max_tokens=40, ignore_eos=True, **how)] * 3)
    requests = tiny.run(there, many, [thinking(budget, **how) for budget in budgets])
    for request, free, budget in zip(requests, plain, budgets):
        said = thought(request)
        assert budget <= len(said) <= budget + 3 and said == free.out[: len(said)]
        assert len(said) == budget or within_character(b"".join(map(tokenizer().raw, said[:budget])))
        assert request.n_out == 40 and text(request).count(CLOSE) == 1
    assert there.counters.forced >= 3 * 4 and there.counters.forwards < 40, "the tag is computed in one pass"


OTHERS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"draft": "prompt_lookup:k=4,min_match=1"}, {}),
    ({"draft": "draft_model:model=SELF,k=3", "verify": "match"}, {}),
    ({"draft": "token_recycling", "verify": "match"}, {}),
    ({"place": "disaggregated:prefill=1,decode=1"}, {"cluster": "inline"}),
]


@pytest.mark.parametrize(("verbs", "limits"), OTHERS)
def test_drafts_and_places_change_no_token(verbs: dict[str, str], limits: dict[str, Any]) -> None:
    many = prompts(40, 7, 21)
    each = [thinking(3), thinking(11, **SAMPLED), thinking(20, opened=False)]
    want = tiny.outs(tiny.run(engine(), many, each))
    verbs = {verb: name.replace("SELF", str(model().files.path)) for verb, name in verbs.items()}
    there = engine(verbs, **limits)
    try:
        assert tiny.outs(tiny.run(there, many, each)) == want
    finally:
        there.close()


def test_preemption_and_siblings_count_anew() -> None:
    (prompt,) = prompts(33)
    placed, first = engine(), Request(prompt, thinking(12, **SAMPLED))
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    while family[1].n_out < 8:
        placed.step()
    for request in family[:2]:
        placed.room.preempt(request)  # type: ignore[attr-defined]
    tiny.finish(placed, family)
    assert [request.out for request in family] == [
        tiny.outs(tiny.run(engine(), [prompt], request.params))[0] for request in family
    ]
    assert all(12 <= len(thought(request)) <= 15 for request in family)


def test_an_answer_that_follows_a_grammar_comes_after_it() -> None:
    asked = around(TAGS["think"], True, True, None, Spelling({}))
    (request,) = tiny.run(engine(), prompts(12), asking(ask={"choice": ["yes"], **asked, **(thinking(6).ask or {})}))
    assert request.left is not None and request.left.reason == "stop"
    assert 6 <= len(thought(request)) <= 9 and text(request).partition(CLOSE)[2].strip() == "yes"


def test_only_what_lies_between_the_tags_counts() -> None:
    pieces = [b" ", b"<th", b"ink>", b"a", b"</", b"think>", b"\xf0\x9f", b"\x98", b"\x80"]
    budget = ThinkingBudget({"open": "<think>", "close": CLOSE, "tokens": 2}, Words(byte_level(pieces), 12, [END]))

    def forced(*said: bytes) -> list[bytes]:
        spent = budget.read(Spent(budget.tags.start), [3 + pieces.index(piece) for piece in said])
        return [pieces[token - 3] for token in budget.closing(spent)]

    opened, end = (b" ", b"<th", b"ink>"), [b"</", b"think>"]
    assert forced(*opened, b"a") == [] and forced(*opened, b"a", b"a") == end
    assert forced(b"a", b"a", b"a") == [], "no reasoning"
    assert forced(*opened, b"a", b"</") == [b"think>"], "as far as the tag has been said"
    assert forced(*opened, b"a", b"\xf0\x9f") == forced(*opened, b"a", b"\xf0\x9f", b"\x98") == []
    assert forced(*opened, b"a", b"\xf0\x9f", b"\x98", b"\x80") == end, "a character is finished first"
    assert forced(*opened, b"a", b"\xf0\x9f", b"a") == end
    assert forced(*opened, b"a", *end, b"a", b"a", b"a") == []


@pytest.mark.parametrize(
    ("params", "why"),
    [(Params(ask={ASK: {"open": "<", "close": "", "tokens": 1}}), "open and close"),
     (Params(ask={ASK: {"open": "<", "close": ">", "tokens": -1}}), "whole number"),
     (thinking(3, allowed_token_ids=(70, 71)), "allowed_token_ids lack")],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(params: Params, why: str) -> None:
    with pytest.raises(UserError, match=why):
        engine().prepare(params, "")
