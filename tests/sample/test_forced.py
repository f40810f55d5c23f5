"""Tokens that a grammar forces are computed in one pass: how many passes that saves, and that nothing else changes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from phasewise.methods.sample import grammar
from phasewise.methods.sample._grammars import Grammars
from phasewise.methods.sample._words import words_of
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import seeds, tiny
from tests.sample.structured import FLAT, asking, engine, model, prompts, text, valid

pytest.importorskip("llguidance")
KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {f"a very long key with the number {n}": {"enum": [f"{c} and so on" for c in "abc"]} for n in "123"},
    "required": [f"a very long key with the number {n}" for n in "123"],
    "additionalProperties": False,
}
FORM = {"regex": "the name of the thing: [a-c]{1,2}, and what it is made of: (wood|stone)\\."}
ASKS = pytest.mark.parametrize(
    "ask", [{"json_schema": KEYS}, FORM, {"json_schema": FLAT}], ids=["keys", "form", "flat"]
)


def choices(request: Request) -> list[int]:
    """How many tokens the grammar left at each place of an answer, by a matcher that knows of nothing else."""
    words = words_of(model())
    matcher = Grammars(words).get(request.params.ask or {}).start()
    found = []
    for token in request.out:
        mask = np.zeros(words.width, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        found.append(int(np.bitwise_count(mask.view(np.uint32)).sum()))
        matcher.consume_token(token)
    return found


def passes(left: list[int], ends: bool) -> tuple[int, int]:
    """The prompt's, and one for each token that comes after no forced one or after the last of them. -> that, and how
    many come along with another. `ends`: the last token is an end token, which is never one of these."""
    forced = [n == 1 for n in left]
    if ends:
        forced[-1] = False
    count, along, at = 1, 0, 1
    while at < len(left):
        run = next((i for i, each in enumerate(forced[at:]) if not each), len(left) - at)
        run = min(run, len(left) - at - 1)  # one is drawn after them
        along += run
        count += 1
        at += run + 1
    return count, along


def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar._Grammar, "sure", lambda self, request: ())


@ASKS
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_passes_by_the_closed_form(ask: dict[str, Any], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(12)
    told = engine()
    (request,) = tiny.run(told, [prompt], asking(ask=ask, **how))
    assert request.left is not None and request.left.reason == "stop"
    count, along = passes(choices(request), ends=True)
    work = told.counters
    assert work.forwards == count and work.forced == work.accepted == work.drafted == along > 4
    assert work.head_rows == count
    untold(monkeypatch)
    plain = engine()
    (same,) = tiny.run(plain, [prompt], asking(ask=ask, **how))
    assert same.out == request.out and plain.counters.forwards == same.n_out and plain.counters.forced == 0
    assert plain.counters.rows == work.rows


def test_long_keys_cost_few_passes() -> None:
    placed = engine()
    requests = tiny.run(placed, prompts(12), asking(ask={"json_schema": KEYS}))
    assert valid(requests, KEYS) == 1 and placed.counters.forwards < requests[0].n_out / 2, text(requests[0])


DRAFTS = ["paced", "prompt_lookup:k=4,min_match=1", "token_recycling", "draft_model:k=3"]


@pytest.mark.parametrize(("draft", "verify"), seeds.params(product(DRAFTS, ["match", "rejection"]), 3, "forced"))
def test_drafted_in_a_mixed_batch(draft: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many = prompts(40, 7, 21, 9)
    each = [asking(ask={"json_schema": KEYS}), Params(max_tokens=20), asking(ask=FORM, temperature=0.8, seed=1),
            asking(17, ask={"json_schema": KEYS})]  # fmt: skip
    if "draft_model" in draft:  # which draws its guesses for sampled requests: what is drawn hangs on them
        draft, each[2] = f"draft_model:model={model().files.path},k=3", asking(ask=FORM)
    told = engine({"draft": draft, "verify": verify})
    outs = tiny.outs(tiny.run(told, many, each))
    assert 0 < told.counters.forced <= told.counters.accepted
    untold(monkeypatch)
    assert outs == tiny.outs(tiny.run(engine(), many, each))


def test_rules_of_the_request_come_first() -> None:
    """What is forced ends at a stop token."""
    (prompt,) = prompts(9)
    (whole,) = tiny.run(engine(), [prompt], asking(ask=FORM))
    stop = whole.out[6]
    (stopped,) = tiny.run(engine(), [prompt], asking(ask=FORM, stop_tokens=[stop]))
    assert stopped.out == whole.out[: whole.out.index(stop) + 1]
    (held,) = tiny.run(
        engine(), [prompt], asking(ask=FORM, min_tokens=30, bad_words=[[stop]], logit_bias={stop: -100.0})
    )
    assert text(held).startswith("the name of the thing: "), "bad words give way where they would leave nothing"


def test_what_is_forced_may_not_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the request fails there, for what it asked, and no other."""
    many = prompts(9, 12)
    (whole,) = tiny.run(engine(), many[:1], asking(ask=FORM))
    stop = whole.out[6]
    lacking = asking(ask=FORM, allowed_token_ids=[token for token in range(320) if token != stop])
    for verbs in ({}, {"draft": "prompt_lookup:k=4,min_match=1"}):
        held, mate = tiny.run(engine(verbs), many, [lacking, asking(ask=FORM)])
        assert held.left is not None and held.left.how == "failed" and held.left.asked
        assert "regex and allowed_token_ids leave no token to go on with" in held.left.reason
        assert held.out == whole.out[: held.n_out] and stop not in held.out
        assert mate.left is not None and mate.left.reason == "stop"
    untold(monkeypatch)
    (same,) = tiny.run(engine(), many[:1], lacking)
    assert same.left == held.left and same.out == whole.out[: whole.out.index(stop)]


@pytest.mark.parametrize("place", ["disaggregated:prefill=1,decode=1"])
def test_workers_count_them_too(place: str) -> None:
    there = engine({"place": place}, cluster="inline")
    try:
        requests = tiny.run(there, prompts(9), asking(ask={"json_schema": KEYS}))
        assert valid(requests, KEYS) == 1 and there.counters.forced > 10
    finally:
        there.close()
