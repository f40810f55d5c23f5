"""/v1/embeddings through the real `openai` package: the rows that `transformers` has after its last layer."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from phasewise.engine.limits import Limits
from phasewise.llm import LLM
from tests.serve.running import Server
from tests.serve.test_logprobs import twin
from tests.serve.tiny_chat import CONTEXT, chat_checkpoint

TEXTS = ["the quick brown fox", "héllo 🎉", "the lazy dog and then the other thing " * 20]


@torch.inference_mode()
def truth(tokens: Sequence[int], pooling: str, normalised: bool) -> list[float]:
    out = twin()(torch.tensor([list(tokens)]), output_hidden_states=True)
    rows = out.hidden_states[-1][0].float()  # after the last norm
    vector = rows.mean(0) if pooling == "mean" else rows[-1]
    found: list[float] = (vector / vector.norm() if normalised else vector).tolist()
    return found


@pytest.mark.parametrize(("pooling", "normalised"), [("mean", True), ("last", False)])
def test_rows_of_the_last_layer(client: openai.OpenAI, llm: LLM, pooling: str, normalised: bool) -> None:
    extra = {"pooling": pooling, "normalize": normalised}
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        for _ in range(2):  # prefixes that have been met change nothing
            done = client.embeddings.create(model="tiny", input=given, extra_body=extra)
            assert [one.index for one in done.data] == [0, 1, 2]
            assert done.usage.prompt_tokens == done.usage.total_tokens == sum(map(len, ids))
            for one, tokens in zip(done.data, ids):
                assert one.embedding == pytest.approx(truth(tokens, pooling, normalised), abs=2e-4)


def test_the_forms_of_input_and_answer(client: openai.OpenAI, server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXTS[0])
    want = truth(ids, "mean", True)
    for given in (TEXTS[0], ids):
        assert client.embeddings.create(model="tiny", input=given).data[0].embedding == pytest.approx(want, abs=2e-4)
    plain = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "float", "dimensions": 48}).json()
    packed = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    assert plain["object"] == "list" and plain["data"][0]["object"] == "embedding"
    numbers = struct.unpack("<48f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(numbers) == pytest.approx(plain["data"][0]["embedding"], abs=1e-7)
    cut = server.post("/v1/embeddings", {"input": TEXTS[2], "truncate_prompt_tokens": 9}).json()
    assert cut["usage"]["prompt_tokens"] == 9
    assert cut["data"][0]["embedding"] == pytest.approx(
        truth(llm.tokenizer.encode(TEXTS[2])[-9:], "mean", True), abs=2e-4
    )
    server.settled()


@pytest.mark.parametrize(
    "verbs",
    [{"schedule": "sarathi:budget=16"}, {"schedule": "layered"}, {"draft": "prompt_lookup"},
     {"place": "disaggregated"}, {"place": "semi_pd"}],
    ids=lambda verbs: "-".join(verbs.values()),
)  # fmt: skip
def test_however_prompts_are_computed(verbs: dict[str, str]) -> None:
    llm = LLM(str(chat_checkpoint()), limits=Limits(max_running=2), **verbs)
    for pooling in ("mean", "last"):
        for vector, text in zip(llm.embed(TEXTS, pooling=pooling), TEXTS):
            assert vector == pytest.approx(truth(llm.tokenizer.encode(text), pooling, True), abs=2e-4)
    llm.close()


def test_preemption_counts_no_row_twice(llm: LLM) -> None:
    from phasewise.llm import vector_of
    from phasewise.request.params import Params
    from tests.laws.engines import preempt

    own = LLM(str(chat_checkpoint()), schedule="sarathi:budget=16")
    ids = own.tokenizer.encode(TEXTS[2])
    request = own.request(ids, Params(max_tokens=0, pooling="mean"))
    own.engine.add(request)
    for _ in range(2):
        own.engine.step()
        own.engine.step()
        assert preempt(own.engine, lambda i, one: True)
    while request.left is None:
        own.engine.step()
    assert vector_of(request, False).tolist() == pytest.approx(truth(ids, "mean", False), abs=5e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 12}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "colour": 1}, "colour"),
    ],
)
def test_mistakes_are_named(server: Server, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_cannot_be_embedded(server: Server) -> None:
    for given in ("", "the " * CONTEXT, [9999]):
        answer = server.post("/v1/embeddings", {"input": given})
        assert answer.status_code == 400, answer.text
    assert server.post("/v1/embeddings", {"model": "giant", "input": "a"}).status_code == 404
    server.settled()
