"""Targets on their way from a client, or the server's own, to the requests that the scheduler sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phasewise.llm import LLM
from phasewise.request.params import SLO
from phasewise.serve.completions.answer import Answer
from phasewise.serve.completions.schema import ChatAsk, CompletionAsk, read
from phasewise.serve.failures import ApiError
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.service import Service
from tests.serve.running import Server


def asked(**fields: Any) -> CompletionAsk:
    return read(CompletionAsk, json.dumps({"prompt": "the", **fields}).encode())


@pytest.mark.parametrize(
    ("slo", "wanted"),
    [
        (None, SLO(0.5, None)),
        ({}, SLO(0.5, None)),
        ({"tpot_ms": 40}, SLO(0.5, 0.04)),
        ({"ttft_ms": 1500.5, "tpot_ms": 25}, SLO(1.5005, 0.025)),
        ({"ttft_ms": None}, SLO(0.5, None)),
    ],
)
def test_targets_are_milliseconds_and_the_servers_fill_in(slo: Any, wanted: SLO) -> None:
    assert asked(slo=slo).targets(SLO(ttft=0.5)) == wanted
    chat = read(ChatAsk, json.dumps({"messages": [{"role": "user", "content": "a"}], "slo": slo}).encode())
    assert chat.targets(SLO(ttft=0.5)) == wanted


def test_a_wrong_target_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ApiError, match=r"slo\.ttft_ms: .*greater than 0"):
        asked(slo={"ttft_ms": 0})
    with pytest.raises(ApiError, match=r"slo\.ttft.*'ttft_ms' or 'tpot_ms'"):
        asked(slo={"ttft": 5})


def test_every_sample_has_the_targets(llm: LLM) -> None:
    service = Service(llm, "tiny", ServePolicy(queue=4), SLO(tpot=0.1))
    ask = asked(prompt=["the", "dog"], n=2, slo={"ttft_ms": 200})
    order = service._order(ask, [[5, 6], [7]], "prompt")
    requests = [choice.feed.request for choice in Answer(llm, service.engine, order).choices]
    assert [request.slo for request in requests] == [SLO(0.2, 0.1)] * 4


def test_a_served_request_may_have_targets(server: Server) -> None:
    body = {"model": "tiny", "prompt": "the dog", "max_tokens": 5, "temperature": 0}
    plain = server.post("/v1/completions", body)
    hurried = server.post("/v1/completions", body | {"slo": {"ttft_ms": 1, "tpot_ms": 1}})
    assert hurried.status_code == plain.status_code == 200
    assert hurried.json()["choices"] == plain.json()["choices"]
