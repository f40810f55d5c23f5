"""A real server in a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Self

import httpx
import openai

from phasewise.cli import main
from tests.forked import Forked
from tests.serve.launch import main as start
from tests.serve.tiny_chat import chat_checkpoint

PATIENCE = 60.0  # seconds for anything that must happen at all
SOON = 5.0  # seconds: far less than a lease lasts


def launch(*words: str, errors: IO[str] | None = None) -> Forked:
    """`phasewise WORDS` in a process of its own, with one thread for torch."""
    return Forked(main, list(words), errors=errors)


class Server:
    """`options` as in launch.py. Use as a context manager; leaving it ends the process. `secret`: a key to send."""

    def __init__(self, *, chat: bool = True, model: Path | None = None, secret: str = "none", **options: Any) -> None:
        options = {"port": 0, "name": "tiny", **options}
        self.secret = secret
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._http = httpx.Client(verify=False, timeout=PATIENCE)  # certificates take longer to read than answers
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe that nobody reads would fill up)
        self.model = str(model or chat_checkpoint(chat))
        self.process = self._process(options)
        self.banner = self.process.stdout.readline()
        self.curl = self.process.stdout.readline()
        found = re.search(r"https?://[^ ]+", self.banner)
        if found is None:
            raise AssertionError(f"the server did not start: {self.errors()}")
        self.url = found[0]
        self.port = int(self.url.rpartition(":")[2])

    def _process(self, options: dict[str, Any]) -> Forked:
        return Forked(start, self.model, json.dumps(options), errors=self._errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE)
        self._errors.close()
        self._http.close()

    def errors(self) -> str:
        """What it has written to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": self.secret, "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=openai.DefaultHttpxClient(verify=False), **options)

    def async_client(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.secret, max_retries=0, timeout=PATIENCE, http_client=http
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body` as JSON, or as it is if it is text or bytes."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        options = {"headers": self._headers, **options}
        return self._http.post(f"{self.url}{path}", content=content, **options)

    def health(self) -> httpx.Response:
        return self._http.get(f"{self.url}/health")

    def metrics(self) -> dict[str, float]:
        """Every sample by name, labels included."""
        lines = self._http.get(f"{self.url}/metrics", headers=self._headers).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def settled(self) -> dict[str, float]:
        """The metrics once nothing runs; every KV byte of requests goes back at once then, or with the next word of a
        worker, long before any lease ends."""
        deadline = time.monotonic() + PATIENCE
        while True:
            now = self.metrics()
            if not now["phasewise_requests_running"] and not now["phasewise_requests_waiting"]:
                break
            assert time.monotonic() < deadline, f"requests still run: {now}"
            time.sleep(0.02)
        deadline = min(deadline, time.monotonic() + SOON)
        while now["phasewise_kv_live_bytes"]:
            assert time.monotonic() < deadline, f"{now['phasewise_kv_live_bytes']} KV bytes are left behind"
            time.sleep(0.02)
            now = self.metrics()
        return now

    def end(self, signal: int) -> tuple[int, str]:
        """The exit code after a signal, and what was written to stderr."""
        self.process.send_signal(signal)
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, self.errors()
