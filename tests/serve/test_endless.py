"""Texts beyond the model's context over HTTP: in constant memory, and refused where no method carries them."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from phasewise.verbs.host import ENDLESS
from tests.serve.running import Server
from tests.serve.tiny_chat import CONTEXT

SINKS, WINDOW = 4, 60


@pytest.fixture(scope="module")
def endless() -> Iterator[Server]:
    verbs = {"evict": f"streaming:sinks={SINKS},window={WINDOW}"}
    with Server(verbs=verbs, recipes={"dense": {"evict": "none"}}, limits={"prefix_cache": False}) as running:
        yield running


def test_answers_run_over_the_context_in_constant_memory(endless: Server) -> None:
    live, tokens = [], 0
    with endless.client() as client:
        for chunk in client.completions.create(
            model="tiny", prompt="the quick", temperature=0, max_tokens=CONTEXT + 400, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        ):  # fmt: skip
            tokens += bool(chunk.choices)
            if chunk.choices and tokens % 200 == 0:
                live.append(endless.metrics()["phasewise_kv_live_bytes"])
            if chunk.usage is not None:
                assert chunk.usage.completion_tokens == CONTEXT + 400
    while_running = [each for each in live[1:] if each]
    assert while_running and max(while_running) == min(while_running)


def test_prompts_run_over_the_context(endless: Server) -> None:
    with endless.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=[5 + i % 300 for i in range(2 * CONTEXT)], temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 * CONTEXT, 8)


def test_clients_learn_how_far_each_recipe_goes(endless: Server) -> None:
    with endless.client() as client:
        told = {card.id: card.model_extra["max_model_len"] for card in client.models.list() if card.model_extra}
    assert told == {"tiny": ENDLESS, "tiny@dense": CONTEXT}
    for name, most in told.items():
        assert endless.post("/tokenize", {"model": name, "prompt": "the quick"}).json()["max_model_len"] == most


def test_recipes_that_carry_no_such_text_refuse_it(endless: Server) -> None:
    with endless.client() as client, pytest.raises(openai.BadRequestError, match=f"context is {CONTEXT} tokens") as no:
        client.completions.create(model="tiny@dense", prompt=[5] * CONTEXT, max_tokens=1)
    assert no.value.code == "context_length_exceeded"
