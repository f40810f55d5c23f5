"""`phasewise pull` against a hub of its own, over HTTP: what is taken, what goes on, and what is said without one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.model.hub import pull as from_hub
from phasewise.model.hub import wanted

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * (11 << 12)  # 11 MiB: the hub's client keeps what it has in pieces of 10


class Hub:
    """A hub with one repository, org/tiny. `breaks`: bytes after which the next connection for the weights ends;
    `lost`: a file that is not found."""

    def __init__(self) -> None:
        self.files = {
            "model.safetensors": WEIGHTS, "config.json": b"{}", "tokenizer.json": b"[]", "README.md": b"# tiny",
            "pytorch_model.bin": b"pickled", "onnx/config.json": b"{}",
        }  # fmt: skip
        self.breaks: int | None = None
        self.lost = ""
        self.gets: list[tuple[str, str | None]] = []  # of files: name and range
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            self._json(request, [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ])  # fmt: skip
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            self._json(request, {"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/") and not path.endswith(f"/{self.lost}"):
            self._file(request, path.removeprefix(f"/org/tiny/resolve/{COMMIT}/"), body)
        else:
            request.send_error(404)

    def _json(self, request: BaseHTTPRequestHandler, value: Any) -> None:
        data = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _file(self, request: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        data, given = self.files[name], request.headers.get("Range")
        start = int(given.removeprefix("bytes=").partition("-")[0]) if given else 0
        request.send_response(206 if given else 200)
        request.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", str(len(data) - start))
        if given:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        if body:
            self.gets.append((name, given))
            end = len(data)
            if self.breaks is not None and name == "model.safetensors":
                end, self.breaks = self.breaks, None
            request.wfile.write(data[start:end])


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def pull(hub: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The real command: the hub's client reads its environment when it is imported."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": hub, "HF_HOME": str(home),
                   "HF_HUB_ETAG_TIMEOUT": "5", "OMP_NUM_THREADS": "1", "HOME": str(home)}  # fmt: skip
    command = [sys.executable, "-m", "phasewise", "pull", "org/tiny", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.thorough  # two starts of the command, and a pause of the hub's client
def test_only_what_is_read_is_pulled_and_none_of_it_twice(hub: Hub, tmp_path: Path) -> None:
    hub.breaks, hub.lost = len(WEIGHTS) - 1000, "tokenizer.json"
    broken = pull(hub.url, tmp_path)
    assert broken.returncode == 2 and "could not be pulled" in broken.stderr and "Traceback" not in broken.stderr
    weights = [given for name, given in hub.gets if name == "model.safetensors"]
    assert weights == [None, f"bytes={10 << 20}-"], "a connection that breaks goes on where it stopped"
    hub.lost, before = "nothing", len(hub.gets)
    said = pull(hub.url, tmp_path)
    assert said.returncode == 0, said.stderr
    folder = Path(said.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert [name for name, _ in hub.gets[before:]] == ["tokenizer.json"], "whole files are not downloaded again"


@pytest.mark.thorough  # a start of the command
def test_without_a_network_it_says_what_could_be_passed_instead(tmp_path: Path) -> None:
    said = pull("http://127.0.0.1:9", tmp_path)
    assert said.returncode == 2 and said.stderr.splitlines()[-1].startswith("error: org/tiny could not be pulled")
    assert "path of a .gguf file" in said.stderr and "Traceback" not in said.stderr


def test_whatever_the_client_raises_names_what_could_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def info(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", info)
    with pytest.raises(UserError, match=r"org/tiny could not be pulled \(no route\): .* path of a .gguf file"):
        from_hub("org/tiny")


def test_of_several_gguf_files_one_is_chosen() -> None:
    names = ["README.md", "config.json", "m-q4.gguf", "m-q8.gguf", "mmproj-f16.gguf"]
    with pytest.raises(UserError, match=r"2 GGUF models: choose one with --file: m-q4.gguf, m-q8.gguf"):
        wanted(names, None, "org/m")
    assert wanted(names, "m-q8.gguf", "org/m") == ["m-q8.gguf"]
    with pytest.raises(UserError, match=r"no GGUF file 'm-q5.gguf'; it has m-q4.gguf"):
        wanted(names, "m-q5.gguf", "org/m")
    shards = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert wanted(shards, None, "org/m") == shards
    with pytest.raises(UserError, match="neither safetensors nor GGUF"):
        wanted(["pytorch_model.bin", "config.json"], None, "org/m")
