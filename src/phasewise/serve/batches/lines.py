"""The lines of a batch: {"custom_id", "method": "POST", "url", "body"} in, {"custom_id", "response", "error"} out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.errors import UserError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
FIELDS = ("custom_id", "method", "url", "body")
TOLD = 100  # mistakes that are named of one file


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request: which line it is, from 0, the name that its client gave it, where it goes, and its body as JSON."""

    number: int
    custom_id: str
    url: str
    body: bytes


class LineError(UserError):
    """A line that is no request. `line` counts from 1, `code` is a word for programs, `param` the field at fault."""

    def __init__(self, line: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"line {line}: {message}")
        self.line, self.code, self.param = line, code, param

    def told(self) -> dict[str, Any]:
        """The error as a batch's `errors` have it."""
        return {"code": self.code, "message": str(self), "param": self.param, "line": self.line}


def parse(number: int, text: bytes, endpoint: str | None) -> BatchLine:
    """A line as a request to `endpoint` (None: to any of them). Raises LineError."""
    at = number + 1
    custom_id, method, url, body = _fields(at, text)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise LineError(at, "invalid_custom_id", "custom_id must be a text of 1 to 512 characters", "custom_id")
    if method != "POST":
        raise LineError(at, "invalid_method", f"method must be POST, not {method!r}", "method")
    there = (endpoint,) if endpoint is not None else ENDPOINTS
    if url not in there:
        raise LineError(at, "mismatched_url", f"url must be {' or '.join(there)}, not {url!r}", "url")
    if not isinstance(body, Mapping):
        raise LineError(at, "invalid_request", "body must be a JSON object", "body")
    if body.get("stream"):
        raise LineError(at, "invalid_request", "a line cannot stream: leave stream out of its body", "body.stream")
    return BatchLine(number, custom_id, url, json.dumps(body).encode())


def _fields(at: int, text: bytes) -> list[Any]:
    """The values of `FIELDS` in line `at`, which has these and no others. Raises LineError."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(at, "invalid_json_line", f"this is not JSON ({error})") from error
    if not isinstance(said, Mapping):
        raise LineError(at, "invalid_request", "this is no JSON object")
    for field in FIELDS:
        if field not in said:
            raise LineError(at, "missing_required_parameter", f"{field} is required", field)
    unknown = next((field for field in said if field not in FIELDS), None)
    if unknown is not None:
        raise LineError(
            at, "invalid_request", f"{unknown!r} is no field of a line: it has {', '.join(FIELDS)}", unknown
        )
    return [said[field] for field in FIELDS]


def checked(lines: Iterable[bytes], endpoint: str | None, most: int) -> tuple[int, list[LineError]]:
    """The number of lines, and what is wrong with them; at most `TOLD` mistakes are looked for. Empty lines are left
    out."""
    seen: dict[str, int] = {}
    wrong: list[LineError] = []
    for number, text in numbered(lines):
        try:
            line = parse(number, text, endpoint)
            if line.custom_id in seen:
                first = seen[line.custom_id]
                raise LineError(number + 1, "duplicate_custom_id",
                                f"custom_id {line.custom_id!r} is that of line {first}, too", "custom_id")  # fmt: skip
            seen[line.custom_id] = number + 1
        except LineError as error:
            wrong.append(error)
        if len(wrong) >= TOLD:
            break
        if len(seen) > most:
            wrong.append(LineError(number + 1, "too_many_lines", f"a batch may have {most} lines"))
            break
    if not seen and not wrong:
        wrong.append(LineError(1, "empty_file", "the file has no lines"))
    return len(seen), wrong


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, each with its number in the file, from 0."""
    return ((number, text) for number, text in enumerate(lines) if text.strip())


def answered(line: BatchLine, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The line that tells what a request was answered, be it an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _id(), "custom_id": line.custom_id, "response": response, "error": None}


def unanswered(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The line of a request that was never asked."""
    return {"id": _id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
