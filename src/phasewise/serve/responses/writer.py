"""Writes one response of /v1/responses, whole or as its typed events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasewise.serve.completions.answer import Answer, AnswerDelta
from phasewise.serve.completions.said import call_id
from phasewise.serve.failures import ApiError
from phasewise.serve.responses.ask import ENCRYPTED, ResponsesAsk, sealed
from phasewise.serve.tools.deltas import OutputDelta

ITEMS = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}


class ResponseWriter:
    """`keep` is told the finished response, and says whether it is kept."""

    def __init__(self, ask: ResponsesAsk, model: str, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        self._keep, self._number = keep, -1
        self._custom, self._spaces = ask.custom(), ask.spaces()
        self._sealed = ENCRYPTED in (ask.include or ())
        self._arguments = ""  # of a call that is to hold a text
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item is under way
        self._finish: str | None = None
        choice = "auto" if ask.tool_choice is None else ask.tool_choice
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "error": None, "incomplete_details": None, "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens, "metadata": ask.metadata or {},
            "parallel_tool_calls": ask.parallel_tool_calls is not False,
            "previous_response_id": ask.previous_response_id, "store": ask.store is not False,
            "temperature": 1.0 if ask.temperature is None else ask.temperature,
            "reasoning": {"effort": None, "summary": None, **(ask.reasoning or {})},
            "text": {"format": {"type": "text"}, **(ask.text or {})}, "tool_choice": choice, "tools": ask.tools or [],
            "top_p": 1.0 if ask.top_p is None else ask.top_p, "truncation": "disabled",
        }  # fmt: skip

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def body(self, answer: Answer, pieces: Sequence[AnswerDelta]) -> dict[str, Any]:
        """The whole response."""
        for piece in pieces:
            self.chunk(piece, answer)
        return self._ended(answer)

    def chunk(self, piece: AnswerDelta, answer: Answer) -> str:
        """The events of a piece."""
        events = []
        if piece.first:
            begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
            events += [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]
        for delta in _deltas(piece):
            if delta.kind == "call" or not self._open or not self._goes_on(delta):
                events += self._stop("completed") + self._begin(delta)
            if delta.kind != "call":
                events += self._more(delta)
        if piece.finish:
            self._finish = piece.finish
            events += self._stop("incomplete" if piece.finish == "length" else "completed")
        return "".join(events)

    def last(self, answer: Answer) -> bytes:
        """The last event of the stream."""
        if self._finish is None:  # the client has gone
            return b""
        body = self._ended(answer)
        return self._event(f"response.{body['status']}", response=body).encode()

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""
        told = {"code": "server_error", "message": str(error)}
        body = {**self._head, "status": "failed", "error": told, "output": self._output, "usage": None}
        return self._event("response.failed", response=body).encode()

    def _ended(self, answer: Answer) -> dict[str, Any]:
        given, made = answer.prompt_tokens, answer.output_tokens
        usage: dict[str, Any] = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
        if details := answer.details:
            usage["input_tokens_details"] = details
        body = {**self._head, "status": "completed", "output": self._output, "usage": usage}
        if self._finish == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        body["store"] = body["store"] and self._keep(body)
        return body

    # ---- one item
    def _goes_on(self, delta: OutputDelta) -> bool:
        kind = self._output[-1]["type"]
        return bool(("function_call" if kind == CUSTOM else kind) == ITEMS[delta.kind])

    def _begin(self, delta: OutputDelta) -> list[str]:
        kind, self._open = ITEMS[delta.kind], True
        if kind == "function_call" and delta.text in self._custom:
            kind, self._arguments = CUSTOM, ""
        item: dict[str, Any] = {"type": kind, "id": f"{_IDS[kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        match kind:
            case "message":
                item |= {"role": "assistant", "content": []}
            case "reasoning":
                item |= {"summary": [], "content": []}
            case "custom_tool_call":
                item |= {"call_id": call_id(), **self._name(delta.text), "input": ""}
            case _:
                item |= {"call_id": call_id(), **self._name(delta.text), "arguments": ""}
        self._output.append(item)
        events = [self._event("response.output_item.added", output_index=self._at, item=item)]
        if kind in ("message", "reasoning"):
            item["content"].append(_part(kind))
            events += self._part("added") if kind == "message" else []
        return events

    def _name(self, known: str) -> dict[str, str]:
        """A tool's name in a call's item, and its namespace, by the name that the model knows."""
        if known not in self._spaces:
            return {"name": known}
        namespace, name = self._spaces[known]
        return {"name": name, "namespace": namespace}

    def _more(self, delta: OutputDelta) -> list[str]:
        item, told = self._output[-1], {"delta": delta.text}
        match item["type"]:
            case "custom_tool_call":
                self._arguments += delta.text  # JSON, of which the text is known at its end
                return []
            case "function_call":
                item["arguments"] += delta.text
                return [self._event("response.function_call_arguments.delta", **self._where(), **told)]
            case "reasoning":
                item["content"][0]["text"] += delta.text
                return [self._event("response.reasoning_text.delta", **self._where(), content_index=0, **told)]
        item["content"][0]["text"] += delta.text
        more = {"content_index": 0, "delta": delta.text, "logprobs": []}
        return [self._event("response.output_text.delta", **self._where(), **more)]

    def _stop(self, status: str) -> list[str]:
        if not self._open:
            return []
        item, self._open = self._output[-1], False
        item["status"] = status
        match item["type"]:
            case "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                events = [self._event("response.function_call_arguments.done", **self._where(), **done)]
            case "custom_tool_call":
                item["input"] = _input(self._arguments)
                events = [
                    self._event("response.custom_tool_call_input.delta", **self._where(), delta=item["input"]),
                    self._event("response.custom_tool_call_input.done", **self._where(), input=item["input"]),
                ]
            case "reasoning":
                if self._sealed:
                    item["encrypted_content"] = sealed(item["content"][0]["text"])
                done = {"content_index": 0, "text": item["content"][0]["text"]}
                events = [self._event("response.reasoning_text.done", **self._where(), **done)]
            case _:
                done = {"content_index": 0, "text": item["content"][0]["text"], "logprobs": []}
                events = [self._event("response.output_text.done", **self._where(), **done), *self._part("done")]
        return [*events, self._event("response.output_item.done", output_index=self._at, item=item)]

    def _part(self, what: str) -> list[str]:
        part = self._output[-1]["content"][0]
        return [self._event(f"response.content_part.{what}", **self._where(), content_index=0, part=part)]

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": self._at}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        body = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n"


CUSTOM = "custom_tool_call"
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", CUSTOM: "ctc"}


def _input(arguments: str) -> str:
    """The text in the arguments of a call that takes one; the model's own words where it has written others."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _deltas(piece: AnswerDelta) -> list[OutputDelta]:
    if piece.deltas is not None:
        return piece.deltas
    return [OutputDelta("content", piece.text)] if piece.text else []
