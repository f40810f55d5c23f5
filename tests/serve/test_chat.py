"""/v1/chat/completions and /v1/models through the real `openai` package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import Server
from tests.serve.tiny_chat import CONTEXT

HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the fox?"}]


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[int, str], dict[int, str | None]]:
    texts: dict[int, str] = {}
    finishes: dict[int, str | None] = {}
    for chunk in client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            assert choice.index not in finishes
            assert (choice.delta.role == "assistant") == (choice.index not in texts), "the role comes once, first"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return texts, finishes


def test_greedy_is_the_models_own_answer(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=20)
    expected = llm.chat(HELLO, Params(max_tokens=20))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.encode_chat(HELLO))


def test_variables_reach_the_template(client: openai.OpenAI, llm: LLM) -> None:
    mood = {"mood": "quick brown"}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=20, extra_body={"chat_template_kwargs": mood}
    )
    expected = llm.chat(HELLO, max_tokens=20, variables=mood)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.encode_chat(HELLO, mood)) > len(llm.encode_chat(HELLO))


@pytest.mark.parametrize("knobs", [{"temperature": 0}, {"temperature": 2, "seed": 9, "n": 3}, {"stop": " fox"}])
def test_streaming_equals_not_streaming(client: openai.OpenAI, knobs: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 20, "seed": 1, **knobs}
    whole = client.chat.completions.create(**body)
    texts, finishes = streamed(client, **body)
    assert {choice.index: choice.message.content for choice in whole.choices} == texts
    assert {choice.index: choice.finish_reason for choice in whole.choices} == finishes


def test_contents_in_parts_and_developer_messages(client: openai.OpenAI) -> None:
    def text(messages: Any) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
        return answer.choices[0].message.content

    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox?"}]
    assert text(HELLO) == text([HELLO[0], {"role": "user", "content": parts}])
    assert text(HELLO) == text([{"role": "developer", "content": "Be brief."}, HELLO[1]])


def test_without_a_limit_the_answer_may_fill_the_context(client: openai.OpenAI, llm: LLM) -> None:
    long: list[Any] = [{"role": "user", "content": "the " * 1900}]
    answer = client.chat.completions.create(model="tiny", messages=long, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < CONTEXT == answer.usage.total_tokens


def test_fields_that_ask_for_nothing_are_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, temperature=0)
    asked = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, logprobs=False, tools=[],
        response_format={"type": "text"}, user="somebody", store=False, metadata={"a": "b"},
        extra_body={"unheard_of": None, "top_k": -1},
    )  # fmt: skip
    assert asked.choices == plain.choices and asked.usage == plain.usage


def test_a_model_without_a_template_says_so_and_still_completes(narrow: Server) -> None:
    assert "/v1/completions" in narrow.curl
    with pytest.raises(openai.BadRequestError) as refused:
        narrow.client().chat.completions.create(model="tiny", messages=HELLO)
    assert refused.value.param == "messages" and "chat template" in refused.value.message
    assert narrow.client().completions.create(model="tiny", prompt="the", max_tokens=2).choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")
