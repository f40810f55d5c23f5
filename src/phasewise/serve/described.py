"""The server's OpenAPI document: every status that an endpoint may answer with, and what an error looks like."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

ERROR: dict[str, Any] = {
    "type": "object", "required": ["error"], "additionalProperties": False,
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"], "additionalProperties": False,
        "properties": {
            "message": {"type": "string"},
            "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
            "param": {"type": ["string", "null"], "description": "the field at fault"},
            "code": {"type": ["string", "null"], "description": "a word for programs"},
        },
    }},
}  # fmt: skip
ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object", "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": {
        "type": "object", "required": ["type", "message"],
        "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
    }},
}  # fmt: skip
MEANINGS = {
    400: "The request is wrong; `param` names the field.", 401: "There is no API key, or an unknown one.",
    403: "The key may not do this.", 404: "There is no such model.",
    409: "Something still needs it, or it is over.",
    408: "The body did not arrive in time, or the answer was not complete within its timeout.",
    413: "The body is too large.", 429: "Too much is asked for at a time: try again after Retry-After seconds.",
    500: "The request failed.", 503: "The engine has failed, or the server is shutting down.",
}  # fmt: skip
POSTED = tuple(status for status in MEANINGS if status != 409)
Answers = dict[int | str, dict[str, Any]]


def error_of(path: str) -> dict[str, Any]:
    """The schema of an error of this route."""
    return ANTHROPIC_ERROR if path.startswith("/v1/messages") else ERROR


def answers(*failures: int, kinds: tuple[str, ...] = ("application/json",), error: dict[str, Any] = ERROR) -> Answers:
    """Describes a route's answers: one of `kinds` on success, and these failures as JSON."""
    good: dict[str, Any] = {kind: {"schema": {}} for kind in kinds}
    found: Answers = {200: {"description": "The answer.", "content": good}}
    for status in failures:
        found[status] = {"description": MEANINGS[status], "content": {"application/json": {"schema": error}}}
    return found


def asks(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description that says what its body is."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def describe(app: FastAPI) -> None:
    """Leave out of the document what the framework answers elsewhere, and this server never does."""
    written = app.openapi

    def document() -> dict[str, Any]:
        whole = written()
        for path in whole["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return whole

    app.openapi = document  # type: ignore[method-assign]
