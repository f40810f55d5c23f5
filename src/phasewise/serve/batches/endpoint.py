"""/v1/files and /v1/batches, as OpenAI's clients know them."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse
from starlette.types import Message

from phasewise.serve.batches.folder import BLOCK, OVER, BatchFolder
from phasewise.serve.batches.runner import BatchRunner
from phasewise.serve.completions.schema import read
from phasewise.serve.completions.stream import BODY_SECONDS, Bodies
from phasewise.serve.described import POSTED, answers, asks
from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.guard.context import CURRENT
from phasewise.serve.guard.policy import BatchPolicy

if TYPE_CHECKING:
    from phasewise.serve.guard.keys import KeyRing

WINDOW = 24 * 3600  # seconds that a batch has
AROUND = 1 << 16  # bytes that a form may have beside its file
FORM = ("file", "purpose")
NAME = re.compile(r"[\w. -]{1,200}")
T = TypeVar("T")


class BatchAsk(BaseModel):
    """POST /v1/batches"""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class BatchEndpoints:
    """The endpoints. Everything belongs to the key that made it; without keys, to everybody."""

    def __init__(self, runner: BatchRunner, policy: BatchPolicy) -> None:
        self._runner, self._folder, self._policy, self._bodies = runner, runner.folder, policy, Bodies()

    def add_to(self, app: FastAPI) -> None:
        """Adds them to an application, each described with what it answers."""
        plain, found = Response, answers(401, 404)
        form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
            "type": "object", "required": list(FORM), "properties": {
                "file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"},
            },
        }}}}}  # fmt: skip
        listed, posted, kept = answers(400, 401), answers(*POSTED), answers(401, 404, 409)
        content = answers(401, 404, kinds=("application/octet-stream",))
        routes: Sequence[tuple[str, str, Callable[..., Awaitable[Response]], Any, Any]] = (
            ("POST", "/v1/files", self.upload, posted, form),
            ("GET", "/v1/files", self.list_files, listed, None),
            ("GET", "/v1/files/{id}", self.file, found, None),
            ("GET", "/v1/files/{id}/content", self.content, content, None),
            ("DELETE", "/v1/files/{id}", self.delete, kept, None),
            ("POST", "/v1/batches", self.create, posted, asks(BatchAsk)),
            ("GET", "/v1/batches", self.list_batches, listed, None),
            ("GET", "/v1/batches/{id}", self.batch, found, None),
            ("POST", "/v1/batches/{id}/cancel", self.cancel, answers(401, 404, 409, 429), None),
        )
        for method, path, endpoint, said, extra in routes:
            app.add_api_route(
                path, endpoint, methods=[method], responses=said, response_class=plain, openapi_extra=extra
            )

    # ---- files
    async def upload(self, request: Request) -> Response:
        """A file of requests, as multipart/form-data."""
        form = await _form(request, self._policy.file_bytes)
        try:
            wrong = next((name for name in form if name not in FORM), None)
            if wrong is not None:
                raise ApiError(400, f"unknown field {wrong!r}: give file and purpose", wrong)
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(
                    400, "file is required, as a part with a file name", "file", "missing_required_parameter"
                )
            if purpose != "batch":
                raise ApiError(400, f"purpose must be 'batch', not {purpose!r}", "purpose", "invalid_value")
            size = file.size or 0
            if size > self._policy.file_bytes:
                raise _too_large(self._policy.file_bytes)
            if self._folder.size + size > self._folder.most_bytes:
                raise ApiError(
                    413, f"files of batches may take {self._folder.most_bytes:,} bytes together, and this one would be "
                    "too much: delete some", "file", "storage_full",
                )  # fmt: skip
            name = file.filename or ""
            name = name if NAME.fullmatch(name) else "batch.jsonl"
            blocks = iter(lambda: file.file.read(BLOCK), b"")
            kept = await asyncio.to_thread(self._folder.keep, blocks, name, "batch", _owner())
        finally:
            await form.close()
        return json_response(kept.body)

    async def list_files(self, request: Request) -> Response:
        """The key's files, the newest first (`order=asc`: the oldest)."""
        asked = request.query_params
        purpose, order = asked.get("purpose"), asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be asc or desc, not {order!r}", "order", "invalid_value")
        bodies = [f.body for f in self._folder.files.values() if f.owner == _owner()]
        bodies = [body for body in bodies if purpose in (None, body["purpose"])]
        return _page(_sorted(bodies, order == "desc"), request, 10_000, 10_000)

    async def file(self, id: str) -> Response:
        """What is known of a file."""
        return json_response(self._folder.file(id, _owner()).body)

    async def content(self, id: str) -> Response:
        """The file itself."""
        return FileResponse(self._folder.file(id, _owner()).path, media_type="application/octet-stream")

    async def delete(self, id: str) -> Response:
        """Keep it no longer."""
        self._folder.forget(self._folder.file(id, _owner()))
        return json_response({"id": id, "object": "file", "deleted": True})

    # ---- batches
    async def create(self, request: Request) -> Response:
        """A batch of the requests in a file."""
        ask = read(BatchAsk, await self._bodies.read(request))
        owner = _owner()
        source = self._folder.file(ask.input_file_id, owner, "input_file_id")
        if source.body["purpose"] != "batch":
            raise ApiError(400, f"{source.id} is a file of results: give one with purpose batch", "input_file_id")
        live = sum(batch.owner == owner and batch.status not in OVER for batch in self._folder.batches.values())
        if live >= self._policy.live:
            raise ApiError(429, f"{live} batches are under way, as many as there may be: try again when one is over",
                           code="too_many_batches", retry=60.0)  # fmt: skip
        batch = self._folder.begin(new_batch(ask), owner)
        self._runner.drive(batch)
        return json_response(batch.body)

    async def list_batches(self, request: Request) -> Response:
        """The key's batches, the newest first."""
        bodies = [b.body for b in self._folder.batches.values() if b.owner == _owner()]
        return _page(_sorted(bodies, True), request, 20, 100)

    async def batch(self, id: str) -> Response:
        """How far a batch is."""
        return json_response(self._folder.batch(id, _owner()).body)

    async def cancel(self, id: str) -> Response:
        """Answer no further line of it. What is finished stays, and can be had."""
        batch = self._folder.batch(id, _owner())
        if batch.status in OVER:
            raise ApiError(409, f"the batch {id!r} is {batch.status}: there is nothing to cancel", code="batch_is_over")
        self._runner.cancel(batch)
        return json_response(batch.body)


