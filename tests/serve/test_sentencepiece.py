"""Text of models whose tokens carry their spaces: answers go on with their prompts, line breaks are byte tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phasewise.llm import LLM
from tests.model.test_tokenizer import sentencepiece
from tests.serve.running import Server
from tests.tiny import write_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)
BEFORE = [{"role": "assistant", "content": "the ab"}]


@pytest.fixture(scope="module", params=["metaspace", "strip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    backend = sentencepiece(request.param).backend
    backend.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])  # as Code Llama has them
    write_checkpoint(folder, layers=1, vocab=backend.get_vocab_size(), context=256)
    backend.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(model=model) as running:
        yield running


def saying(llm: LLM, token: str, count: int, **more: Any) -> dict[str, Any]:
    """Fields of a request whose answer is this token, so often."""
    return {"allowed_token_ids": [llm.tokenizer.id(token)], "max_tokens": count, "ignore_eos": True, **more}


def test_from_python(llm: LLM) -> None:
    prompt = "the ab"
    assert llm.generate(prompt, **saying(llm, "▁the", 2))[0].text == " the the"
    assert llm.generate([llm.encode(prompt)], **saying(llm, "▁the", 2))[0].text == " the the"
    assert "".join(llm.stream(prompt, **saying(llm, "▁the", 2))) == " the the"
    assert llm.generate("<s>", **saying(llm, "▁the", 2))[0].text == "the the", "there is no text to go on with"
    stopped = llm.generate(prompt, stop=" the", **saying(llm, "▁the", 9))[0]
    assert stopped.text == "" and len(stopped.tokens) == 1
    message = [{"role": "user", "content": "the"}]
    assert llm.chat(message, **saying(llm, "▁the", 2)).text == "the the", "a message begins with its first word"
    assert "".join(llm.stream(message, **saying(llm, "▁the", 2))) == "the the"
    on: dict[str, Any] = {"variables": {"continue_final_message": True}}
    assert llm.chat(BEFORE, **on, **saying(llm, "▁the", 2)).text == " the the"
    assert "".join(llm.stream(BEFORE, **on, **saying(llm, "▁the", 2))) == " the the"


def test_completions(server: Server, llm: LLM) -> None:
    def answer(**more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": "the ab", **saying(llm, "▁the", 3), **more}
        return dict(server.post("/v1/completions", body).json()["choices"][0])

    assert answer()["text"] == " the the the"
    assert answer(prompt=llm.encode("the ab"))["text"] == " the the the"
    assert answer(echo=True)["text"] == "the ab the the the"
    assert answer(n=2, stop=[" the"], seed=1)["text"] == ""
    told = answer(logprobs=0)["logprobs"]
    assert told["tokens"] == [" the"] * 3 and told["text_offset"] == [0, 4, 8]
    whole = answer(logprobs=0, echo=True)
    offsets = whole["logprobs"]["text_offset"]
    for token, at in list(zip(whole["logprobs"]["tokens"], offsets))[1:]:
        assert whole["text"][at : at + len(token)] == token
    assert "".join(entry["token"] for entry in answer(provenance=True)["provenance"]) == " the the the"


def test_what_is_filled_in_keeps_its_first_space(server: Server, llm: LLM) -> None:
    for before, after in (("the", " ab"), ("", "ab"), ("the ab", "the")):
        body = {"model": "tiny", "prompt": before, "suffix": after, **saying(llm, "▁the", 2)}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == " the the"


def test_chats(server: Server, llm: LLM) -> None:
    def content(**more: Any) -> str:
        body = {"model": "tiny", "messages": BEFORE, **saying(llm, "▁the", 2), **more}
        return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

    assert content() == "the the"
    assert content(continue_final_message=True) == " the the"
    assert content(continue_final_message=True, stop=" the") == ""


@pytest.mark.parametrize("stop, tokens", [("\n", 1), ("\n\n", 2)])
def test_a_stop_of_line_breaks_ends_at_once(stop: str, tokens: int, server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "prompt": "the", "stop": stop, **saying(llm, "<0x0A>", 100)}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == tokens
    assert llm.generate("the", stop=stop, **saying(llm, "<0x0A>", 100))[0].left.reason == "stop"


def test_line_breaks_are_streamed(llm: LLM) -> None:
    assert list(llm.stream("the", **saying(llm, "<0x0A>", 30))) == ["\n"] * 30
