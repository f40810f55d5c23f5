"""/v1/messages and /v1/messages/count_tokens: Anthropic's endpoints."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from phasewise.serve.completions.answer import Answer, AnswerDelta
from phasewise.serve.completions.said import call_id
from phasewise.serve.completions.schema import ChatAsk
from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.messages.ask import CountAsk, MessagesAsk, error_body
from phasewise.serve.tools.deltas import OutputDelta

if TYPE_CHECKING:
    from phasewise.serve.service import Service

BLOCKS = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """The endpoints, on top of a service's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = [
            ("/v1/messages", self.create, MessagesAsk),
            ("/v1/messages/count_tokens", self.count, CountAsk),
        ]

    async def create(self, request: Request) -> Response:
        """The assistant's next message."""
        ask = self._chat(await self._service.read(MessagesAsk, request))
        order = await self._service.order_chat(ask)
        return await self._service.respond(request, order, MessageWriter(ask.model or self._service.name))

    async def count(self, request: Request) -> Response:
        """Counts the tokens of these messages' prompt."""
        ask = self._chat(await self._service.read(CountAsk, request))
        self._service.recipe(ask.model)
        return json_response({"input_tokens": len((await self._service.prompt(ask)).ids)})

    def _chat(self, ask: CountAsk) -> ChatAsk:
        """The same as a chat completion says it. Raises ApiError where the prompt might have to be edited."""
        beyond = ask.edited_beyond()
        if beyond is not None and beyond < self._service.llm.engine.reach(self._service.recipe(ask.model)):
            raise ApiError(400, "context_management: tool uses are not cleared here, nor is anything compacted, and "
                           f"that might be due beyond {beyond:,} tokens: leave such edits out", "context_management",
                           "unsupported_parameter")  # fmt: skip
        return ask.chat()


class MessageWriter:
    """Writes one message: its blocks are text, thinking and uses of tools, in the model's order."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._open: str | None = None  # the block under way
        self._blocks = 0  # begun so far
        self._end: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def body(self, answer: Answer, pieces: Sequence[AnswerDelta]) -> dict[str, Any]:
        """The whole message."""
        (piece,) = pieces
        content: list[dict[str, Any]] = []
        for delta in _deltas(piece):
            kind = BLOCKS[delta.kind]
            if delta.kind == "call" or not content or content[-1]["type"] != kind:
                content.append(_block(delta))
            if delta.kind != "call":
                content[-1][_KEYS[kind]] += delta.text
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _input(block["input"])
        return {**self._head, "content": content, **_ended(piece, answer), "usage": _usage(answer)}

    def chunk(self, piece: AnswerDelta, answer: Answer) -> str:
        """The events of a piece."""
        events = [self._start(answer)] if piece.first else []
        for delta in _deltas(piece):
            if delta.kind == "call" or self._open != BLOCKS[delta.kind]:
                events += [*self._stop(), self._begin(delta)]
            if delta.kind != "call":
                events.append(self._more(delta))
        if piece.finish:
            events += self._stop()
            self._end = _ended(piece, answer)
        return "".join(events)

    def last(self, answer: Answer) -> bytes:
        """Why and how it ended."""
        if not self._end:  # the client has gone
            return b""
        return (_event("message_delta", delta=self._end, usage=_usage(answer)) + _event("message_stop")).encode()

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""
        return f"event: error\ndata: {json.dumps(error_body(error))}\n\n".encode()

    def _start(self, answer: Answer) -> str:
        usage = {**_usage(answer), "output_tokens": 0}
        message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = usage
        return _event("message_start", message=message)

    def _begin(self, delta: OutputDelta) -> str:
        self._open, self._blocks = BLOCKS[delta.kind], self._blocks + 1
        block = _block(delta)
        block = {**block, "input": {}} if self._open == "tool_use" else block
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _more(self, delta: OutputDelta) -> str:
        kind = _DELTAS[BLOCKS[delta.kind]]
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind[0], kind[1]: delta.text})

    def _stop(self) -> Iterable[str]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._blocks - 1)]


_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {
    "text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _deltas(piece: AnswerDelta) -> list[OutputDelta]:
    if piece.deltas is not None:
        return piece.deltas
    return [OutputDelta("content", piece.text)] if piece.text else []


def _block(delta: OutputDelta) -> dict[str, Any]:
    """An empty block for what begins with this delta."""
    match BLOCKS[delta.kind]:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "tool_use":
            return {"type": "tool_use", "id": call_id(), "name": delta.text, "input": ""}
    return {"type": "text", "text": ""}


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object; what the model wrote wrongly is told as such."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed": text}


def _ended(piece: AnswerDelta, answer: Answer) -> dict[str, Any]:
    stopped = answer.choices[piece.index].text.stop if piece.finish == "stop" else None
    reason = "stop_sequence" if stopped is not None else REASONS[piece.finish or "stop"]
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(answer: Answer) -> dict[str, int]:
    """Tokens of the prompt and of the answer. Those that the prefix cache had are counted apart from the others, and
    none as written to it: every prompt is cached without being asked, and that costs nothing."""
    cached = answer.cached_tokens
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.output_tokens,
    }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
