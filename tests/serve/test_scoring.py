"""/v1/score and /v1/rerank: likelihoods of texts after others, over HTTP, against `transformers`."""

from __future__ import annotations

import math
import time
from typing import Any

import httpx
import pytest

from phasewise.llm import LLM
from tests.serve.running import PATIENCE, Server
from tests.serve.test_logprobs import truth
from tests.serve.tiny_chat import CONTEXT

LONG = "the quick brown fox jumps over the lazy dog and then the other thing " * 12
TEXTS = [" and then", " the fox", " jumps over the dog", " héllo"]


def likelihood(llm: LLM, before: str, after: str) -> tuple[float, int]:
    """The sum of log-probabilities, and of how many tokens."""
    first, second = llm.tokenizer.encode(before), llm.tokenizer.encode(after, False)
    rows = truth([*first, *second])
    return sum(float(rows[len(first) + i - 1, token]) for i, token in enumerate(second)), len(second)


def check(llm: LLM, answer: httpx.Response, pairs: list[tuple[str, str]]) -> None:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list" and body["model"].startswith("tiny")
    assert [entry["index"] for entry in body["data"]] == list(range(len(pairs)))
    total = 0
    for entry, (before, after) in zip(body["data"], pairs):
        logprob, tokens = likelihood(llm, before, after)
        assert entry["tokens"] == tokens and entry["object"] == "score"
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-3)
        assert entry["score"] == pytest.approx(logprob / tokens, abs=1e-3)
        total += len(llm.tokenizer.encode(before)) + tokens
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}


def test_one_prefix_is_computed_once(llm: LLM) -> None:
    with Server(limits={"max_running": 3}, recipes={"guess": {"draft": "prompt_lookup"}}) as running:
        for name in ("tiny", "tiny@guess"):
            before = running.metrics()
            answer = running.post("/v1/score", {"model": name, "text_1": LONG, "text_2": TEXTS * 2})
            check(llm, answer, [(LONG, text) for text in TEXTS * 2])
            now = running.settled()
            hits = now["phasewise_prefix_hits_total"] - before["phasewise_prefix_hits_total"]
            shared = (len(llm.tokenizer.encode(LONG)) - 1) // 32 * 32
            assert shared > 32 and hits >= 7 * shared


def test_pairs(server: Server, llm: LLM) -> None:
    pairs = [("the quick", " brown"), ("the lazy", " dog"), ("a fox", " fox")]
    body = {"text_1": [a for a, _ in pairs], "text_2": [b for _, b in pairs]}
    check(llm, server.post("/v1/score", body), pairs)
    check(llm, server.post("/v1/score", {"text_1": "the quick", "text_2": " brown"}), pairs[:1])
    check(llm, server.post("/v1/score", {"text_1": ["the quick"], "text_2": [" brown", " dog"]}),
          [pairs[0], ("the quick", " dog")])  # fmt: skip


@pytest.mark.parametrize("top", [None, 2])
def test_documents_by_how_likely_the_query_is(server: Server, llm: LLM, top: int | None) -> None:
    query, documents = "the lazy dog", ["a fox", LONG, "the other thing", "jumps"]
    fields = {} if top is None else {"top_n": top}
    answer = server.post("/v1/rerank", {"model": "tiny", "query": query, "documents": documents, **fields})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    worth = []
    for document in documents:
        logprob, tokens = likelihood(llm, document + "\n\n", query)
        worth.append(math.exp(logprob / tokens))
    order = sorted(range(4), key=lambda i: -worth[i])[:top]
    assert [result["index"] for result in results] == order
    for result in results:
        assert result["document"] == {"text": documents[result["index"]]}
        assert result["relevance_score"] == pytest.approx(worth[result["index"]], rel=2e-3)
    assert answer.json()["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "colour": 1}, "colour"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 5]}, "documents"),
    ],
)
def test_mistakes_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_is_too_long_is_refused_and_nothing_stays(server: Server) -> None:
    answer = server.post("/v1/score", {"text_1": "the " * CONTEXT, "text_2": ["a", "b"]})
    assert answer.status_code == 400 and "context" in answer.json()["error"]["message"]
    assert server.post("/v1/score", {"model": "giant", "text_1": "a", "text_2": "b"}).status_code == 404
    server.settled()


def test_a_client_that_leaves_takes_its_requests_along() -> None:
    with Server(faults={"pause": 0.05}, limits={"max_running": 1}) as slow:
        body = {"text_1": "the", "text_2": ["a", "b", "c", "d"] * 30}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow.url}/v1/score", json=body, timeout=0.3, verify=False)
        deadline = time.monotonic() + PATIENCE
        while 'phasewise_http_errors_total{status="499"}' not in slow.metrics():
            assert time.monotonic() < deadline, "nobody has noticed"
        assert slow.settled()["phasewise_requests_accepted_total"] < 120
        assert slow.post("/v1/score", {"text_1": "the", "text_2": "a"}).status_code == 200
