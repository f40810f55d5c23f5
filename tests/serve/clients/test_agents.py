"""Coding agents: bodies in the shape that each client sends them, over HTTP, one whole conversation each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phasewise.serve.completions.fields import CHAT_REFUSED, HARMLESS
from phasewise.serve.completions.schema import ChatAsk
from phasewise.serve.failures import ApiError
from phasewise.serve.messages.ask import HARMLESS as MESSAGES_HARMLESS
from phasewise.serve.messages.ask import REFUSED as MESSAGES_REFUSED
from phasewise.serve.messages.ask import MessagesAsk, forget
from phasewise.serve.responses.ask import REFUSED as RESPONSES_REFUSED
from phasewise.serve.responses.ask import RESPONSES_HARMLESS, ResponsesAsk, opened, sealed
from tests.serve.playing import play
from tests.serve.running import Server

DOCS = Path(__file__).parents[3] / "docs" / "clients.md"
THOUGHT = "<think>\nHm.\n</think>\n\n"
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
    "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": False,
}  # fmt: skip


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream that is answered with 200."""
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_claude_code(thinking: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": "tiny", "max_tokens": 32000, "temperature": 1, "metadata": {"user_id": "user_a_session_b"},
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief.", **cached}],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA, **cached}],
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    asked = {"type": "text", "text": play(THOUGHT + call("Read", {"path": "a.py"})), **cached}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [asked]}]
    events = streamed(thinking, "/v1/messages?beta=true", {**body, "messages": messages})
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"] and blocks[1]["name"] == "Read"
    (end,) = [event for event in events if event["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
    given = "".join(e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta")
    said = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {**blocks[1], "input": json.loads(given)}]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": play("Done."), **cached}
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    counted = {key: body[key] for key in ("model", "system", "tools", "thinking", "context_management")}
    known = thinking.post("/v1/messages/count_tokens?beta=true", {**counted, "messages": messages}).json()
    events = streamed(thinking, "/v1/messages?beta=true", {**body, "messages": messages})
    usage = events[0]["message"]["usage"]
    assert usage["cache_read_input_tokens"] > 0, "the beginning of the conversation was computed before"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == known["input_tokens"]
    assert "".join(e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta") == "Done."


def test_codex(thinking: Server) -> None:
    patch = "*** Begin Patch\n*** Delete File: a\u00e9.py\n*** End Patch"
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /[^x]+/"}
    body: dict[str, Any] = {
        "model": "tiny", "instructions": "You are an agent.", "store": False, "parallel_tool_calls": True,
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [
                {"type": "function", "name": "shell", "description": "Asks.", "strict": False, "parameters": SCHEMA}]},
        ],
        "tool_choice": "auto", "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "a"}, "service_tier": "priority",
    }  # fmt: skip
    asked = play(
        THOUGHT
        + call("shell", {"path": "a"})
        + call("apply_patch", {"input": patch})
        + call("agents__shell", {"path": "b"})
    )
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": asked}]},
    ]
    events = streamed(thinking, "/v1/responses", {**body, "input": items})
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == [
        "reasoning", "function_call", "custom_tool_call", "function_call"]  # fmt: skip
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    thought, shell, custom, spaced = final["output"]
    assert (shell["name"], shell.get("namespace")) == ("shell", None)
    assert (spaced["name"], spaced["namespace"], json.loads(spaced["arguments"])) == ("shell", "agents", {"path": "b"})
    assert custom["input"] == patch and custom["name"] == "apply_patch" and "arguments" not in custom
    told = {e["type"]: e for e in events}
    assert told["response.custom_tool_call_input.delta"]["delta"] == patch
    assert told["response.custom_tool_call_input.done"]["input"] == patch
    assert opened(thought["encrypted_content"]) == "Hm."
    thought = {**thought, "content": None}  # Codex keeps what is encrypted alone
    outputs = [
        {"type": "function_call_output", "call_id": shell["call_id"], "output": "a"},
        {"type": "function_call_output", "call_id": spaced["call_id"], "output": "b"},
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": play("Done.")},
    ]
    calls = [shell, custom, spaced]
    whole = thinking.post("/v1/responses", {**body, "input": [*items, thought, *calls, *outputs]}).json()
    assert [part["text"] for item in whole["output"] for part in item["content"]] == ["Done."]
    prompts = [ResponsesAsk.model_validate({**body, "input": [*items, each, *calls, *outputs]}).chat([])
               for each in (thought, {**thought, "encrypted_content": "of another server"})]  # fmt: skip
    roles = ["system", "user", "assistant", "tool", "tool", "tool"]
    assert [[m["role"] for m in p.messages] for p in prompts] == [roles] * 2
    said = prompts[0].messages[2]["tool_calls"]
    assert [each["function"]["name"] for each in said] == ["shell", "apply_patch", "agents__shell"]
    assert prompts[0].tools[2]["function"]["description"] == "Sub-agents.\nAsks."
    assert [p.messages[2].get("reasoning_content") for p in prompts] == ["Hm.", ""]
    assert "start: /[^x]+/" in prompts[0].tools[1]["function"]["description"]


