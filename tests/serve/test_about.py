"""What a server says of itself, and tokens of texts: over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from phasewise import __version__
from phasewise.llm import LLM
from phasewise.serve.about import TokenizeAsk
from phasewise.serve.completions.schema import CompletionAsk
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.service import Service
from tests.serve.running import PATIENCE, Server
from tests.serve.tiny_chat import CONTEXT, TEMPLATE, VOCAB, chat_checkpoint

PROMPT = "the quick brown fox, héllo 🎉"
MESSAGES = [{"role": "user", "content": "the lazy dog"}, {"role": "assistant", "content": "jumps"}]


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=PATIENCE, verify=False)


def test_the_version(server: Server) -> None:
    assert get(server, "/version").json() == {"version": __version__}


def test_what_spells_prompts(server: Server, llm: LLM) -> None:
    told = get(server, "/tokenizer_info").json()
    assert told == {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": TEMPLATE}
    assert told["eos_token"] == llm.tokenizer.token(2)


def test_tokens_of_a_prompt_and_back(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    answer = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT}).json()
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    told = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()["token_strs"]
    assert told == [llm.tokenizer.token(i) for i in ids]
    assert server.post("/detokenize", {"model": "tiny", "tokens": ids}).json() == {"prompt": PROMPT}
    special = [3, *ids, 2]
    assert server.post("/detokenize", {"tokens": special}).json()["prompt"] == f"<|im_start|>{PROMPT}<|im_end|>"
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


@pytest.mark.parametrize(
    "fields",
    [{}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"mood": "!"}}],
)
def test_tokens_of_a_conversation(server: Server, llm: LLM, fields: dict[str, Any]) -> None:
    told = server.post("/tokenize", {"messages": MESSAGES, **fields}).json()
    variables = {**fields, **fields.pop("chat_template_kwargs", {})}
    assert told["tokens"] == llm.encode_chat(MESSAGES, variables)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **fields}
    body |= {"chat_template_kwargs": {"mood": "!"}} if variables.get("mood") else {}
    used = server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    assert used == told["count"]


CALLED = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "set", "arguments": '{"city": "Oslo", "n": [1, 2]}'}}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
]  # fmt: skip
SET = {"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("fields", [{}, {"tools": [SET]}, {"tools": [SET], "tool_choice": "none"},
                                    {"tools": [SET], "tool_choice": "required"}])  # fmt: skip
def test_tokens_of_a_conversation_with_calls_are_those_that_a_chat_reads(
    hermes: Server, fields: dict[str, Any]
) -> None:
    told = hermes.post("/tokenize", {"messages": CALLED, **fields}).json()
    assert '"arguments": {"city": "Oslo"' in hermes.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"]
    used = hermes.post("/v1/chat/completions", {"model": "tiny", "messages": CALLED, "max_tokens": 1, **fields}).json()
    assert used["usage"]["prompt_tokens"] == told["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a", "tools": [SET]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "colour": "red"}, "colour"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "stranger", "content": "a"}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "the"}, "tokens"),
    ],
)
def test_mistakes_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_another_model_is_not_found(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [3]})):
        assert server.post(path, {"model": "giant", **body}).status_code == 404


def test_live_and_ready(server: Server) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        answer = get(server, path)
        assert answer.status_code == 200 and answer.json()["status"] == "ok"


def test_a_failed_engine_is_neither() -> None:
    with Server(faults={"break_at": 2}) as broken:
        broken.post("/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 9})
        for path in ("/health", "/health/live", "/health/ready"):
            answer = get(broken, path)
            assert answer.status_code == 503 and answer.json()["status"] == "failed"


def test_a_server_that_shuts_down_lives_but_is_not_ready(llm: LLM) -> None:
    service = Service(llm, "tiny", ServePolicy(queue=1))
    service.close()
    gets = dict(service.gets)
    assert asyncio.run(gets["/health/live"]()).status_code == 200
    assert asyncio.run(gets["/health/ready"]()).status_code == 503


def test_special_tokens_around_a_prompt(tmp_path: Path) -> None:
    """A checkpoint that begins every text with a token of its own."""
    shutil.copytree(chat_checkpoint(), tmp_path / "begins")
    path = tmp_path / "begins" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    service = Service(LLM(str(tmp_path / "begins")), "tiny", ServePolicy(queue=1))
    plain = service.llm.tokenizer.encode(PROMPT, False)
    for flag, ids in ((None, [1, *plain]), (True, [1, *plain]), (False, plain)):
        assert asyncio.run(service._about._encode(TokenizeAsk(prompt=PROMPT, add_special_tokens=flag))) == ids
        ask = CompletionAsk(prompt=[PROMPT], add_special_tokens=flag)
        assert service._encode(ask, PROMPT) == ids
    chat = service.llm.encode_chat(MESSAGES)
    for flag, ids in ((None, chat), (False, chat), (True, [1, *chat])):
        assert asyncio.run(service._about._encode(TokenizeAsk(messages=MESSAGES, add_special_tokens=flag))) == ids
