"""Draw the bar charts of README.md and docs/ from the tables of measured results beside them; nothing is measured.

    python scripts/docs_figures.py

peers.svg: every engine's tokens per second, from docs/results/performance.md. kv-*.svg: the fewest KV bytes at which
each method still answers pocket's second questions, from docs/results/kv.md. savers-8.svg: gains on the clock, from
docs/results/savers.md. goodput.svg: goodput by schedule and placement, from docs/phases.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from phasewise.bench import figures, front, worth
from phasewise.bench.figures import BarRow
from phasewise.bench.front import FrontPoint
from phasewise.bench.rounds import Ratio
from phasewise.bench.stats import Difference

DOCS = Path(__file__).resolve().parent.parent / "docs"
IMAGES = DOCS / "images"
NAMES = {
    "phasewise int8": "phasewise, int8", "phasewise bf16": "phasewise, bf16",
    "openvino-genai bf16": "OpenVINO GenAI, bf16", "openvino-genai int8+u8kv": "OpenVINO GenAI, int8",
    "vllm bf16": "vLLM, bf16", "transformers bf16": "Transformers, bf16", "llama.cpp q8_0": "llama.cpp, q8_0",
    "llama.cpp bf16": "llama.cpp, bf16",
}  # fmt: skip


def rows(page: str, *before: str) -> Iterator[dict[str, str]]:
    """The rows of the first table after these texts, in their order, by its header; a header twice gets a 2."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for mark in before:
        text = text[text.index(mark) + len(mark) :]
    found = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert found, (page, before)
    lines = [[cell.strip(" `*") for cell in line.strip("| ").split(" | ")] for line in found[0].splitlines()]
    header = [name if name not in lines[0][:at] else f"{name} 2" for at, name in enumerate(lines[0])]
    for line in lines[2:]:
        yield dict(zip(header, line))


def number(text: str) -> float:
    found = re.search(r"-?[\d.]+", text)
    assert found, text
    return float(found[0])


def peers() -> None:
    column = "decode 8"
    found = [(number(row[column]), row["peer"]) for row in rows("results/performance.md", "**M, all of them**")
             if row["peer"] in NAMES]  # fmt: skip
    drawn = [
        BarRow(NAMES[peer], speed, f"{speed:.0f}", peer.startswith("phasewise")) for speed, peer in sorted(found)[::-1]
    ]
    figures.bars(IMAGES / "peers.svg", drawn, "Tokens per second, eight requests at once, two cores")


class Read(FrontPoint):
    """A point whose difference to dense is that of a table."""

    @property
    def less(self) -> Difference | None:
        low, high = self.line["within"]
        return Difference(self.line["mean"], low, high, 0)


def kv(cost: str, column: str) -> None:
    some: list[FrontPoint] = []
    for row in rows("results/kv.md", "<!-- kv pocket:begin -->", "later@1k: right answers", "\n"):
        if row["system"] != "dense" and row[column] != "-":
            mean, low, high = (float(each) / 100 for each in re.findall(r"[-+][\d.]+", row["less dense"]))
            line = {"setting": row["system"], "unit": "exact", "value": number(row["quality"]) / 100, "mean": mean,
                    "within": (low, high), cost: number(row[column])}  # fmt: skip
            some.append(Read(line, {cost: 100.0}))
    title = f"Fewest KV bytes {front.SAID[cost]} without a certain loss (second questions, pocket)"
    figures.bars(IMAGES / f"kv-later-1k-{cost}.svg", front.fewest(some, cost), title)


def savers(batch: int) -> None:
    found = []
    for row in rows("results/savers.md", "<!-- smollm2 7800:begin -->", f"{batch} at once:"):
        middle, low, high = map(float, re.findall(r"[\d.]+", row["gain"]))
        promised = number(row["gain the bytes promise"])
        found.append(worth.Worth(row["setting"], batch, 0.0, Ratio(middle, low, high, 5), 0.0, promised))
    worth.draw(IMAGES / "savers.svg", found, "SmolLM2, 7,800 tokens of context")


def goodput() -> None:
    drawn = []
    for row in rows("phases.md", "The first 24 requests of the Azure conversation trace"):
        name = row["requests/s"].removeprefix("schedule ").removeprefix("place ")
        drawn.append(BarRow(name, number(row["medium"]), row["medium"], row["requests/s"].startswith("place")))
    drawn.sort(key=lambda bar: -bar.value)
    title = "Requests/s of which 90 % meet TTFT 2 s and TPOT 150 ms (blue: a core per worker)"
    figures.bars(IMAGES / "goodput.svg", drawn, title)


def main() -> None:
    peers()
    kv("live", "of dense")
    kv("read", "of dense 2")
    savers(8)
    goodput()


if __name__ == "__main__":
    main()
