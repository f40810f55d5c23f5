"""/v1/messages through the real `anthropic` package."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lazy import lazy
from tests.serve.playing import play
from tests.serve.running import PATIENCE, Server

anthropic: Any = lazy("anthropic")

WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def client(server: Server) -> Any:
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=http)


def asked(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": play(text)}]
    return {"model": "tiny", "messages": messages, "max_tokens": 200, **more}


def told(message: Any) -> list[dict[str, Any]]:
    """Its blocks, without ids."""
    return [{key: value for key, value in block.model_dump().items() if key not in ("id", "citations") and value}
            for block in message.content]  # fmt: skip


def streamed(server: Server, **body: Any) -> Any:
    with client(server).messages.stream(**body) as stream:
        return stream.get_final_message()


def prompt_tokens(message: Any) -> int:
    """All tokens of its prompt, wherever their keys and values came from."""
    usage = message.usage
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


USE = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}


@pytest.mark.parametrize(
    ("text", "more", "blocks", "reason"),
    [
        ("It rains.", {"max_tokens": 3}, [{"type": "text", "text": "It "}], "max_tokens"),
        ("It rains. Yes.", {"stop_sequences": ["xyz", " Y"]}, [{"type": "text", "text": "It rains."}], "stop_sequence"),
        (f"Let me see.\n{CALL}", {"tools": [WEATHER, CLOCK]}, [{"type": "text", "text": "Let me see."}, USE],
         "tool_use"),
        (CALL, {"tools": [WEATHER], "tool_choice": {"type": "none"}}, [{"type": "text", "text": CALL}], "end_turn"),
        (CALL, {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         [USE], "tool_use"),
        (CALL, {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "tool", "name": "weather"}},
         [USE], "tool_use"),
        (f"{CALL}{CALL}", {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         [USE], "tool_use"),
        ("", {}, [], "end_turn"),
    ],
)  # fmt: skip
def test_blocks_whole_and_streamed(
    hermes: Server, text: str, more: dict[str, Any], blocks: list[dict[str, Any]], reason: str
) -> None:
    body = asked(text, **more)
    whole = client(hermes).messages.create(**body)
    assert (told(whole), whole.stop_reason) == (blocks, reason)
    assert whole.stop_sequence == (" Y" if reason == "stop_sequence" else None)
    assert whole.role == "assistant" and whole.model == "tiny" and whole.id.startswith("msg_")
    part = streamed(hermes, **body)
    assert (told(part), part.stop_reason, part.stop_sequence) == (blocks, reason, whole.stop_sequence)
    assert prompt_tokens(part) == prompt_tokens(whole)
    if "disable" not in str(more):  # such a stream ends earlier
        assert part.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_order(thinking: Server) -> None:
    body = asked(f"<think>\nHm, hm.\n</think>\n\nSo:\n{CALL}", tools=[WEATHER])
    events = list(client(thinking).messages.create(stream=True, **body))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks, index = [], -1
    for event in events[1:-2]:
        if event.type == "content_block_start":
            index += 1
            blocks.append(event.content_block.type)
        assert event.index == index
    assert blocks == ["thinking", "text", "tool_use"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    pieces = [event.delta.thinking for event in events if getattr(event, "delta", None) and event.type ==
              "content_block_delta" and event.delta.type == "thinking_delta"]  # fmt: skip
    assert "".join(pieces) == "Hm, hm."
    whole = client(thinking).messages.create(**body)
    assert [block["type"] for block in told(whole)] == blocks and told(whole)[0]["thinking"] == "Hm, hm."
    assert whole.usage.output_tokens == events[-2].usage.output_tokens


def test_a_conversation_with_results(hermes: Server) -> None:
    first = client(hermes).messages.create(**asked(CALL, tools=[WEATHER]))
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [{"type": "text", "text": "Rain"}]}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": play("Yes.")}]},
    ]
    body = asked("", tools=[WEATHER], system=[{"type": "text", "text": "Be brief."}])
    second = client(hermes).messages.create(**{**body, "messages": messages})
    assert told(second) == [{"type": "text", "text": "Yes."}]


def test_tokens_are_counted_before(hermes: Server) -> None:
    body = asked("Hello", tools=[WEATHER], system="Be brief.")
    shown = {key: body[key] for key in ("model", "messages", "tools", "system")}
    counted = client(hermes).messages.count_tokens(**shown).input_tokens
    assert counted == prompt_tokens(client(hermes).messages.create(**body))
    assert client(hermes).messages.count_tokens(**{**shown, "tools": []}).input_tokens < counted


def test_usage_tells_what_the_prefix_cache_had(hermes: Server) -> None:
    body = asked("Yes.", system="A beginning that no other test has, and long enough for some blocks. " * 4)
    first, again = (client(hermes).messages.create(**body) for _ in range(2))
    assert first.usage.cache_read_input_tokens == 0 and again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens == first.usage.input_tokens - again.usage.cache_read_input_tokens > 0
    assert first.usage.cache_creation_input_tokens == again.usage.cache_creation_input_tokens == 0
    events = list(client(hermes).messages.create(stream=True, **body))
    started, ended = events[0].message.usage, events[-2].usage
    for usage in (started, ended):
        assert usage.input_tokens == again.usage.input_tokens
        assert usage.cache_read_input_tokens == again.usage.cache_read_input_tokens
    assert (started.output_tokens, ended.output_tokens) == (0, again.usage.output_tokens)


def test_thinking_can_be_left_out(thinking: Server) -> None:
    body = asked("<think>a</think>b")
    assert told(client(thinking).messages.create(**body, thinking={"type": "disabled"}))[-1]["text"].endswith("b")
    bound = {"type": "enabled", "budget_tokens": 199}  # of 200: more than it thinks
    assert told(client(thinking).messages.create(**body, thinking=bound))[0]["thinking"] == "a"
    called = asked(CALL, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    budget = {"type": "enabled", "budget_tokens": 100}  # there is no reasoning before a call that has to be
    assert told(client(thinking).messages.create(**called, thinking=budget)) == [USE]


@pytest.mark.parametrize("budget", [1, 7])
def test_a_budget_ends_the_thinking(thinking: Server, budget: int) -> None:
    """The model would think for longer; its words go on behind the tag, where they are the answer."""
    body = asked(f"<think>{'1234567890' * 6}", thinking={"type": "enabled", "budget_tokens": budget})
    whole, part = client(thinking).messages.create(**body), streamed(thinking, **body)
    for message in (whole, part):
        thought, text = told(message)
        assert thought["thinking"] == "1234567890"[:budget] and text["text"].startswith(tuple("1234567890"))
        assert len(text["text"]) > 30 and "</think>" not in text["text"]
    assert told(whole) == told(part)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 2}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0"),
    ({"tools": [WEATHER | {"input_examples": [{}]}]}, "input_examples"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, "continued"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"context_management": {"edits": [{"type": "other"}]}}, "context_management"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}}, "keep"),
    (
        {
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}]
            }
        },
        "beyond 100 tokens",
    ),
    ({"context_management": {"edits": [{"type": "compact_20260112", "trigger": {"type": "tool_uses"}}]}}, "beyond 0"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
    ({"tools": [WEATHER | {"strict": "yes"}]}, "strict"),
    ({"tools": [WEATHER], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ({"thinking": {"type": "hard"}}, "thinking"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"output_config": {"effort": "hard"}}, "output_config"),
    ({"output_config": {"task_budget": {}}}, "task_budget"),
    ({"output_config": {"format": {"type": "xml"}}}, "format"),
]


@pytest.mark.parametrize(("more", "words"), WRONG)
def test_errors_have_anthropics_shape(hermes: Server, more: dict[str, Any], words: str) -> None:
    answer = hermes.post("/v1/messages", {**asked("x"), **more})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


def test_other_errors(hermes: Server, narrow: Server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client(hermes).messages.create(**{**asked("x"), "model": "other"})
    with pytest.raises(anthropic.NotFoundError):
        client(hermes).messages.count_tokens(model="other", messages=asked("x")["messages"])
    with pytest.raises(anthropic.BadRequestError, match="chat template"):
        client(narrow).messages.create(**asked("x"))
    assert hermes.post("/v1/messages", "{").json()["error"]["message"].startswith("the body is not JSON")


def test_a_stream_that_breaks_says_so() -> None:
    from tests.serve.playing import checkpoint

    with Server(model=checkpoint("hermes"), faults={"plays": True, "break_at": 12}) as server:
        with pytest.raises(anthropic.APIStatusError, match="engine has failed"):
            streamed(server, **asked("a" * 100))
        assert server.process.poll() is None
