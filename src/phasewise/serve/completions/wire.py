"""The JSON that clients get. Stream events are put together by hand: only the text of each is encoded per step."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.serve.completions.answer import Answer, AnswerDelta
from phasewise.serve.completions.logprobs import LogprobFormatter, TokenScore
from phasewise.serve.completions.said import Said, delta
from phasewise.serve.failures import ApiError, error_body

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class EndpointFormat:
    """The differences between endpoints: `object` of a whole answer and of a stream's events, and where the text is."""

    prefix: str  # of ids
    whole: str
    part: str
    content: Callable[[AnswerDelta], dict[str, Any]]  # in a choice of a whole answer
    delta: Callable[[AnswerDelta], str]  # JSON text, in a choice of an event
    logprobs: Callable[[LogprobFormatter, Sequence[TokenScore]], dict[str, Any]]
    each: bool = False  # whether every choice has the prompt's log-probabilities, or the answer


def _chat_delta(piece: AnswerDelta) -> str:
    if not (piece.text or piece.first):
        return '"delta": {}'
    if piece.deltas is not None:
        return f'"delta": {json.dumps(delta(piece))}'
    role = '"role": "assistant", ' if piece.first else ""
    return f'"delta": {{{role}"content": {json.dumps(piece.text)}}}'


def _chat_message(piece: AnswerDelta) -> dict[str, Any]:
    if piece.deltas is not None:
        return {"message": Said(piece.deltas).message()}
    return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}


COMPLETION = EndpointFormat(
    "cmpl", "text_completion", "text_completion",
    content=lambda piece: {"text": piece.text},
    delta=lambda piece: f'"text": {json.dumps(piece.text)}',
    logprobs=LogprobFormatter.completion, each=True,
)  # fmt: skip
CHAT = EndpointFormat(
    "chatcmpl", "chat.completion", "chat.completion.chunk",
    content=_chat_message,
    delta=_chat_delta,
    logprobs=LogprobFormatter.chat,
)  # fmt: skip


class AnswerWriter:
    """Writes one answer, whole or as events. `continuous`: usage so far in every event, and one for every step, whether
    there is text to tell or not."""

    def __init__(
        self, format: EndpointFormat, model: str, include_usage: bool = False, continuous: bool = False
    ) -> None:
        self._format, self._include_usage, self._continuous = format, include_usage, continuous
        self._head = {"id": f"{format.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        chunk = json.dumps({**self._head, "object": format.part})[:-1]
        self._open = f'data: {chunk}, "choices": [{{"index": '
        self._close = ', "usage": null}\n\n' if include_usage else "}\n\n"

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def body(self, answer: Answer, pieces: Sequence[AnswerDelta]) -> dict[str, Any]:
        """A whole answer."""
        choices: list[dict[str, Any]] = [
            {
                "index": piece.index, **self._format.content(piece), "logprobs": self._logprobs(piece, answer),
                "finish_reason": piece.finish,
            }
            for piece in pieces
        ]  # fmt: skip
        for piece, written in zip(pieces, choices):
            if piece.origins is not None:
                written["provenance"] = piece.origins
        body = {**self._head, "object": self._format.whole, "choices": choices, "usage": usage(answer)}
        for told, choice in zip(choices if self._format.each else [body], answer.choices):
            prompt = answer.prompt_logprobs(choice)
            if prompt is not None:
                told["prompt_logprobs"] = prompt
        return body

    def chunk(self, piece: AnswerDelta, answer: Answer) -> str:
        """The event of a piece; empty if the piece says nothing."""
        if not (piece.text or piece.first or piece.finish or piece.told or piece.origins or self._continuous):
            return ""
        finish = f'"{piece.finish}"' if piece.finish else "null"
        close = f', "usage": {_counted(answer)}}}\n\n' if self._continuous else self._close
        logprobs = "null" if piece.told is None else json.dumps(self._logprobs(piece, answer))
        content = f'{self._format.delta(piece)}, "logprobs": {logprobs}, "finish_reason": {finish}'
        if piece.origins is not None:
            content += f', "provenance": {json.dumps(piece.origins)}'
        return f"{self._open}{piece.index}, {content}}}]{close}"

    def _logprobs(self, piece: AnswerDelta, answer: Answer) -> dict[str, Any] | None:
        teller = answer.choices[piece.index].teller
        return None if teller is None or piece.told is None else self._format.logprobs(teller, piece.told)

    def last(self, answer: Answer) -> bytes:
        """The last event of a stream."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "object": self._format.part, "choices": [], "usage": usage(answer)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""
        return event(error_body(error)) + DONE


def usage(answer: Answer) -> dict[str, Any]:
    """A prompt counts once, however many samples it has; an end token counts as output."""
    prompt, output = answer.prompt_tokens, answer.output_tokens
    counted: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
    }  # fmt: skip
    if details := answer.details:
        counted["prompt_tokens_details"] = details
    return counted


def _counted(answer: Answer) -> str:
    """`usage` as JSON, for every event."""
    if answer.details:
        return json.dumps(usage(answer))
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return f'{{"prompt_tokens": {prompt}, "completion_tokens": {output}, "total_tokens": {prompt + output}}}'


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"
