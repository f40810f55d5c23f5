"""`Params.ask`: plain data on its way from a caller to the method that takes it, unchanged wherever it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.sample.standard import Standard
from phasewise.options import parse
from phasewise.request.header import request_of
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits
from tests import tiny

ASK = {"favour": {"token": 9, "by": [1.5, {"deep": None}]}}
PLACES = ["colocated", "disaggregated:prefill=1,decode=1", "splitwise", "semi_pd:cores=2"]


@dataclass(frozen=True)
class Favours(Method, Sample):
    """Raises the logit of one token, as each request asks."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("sample", asks=("favour",))

    def check(self, params: Params) -> None:
        assert params.ask is not None
        if not 0 <= params.ask["favour"]["token"] < tiny.VOCAB:
            raise UserError(f"favour: there is no token {params.ask['favour']['token']}")

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        for row, context in enumerate(contexts):
            ask = context.request.params.ask
            if ask is not None:
                assert ask == ASK, "what arrives is what was asked"
                logits[row, ask["favour"]["token"]] += 1e4 if context.position % 3 == 0 else 0.0
        return Standard()(logits, contexts)


def placed(**verbs: str) -> Placed:
    methods = parse(verbs) | {"sample": Favours()}
    return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20, cluster="inline"), load=tiny.load).build()


def asking(n: int = 12, **more: Any) -> Params:
    return Params(max_tokens=n, ignore_eos=True, ask=ASK, **more)


def test_it_is_what_json_makes_of_it() -> None:
    given = {"a": (1, 2), "b": {"c": [True, None, 0.5, "ü"]}}
    params = Params(ask=given)
    assert params.ask == {"a": [1, 2], "b": {"c": [True, None, 0.5, "ü"]}}
    given["b"] = {}
    assert params.ask is not None and params.ask["b"], "a later change is not seen"
    assert replace(params, seed=3).ask == params.ask
    assert Params().ask is None and Params(ask={}).ask is None


def nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("ask", "why"),
    [({"a": float("nan")}, "no plain JSON"), ({"a": object()}, "no plain JSON"), ({"a": {1, 2}}, "no plain JSON"),
     ({"a": nested(100_000)}, "no plain JSON"), ([1], "does not name"), ("text", "does not name")],
    ids=["nan", "object", "set", "deep", "list", "text"],
)  # fmt: skip
def test_what_is_no_plain_data_is_refused(ask: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Params(ask=ask)


def test_it_travels_in_the_header_and_to_siblings() -> None:
    request = Request([5, 6], asking())
    travelled = request_of(json.loads(json.dumps(request.header())))
    assert travelled.params == request.params and travelled.params.ask == ASK
    assert request.sibling(1).params.ask == ASK


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drafts", [{}, {"draft": "prompt_lookup:k=3"}], ids=str)
def test_the_method_is_asked_wherever_the_request_runs(place: str, drafts: dict[str, str]) -> None:
    prompts = tiny.prompts(31, 7, 50)
    plain = tiny.outs(tiny.run(placed(), prompts, tiny.greedy(12)))
    want = tiny.outs(tiny.run(placed(), prompts, asking()))
    assert want != plain and all(9 in out for out in want)
    there = placed(place=place, **drafts)
    try:
        assert tiny.outs(tiny.run(there, prompts, asking())) == want
    finally:
        there.close()


def test_preemption_and_siblings_keep_it() -> None:
    (prompt,) = tiny.prompts(33)
    engine = placed()
    first = Request(prompt, asking(temperature=0.9, seed=5))
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        engine.add(request)
    while family[1].n_out < 4:
        engine.step()
    engine.room.preempt(family[1])  # type: ignore[attr-defined]
    tiny.finish(engine, family)
    alone = [tiny.outs(tiny.run(placed(), [prompt], request.params))[0] for request in family]
    assert [request.out for request in family] == alone


def test_what_nobody_takes_is_refused_before_admission() -> None:
    engine = placed()
    with pytest.raises(UserError, match=r"no method of this engine takes favor. Did you mean favour"):
        engine.add(Request([5], Params(ask={"favor": 1})))
    with pytest.raises(UserError, match="favour: there is no token 99"):
        engine.add(Request([5], Params(ask={"favour": {"token": 99}})))
    with pytest.raises(UserError, match="no token 99"):
        engine.prepare(Params(ask={"favour": {"token": 99}}), "")
    engine.prepare(Params(ask=ASK), "")
    assert engine.idle


def test_where_tokens_come_out_of_order_it_is_refused() -> None:
    engine = placed(decode="block_diffusion:block=4")
    with pytest.raises(UserError, match="favour cannot be kept where tokens are drawn before"):
        engine.add(Request([5], asking()))
    assert tiny.outs(tiny.run(engine, tiny.prompts(9), tiny.greedy(4)))