def test_opencode(thinking: Server) -> None:
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    body: dict[str, Any] = {
        "model": "tiny", "max_tokens": 32000, "temperature": 0.5, "top_p": 1, "reasoning_effort": "high",
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked = play(THOUGHT + call("read", {"path": "a.py"}))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": asked}]},
    ]
    chunks = streamed(thinking, "/v1/chat/completions", {**body, "messages": messages})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    calls = [each for delta in deltas for each in delta.get("tool_calls", ())]
    arguments = "".join(each["function"]["arguments"] for each in calls)
    assert (calls[0]["function"]["name"], json.loads(arguments)) == ("read", {"path": "a.py"})
    assert chunks[-1]["usage"]["completion_tokens"] > 10
    made = {"id": calls[0]["id"], "type": "function", "function": {"name": "read", "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": play("Done.")},
    ]
    chunks = streamed(thinking, "/v1/chat/completions", {**body, "messages": messages})
    assert "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]) == "Done."
    del body["max_tokens"], body["stream_options"]
    other = {**body, "messages": messages, "max_completion_tokens": 64, "verbosity": "low"}
    assert thinking.post("/v1/chat/completions", other).json()["choices"][0]["message"]["content"] == "Done."


def test_an_answer_begun_by_the_client_and_a_schema(hermes: Server) -> None:
    asked = [{"role": "user", "content": "the fox"}]
    begun = {"model": "tiny", "max_tokens": 8, "messages": [*asked, {"role": "assistant", "content": "It"}]}
    told = [hermes.post("/v1/messages", begun).json()]
    told.append(hermes.post("/v1/messages/count_tokens", {key: begun[key] for key in ("model", "messages")}).json())
    same = {**begun, "continue_final_message": True, "add_generation_prompt": False}
    usage = hermes.post("/v1/chat/completions", same).json()["usage"]
    assert told[0]["usage"]["input_tokens"] == told[1]["input_tokens"] == usage["prompt_tokens"]
    pytest.importorskip("llguidance")
    format = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    for field in ({"output_config": {"format": format}}, {"output_format": format}):
        answer = hermes.post("/v1/messages", {"model": "tiny", "max_tokens": 64, "messages": asked, **field}).json()
        assert answer["content"][0]["text"] in ('"yes"', '"no"')


def test_reasoning_that_is_to_be_forgotten() -> None:
    def left(**edit: Any) -> str:
        messages: list[dict[str, Any]] = [{"role": "assistant", "reasoning_content": letter} for letter in "abc"]
        forget(messages, [{"type": "clear_thinking_20251015", **edit}])
        return "".join(message.get("reasoning_content", "") for message in messages)

    assert (left(), left(keep="all"), left(keep={"type": "all"})) == ("c", "abc", "abc")
    assert [left(keep={"type": "thinking_turns", "value": n}) for n in (2, 3, 9)] == ["bc", "abc", "abc"]
    assert opened(sealed("é\n")) == "é\n" and opened("no base64!") == opened(None) == ""


def test_hints_reach_the_template() -> None:
    def shown(**fields: Any) -> dict[str, Any]:
        return ChatAsk.model_validate({"messages": [{"role": "user", "content": "a"}], **fields}).variables()

    assert shown(reasoning_effort="low", verbosity="high") == {"reasoning_effort": "low", "verbosity": "high"}
    assert shown(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert shown(thinking_token_budget=64) == {"thinking_budget": 64}
    for same in ({"thinking_budget": 64}, {"reasoning": {"max_tokens": 64}}):
        assert shown(**same, thinking_token_budget=64) == shown(**same) == {"thinking_budget": 64}
    assert shown(reasoning={"effort": "low"}) == {"reasoning_effort": "low"}
    assert shown(reasoning={"enabled": False}) == {"thinking_budget": 0, "enable_thinking": False}
    for wrong in ({"max_tokens": -1}, {"max_tokens": 2**63}, {"max_tokens": True}, {"enabled": 1}, {"effort": "some"},
                  {"exclude": True}, {"enabled": False, "max_tokens": 5}):  # fmt: skip
        with pytest.raises(ApiError, match="reasoning: "):
            shown(reasoning=wrong)
    with pytest.raises(ApiError, match="thinking_budget give different budgets"):
        shown(thinking_token_budget=64, thinking_budget=65)
    own = {"enable_thinking": True, "reasoning_effort": "high"}
    assert shown(reasoning_effort="none", chat_template_kwargs=own) == own


TABLES: dict[str, tuple[Any, Any, Any]] = {
    "/v1/messages": (MessagesAsk.model_fields, MESSAGES_HARMLESS, MESSAGES_REFUSED),
    "/v1/responses": (ResponsesAsk.model_fields, RESPONSES_HARMLESS, RESPONSES_REFUSED),
    "/v1/chat/completions": (ChatAsk.model_fields, HARMLESS, CHAT_REFUSED),
}


def test_the_page_says_of_each_field_what_the_code_does() -> None:
    rows = re.findall(r"^\| `(/v1/[a-z/]+)` \| (.+?) \| (honoured|accepted|refused)", DOCS.read_text(), re.MULTILINE)
    assert {path for path, _, _ in rows} == {*TABLES}
    told: dict[str, set[str]] = {path: set() for path in TABLES}
    for path, fields, treatment in rows:
        names = set(re.findall(r"`(\w+)[.\w]*`", fields))
        home = TABLES[path][("honoured", "accepted", "refused").index(treatment)]
        assert names and names <= {*home}, (path, treatment, names - {*home})
        told[path] |= names
    for path, (_, harmless, refused) in TABLES.items():
        assert {*harmless} <= told[path] and (path == "/v1/chat/completions" or {*refused} <= told[path]), path
