"""Tiny models in tiny wheels, folders and servers that pip finds them in, and processes that fetch them."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from phasewise.known.models import Known, Terms, Wheel

ROOT = Path(__file__).parents[2]
TERMS = Terms("https://example.org/terms", "Be kind.")


def wheel(folder: Path, package: str, member: str, content: bytes, version: str = "1.0") -> Wheel:
    """Write a wheel that pip accepts, with one member besides what every wheel has."""
    plain = package.replace("-", "_")
    about = f"{plain}-{version}.dist-info"
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        out.writestr(member, content)
        out.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        out.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr(f"{about}/RECORD", "")
    return Wheel(package, version, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, member)


def model(folder: Path, *, parts: int = 1, size: int = 4000, name: str = "tiny", terms: Terms | None = None) -> Known:
    """A model of `parts` wheels in `folder`, its file `size` bytes of noise."""
    folder.mkdir(exist_ok=True)
    content = random.Random(f"{name} {size}").randbytes(size)
    cuts = [size * i // parts for i in range(parts + 1)]
    wheels = tuple(
        wheel(folder, f"{name}-part{i}", f"data/file.part{i}", content[cuts[i] : cuts[i + 1]]) for i in range(parts)
    )
    return Known(
        name=name, about="Noise.", parameters=size, licence="Terms" if terms else "Apache-2.0", file=f"{name}.gguf",
        size=size, sha256=hashlib.sha256(content).hexdigest(), wheels=wheels, terms=terms,
    )  # fmt: skip


@dataclass
class House:
    """A page of links to a folder's wheels, over HTTP. Wheels stop half-way until `go` is set."""

    url: str
    go: threading.Event = field(default_factory=threading.Event)
    half: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # once per wheel half sent
    asked: list[str] = field(default_factory=list)  # wheels, in order


@contextmanager
def house(folder: Path) -> Iterator[House]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            path = folder / name
            links = "".join(f'<a href="/{p.name}">{p.name}</a>' for p in sorted(folder.glob("*.whl")))
            content = path.read_bytes() if name.endswith(".whl") else f"<html><body>{links}</body></html>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if name.endswith(".whl") else "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                self._body(name, content)
            except OSError:  # whoever asked was killed
                self.close_connection = True

        def _body(self, name: str, content: bytes) -> None:
            if name.endswith(".whl"):
                made.asked.append(name)
                half = len(content) // 2
                self.wfile.write(content[:half])
                self.wfile.flush()
                made.half.release()
                made.go.wait(60)
                content = content[half:]
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = House(f"http://127.0.0.1:{server.server_address[1]}/")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def environment(cache: Path, links: str | Path) -> dict[str, str]:
    """What makes pip look at `links` alone, and phasewise keep models in `cache`."""
    return {
        "XDG_CACHE_HOME": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip


def fetching(one: Known, cache: Path, links: str | Path) -> subprocess.Popen[str]:
    """A process, the first of a group of its own, that fetches a model; it says each stage and ends with the path."""
    program = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored by what shells put behind
        "from phasewise.known.fetch import fetch\nfrom phasewise.known.models import *\n"
        f"print(fetch({one!r}, accepted=True, say=lambda line: print(line, flush=True)))"
    )
    variables = {**os.environ, **environment(cache, links), "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables,
        start_new_session=True,
    )  # fmt: skip
