"""The page's files, as they lie in the package: nothing is built, and nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response

ROOT = "/"
BELOW = "/playground/"
KINDS = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
HEADERS = {
    # scripts, styles and requests of this server alone, and nobody may show the page within another
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One of the page's files."""

    content: bytes
    kind: str
    tag: str  # of this content alone

    @classmethod
    def of(cls, content: bytes, name: str) -> File:
        kind = KINDS[name[name.rindex(".") :]]
        return cls(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@cache
def pages() -> dict[str, File]:
    """The page's files, by the path at which each is served."""
    found = {}
    for each in files(__package__).joinpath("static").iterdir():
        path = ROOT if each.name == "index.html" else BELOW + each.name
        found[path] = File.of(each.read_bytes(), each.name)
    return found


async def page(request: Request) -> Response:
    """The file of this path, or that it has not changed."""
    file = pages()[request.url.path]
    headers = {**HEADERS, "ETag": file.tag, "Content-Type": file.kind}
    if request.headers.get("if-none-match") == file.tag:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers)


def add_to(app: FastAPI) -> None:
    """Serve the page."""
    for path in pages():
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False, response_class=Response)
