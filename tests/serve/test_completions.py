"""/v1/completions through the real `openai` package: what is streamed is what is returned, and both are the model's."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import Server


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[int, list[str]], dict[int, str | None], list[Any]]:
    """The texts and finish reasons by choice, and the usages that came."""
    texts: dict[int, list[str]] = {}
    finishes: dict[int, str | None] = {}
    usages = []
    for chunk in client.completions.create(stream=True, **body):
        for choice in chunk.choices:
            assert choice.index not in finishes, "a choice went on after its finish reason"
            texts.setdefault(choice.index, []).append(choice.text)
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
        if chunk.usage:
            usages.append(chunk.usage)
    return texts, finishes, usages


def bias_to_bytes(llm: LLM) -> dict[str, float]:
    """A model that can say little but the bytes of é emits many whole characters and many incomplete ones."""
    first, second = llm.tokenizer.encode("é")
    return {str(first): 100.0, str(second): 100.0}


def test_greedy_is_the_models_own_text(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt="the quick", temperature=0, max_tokens=24)
    expected = llm.generate("the quick", Params(max_tokens=24))[0]
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.left.reason
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode("the quick"))
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 5},
        {"temperature": 2, "seed": 3, "n": 3},
        {"temperature": 2, "seed": 7, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": 0.5},
        {"temperature": 2, "seed": 1, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}},
        {"temperature": 0, "echo": True},
        {"temperature": 0, "prompt": ["the lazy dog", "a fox", "the"], "n": 2},
    ],
)
def test_streaming_equals_not_streaming(client: openai.OpenAI, llm: LLM, knobs: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "the brown fox", "max_tokens": 20, **knobs}
    whole = client.completions.create(**body)
    texts, finishes, usages = streamed(client, **body, stream_options={"include_usage": True})
    assert {choice.index: choice.text for choice in whole.choices} == {i: "".join(t) for i, t in texts.items()}
    assert {choice.index: choice.finish_reason for choice in whole.choices} == finishes
    assert usages == [whole.usage]
    given = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    read = sum(len(llm.tokenizer.encode(prompt)) for prompt in given)
    assert whole.usage is not None and whole.usage.prompt_tokens == read, "each prompt counts once, not once a sample"
    assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))


def test_usage_is_streamed_only_on_request(client: openai.OpenAI) -> None:
    assert streamed(client, model="tiny", prompt="the", max_tokens=3)[2] == []


def test_usage_so_far_comes_with_every_step_on_request(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 9, "logit_bias": {"1": 100.0}}  # which has no text
    options = {"include_usage": True, "continuous_usage_stats": True}
    *steps, last = streamed(client, **body, stream_options=options)[2]
    counts = [usage.completion_tokens for usage in steps]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == last.completion_tokens == 9
    assert len(counts) > len(streamed(client, **body, stream_options={"include_usage": True})[0][0])


def test_a_seed_repeats_the_text_and_no_seed_does_not(client: openai.OpenAI) -> None:
    def text(**knobs: Any) -> str:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 40, "temperature": 2, **knobs}
        return client.completions.create(**body).choices[0].text

    assert text(seed=11) == text(seed=11)
    assert text(seed=11) != text(seed=12)
    assert text() != text()


def test_samples_differ_and_the_first_is_the_lone_one(client: openai.OpenAI, llm: LLM) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 30, "temperature": 2, "seed": 4}
    choices = client.completions.create(**body, n=4).choices
    assert len({choice.text for choice in choices}) == 4
    assert choices[0].text == client.completions.create(**body).choices[0].text
    assert choices[0].text == llm.generate("the", Params(max_tokens=30, temperature=2, seed=4))[0].text


def test_prompts_may_be_texts_or_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8)
        return [choice.text for choice in answer.choices]

    a, b = llm.tokenizer.encode("the lazy"), llm.tokenizer.encode("dog")
    assert texts(["the lazy", "dog"]) == texts([a, b]) == texts(a) + texts(b) == texts("the lazy") + texts("dog")


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the dog", "max_tokens": 60, "temperature": 0}
    body["extra_body"] = {"ignore_eos": True}
    full = client.completions.create(**body).choices[0].text
    for start, size in ((5, 1), (9, 3), (14, 6), (0, 2)):
        stop = full[start : start + size]
        answer = client.completions.create(**body, stop=["never in the text", stop])
        texts, finishes, _ = streamed(client, **body, stop=["never in the text", stop])
        assert answer.choices[0].text == full[: full.find(stop)]
        assert answer.choices[0].finish_reason == "stop" == finishes[0]
        assert "".join(texts[0]) == answer.choices[0].text  # nothing of the stop string was streamed, ever


def test_a_stop_string_ends_every_sample(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the dog", "max_tokens": 60, "temperature": 0}
    full = client.completions.create(**body).choices[0].text
    answer = client.completions.create(**body, n=3, stop=full[9:11])
    assert [(c.text, c.finish_reason) for c in answer.choices] == [(full[: full.find(full[9:11])], "stop")] * 3
    assert answer.usage is not None and answer.usage.completion_tokens < 3 * 30


def test_held_back_text_comes_when_it_is_no_stop_string(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the dog", "max_tokens": 30, "temperature": 0}
    full = client.completions.create(**body).choices[0].text
    almost = [full[3:9] + "\0", full[-4:] + "\0"]  # both begin in the text, neither is ever complete
    texts, finishes, _ = streamed(client, **body, stop=almost)
    assert "".join(texts[0]) == full
    assert finishes[0] == client.completions.create(**body).choices[0].finish_reason


def test_never_half_a_character(client: openai.OpenAI, llm: LLM) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 60, "temperature": 2}
    body |= {"logit_bias": bias_to_bytes(llm), "extra_body": {"ignore_eos": True}}
    seen = ""
    for seed in range(3):
        whole = client.completions.create(**body, seed=seed).choices[0].text
        texts, _, _ = streamed(client, **body, seed=seed)
        assert "".join(texts[0]) == whole  # a piece that ended in half a character would have a U+FFFD too many
        seen += whole
    assert "é" in seen and "\ufffd" in seen, "the test says nothing"


def test_logit_bias_and_ends(client: openai.OpenAI, llm: LLM) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "temperature": 0, "max_tokens": 9}
    wanted = llm.tokenizer.encode("Z")[0]
    assert client.completions.create(**body, logit_bias={str(wanted): 100}).choices[0].text == "Z" * 9
    end = client.completions.create(**body, logit_bias={"2": 100})
    assert (end.choices[0].text, end.choices[0].finish_reason) == ("", "stop")
    assert end.usage is not None and end.usage.completion_tokens == 1
    on = client.completions.create(**body, logit_bias={"2": 100}, extra_body={"ignore_eos": True})
    assert on.usage is not None and on.usage.completion_tokens == 9
    own = client.completions.create(**body, logit_bias={str(wanted): 100}, extra_body={"stop_token_ids": [wanted]})
    assert (own.choices[0].text, own.choices[0].finish_reason) == ("", "stop")


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_no_bytes_stay_behind(server: Server) -> None:
    server.settled()
