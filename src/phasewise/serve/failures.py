"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from phasewise.errors import PhasewiseError, UserError

_PATH = re.compile(r"(?<![\w:/.~])~?/[\w.+@%-]+(?:/[\w.+@%-]*)+")
SHUTDOWN = "the server is shutting down"


class ServerBusy(PhasewiseError):
    """The server has as many live requests as it takes; clients should try again later."""


class Unavailable(PhasewiseError):
    """The engine has failed, or the server is shutting down."""


class ApiError(PhasewiseError):
    """An error with its HTTP status; `param` is the request field at fault, `code` a word for programs,
    `retry` the seconds after which the same may succeed, `headers` go into the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry
        self.headers = dict(headers or {})


def api_error(error: Exception) -> ApiError:
    """Any exception as an ApiError. Those not raised on purpose become a 500 that shows no internals."""
    match error:
        case ApiError():
            return error
        case ServerBusy():
            return ApiError(429, str(error), code="queue_full")
        case Unavailable():
            return ApiError(503, str(error), code="unavailable")
        case UserError():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            return ApiError(500, "an internal error; the server's log has the details", code="internal_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error, as a response's body or as an event in a stream."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    message = without_paths(str(error)) if error.status >= 500 else str(error)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def without_paths(reason: str) -> str:
    """A reason that was not written for clients, without the places of this machine that it names."""
    return _PATH.sub("...", reason)


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(body, allow_nan=False)  # NaN is no JSON: whoever reads the body could read none of it
    return Response(text, status, dict(headers or {}), media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers)
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)
