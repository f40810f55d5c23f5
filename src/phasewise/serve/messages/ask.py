"""Anthropic's request: what /v1/messages takes, as the conversation that the rest of the server knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.serve.completions.fields import among, check
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, ChatAsk, Effort, in_parts, read
from phasewise.serve.failures import ApiError

# Fields that are not supported, each with the values that ask for nothing; null always asks for nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    "mcp_servers": ([],), "container": (), "speed": ("standard",), "fallbacks": ([],),
}  # fmt: skip
TOOL_REFUSED: dict[str, tuple[object, ...]] = {
    "defer_loading": (False,), "input_examples": ([],), "allowed_callers": (["direct"], []),
}  # fmt: skip
HARMLESS = frozenset({"metadata", "service_tier", "cache_control", "user_profile_id", "betas"})
CLEAR_THINKING = "clear_thinking_20251015"
TRIGGERS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}  # edits, and where they begin if unsaid
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class CountAsk(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")

    @model_validator(mode="after")
    def _supported(self) -> Self:
        check(self, REFUSED, HARMLESS)
        return self

    def chat(self) -> ChatAsk:
        """The same as OpenAI's clients say it. Raises ApiError."""
        return read(ChatAsk, json.dumps(self._fields()).encode())

    def _fields(self) -> dict[str, Any]:
        messages = [] if self.system is None else [{"role": "system", "content": _content(self.system, "system")}]
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{i}")
        forget(messages, _edits(self.context_management))
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": 1,
        }  # what is counted needs none
        if messages[-1]["role"] == "assistant":
            if "tool_calls" in messages[-1] or not messages[-1]["content"]:
                raise ApiError(400, "the last message is the assistant's and ends with no text, so it cannot be "
                               "continued", "messages")  # fmt: skip
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        fields |= _output(self.output_config or {}, self.output_format)
        if self.thinking is not None:
            fields |= _thinking(self.thinking)
        return fields

    def edited_beyond(self) -> int | None:
        """The tokens of a prompt beyond which it would be edited in a way that is not supported; None: it never is."""
        found = [each for each in _edits(self.context_management) if each["type"] != CLEAR_THINKING]
        return min((_trigger(each) for each in found), default=None)


