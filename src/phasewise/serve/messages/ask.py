"""Anthropic's request: what /v1/messages takes, as the conversation that the rest of the server knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.serve.completions.fields import among, check
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, ChatAsk, in_parts, read
from phasewise.serve.failures import ApiError

# Fields that are not supported, each with the values that ask for nothing; null always asks for nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    "mcp_servers": ([],), "container": (), "context_management": (), "output_config": ({},), "output_format": (),
    "speed": ("standard",), "fallbacks": ([],),
}  # fmt: skip
TOOL_REFUSED: dict[str, tuple[object, ...]] = {
    "defer_loading": (False,), "input_examples": ([],), "allowed_callers": (["direct"], []),
}  # fmt: skip
HARMLESS = frozenset({"metadata", "service_tier", "cache_control", "user_profile_id"})
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
        if messages[-1]["role"] == "assistant":
            raise ApiError(400, "the last message is the assistant's: continuing one is not supported", "messages")
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        if self.thinking is not None:
            fields |= _thinking(self.thinking)
        return fields


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
                content = _content(block.get("content", ""), f"{where}.content.{i}")
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
            return {"chat_template_kwargs": {"enable_thinking": False}}
        case "adaptive":
            return {}
        case "enabled":
            raise ApiError(400, "thinking: a budget is not supported; models that reason do so unless it is disabled "
                           "(adaptive)", "thinking", "unsupported_parameter")  # fmt: skip
    raise ApiError(400, "thinking: type must be adaptive or disabled", "thinking")
