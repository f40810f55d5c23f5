"""Deltas in OpenAI's words: messages of chat completions, and what is new of them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from phasewise.serve.completions.answer import AnswerDelta
from phasewise.serve.tools.deltas import OutputDelta


def call_id() -> str:
    """Nine letters and digits: the form that every template takes, Mistral's too."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class Call:
    """A tool call: its arguments are JSON text, as far as the model knows JSON."""

    name: str
    id: str = field(default_factory=call_id)
    arguments: str = ""

    def openai(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Said:
    """All that an answer says."""

    def __init__(self, deltas: Iterable[OutputDelta]) -> None:
        self.content, self.reasoning = "", ""
        self.calls: list[Call] = []
        for delta in deltas:
            match delta.kind:
                case "content":
                    self.content += delta.text
                case "reasoning":
                    self.reasoning += delta.text
                case "call":
                    self.calls.append(Call(delta.text))
                case "arguments":
                    self.calls[delta.index].arguments += delta.text

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.openai() for call in self.calls]
        return message


def delta(piece: AnswerDelta) -> dict[str, Any]:
    """The part of the message that a piece adds: the id and the name of a call once, where it begins."""
    new: dict[str, Any] = {"role": "assistant"} if piece.first else {}
    calls: dict[int, dict[str, Any]] = {}
    for one in piece.deltas or ():
        match one.kind:
            case "content":
                new["content"] = new.get("content", "") + one.text
            case "reasoning":
                new["reasoning_content"] = new.get("reasoning_content", "") + one.text
            case "call":
                calls[one.index] = {"index": one.index, **Call(one.text).openai()}
            case "arguments":
                call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += one.text
    if piece.first and not calls:
        new.setdefault("content", "")
    if calls:
        new["tool_calls"] = list(calls.values())
    return new
