"""Headless Chromium for tests, as PyQt6-WebEngine brings it (`make browser`), driven by its debugging protocol."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from bisect import bisect
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

PATIENCE = 60.0  # seconds for anything that must happen at all
FLAGS = "--no-sandbox --disable-gpu --disable-dev-shm-usage --force-color-profile=srgb"
TRACED = "disabled-by-default-devtools.timeline,devtools.timeline"
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, ""), "ArrowLeft": (37, ""),
        "ArrowDown": (40, ""), "End": (35, ""), "Home": (36, "")}  # fmt: skip


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    if importlib.util.find_spec("PyQt6") is None or importlib.util.find_spec("PyQt6.QtWebEngineWidgets") is None:
        return "there is no browser: `make browser` installs one"
    return None


class Browser:
    """One page. Use as a context manager."""

    def __init__(self) -> None:
        port = _free_port()
        environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": FLAGS,
                       "QTWEBENGINE_REMOTE_DEBUGGING": str(port)}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("window.py"))], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "here\n":
            raise AssertionError("the browser did not start")
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE).json()
        self._line = connect(pages[0]["webSocketDebuggerUrl"], max_size=1 << 26, open_timeout=PATIENCE)
        self._calls = 0
        self.requests: list[str] = []  # URLs that the page has asked for
        self.problems: list[str] = []  # what its console and its security policy complain of
        self._trace: list[dict[str, Any]] = []
        self._traced = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._line.close()
        self._process.kill()
        self._process.communicate()

    # ---- the protocol
    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are noted."""
        self._calls += 1
        self._line.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            said = json.loads(self._line.recv(timeout=PATIENCE))
            if said.get("id") == self._calls:
                if "error" in said:
                    raise AssertionError(f"{method}: {said['error']}")
                result: dict[str, Any] = said["result"]
                return result
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        self._traced = self._traced or said.get("method") == "Tracing.tracingComplete"
        match said.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            case "Tracing.dataCollected":
                self._trace += params["value"]
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    # ---- what tests do
    def open(self, url: str) -> None:
        self.js("void (window.before = true)")
        self.call("Page.navigate", url=url)
        self.until("!window.before && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait until an expression is true: what it is then."""
        deadline = time.monotonic() + PATIENCE
        while not (found := self.js(condition)):
            assert time.monotonic() < deadline, f"{condition} has not come true; problems: {self.problems}"
            time.sleep(0.02)
        return found

    def frames(self, expression: str) -> list[float]:
        """What the page's thread had to do for each frame while an expression was awaited: milliseconds of the
        processor, whatever else the machine did meanwhile."""
        self._trace, self._traced = [], False
        self.call("Tracing.start", categories=TRACED, transferMode="ReportEvents")
        self.js(expression)
        self.call("Tracing.end")
        while not self._traced:
            self._note(json.loads(self._line.recv(timeout=PATIENCE)))
        return _frames(self._trace)

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key, as from a keyboard."""
        code, text = KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def look(self, width: int = 1280, height: int = 900, scheme: str = "light", motion: str = "no-preference") -> None:
        """What the page takes the screen and its user's wishes for."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme},
                    {"name": "prefers-reduced-motion", "value": motion}]  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def _frames(trace: list[dict[str, Any]]) -> list[float]:
    """By the page's own thread: the time of its tasks, from one frame to the next."""
    (page,) = {(each["pid"], each["tid"]) for each in trace if each["args"].get("name") == "CrRendererMain"}
    mine = [each for each in trace if (each["pid"], each["tid"]) == page]
    begun = sorted(each["ts"] for each in mine if each["name"] == "AnimationFrame" and each["ph"] == "b")
    assert len(begun) > 2, "there was nothing to see"
    found = [0.0] * (len(begun) + 1)
    for task in mine:
        if task["name"] == "RunTask" and "dur" in task:  # the last one has not ended
            found[bisect(begun, task["ts"])] += task["tdur"] / 1000
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
