"""Answers batches while nobody else asks: a few lines at a time, each a request in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from phasewise.serve.batches.call import ask_patiently
from phasewise.serve.batches.folder import OVER, BatchFolder, KeptBatch
from phasewise.serve.batches.lines import BatchLine, answered, checked, unanswered
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.guard.policy import BatchPolicy

log = logging.getLogger(__name__)
Outcome = Literal["completed", "expired", "cancelled"]


class BatchRunner(Collector):
    """Runs every batch of a folder that is not over, from where it is. `app`: the server's own application; `keys`:
    whose limits the lines have.

    Lines wait their turn in order of arrival, so that a large batch does not keep the others waiting until it ends.
    """

    def __init__(self, folder: BatchFolder, app: ASGIApp, keys: KeyRing | None, policy: BatchPolicy) -> None:
        self.folder, self._app, self._keys, self._policy = folder, app, keys, policy
        self._slots = asyncio.Semaphore(policy.running)
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._lines: Counter[str] = Counter()  # finished since the start, by how
        self._stopping = False

    def start(self) -> None:
        """Go on with what was under way when the last server ended."""
        for batch in self.folder.batches.values():
            if batch.status not in OVER:
                self.drive(batch)

    async def stop(self) -> None:
        """The server ends; what is finished is on the disk, and the rest waits for the next one."""
        self._stopping = True
        for task in self._drives.values():
            task.cancel()
        await asyncio.gather(*self._drives.values(), return_exceptions=True)
        self.folder.close()

    def drive(self, batch: KeptBatch) -> None:
        """Begin to answer a batch, or go on with it."""
        task = self._drives[batch.id] = asyncio.create_task(self._drive(batch))
        task.add_done_callback(lambda _: self._drives.pop(batch.id, None))

    def cancel(self, batch: KeptBatch) -> None:
        """Answer no further line of it; what is finished can be had."""
        if batch.status in (*OVER, "finalizing", "cancelling"):
            return
        batch.move("cancelling")
        self.folder.save(batch)
        if (task := self._drives.get(batch.id)) is not None:
            task.cancel()

    def collect(self) -> Iterator[Metric]:
        lines = CounterMetricFamily("phasewise_batch_lines", "Lines of batches finished, by how", labels=["how"])
        for how in ("completed", "failed"):
            lines.add_metric([how], self._lines[how])
        batches = GaugeMetricFamily("phasewise_batches", "Batches that are kept, by status", labels=["status"])
        for status, count in Counter(batch.status for batch in self.folder.batches.values()).items():
            batches.add_metric([status], count)
        running = sum(batch.running for batch in self.folder.batches.values())
        yield from (lines, batches)
        yield GaugeMetricFamily("phasewise_batch_lines_running", "Lines of batches under way", running)
        yield GaugeMetricFamily("phasewise_batch_files_bytes", "Bytes of all files of batches", self.folder.size)

    # ---- one batch
    async def _drive(self, batch: KeptBatch) -> None:
        outcome: Outcome = "completed"
        try:
            if batch.status == "validating" and not await self._validated(batch):
                return
            if batch.status == "in_progress":
                async with asyncio.timeout(max(0.0, batch.body["expires_at"] - time.time())):
                    await self._answer(batch)
        except TimeoutError:
            outcome = "expired"
        except asyncio.CancelledError:
            if self._stopping or batch.status != "cancelling":
                raise
        except Exception as error:
            log.exception("the batch %s cannot go on", batch.id)
            self._fail(batch, error)
            return
        if batch.status == "cancelling":
            outcome = "cancelled"
        try:
            await asyncio.to_thread(self._finalise, batch, outcome)
        except Exception as error:
            log.exception("the results of the batch %s cannot be written", batch.id)
            self._fail(batch, error)

    async def _validated(self, batch: KeptBatch) -> bool:
        source = self.folder.files[batch.body["input_file_id"]]
        total, wrong = await asyncio.to_thread(checked, source.lines(), batch.body["endpoint"], self._policy.lines)
        batch.body["request_counts"]["total"] = total
        if batch.status == "cancelling":
            return True
        if wrong:
            batch.body["errors"] = {"object": "list", "data": [error.told() for error in wrong]}
        batch.move("failed" if wrong else "in_progress")
        self.folder.save(batch)
        return not wrong

    def _fail(self, batch: KeptBatch, why: Exception) -> None:
        """It ends here, and its client is told so; why is in the log."""
        disk = isinstance(why, OSError)
        message = f"the batch cannot go on: {'its files cannot be written' if disk else 'an internal error'}"
        code = "storage_failed" if disk else "internal_error"
        told = {"code": code, "message": f"{message}; the server's log has the details", "param": None, "line": None}
        batch.body["errors"] = {"object": "list", "data": [told]}
        batch.move("failed")
        try:
            self.folder.save(batch)
        except OSError:
            log.exception("nor can its state be kept")

    async def _answer(self, batch: KeptBatch) -> None:
        """All lines that are not finished. Raises what the disk raises."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            for line in self.folder.waiting(batch):
                await self._slots.acquire()
                task = asyncio.create_task(self._line(batch, line))
                task.add_done_callback(lambda _: self._slots.release())
                tasks.add(task)
                for done in [each for each in tasks if each.done()]:
                    tasks.remove(done)
                    done.result()
            while tasks:
                finished, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for done in finished:
                    done.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _line(self, batch: KeptBatch, line: BatchLine) -> None:
        batch.running += 1
        try:
            quota = None if self._keys is None or batch.owner is None else self._keys.named(batch.owner)
            if self._keys is not None and quota is None:
                ok, told = False, unanswered(line.custom_id, "invalid_api_key", "the key of this batch is gone")
            else:
                status, headers, body = await ask_patiently(self._app, line, quota)
                ok, told = status == 200, answered(line, status, headers.get("x-request-id", ""), body)
            keeping = asyncio.ensure_future(asyncio.to_thread(self.folder.finish, batch, line.number, ok, told))
            try:
                await asyncio.shield(keeping)
            except asyncio.CancelledError:
                await keeping  # nobody reads the file of finished lines while one is written
                raise
            self._lines["completed" if ok else "failed"] += 1
        finally:
            batch.running -= 1

    def _finalise(self, batch: KeptBatch, outcome: Outcome) -> None:
        """Write the files of results, under ids that are kept first, for it may be done again after a death."""
        body = batch.body
        if outcome == "completed":
            batch.move("finalizing")
        left = iter(()) if outcome == "completed" else self._left(batch, outcome)
        for ok, name in ((True, "output"), (False, "error")):
            field = f"{name}_file_id"
            rows = chain(self.folder.results(batch, ok), iter(()) if ok else left)
            first = next(rows, None)
            if first is None:
                continue
            body[field] = body[field] or f"file-{uuid.uuid4().hex}"
            self.folder.save(batch)
            self.folder.keep(
                chain((first,), rows), f"{batch.id}_{name}.jsonl", "batch_output", batch.owner, body[field]
            )
        batch.move(outcome)
        self.folder.save(batch)

    def _left(self, batch: KeptBatch, outcome: Outcome) -> Iterator[bytes]:
        """The error lines of requests that were never answered."""
        said = {"expired": "the batch expired before this line was answered",
                "cancelled": "the batch was cancelled before this line was answered"}[outcome]  # fmt: skip
        if batch.body["in_progress_at"] is None:
            return
        for line in self.folder.waiting(batch):
            yield json.dumps(unanswered(line.custom_id, f"batch_{outcome}", said)).encode() + b"\n"
