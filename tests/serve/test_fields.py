"""Fields beyond OpenAI's, over HTTP through the real `openai` package and in Python alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from tests.serve.running import Server

PROMPT = "the quick brown fox"
EOS = 2


def complete(client: openai.OpenAI, **fields: Any) -> tuple[str, str | None, int]:
    """Text, finish reason and tokens, greedy unless told otherwise; streamed, it is the same."""
    known = {"stop", "n", "seed", "max_tokens", "logit_bias", "temperature", "prompt", "echo"}
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    body |= {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    done = client.completions.create(**body, extra_body=extra)
    assert done.usage is not None
    choice = done.choices[0]
    chunks = list(client.completions.create(stream=True, **body, extra_body=extra))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == choice.text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == choice.finish_reason
    return choice.text, choice.finish_reason, done.usage.completion_tokens


def likely(*tokens: int) -> dict[str, float]:
    return {str(token): 100.0 for token in tokens}


def test_min_tokens(client: openai.OpenAI, llm: LLM) -> None:
    bias = likely(EOS)
    assert complete(client, logit_bias=bias)[1:] == ("stop", 1)
    assert complete(client, logit_bias=bias, min_tokens=5)[1:] == ("stop", 6)
    assert complete(client, logit_bias=bias, min_tokens=24)[1:] == ("length", 24)
    assert len(llm.generate(PROMPT, logit_bias={EOS: 100.0}, min_tokens=5, max_tokens=9)[0].tokens) == 6


def test_min_tokens_of_a_stop_string(client: openai.OpenAI, llm: LLM) -> None:
    (letter,) = llm.tokenizer.encode("q")
    assert complete(client, logit_bias=likely(letter), stop="qq", min_tokens=4) == ("qqqq", "stop", 6)
    (said,) = llm.generate(PROMPT, logit_bias={letter: 100.0}, stop="qq", min_tokens=4)
    assert (said.text, len(said.tokens)) == ("qqqq", 6)


def test_allowed_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    allowed = [llm.tokenizer.encode(letter)[0] for letter in "abc"]
    text, finish, count = complete(client, allowed_token_ids=allowed, temperature=2, seed=3)
    assert set(text) <= set("abc") and len(set(text)) > 1 and (finish, count) == ("length", 24)
    (said,) = llm.generate(PROMPT, max_tokens=24, temperature=2.0, seed=3, allowed_token_ids=allowed)
    assert said.text == text


def test_bad_words(client: openai.OpenAI, llm: LLM) -> None:
    first, second = (llm.tokenizer.encode(letter)[0] for letter in "qz")
    bias = likely(first) | {str(second): 60.0}
    assert complete(client, logit_bias=bias)[0] == "q" * 24
    assert complete(client, logit_bias=bias, bad_words=["q"])[0] == "z" * 24
    text = complete(client, logit_bias=bias, bad_words=["qq", "zz"])[0]
    assert text == "qz" * 12
    own = {first: 100.0, second: 60.0}
    assert llm.generate(PROMPT, max_tokens=24, logit_bias=own, bad_words=["qq", "zz"])[0].text == text
    assert llm.generate(PROMPT, max_tokens=24, logit_bias=own, bad_words=[(first,)])[0].text == "z" * 24


def test_bad_words_after_a_space(llm: LLM) -> None:
    """As it is written by itself, and behind a space, where that is another token."""
    spelled = llm.request([3], llm_params(bad_words=["the", (5, 6)])).params.bad_words
    texts = [llm.tokenizer.decode(word) for word in spelled]
    assert texts[:2] == ["the", " the"] and spelled[2] == (5, 6)


def llm_params(**fields: Any) -> Any:
    from phasewise.request.params import Params

    return Params(**fields)


def test_the_stop_string_may_stay(client: openai.OpenAI, llm: LLM) -> None:
    (letter,) = llm.tokenizer.encode("q")
    bias = likely(letter)
    assert complete(client, logit_bias=bias, stop=["qqq"]) == ("", "stop", 3)
    assert complete(client, logit_bias=bias, stop=["qqq"], include_stop_str_in_output=True) == ("qqq", "stop", 3)
    (said,) = llm.generate(PROMPT, logit_bias={letter: 100.0}, stop=["qqq"], include_stop_str_in_output=True)
    assert said.text == "qqq"
    own = {"logit_bias": bias, "stop_token_ids": [letter]}
    assert complete(client, **own) == ("", "stop", 1)
    assert complete(client, **own, include_stop_str_in_output=True) == ("q", "stop", 1)


def test_special_tokens_may_be_seen(client: openai.OpenAI, llm: LLM) -> None:
    start = llm.tokenizer.id("<|im_start|>")
    assert start is not None
    assert complete(client, logit_bias=likely(start), max_tokens=2)[0] == ""
    assert complete(client, logit_bias=likely(start), max_tokens=2, skip_special_tokens=False)[0] == "<|im_start|>" * 2
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(client, logit_bias=likely(EOS), skip_special_tokens=False)[0] == ""
    assert complete(client, logit_bias=likely(EOS), **both)[0] == "<|im_end|>"
    assert llm.generate(PROMPT, logit_bias={EOS: 100.0}, **both)[0].text == "<|im_end|>"


def test_prompts_are_cut(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    text = llm.generate([ids[-3:]], max_tokens=24)[0].text
    assert complete(client, truncate_prompt_tokens=3)[0] == text
    assert complete(client, prompt=ids, truncate_prompt_tokens=3)[0] == text
    assert complete(client, truncate_prompt_tokens=999)[0] == complete(client)[0]
    assert complete(client, truncate_prompt_tokens=3, echo=True)[0] == llm.tokenizer.decode(ids[-3:]) + text
    assert llm.generate(PROMPT, max_tokens=24, truncate_prompt_tokens=3)[0].text == text
    done = client.completions.create(
        model="tiny", prompt=PROMPT * 999, max_tokens=4, extra_body={"truncate_prompt_tokens": 7}
    )
    assert done.usage is not None and done.usage.prompt_tokens == 7
    said = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT * 999}], max_tokens=4,
        extra_body={"truncate_prompt_tokens": 7},
    )  # fmt: skip
    assert said.usage is not None and said.usage.prompt_tokens == 7


@pytest.mark.parametrize("n", [1, 2])
def test_the_likeliest_of_several(client: openai.OpenAI, n: int) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, "the lazy dog"], "max_tokens": 6, "temperature": 1.5}
    every = client.completions.create(n=5, seed=4, logprobs=0, **body)
    best = client.completions.create(n=n, best_of=5, seed=4, **body)
    assert [choice.index for choice in best.choices] == list(range(2 * n))
    wanted: list[str] = []
    for start in (0, 5):
        means = [(mean(choice), choice.text) for choice in every.choices[start : start + 5]]
        assert len({value for value, _ in means}) == 5
        wanted += [text for _, text in sorted(means, reverse=True)[:n]]
    assert [choice.text for choice in best.choices] == wanted
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None and every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens, "all that were generated count"
    told = client.completions.create(n=n, best_of=5, seed=4, logprobs=0, **body)
    assert [choice.text for choice in told.choices] == wanted
    assert sorted(map(mean, told.choices[:n]), reverse=True) == [mean(choice) for choice in told.choices[:n]]


def mean(choice: Any) -> float:
    values: Sequence[float] = choice.logprobs.token_logprobs
    return sum(values) / len(values)


def test_the_answer_goes_on_with_the_last_message(client: openai.OpenAI, llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "jumps over "}]
    prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\njumps over "
    text = llm.generate([llm.tokenizer.encode(prompt, False)], max_tokens=8)[0].text

    def chat(**extra: Any) -> str:
        done = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=extra
        )
        return str(done.choices[0].message.content)

    assert chat(continue_final_message=True) == text
    assert chat(continue_final_message=True, add_generation_prompt=False) == text
    closed = llm.generate([llm.tokenizer.encode(prompt + "<|im_end|>\n", False)], max_tokens=8)[0].text
    assert chat(add_generation_prompt=False) == closed
    opened = llm.generate([llm.tokenizer.encode(prompt + "<|im_end|>\n<|im_start|>assistant\n", False)], max_tokens=8)
    assert chat(add_generation_prompt=True) == chat() == opened[0].text
    assert llm.chat(messages, variables={"continue_final_message": True}, max_tokens=8).text == text
    with pytest.raises(UserError, match="has no text"):
        llm.encode_chat([{"role": "assistant", "content": None}], {"continue_final_message": True})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("completions", {"min_tokens": -1}, "min_tokens"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("completions", {"allowed_token_ids": [3, 320]}, "allowed_token_ids"),
        ("completions", {"bad_words": [""]}, "bad_words"),
        ("completions", {"bad_words": "fox"}, "bad_words"),
        ("completions", {"best_of": 1, "n": 2}, "best_of"),
        ("completions", {"best_of": 2, "stream": True}, "best_of"),
        ("completions", {"best_of": 0}, "best_of"),
        ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("completions", {"skip_special_tokens": "no"}, "skip_special_tokens"),
        ("completions", {"logits_processors": ["x"]}, "logits_processors"),
        ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("chat/completions", {"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ("chat/completions", {"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ],
)
def test_mistakes_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {"prompt": PROMPT}
    answer = server.post(f"/v1/{path}", {"model": "tiny", **asked, **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_rules_that_leave_nothing(server: Server) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "allowed_token_ids": [EOS], "min_tokens": 1}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400 and "allowed_token_ids are all forbidden" in answer.json()["error"]["message"]
