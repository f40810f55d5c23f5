"""The page in headless Chromium: streaming, stop, errors, reconnecting, recipes, many streams, the keyboard alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.playground import browser as driver
from tests.serve.running import Server

pytestmark = pytest.mark.skipif(driver.missing() is not None, reason=str(driver.missing()))
RECIPES = {"guess": {"draft": "prompt_lookup:k=4,min_match=1"}, "blocks": {"decode": "block_diffusion:block=4"}}
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
LAST = "[...document.querySelectorAll('.answer')].at(-1)"
SHIFT = 8  # among the modifiers of a key
LONGEST = 50  # milliseconds of the processor that a frame may take


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """Steps take a while, so that a test can see what happens between them."""
    with Server(recipes=RECIPES, faults={"pause": 0.02}) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[driver.Browser]:
    with driver.Browser() as one:
        yield one


@pytest.fixture
def page(chromium: driver.Browser, slow: Server) -> driver.Browser:
    """The page of `slow`, just loaded and connected."""
    return opened(chromium, slow.url)


def opened(page: driver.Browser, url: str) -> driver.Browser:
    page.open("about:blank")
    page.look()
    page.requests.clear()
    page.problems.clear()
    page.open(url + "/")
    page.until("document.querySelector('#link').dataset.state === 'open'")
    return page


def choose(page: driver.Browser, **values: str) -> None:
    for name, value in values.items():
        page.js(f"void (document.getElementById({name!r}).value = {value!r})")


def send(page: driver.Browser, text: str = PROMPT) -> None:
    before = page.js("document.querySelectorAll('.turn').length")
    page.js("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn').length === {before + 1}")


def ended(page: driver.Browser) -> str:
    """How the last answer ended."""
    return str(page.until(f"['done', 'stopped', 'failed'].includes({LAST}.dataset.state) && {LAST}.dataset.state"))


def said(page: driver.Browser, selector: str) -> str:
    return str(page.js(f"{LAST}.querySelector({selector!r}).textContent"))


def test_tokens_stream_and_are_coloured(page: driver.Browser, slow: Server) -> None:
    choose(page, tokens="40")
    send(page)
    page.until(f"{LAST}.dataset.state === 'streaming' && {LAST}.querySelectorAll('.t').length > 2")
    assert page.js(f"{LAST}.querySelector('.t').className") == "t prefill"
    page.until("document.querySelector('#running').textContent === '1'")
    assert ended(page) == "done"
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
    message = slow.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    page.until(f"{LAST}.querySelector('.text').textContent === {json.dumps(message)}")
    page.until(f"{LAST}.querySelector('svg.life').getAttribute('aria-label').includes('decode')")
    assert "prefill" in said(page, ".note")
    assert page.problems == []


def test_stop_ends_it_here_and_there(page: driver.Browser, slow: Server) -> None:
    choose(page, tokens="400")
    page.js("document.querySelector('[name=mode][value=completion]').click()")
    send(page)
    page.until(f"{LAST}.querySelectorAll('.t').length > 2")
    page.press("Escape")
    assert ended(page) == "stopped"
    assert slow.settled()['phasewise_requests_total{how="cancelled",recipe="default"}'] >= 1
    page.until("!document.querySelector('#send').disabled && document.querySelector('#stop').disabled")


def test_errors_are_shown_and_the_next_message_goes_through(page: driver.Browser) -> None:
    choose(page, tokens="999999")
    send(page)
    assert ended(page) == "failed"
    assert "context" in said(page, "[role=alert]")
    choose(page, tokens="4")
    send(page)
    assert ended(page) == "done"


def test_recipes_are_switched_by_message_and_stand_side_by_side(page: driver.Browser) -> None:
    options = page.js("[...document.querySelector('#first').options].map(option => option.value)")
    assert options == ["tiny", "tiny@guess", "tiny@blocks"]
    page.js("document.querySelector('[name=mode][value=completion]').click()")
    choose(page, tokens="24", second="tiny@guess")
    send(page)
    every = "[...document.querySelectorAll('.turn:last-child .answer')]"
    page.until(f"{every}.length === 2 && {every}.every(answer => answer.dataset.state === 'done')")
    page.until(f"{every}.every(answer => answer.textContent.includes('tokens/s'))")
    assert page.js(f"{every}[0].querySelectorAll('.accepted').length") == 0
    assert page.js(f"{every}[1].querySelectorAll('.accepted').length") > 0
    page.until(f"{every}[0].querySelector('.text').textContent === {every}[1].querySelector('.text').textContent")
    choose(page, first="tiny@blocks", second="")
    send(page)
    assert ended(page) == "done"
    page.until(f"{LAST}.querySelectorAll('.denoised').length > 0")


def test_the_event_stream_is_taken_up_again(chromium: driver.Browser) -> None:
    with Server() as first:
        page, port = opened(chromium, first.url), first.port
    page.until("document.querySelector('#link').dataset.state === 'closed'")
    with Server(port=port):
        page.until("document.querySelector('#link').dataset.state === 'open'")
        choose(page, tokens="4")
        send(page)
        assert ended(page) == "done"
        page.until("document.querySelector('#lives').ariaLabel.startsWith('The latest 1 requests')")


def test_a_connection_that_breaks_is_no_whole_answer(chromium: driver.Browser) -> None:
    with Server(faults={"pause": 0.02}) as server:
        page = opened(chromium, server.url)
        choose(page, tokens="400")
        page.js("document.querySelector('[name=mode][value=completion]').click()")
        send(page)
        page.until(f"{LAST}.querySelectorAll('.t').length > 2")
        server.process.kill()
        assert ended(page) == "failed" and said(page, "[role=alert]")


def test_twenty_streams(page: driver.Browser, slow: Server, record_property: Any) -> None:
    """Five of them in the page: a browser opens no more than six connections to one server."""
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(15) as pool:
        others = [pool.submit(slow.post, "/v1/completions", {**body, "seed": seed}) for seed in range(15)]
        frames = page.frames(f"""(async () => {{
            const {{ Answer }} = await import("/playground/answer.js");
            const box = document.querySelector("#turns");
            const lives = new (await import("/playground/lives.js")).Lives();
            const answers = Array.from({{ length: 5 }}, () => new Answer(box, "tiny", lives, () => {{}}));
            await Promise.all(answers.map(answer => answer.run("/v1/completions", {json.dumps(body)})));
        }})()""")
        assert all(other.result().status_code == 200 for other in others)
    page.until("document.querySelector('#running').textContent === '0'")
    assert page.js("[...document.querySelectorAll('.answer')].every(answer => answer.dataset.state === 'done')")
    page.until("[...document.querySelectorAll('.answer dl')].every(list => list.textContent.startsWith('tokens60'))")
    assert "were lost" not in page.js("document.querySelector('#scope').textContent")
    record_property("longest_frames_ms", sorted(frames)[-5:])
    print(f"{len(frames)} frames, the longest {max(frames):.1f} ms of the processor")
    assert max(frames) < LONGEST, sorted(frames)[-5:]


def test_twenty_answers_beside_one_another(page: driver.Browser, slow: Server, record_property: Any) -> None:
    """What one connection brought, played to twenty answers at once, while the engine's lanes go on: 50 tokens a second
    each. More than a browser would open connections for; what is held to its frames is the page."""
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True, "provenance": True}
    parts = [part + "\n\n" for part in slow.post("/v1/completions", body).text.split("\n\n") if part]
    played = [part for part in parts if '"finish_reason":"' not in part.replace(" ", "") and "[DONE]" not in part]
    rest = parts[len(played) :]
    assert len(played) > 40 and rest and all(part in parts[: len(played)] for part in played)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(slow.post, "/v1/completions", {**body, "stream": False, "seed": n}) for n in range(4)]
        frames = page.frames(f"""(async () => {{
            const {{ Answer }} = await import("/playground/answer.js");
            const {{ Lives }} = await import("/playground/lives.js");
            const parts = [...Array(4).fill({json.dumps(played)}).flat(), ...{json.dumps(rest)}];
            const ink = new TextEncoder();
            const wait = () => new Promise(resolve => setTimeout(resolve, 20));
            window.fetch = async () => new Response(new ReadableStream({{ async start(to) {{
                for (const part of parts) {{ to.enqueue(ink.encode(part)); await wait(); }}
                to.close();
            }} }}));
            const box = document.querySelector("#turns"), lives = new Lives();
            const answers = Array.from({{ length: 20 }}, () => new Answer(box, "tiny", lives, () => {{}}));
            await Promise.all(answers.map(answer => answer.run("/v1/completions", {{}})));
            window.told = answers.map(answer => answer.tokens.total);
        }})()""")
        assert all(other.result().status_code == 200 for other in others)
    assert page.js("told") == [4 * len(played) + (60 - len(played))] * 20
    assert page.js("[...document.querySelectorAll('.answer')].every(answer => answer.dataset.state === 'done')")
    record_property("longest_frames_ms", sorted(frames)[-5:])
    print(f"{len(frames)} frames, the longest {max(frames):.1f} ms of the processor")
    assert max(frames) < LONGEST, sorted(frames)[-5:]


def test_the_keyboard_is_enough(page: driver.Browser) -> None:
    focus = "document.activeElement.id || document.activeElement.value || document.activeElement.className"
    page.press("Tab")
    assert page.js("document.activeElement.textContent") == "Skip to the prompt"
    page.press("Enter")
    page.until(f"({focus}) === 'prompt'")
    page.type(PROMPT)
    page.press("Enter")
    page.until(f"{LAST}.querySelectorAll('.t').length > 2")
    page.press("Escape")
    assert ended(page) == "stopped"
    seen = []
    while not seen or seen[-1] != "text":
        page.press("Tab", modifiers=SHIFT)
        seen.append(page.js(focus))
        assert len(seen) < 10, seen
    assert seen == ["second", "first", "chat", "text"]
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.js("document.querySelectorAll('.here').length") == 1
    assert "decode" in said(page, ".about") and "probability" in said(page, ".about")
    page.press("Home")
    assert "prefill" in said(page, ".about")
    seen = []
    while not seen or seen[-1] != "send":
        page.press("Tab")
        seen.append(page.js(focus))
        assert len(seen) < 12, seen
    assert seen == ["chat", "first", "second", "prompt", "temperature", "tokens", "clear", "send"]


def test_recipes_are_switched_and_answers_stopped_without_a_mouse(page: driver.Browser) -> None:
    """And the focus is never lost to a button that can no longer be pressed."""
    focus = "document.activeElement.id"
    for key in ("Tab", "Enter"):  # past the header, to the prompt
        page.press(key)
    page.until(f"{focus} === 'prompt'")
    page.press("Tab", modifiers=SHIFT)
    page.press("Tab", modifiers=SHIFT)
    assert page.js(focus) == "first"
    page.press("ArrowDown")
    assert page.until("document.querySelector('#first').value") == "tiny@guess"
    page.press("Tab")
    page.press("Tab")
    page.type(PROMPT)
    while page.js(focus) != "send":
        page.press("Tab")
    page.press("Enter")
    page.until(f"{LAST}?.querySelectorAll('.t').length > 2")
    assert page.js(focus) == "stop"
    page.press("Enter")
    assert ended(page) == "stopped" and page.js(f"{LAST}.getAttribute('aria-label')") == "Answer of tiny@guess"
    page.until(f"{focus} === 'prompt'")
    life = f"{LAST}.querySelector('svg.life')?.getAttribute('aria-label')"
    assert "prefill" in page.until(f"({life} ?? '').includes('prefill') && {life}")


def test_what_has_the_focus_is_seen(page: driver.Browser) -> None:
    style = "getComputedStyle(document.activeElement)"
    outline = f"{style}.outlineStyle === 'none' ? 0 : parseFloat({style}.outlineWidth)"
    name = "document.activeElement.id || document.activeElement.className || document.activeElement.type"
    page.press("Tab")
    seen: dict[str, float] = {page.js(name): page.js(outline)}
    choose(page, tokens="4")
    send(page)
    assert ended(page) == "done"
    for key in 4 * [SHIFT] + 9 * [0]:  # back to the answer, and on to the last button
        page.press("Tab", modifiers=key)
        seen[page.js(name)] = page.js(outline)
    every = {"skip", "text", "radio", "first", "second", "prompt", "temperature", "tokens", "clear", "send"}
    assert every <= set(seen) and min(seen[name] for name in every) >= 2, seen


def test_a_screen_reader_is_told_sentences_and_the_end(page: driver.Browser) -> None:
    choose(page, tokens="12")
    send(page)
    assert ended(page) == "done"
    region = "document.querySelector('#said').textContent"
    told = page.until(f"{region}.includes('done') && {region}")
    assert told.startswith("Asking tiny") and told.endswith("tiny: done, 12 tokens")
    assert page.js(f"{LAST}.getAttribute('aria-busy')") == "false"
    assert page.js("document.querySelector('#lanes').getAttribute('aria-label')")


def test_nothing_is_asked_of_others_nor_at_intervals(page: driver.Browser, slow: Server) -> None:
    choose(page, tokens="30")
    send(page)
    assert ended(page) == "done"
    origin = urlsplit(slow.url).netloc
    assert {urlsplit(url).netloc for url in page.requests} == {origin}
    asked = [urlsplit(url).path for url in page.requests if not urlsplit(url).path.startswith("/playground/")]
    once = ["/", "/v1/models", "/tokenizer_info", "/events", "/v1/chat/completions"]
    assert [path for path in asked if path != "/favicon.ico"] == once
    assert page.problems == []


def test_a_key_is_asked_for_and_stays_in_the_tab(chromium: driver.Browser, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(b"pw-alice").hexdigest()}"\n')
    with Server(keys=str(path)) as server:
        chromium.open(server.url + "/")
        chromium.until("!document.querySelector('#access').hidden && document.activeElement.id === 'key'")
        chromium.type("pw-alice")
        chromium.press("Enter")
        chromium.until("document.querySelector('#link').dataset.state === 'open'")
        assert chromium.js("Object.values({...sessionStorage})") == ["pw-alice"]
        assert chromium.js("localStorage.length") == 0
        chromium.until("document.querySelector('#scope').textContent.includes('its own requests')")
        choose(chromium, tokens="4")
        send(chromium)
        assert ended(chromium) == "done"


@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen_and_scheme(page: driver.Browser, width: int, scheme: str) -> None:
    choose(page, tokens="30", second="tiny@guess")
    send(page)
    assert ended(page) == "done"
    page.look(width, 800, scheme, "reduce")
    page.until(f"innerWidth === {width}")
    assert page.js("document.documentElement.scrollWidth") <= width
    channel = int(page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
    assert (channel < 64) == (scheme == "dark")
    assert page.js(f"getComputedStyle({LAST}).animationName") == "none"


def test_little_motion_is_a_picture_a_second(page: driver.Browser) -> None:
    """However many steps are told of: timers may be late, and are never early."""
    page.look(motion="reduce")
    page.until("matchMedia('(prefers-reduced-motion: reduce)').matches")
    page.js("""void (() => {
        window.drawn = [];
        const { clearRect } = CanvasRenderingContext2D.prototype;
        CanvasRenderingContext2D.prototype.clearRect = function (...area) {
            if (this.canvas.id === "lanes") drawn.push(performance.now());
            return clearRect.apply(this, area);
        };
    })()""")
    choose(page, tokens="100")
    send(page)
    assert ended(page) == "done"
    page.until("drawn.length >= 3")
    drawn = page.js("drawn")
    assert all(then - now > 900 for now, then in pairwise(drawn)), drawn
