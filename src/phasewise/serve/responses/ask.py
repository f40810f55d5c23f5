"""Turns the body of /v1/responses into the conversation that the rest of the server knows."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.serve.completions.fields import HARMLESS, check
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, ChatAsk, in_parts, read, reasoning_budget
from phasewise.serve.completions.structured import wanted
from phasewise.serve.failures import ApiError

# Fields that are not supported, each with the values that ask for nothing; null always asks for nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    "background": (False,), "conversation": (), "max_tool_calls": (), "prompt": (),
    "context_management": ([],), "truncation": ("disabled",), "top_logprobs": (0,), "moderation": (),
    "stream_options": ({}, {"include_obfuscation": False}),
}  # fmt: skip
RESPONSES_HARMLESS = HARMLESS | {"client_metadata"}
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = {  # reasoning to be sent back, and what comes of tools and images that there are none of here
    ENCRYPTED, "web_search_call.results", "web_search_call.action.sources", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url",
}  # fmt: skip
HOSTED = ("web_search", "web_search_preview", "image_generation")  # run by OpenAI: no model here is shown them
ROLES = ("user", "assistant", "system", "developer")
SYSTEM = ("system", "developer")
Item = dict[str, Any]


class ResponsesAsk(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    after: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = Field(
        None, description="format: text, json_object, or json_schema with a schema; verbosity: low, medium, high"
    )
    reasoning: dict[str, Any] | None = Field(None, description="effort, max_tokens; summary: reasoning is told whole")
    include: list[str] | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        check(self, REFUSED, RESPONSES_HARMLESS)
        other = next((name for name in self.include or () if name not in INCLUDED), None)
        if other is not None:
            raise ApiError(400, f"include: {other} is not supported here; leave it out", "include",
                           "unsupported_parameter")  # fmt: skip
        return self

    def custom(self) -> frozenset[str]:
        """The names of tools whose calls hold a text, not arguments."""
        return frozenset(str(tool.get("name")) for _, tool in _each(self.tools or ()) if tool.get("type") == "custom")

    def spaces(self) -> dict[str, tuple[str, str]]:
        """Of tools in a namespace, by the name that the model knows: the namespace, and their name in it."""
        spaces = [tool for tool in self.tools or () if tool.get("type") == "namespace"]
        return {
            in_space(space["name"], tool["name"]): (space["name"], tool["name"])
            for space in spaces for tool in space["tools"]
        }  # fmt: skip

    def items(self) -> list[Item]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, earlier: Sequence[Item]) -> ChatAsk:
        """The same, after `earlier` items, as a chat completion says it. Raises ApiError."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = _one_system([*messages, *_messages([*earlier, *self.items()], len(earlier))])
        same = ("model", "stream", "parallel_tool_calls", "temperature", "top_p", "after")
        fields = {name: getattr(self, name) for name in same}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            fields["tools"] = [_tool(tool, at) for at, tool in _each(self.tools) if tool.get("type") not in HOSTED]
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
        if self.text is not None:
            fields["response_format"] = _format(self.text)
            fields["verbosity"] = self.text.get("verbosity")
        fields |= _reasoning(self.reasoning or {})
        if not messages:
            raise ApiError(400, "input has no items", "input", "invalid_value")
        return read(ChatAsk, json.dumps(fields).encode())


def _messages(items: Sequence[Any], given: int) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls that follow each other are one message of the assistant.

    The first `given` come from elsewhere, and do not count in what errors say.
    """
    found: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input.{i - given}"
        match item:
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                name = in_space(item.get("namespace"), name)
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                _assistant(found).setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                found.append({"role": "tool", "tool_call_id": id, "content": in_parts(_texts(output, where))})
            case {"type": "custom_tool_call", "call_id": str(id), "name": str(name), "input": str(text)}:
                name = in_space(item.get("namespace"), name)
                function = {"name": name, "arguments": json.dumps({"input": text}, ensure_ascii=False)}
                _assistant(found).setdefault("tool_calls", []).append(
                    {"id": id, "type": "function", "function": function}
                )
            case {"type": "custom_tool_call_output", "call_id": str(id), "output": output}:
                found.append({"role": "tool", "tool_call_id": id, "content": in_parts(_texts(output, where))})
            case {"type": "reasoning"}:
                thought = "".join(_texts(item.get("content") or [], where)) or opened(item.get("encrypted_content"))
                found.append({"role": "assistant", "content": "", "reasoning_content": thought})
            case {"role": "assistant", "content": content}:
                _assistant(found, fresh=True)["content"] = in_parts(_texts(content, where))
            case {"role": str(role), "content": content} if role in ROLES:
                found.append({"role": role, "content": in_parts(_texts(content, where))})
            case _:
                raise ApiError(400, f"{where}: must be a message, function_call, custom_tool_call, the output of one, "
                               "or reasoning; other items are not supported", "input", "invalid_value")  # fmt: skip
    return found


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the system's messages at the beginning as one: most templates have room for no more."""
    count = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM), len(messages))
    if count < 2:
        return messages
    texts = [content if isinstance(content, str) else "".join(part["text"] for part in content)
             for content in (message["content"] for message in messages[:count])]  # fmt: skip
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]


