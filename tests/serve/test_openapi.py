"""The server held to its own OpenAPI document, by requests made from it (`scripts/fuzz_api.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.cli.test_project import script
from tests.serve.running import PATIENCE, Server

CASES = 300


@pytest.fixture(scope="module")
def brief() -> Iterator[Server]:
    with Server(caps={"max_tokens": 4, "max_n": 2, "timeout": 60}) as running:
        yield running


def test_the_document_names_every_status() -> None:
    from phasewise.serve.described import POSTED

    with Server() as running:
        paths = httpx.get(f"{running.url}/openapi.json", timeout=PATIENCE).json()["paths"]
    posts = {path: set(kinds["post"]["responses"]) for path, kinds in paths.items() if "post" in kinds}
    assert {"/v1/completions", "/v1/chat/completions"} <= set(posts)
    for path, statuses in posts.items():
        assert statuses == {"200", *map(str, POSTED)}, path
    assert not [path for path, kinds in paths.items() for kind in kinds.values() if "422" in kind["responses"]]


def test_no_request_of_its_kind_surprises(brief: Server) -> None:
    seen = script("fuzz_api").fuzz(brief.url, CASES)
    assert sum(seen.values()) > CASES / 2
    statuses = {status for _, status in seen}
    assert {200, 400, 404} <= statuses and max(statuses) < 500, seen
    brief.settled()
    assert brief.errors() == ""


def test_a_status_that_is_not_named_is_found(brief: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_api = script("fuzz_api")
    from_url = fuzz_api.schemathesis.openapi.from_url

    def without_400(url: str) -> object:
        schema = from_url(url)
        for path in schema.raw_schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("400", None)
        return schema

    monkeypatch.setattr(fuzz_api.schemathesis.openapi, "from_url", without_400)
    with pytest.raises(BaseException, match="400"):
        fuzz_api.fuzz(brief.url, CASES)
