"""Pictures of the playground for the README: a real server, a real model, a real browser (`make browser`).

    python scripts/screenshots.py [MODEL]

Asks the same question twice, without and with drafts, and then while others are served. Writes
docs/images/playground-*.png. The pictures show the machine's speed: run it with nothing else running.
"""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
from PIL import Image  # noqa: E402

from tests.serve.playground.browser import Browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RECIPES = ("plain=draft=none", "guess=draft=suffix_decoding")
PROMPT = (
    "Summarize in two sentences: The lighthouse on the northern cape was built in 1874. It guided fishing boats past "
    "the reef for ninety years. When the keeper retired, the village turned the lighthouse into a small museum about "
    "the sea."
)  # smollm2's answer copies much of it and ends by itself
OTHERS = ("Name three rivers of Europe.", "Why is the sky blue?", "What is 17 + 25?", "List the planets.")
KINDS = {"light": (1280, 860, "light"), "dark": (1280, 860, "dark"), "phone": (390, 844, "light")}
COLOURS = 256  # of a palette: pictures of flat areas lose nothing that is seen


def serve(model: str) -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and its address."""
    words = [
        str(Path(sys.executable).with_name("phasewise")),
        "serve",
        "--model",
        model,
        "--port",
        "0",
        "--dtype",
        "bfloat16",
    ]
    words += [word for recipe in RECIPES for word in ("--recipe", recipe)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Playground: "):
            return process, line.split()[1]
    raise SystemExit("the server did not start")


def others(url: str, model: str) -> None:
    """Requests of somebody else."""
    for prompt in OTHERS:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48}
        httpx.post(f"{url}v1/chat/completions", json=body, timeout=120)


def take(page: Browser, url: str, model: str) -> None:
    """One question, two answers, three pictures."""
    page.look(*KINDS["light"])
    page.open(url)
    page.until("document.querySelector('#link').dataset.state === 'open'")
    for name, value in (("first", f"{model}@plain"), ("second", f"{model}@guess"), ("tokens", "96")):
        page.js(f"void (document.getElementById({name!r}).value = {value!r})")
    crowd = [threading.Thread(target=others, args=(url, model)) for _ in range(2)]
    for one in crowd:
        one.start()
    page.js("document.getElementById('prompt').focus()")
    page.type(PROMPT)
    page.press("Enter")
    page.until("document.querySelectorAll('.answer[data-state=done]').length === 2")
    page.until("document.querySelectorAll('.answer .accepted').length > 0")
    page.js("(document.activeElement.blur(), document.querySelectorAll('.answer .text')[1].focus())")
    for _ in range(11):
        page.press("ArrowRight")
    for one in crowd:
        one.join()
    for name, (width, height, scheme) in KINDS.items():
        page.look(width, height, scheme)
        page.js("scrollTo(0, 0)")
        time.sleep(0.5)  # the canvas follows in the next frames
        save(page.picture(), IMAGES / f"playground-{name}.png")


def save(png: bytes, path: Path) -> None:
    """With a palette, a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KB")


def main(model: str = "smollm2") -> None:
    process, url = serve(model)
    try:
        with Browser() as page:
            take(page, url, model)
            if page.problems:
                raise SystemExit(f"the page complains: {page.problems}")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