class MessagesAsk(CountAsk):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] | None = None

    def _fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return {**super()._fields(), **own, "stop": self.stop_sequences}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error, as a response's body or as an event in a stream."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _content(content: Any, where: str) -> Any:
    """A string, or blocks of text, as a message's content. Raises ApiError for others."""
    return in_parts(_texts(content, where))


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a string, or of blocks of text. Raises ApiError for others."""
    if isinstance(content, str):
        return [content]
    blocks: list[Any] = content if isinstance(content, list) else [None]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"{where}: must be a string, or a list of blocks of text; others are not supported",
                           where.partition(".")[0])  # fmt: skip
    return [block["text"] for block in blocks]


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message, as one or more: each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}: role must be user, assistant or system", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: content must be a string or a list of blocks", "messages")
    if role == "system":
        return [{"role": role, "content": _content(content, where)}]
    return _answer(content, where) if role == "assistant" else _asked(content, where)


def _answer(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts: list[str] = []
    reasoning, calls = "", []
    for i, block in enumerate(blocks):
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning += thought
            case {"type": "redacted_thinking", "data": str()}:
                continue  # nobody but who wrote it can read it
            case _:
                texts += _texts([block], f"{where}.content.{i}")
    message: dict[str, Any] = {"role": "assistant", "content": in_parts(texts)}
    extra = {"reasoning_content": reasoning, "tool_calls": calls}
    return [message | {key: value for key, value in extra.items() if value}]


def _asked(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []  # of the user's message under way
    for i, block in enumerate(blocks):
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                content = _content(block.get("content") or "", f"{where}.content.{i}")
                found.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                if not found or found[-1]["role"] != "user":
                    found.append({"role": "user"})
                    texts = []
                texts += _texts([block], f"{where}.content.{i}")
                found[-1]["content"] = in_parts(texts)
    return found or [{"role": "user", "content": ""}]


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise ApiError(400, f"tools.{i}: tools of type {tool['type']!r} are not supported", "tools")
    for name, harmless in TOOL_REFUSED.items():
        value = tool.get(name)
        if value is not None and not among(value, harmless):
            raise ApiError(400, f"tools.{i}: {name} is not supported here; leave it out", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = choice.get("type"), choice.get("name")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool" and isinstance(name, str):
        return fields | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in CHOICES:
        raise ApiError(400, "tool_choice: type must be auto, any, none, or tool with a name", "tool_choice")
    return fields | {"tool_choice": CHOICES[str(kind)]}


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    match thinking.get("type"):
        case "disabled":
            return {"thinking_token_budget": 0}
        case "adaptive":
            return {}
        case "enabled":
            budget = thinking.get("budget_tokens")
            if type(budget) is not int or not 1 <= budget <= AS_MANY_AS_FIT:
                most = f"of 1 to {AS_MANY_AS_FIT}"
                raise ApiError(400, f"thinking: budget_tokens must be a whole number {most}", "thinking")
            return {"thinking_token_budget": budget}
    raise ApiError(400, "thinking: type must be adaptive, enabled or disabled", "thinking")


def _output(config: Mapping[str, Any], older: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what `output_config` asks for, as a chat completion says it. Raises ApiError."""
    other = next((name for name, value in config.items() if name not in ("effort", "format") and value is not None), "")
    if other:
        raise ApiError(400, f"output_config: {other} is not supported here; leave it out", "output_config",
                       "unsupported_parameter")  # fmt: skip
    effort, format = config.get("effort"), config.get("format") or older
    fields: dict[str, Any] = {}
    if effort is not None:
        if effort not in get_args(Effort):
            raise ApiError(400, f"output_config: effort must be one of {', '.join(get_args(Effort))}", "output_config")
        fields["reasoning_effort"] = effort
    if format is not None:
        if not isinstance(format, Mapping) or format.get("type") != "json_schema" or "schema" not in format:
            raise ApiError(400, "output_config: format must be json_schema with a schema", "output_config")
        named = {"name": "answer", "schema": format["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


# ---- edits of the conversation
def _edits(management: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The edits asked for. Raises ApiError for others than are known."""
    edits = (management or {}).get("edits") or []
    for name in management or {}:
        if name != "edits":
            raise ApiError(400, f"context_management: {name} is not supported here; leave it out", "context_management")
    for each in edits if isinstance(edits, list) else [None]:
        if not isinstance(each, dict) or each.get("type") not in (CLEAR_THINKING, *TRIGGERS):
            known = ", ".join((CLEAR_THINKING, *TRIGGERS))
            raise ApiError(400, f"context_management: edits are a list, each of a type of {known}",
                           "context_management", "unsupported_parameter")  # fmt: skip
    return list(edits)


def _trigger(edit: Mapping[str, Any]) -> int:
    """The tokens of a prompt beyond which an edit acts; 0 where something else is counted."""
    trigger = edit.get("trigger") or {"type": "input_tokens", "value": TRIGGERS[edit["type"]]}
    value = trigger.get("value") if isinstance(trigger, Mapping) and trigger.get("type") == "input_tokens" else None
    return value if type(value) is int else 0


def forget(messages: list[dict[str, Any]], edits: Sequence[Mapping[str, Any]]) -> None:
    """Take the reasoning out of all answers but the last ones, as an edit of type CLEAR_THINKING asks: it keeps
    `all`, or that of the last `thinking_turns`. Raises ApiError."""
    for edit in edits:
        if edit["type"] != CLEAR_THINKING or edit.get("keep") == "all":
            continue
        match edit.get("keep") or {"type": "thinking_turns", "value": 1}:
            case {"type": "all"}:
                continue
            case {"type": "thinking_turns", "value": int(kept)} if kept > 0:
                thought = [message for message in messages if "reasoning_content" in message]
                for message in thought[: max(len(thought) - kept, 0)]:
                    del message["reasoning_content"]
            case _:
                raise ApiError(400, "context_management: keep must be all, or thinking_turns with a value of 1 or "
                               "more", "context_management")  # fmt: skip