def sealed(thought: str) -> str:
    """Reasoning as `encrypted_content`: base64, so that clients that keep nothing else of it send it back."""
    return base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def opened(content: Any) -> str:
    """The reasoning in `encrypted_content`; "" for what another server has encrypted, which nobody else can read."""
    try:
        return base64.b64decode(str(content or ""), validate=True).decode()
    except ValueError:
        return ""


def _assistant(found: list[dict[str, Any]], fresh: bool = False) -> dict[str, Any]:
    """The assistant's message under way; `fresh`: one that says nothing yet but what it thought."""
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if last is None or (fresh and (last["content"] or "tool_calls" in last)):
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "reasoning_text") or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}: the only content parts supported are input_text, output_text and "
                           "reasoning_text", "input", "invalid_value")  # fmt: skip
    return [part["text"] for part in parts]


def in_space(namespace: Any, name: str) -> str:
    """What the model knows a tool of a namespace by; of none (None): its name."""
    return f"{namespace}__{name}" if namespace else name


def _each(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the tools, those of a namespace one by one, and where each stands. Raises ApiError."""
    for i, tool in enumerate(tools):
        if tool.get("type") != "namespace":
            yield f"tools.{i}", tool
            continue
        match tool:
            case {"name": str(space), "tools": [*inner]} if all(_named(each) for each in inner):
                pass
            case _:
                raise ApiError(400, f"tools.{i}: a namespace has a name, and tools that have names", "tools")
        for j, each in enumerate(inner):
            about = "\n".join(str(one["description"]) for one in (tool, each) if one.get("description"))
            yield f"tools.{i}.tools.{j}", {**each, "name": in_space(space, each["name"]), "description": about}


def _named(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("name"), str)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function; a tool that takes a free text becomes a function of one argument, `input`. Raises ApiError."""
    if tool.get("type") == "custom":
        return {"type": "function", "function": _custom(tool, where)}
    if tool.get("type") != "function":
        raise ApiError(400, f"{where}: tools of type {tool.get('type')!r} are not supported", "tools")
    given = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": given}


def _custom(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    format = tool.get("format") or {"type": "text"}
    description = str(tool.get("description") or "")
    match format:
        case {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            description += f"\n\nThe input follows this grammar ({syntax}):\n{definition}"
        case _:
            raise ApiError(400, f"{where}: format must be text, or grammar with a syntax and a definition", "tools")
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                  "additionalProperties": False}  # fmt: skip
    return {"name": tool.get("name"), "description": description.strip(), "parameters": parameters}


def _reasoning(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `reasoning` asks for, as a chat completion says it. Raises ApiError."""
    return {"reasoning_effort": reasoning.get("effort"), "thinking_token_budget": reasoning_budget(reasoning)}


def _format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its flat format as a chat completion's. Raises ApiError."""
    other = next(
        (name for name, value in text.items() if name not in ("format", "verbosity") and value is not None), None
    )
    if other is not None:
        raise ApiError(400, f"text: {other} is not supported here; leave it out", "text", "unsupported_parameter")
    if text.get("verbosity") not in (None, "low", "medium", "high"):
        raise ApiError(400, "text: verbosity must be low, medium or high", "text", "invalid_value")
    given = text.get("format")
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        inner = {key: value for key, value in given.items() if key != "type"}
        given = {"type": "json_schema", "json_schema": inner}
    try:
        wanted({"response_format": given})
    except ApiError as error:
        raise ApiError(400, str(error).replace("response_format", "text.format", 1), "text", error.code) from error
    return given


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        name = in_space(choice.get("namespace"), choice["name"]) if _named(choice) else choice.get("name")
        return {"type": "function", "function": {"name": name}}
    return choice
