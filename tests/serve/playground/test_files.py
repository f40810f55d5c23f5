"""The page over plain HTTP: its files, what they may ask for, and who is shown them. A browser is in test_page.py."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from phasewise.serve.playground.files import pages
from tests.serve.running import PATIENCE, Server

STATIC = Path(__file__).parents[3] / "src" / "phasewise" / "serve" / "playground" / "static"
TEXTS = {path.name: path.read_text() for path in STATIC.iterdir()}


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=PATIENCE, verify=False)


def test_every_file_is_served_as_it_is(server: Server) -> None:
    assert set(pages()) == {"/", *(f"/playground/{name}" for name in TEXTS if name != "index.html")}
    for path in pages():
        reply = get(server, path)
        assert reply.status_code == 200 and reply.text == TEXTS[path.rpartition("/")[2] or "index.html"]
    assert get(server, "/").headers["content-type"] == "text/html; charset=utf-8"
    assert get(server, "/playground/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert get(server, "/playground/nothing.js").status_code == 404
    assert httpx.head(f"{server.url}/", timeout=PATIENCE).status_code == 200


def test_a_browser_may_ask_nobody_else(server: Server) -> None:
    policy = dict(part.split(" ", 1) for part in get(server, "/").headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    for name, text in TEXTS.items():
        assert set(re.findall(r"https?://[^\s\"'>]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_what_is_unchanged_is_not_sent_again(server: Server) -> None:
    tag = get(server, "/playground/main.js").headers["etag"]
    again = get(server, "/playground/main.js", **{"If-None-Match": tag})
    assert again.status_code == 304 and not again.content
    assert get(server, "/playground/main.js", **{"If-None-Match": '"old"'}).status_code == 200


def test_whatever_a_file_names_is_there() -> None:
    named = {found for text in TEXTS.values() for found in re.findall(r'"(/playground/[^"]+)"', text)}
    assert named and named <= set(pages())
    ids = set(re.findall(r'id="([^"]+)"', TEXTS["index.html"]))
    asked = {found for name in TEXTS for found in re.findall(r'\$\("([^"]+)"\)', TEXTS[name])}
    assert asked and asked <= ids


def test_without_a_playground_there_is_none() -> None:
    with Server(playground=False) as server:
        assert get(server, "/").status_code == get(server, "/playground/main.js").status_code == 404
        assert get(server, "/v1/models").status_code == 200
        server.process.terminate()
        assert "Playground" not in server.process.communicate(timeout=PATIENCE)[0]


def test_the_address_is_printed() -> None:
    with Server() as own:
        assert own.process.stdout.readline() == f"Playground: {own.url}/\n"


def test_with_keys_the_page_is_open_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(b"pw-alice").hexdigest()}"\n')
    with Server(keys=str(path)) as server:
        assert get(server, "/").status_code == get(server, "/playground/main.js").status_code == 200
        for closed in ("/v1/models", "/events", "/tokenizer_info", "/playground/nothing.js"):
            assert get(server, closed).status_code == 401


# ---- contrast, as WCAG 2 counts it
def luminance(colour: str) -> float:
    wide = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(wide[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_enough_in_both_schemes(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", TEXTS["style.css"], re.S)[scheme]
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", block))
    for ground in ("paper", "card"):
        for text in ("ink", "soft", "bad", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for shape in ("prefill", "decode", "accepted", "forced", "denoised", "queue", "handoff"):
            assert contrast(colours[shape], colours[ground]) >= 3, (shape, ground)
    assert contrast(colours["on"], colours["accent"]) >= 4.5
