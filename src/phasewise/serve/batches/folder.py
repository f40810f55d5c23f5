"""The folder of files and batches: all that a restart, or the death of the process, has to find again.

    files/ID.json    what is known of a file          files/ID.data       the file
    batches/ID.json  a batch, as clients see it       batches/ID.lines    its finished lines, one write each

A JSON file is written beside its place and moved there, so that nobody ever finds half of it. A finished line is on the
disk before it counts; what a process that died has left of an unfinished write is cut off, and that line is done again.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from phasewise.errors import UserError
from phasewise.serve.batches.lines import BatchLine, numbered, parse
from phasewise.serve.failures import ApiError

log = logging.getLogger(__name__)
BLOCK = 1 << 20
OVER = ("completed", "failed", "expired", "cancelled")  # statuses in which a batch stays


@dataclass(eq=False)
class KeptFile:
    """A file, and the name of the key that it belongs to; None: anybody's, where there are no keys."""

    body: dict[str, Any]  # as clients see it
    owner: str | None
    path: Path

    @property
    def id(self) -> str:
        return str(self.body["id"])

    def lines(self) -> Iterator[bytes]:
        """Its lines, read as they are asked for."""
        with self.path.open("rb") as file:
            yield from file


@dataclass(eq=False)
class KeptBatch:
    """A batch, the name of the key that it belongs to, and which of its lines are finished."""

    body: dict[str, Any]  # as clients see it
    owner: str | None
    log: Path
    done: set[int] = field(default_factory=set)
    failed: int = 0  # of those
    running: int = 0  # lines under way

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def status(self) -> str:
        return str(self.body["status"])

    def move(self, status: str) -> None:
        """Another status from now on, and since when."""
        self.body["status"] = status
        self.body[f"{status}_at"] = int(time.time())

    def count(self) -> None:
        """Bring what clients see of its lines up to date."""
        self.body["request_counts"] |= {"completed": len(self.done) - self.failed, "failed": self.failed}


class BatchFolder:
    """Files and batches by id. `most_bytes`: of all files together. Raises UserError for a folder that cannot be used,
    or that another server uses."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._files, self._batches, self.most_bytes = path / "files", path / "batches", most_bytes
        try:
            for each in (self._files, self._batches):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)  # what clients have sent is nobody else's
            self._lock = FileLock(path / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"--batches {path}: another server uses this folder: give each one its own") from error
        except OSError as error:
            raise UserError(f"--batches {path} cannot be used: {error.strerror or error}") from error
        for left in (*self._files.glob("*.part"), *self._batches.glob("*.part")):
            left.unlink()
        self.files = {file.id: file for file in map(self._file, sorted(self._files.glob("*.json"))) if file}
        self.batches = {batch.id: batch for batch in map(self._batch, sorted(self._batches.glob("*.json")))}

    def close(self) -> None:
        self._lock.release()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.body["bytes"] for file in self.files.values())

    # ---- files
    def file(self, id: str, owner: str | None, param: str | None = None) -> KeptFile:
        """A file of this key. Raises ApiError 404."""
        found = self.files.get(id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no file {id!r}", param, "file_not_found")
        return found

    def keep(
        self, blocks: Iterable[bytes], name: str, purpose: str, owner: str | None, id: str | None = None
    ) -> KeptFile:
        """Write a file here, under a new id or one that was promised."""
        id = id or f"file-{uuid.uuid4().hex}"
        path, part = self._files / f"{id}.data", self._files / f"{id}.part"
        with part.open("wb") as out:
            for block in blocks:
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        part.replace(path)
        body = {"id": id, "object": "file", "bytes": size, "created_at": int(time.time()), "filename": name,
                "purpose": purpose, "status": "processed"}  # fmt: skip
        file = KeptFile(body, owner, path)
        _write(self._files / f"{id}.json", {"body": body, "owner": owner})
        self.files[id] = file
        return file

    def forget(self, file: KeptFile) -> None:
        """Delete a file. Raises ApiError 409 while a batch that is not over reads it."""
        live = (batch for batch in self.batches.values() if batch.status not in OVER)
        user = next((batch for batch in live if batch.body["input_file_id"] == file.id), None)
        if user is not None:
            raise ApiError(409, f"the batch {user.id!r} still reads this file: cancel it first", code="file_in_use")
        (self._files / f"{file.id}.json").unlink(missing_ok=True)
        file.path.unlink(missing_ok=True)
        self.files.pop(file.id, None)

    # ---- batches
    def batch(self, id: str, owner: str | None) -> KeptBatch:
        """A batch of this key. Raises ApiError 404."""
        found = self.batches.get(id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no batch {id!r}", code="batch_not_found")
        return found

    def begin(self, body: dict[str, Any], owner: str | None) -> KeptBatch:
        """A new batch, on the disk."""
        batch = KeptBatch(body, owner, self._batches / f"{body['id']}.lines")
        self.save(batch)
        self.batches[batch.id] = batch
        return batch

    def save(self, batch: KeptBatch) -> None:
        """Have the disk know what clients see of a batch."""
        batch.count()
        _write(self._batches / f"{batch.id}.json", {"body": batch.body, "owner": batch.owner})

    def finish(self, batch: KeptBatch, number: int, ok: bool, told: dict[str, Any]) -> None:
        """A line is finished, once and for all."""
        data = json.dumps({"line": number, "ok": ok, "told": told}).encode() + b"\n"
        with batch.log.open("ab") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        batch.done.add(number)
        batch.failed += not ok
        batch.count()

    def waiting(self, batch: KeptBatch) -> Iterator[BatchLine]:
        """The lines of a batch that are not finished."""
        source = self.files[batch.body["input_file_id"]]
        for number, text in numbered(source.lines()):
            if number not in batch.done:
                yield parse(number, text, batch.body["endpoint"])

    def results(self, batch: KeptBatch, ok: bool) -> Iterator[bytes]:
        """The finished lines for the output file, or for the error file, in the order of the input."""
        if not batch.log.exists():
            return
        places: list[tuple[int, int]] = []
        with batch.log.open("rb") as file:
            at = 0
            for text in file:
                said = json.loads(text)
                if said["ok"] is ok:
                    places.append((said["line"], at))
                at += len(text)
            for _, at in sorted(places):
                file.seek(at)
                yield json.dumps(json.loads(file.readline())["told"]).encode() + b"\n"

    # ---- inside
    def _file(self, path: Path) -> KeptFile | None:
        said = json.loads(path.read_bytes())
        data = path.with_suffix(".data")
        if not data.exists():
            log.warning("%s has lost its data, and is left out", path.name)
            return None
        return KeptFile(said["body"], said["owner"], data)

    def _batch(self, path: Path) -> KeptBatch:
        said = json.loads(path.read_bytes())
        batch = KeptBatch(said["body"], said["owner"], path.with_suffix(".lines"))
        if batch.log.exists():
            with batch.log.open("rb+") as file:
                end = 0
                for text in file:
                    if not text.endswith(b"\n"):
                        break
                    line = json.loads(text)
                    batch.done.add(line["line"])
                    batch.failed += not line["ok"]
                    end += len(text)
                file.truncate(end)
        batch.count()
        return batch


def _write(path: Path, said: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        json.dump(said, out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
