"""Errors as the clients of each endpoint expect them: as a body, and as the last event of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phasewise.serve.failures import ApiError
from phasewise.serve.failures import error_body as openai_body
from phasewise.serve.messages.ask import error_body as anthropic_body

ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON of an error at this path: Anthropic's for its endpoints, OpenAI's for all others."""
    return anthropic_body(error) if path.startswith(ANTHROPIC) else openai_body(error)


def error_event(path: str, body: Mapping[str, Any], number: int = 0) -> bytes:
    """The event of an error with this `error_body`. `number`: which event of the stream it is, for /v1/responses."""
    if path == RESPONSES:
        told = body["error"]
        body = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"],
                "sequence_number": number}  # fmt: skip
    named = b"event: error\n" if path.startswith((ANTHROPIC, RESPONSES)) else b""
    return named + b"data: " + json.dumps(body).encode() + b"\n\n"