def new_batch(ask: BatchAsk) -> dict[str, Any]:
    """A batch as clients see it first."""
    now = int(time.time())
    times = {f"{each}_at": None for each in (*OVER, "in_progress", "finalizing", "cancelling")}
    return {
        "id": f"batch_{uuid.uuid4().hex}", "object": "batch", "endpoint": ask.endpoint, "errors": None,
        "input_file_id": ask.input_file_id, "completion_window": ask.completion_window, "status": "validating",
        "output_file_id": None, "error_file_id": None, "created_at": now, **times, "expires_at": now + WINDOW,
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": ask.metadata,
    }  # fmt: skip


def add_batches(app: FastAPI, policy: BatchPolicy | None, keys: KeyRing | None) -> BatchRunner | None:
    """Adds the endpoints to a server that keeps batches, and what runs them. Raises UserError for a folder that cannot
    be used."""
    if policy is None:
        return None
    runner = BatchRunner(BatchFolder(policy.folder, policy.total_bytes), app, keys, policy)
    BatchEndpoints(runner, policy).add_to(app)
    return runner


def _owner() -> str | None:
    """The name of the key that asks."""
    exchange = CURRENT.get()
    return None if exchange is None or exchange.quota is None else exchange.quota.key.name


def _sorted(bodies: Sequence[dict[str, Any]], newest_first: bool) -> list[dict[str, Any]]:
    """By when they were made; of one second, as they came."""
    oldest_first = sorted(bodies, key=lambda body: int(body["created_at"]))
    return oldest_first[::-1] if newest_first else oldest_first


def _page(bodies: Sequence[dict[str, Any]], request: Request, usual: int, most: int) -> Response:
    """The part of a list that `after` and `limit` ask for."""
    after, text = request.query_params.get("after"), request.query_params.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ApiError(400, f"limit must be from 1 to {most}, not {text!r}", "limit", "invalid_value")
    if after is not None:
        at = next((i for i, body in enumerate(bodies) if body["id"] == after), None)
        if at is None:
            raise ApiError(400, f"there is nothing called {after!r} in this list", "after", "invalid_value")
        bodies = bodies[at + 1 :]
    shown = list(bodies[: int(text)])
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(shown) < len(bodies)})


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"a file may have {most:,} bytes: split it", "file", "file_too_large")


async def _form(request: Request, most: int) -> Any:
    """The form of a request whose file has at most so many bytes, on the disk. Raises ApiError 400, 408, 413 or 499."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "send the file as multipart/form-data, with the fields file and purpose")
    size, inner = 0, request.receive

    async def counted() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await inner()
        except TimeoutError:
            raise ApiError(408, f"nothing of the file came for {BODY_SECONDS:.0f} s") from None
        size += len(message.get("body", b""))
        if size > most + AROUND:
            raise _too_large(most)
        return message

    try:
        return await Request(request.scope, counted).form(max_files=1, max_fields=8)
    except ClientDisconnect:
        raise ApiError(499, "the client left before its file was complete") from None
