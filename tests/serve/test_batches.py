"""/v1/files and /v1/batches with the real client: every line once, whatever dies, and nobody kept waiting by them."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.request.params import BACKGROUND, Params
from phasewise.request.request import Request
from phasewise.serve.batches.endpoint import BatchAsk, new_batch
from phasewise.serve.batches.folder import BatchFolder, KeptBatch
from phasewise.serve.batches.lines import checked
from phasewise.serve.batches.runner import BatchRunner
from phasewise.serve.guard.keys import new_key
from phasewise.serve.guard.policy import BatchPolicy
from tests import tiny
from tests.serve.running import PATIENCE, Server

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 4, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}) + "\n"


def begin(client: openai.OpenAI, text: str, endpoint: str = CHAT) -> Any:
    """A batch of these lines."""
    file = client.files.create(file=io.BytesIO(text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def until(client: openai.OpenAI, id: str, true: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not true(batch := client.batches.retrieve(id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def over(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def rows(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(row) for row in client.files.content(file).text.splitlines()]


def policy(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    rules = policy(tmp_path_factory.mktemp("batches"), lines=5, file_bytes=100_000)
    with Server(batches=rules) as running:
        yield running


def test_every_line_is_answered_as_it_is_asked_alone(server: Server, llm: LLM) -> None:
    client = server.client()
    batch = begin(client, line("one") + "\n" + line("two") + line("bad", max_tokens=-5) + line("three"))
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 24 * 3600
    batch = until(client, batch.id, over)
    assert batch.status == "completed" and batch.completed_at >= batch.finalizing_at >= batch.in_progress_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    answers = rows(client, batch.output_file_id)
    assert [row["custom_id"] for row in answers] == ["one", "two", "three"]
    for row in answers:
        assert row["response"]["status_code"] == 200 and row["error"] is None and row["response"]["request_id"]
        wanted = llm.chat([{"role": "user", "content": row["custom_id"]}], max_tokens=4).text
        assert row["response"]["body"]["choices"][0]["message"]["content"] == wanted
    (wrong,) = rows(client, batch.error_file_id)
    assert wrong["custom_id"] == "bad" and wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "max_tokens"
    assert server.metrics()['phasewise_batch_lines_total{how="failed"}'] >= 1


def test_the_other_endpoints(server: Server) -> None:
    client = server.client()
    for url, body in (
        ("/v1/completions", {"prompt": "the", "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["the", "fox"]}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    ):
        batch = until(client, begin(client, line("a", url, **body), url).id, over)
        assert batch.status == "completed", batch
        (row,) = rows(client, batch.output_file_id or batch.error_file_id)
        assert row["response"]["status_code"] == 200, row


def test_files_are_listed_read_and_deleted(server: Server) -> None:
    client = server.client()
    text = line("alone")
    first = client.files.create(file=("mine.jsonl", text.encode()), purpose="batch")
    second = client.files.create(file=("../../etc/x", text.encode()), purpose="batch")
    assert (first.filename, first.bytes, first.purpose) == ("mine.jsonl", len(text), "batch")
    assert client.files.retrieve(first.id) == first and client.files.content(first.id).text == text
    assert "/" not in second.filename
    found = {file.id for file in client.files.list(purpose="batch", limit=2)}  # page after page
    assert {first.id, second.id} <= found
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(first.id)


@pytest.mark.parametrize(
    ("text", "code", "at"),
    [
        ("", "empty_file", 1),
        (line("a") + "{", "invalid_json_line", 2),
        (line("a") + line("a"), "duplicate_custom_id", 2),
        (line("a", "/v1/completions"), "mismatched_url", 1),
        (line("a", stream=True), "invalid_request", 1),
        ("[]", "invalid_request", 1),
        ("[" * 100_000, "invalid_json_line", 1),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}', "missing_required_parameter", 1),
        (line("a").replace("POST", "GET"), "invalid_method", 1),
        ("".join(line(str(i)) for i in range(6)), "too_many_lines", 6),
    ],
)
def test_lines_that_are_no_requests_are_named(text: str, code: str, at: int) -> None:
    _, wrong = checked(text.encode().splitlines(), CHAT, 5)
    assert [(error.code, error.line) for error in wrong] == [(code, at)]


def test_wrong_files_and_batches_are_refused(server: Server) -> None:
    client = server.client()
    failed = until(client, begin(client, line("a") + "{").id, over)
    assert failed.status == "failed" and failed.errors.data[0].line == 2
    with pytest.raises(openai.APIStatusError, match="a file may have 100,000 bytes") as raised:
        client.files.create(file=io.BytesIO(b"x" * 200_000), purpose="batch")
    assert raised.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=io.BytesIO(b"x"), purpose="fine-tune")
    assert server.post("/v1/files", "x").status_code == 400
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-none'"):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id="file-none", endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.APIStatusError, match="nothing to cancel"):
        client.batches.cancel(failed.id)
    assert next(batch.id for batch in client.batches.list(limit=1)) == failed.id


def test_a_server_killed_at_any_time_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    """kill -9 while lines are answered: what was finished stays as it is, the rest is answered by the next server."""
    rules = policy(tmp_path / "kept", running=2)
    text = "".join(line(f"n{i}", max_tokens=24, ignore_eos=True) for i in range(12))
    with Server(batches=rules, faults={"pause": 0.01}) as server:
        id = begin(server.client(), text).id
        until(server.client(), id, lambda batch: batch.request_counts.completed >= 3)
        server.process.send_signal(signal.SIGKILL)
        server.process.communicate(timeout=PATIENCE)
    log = tmp_path / "kept" / "batches" / f"{id}.lines"
    before = {said["line"]: said["told"]["id"] for said in map(json.loads, log.read_bytes().splitlines())}
    assert 3 <= len(before) < 12
    with log.open("ab") as file:
        file.write(b'{"line": 11, "ok": true, "to')  # what a write under way may leave
    with Server(batches=rules) as server:
        batch = until(server.client(), id, over)
        assert batch.status == "completed" and batch.request_counts.completed == 12
        answers = rows(server.client(), batch.output_file_id)
    assert [row["custom_id"] for row in answers] == [f"n{i}" for i in range(12)]
    assert {i: answers[i]["id"] for i in before} == before, "a finished line was done again"


@pytest.mark.thorough  # a server of its own
def test_a_cancelled_batch_keeps_what_is_finished(tmp_path: Path) -> None:
    text = "".join(line(f"n{i}", max_tokens=16, ignore_eos=True) for i in range(40))
    with Server(batches=policy(tmp_path, running=2), faults={"pause": 0.01}) as server:
        client = server.client()
        id = begin(client, text).id
        until(client, id, lambda batch: batch.request_counts.completed >= 2)
        file = client.batches.retrieve(id).input_file_id
        with pytest.raises(openai.ConflictError, match="still reads this file"):
            client.files.delete(file)
        assert client.batches.cancel(id).status == "cancelling"
        batch = until(client, id, over)
        assert batch.status == "cancelled"
        done, left = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
        assert len(done) >= 2 and len(done) + len(left) == 40
        assert {row["error"]["code"] for row in left} == {"batch_cancelled"}
        assert server.settled()["phasewise_requests_running"] == 0


@pytest.mark.thorough  # a server of its own
def test_keys_see_their_own_alone(tmp_path: Path) -> None:
    (alice, mine), (bob, his) = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nsha256 = "{mine}"\nmax_tokens = 8\n\n[keys.bob]\nsha256 = "{his}"\n')
    with Server(batches=policy(tmp_path / "kept"), keys=str(keys), secret=alice) as server:
        client, other = server.client(), server.client(api_key=bob)
        batch = until(client, begin(client, line("a") + line("b", max_tokens=9)).id, over)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1), "limits of the key hold"
        for wrong in (lambda: other.batches.retrieve(batch.id), lambda: other.files.content(batch.output_file_id)):
            with pytest.raises(openai.NotFoundError):
                wrong()
        assert list(other.batches.list()) == [] and list(other.files.list()) == []


def test_a_folder_is_one_servers_alone(tmp_path: Path) -> None:
    first = BatchFolder(tmp_path, 1 << 20)
    with pytest.raises(UserError, match="another server uses this folder"):
        BatchFolder(tmp_path, 1 << 20)
    first.close()
    BatchFolder(tmp_path, 1 << 20).close()


# ---- the runner, with an application of its own
Answers = Callable[[int], tuple[int, dict[str, Any]]]


def ran(folder: Path, answers: Answers, *, expires: float = 3600, breaks: bool = False) -> tuple[KeptBatch, list[Any]]:
    """A batch of two lines where the n-th request gets what `answers(n)` says: the batch, and its error lines."""
    asked = itertools.count()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, body = answers(next(asked))
        if status == 0:
            await asyncio.Event().wait()
        headers = [(b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def run() -> tuple[KeptBatch, list[Any]]:
        kept = BatchFolder(folder, 1 << 20)
        runner = BatchRunner(kept, app, None, BatchPolicy(folder))
        source = kept.keep([(line("a") + line("b")).encode()], "x", "batch", None)
        batch = kept.begin(new_batch(BatchAsk(
            input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h"
        )), None)  # fmt: skip
        batch.body["expires_at"] = time.time() + expires
        if breaks:
            kept.finish = full  # type: ignore[method-assign]
        runner.drive(batch)
        await asyncio.wait_for(asyncio.gather(*runner._drives.values()), PATIENCE)
        errors = list(kept.files[batch.body["error_file_id"]].lines()) if batch.body["error_file_id"] else []
        await runner.stop()
        return batch, [json.loads(row) for row in errors]

    return asyncio.run(run())


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_server_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    batch, _ = ran(tmp_path, lambda n: (429, {"error": {"code": "queue_full"}}) if n < 3 else (200, {}))
    assert batch.status == "completed" and batch.body["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_what_is_not_answered_in_time_is_told(tmp_path: Path) -> None:
    batch, errors = ran(tmp_path, lambda n: (0, {}) if n else (200, {}), expires=0.2)
    assert batch.status == "expired" and batch.body["request_counts"]["completed"] == 1
    assert [row["error"]["code"] for row in errors] == ["batch_expired"]


def test_a_disk_that_is_full_ends_the_batch_and_not_the_server(tmp_path: Path) -> None:
    batch, _ = ran(tmp_path, lambda n: (200, {}), breaks=True)
    assert batch.status == "failed" and batch.body["errors"]["data"][0]["code"] == "storage_failed"


# ---- in the engine
def background(prompt: list[int], n: int = 20) -> Request:
    return Request(prompt, Params(max_tokens=n, ignore_eos=True, priority=BACKGROUND))


def test_requests_in_the_background_stand_still_while_there_are_others() -> None:
    engine: Any = tiny.engine(max_running=2)
    prompts = tiny.prompts(20, 30, 25)
    slow = [background(prompt) for prompt in prompts[:2]]
    for request in slow:
        engine.add(request)
    for _ in range(4):
        engine.step()
    before = [request.known for request in slow]
    quick = Request(prompts[2], tiny.greedy(6))
    engine.add(quick)
    engine.step()
    assert quick.n_out == 1, "it had to wait for a slot"
    while quick.left is None:
        engine.step()
    assert [request.known for request in slow] == before, "they took part in its steps"
    tiny.finish(engine, slow)
    alone = [*tiny.plain([prompts[2]], tiny.greedy(6)), *tiny.plain(prompts[:2], tiny.greedy(20))]
    assert tiny.outs([quick, *slow]) == alone
